"""Pairs with one side from a model: sources (back-translation) or targets (distillation)."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import tee
from typing import Any

from heedful.decoding.engines import Translation
from heedful.decoding.strategies.sampling import SeededSampling
from heedful.decoding.translation import Translator
from heedful.distillation.candidates import Candidates
from heedful.files import check_at_least
from heedful.symbols_heed import check_are_several, trimmed

LOOP = re.compile(r"(?<!\S)((?:\S+ ){1,4}?)\1{3}")  # up to four words, four times in a row
# Decoding methods, with their settings and defaults.
METHODS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beam": {"num_beams": 5},
    "sampling": {"temperature": 1.0, "top_k": None, "seed": 1},
}


@dataclass
class BackTranslation:
    """Settings to make sources for given targets.

    `sampling` draws from the model's distribution (Edunov et al., 2018, arXiv 1808.09381); random numbers depend only
    on `seed` and the line number. Lines without words are left out, and so are empty, cut-off and repetitive sources
    (four repeats in a row). `None` is the default in `METHODS`.

    Raises:
        ValueError: If a setting is out of range or belongs to another method.
    """

    method: str = "beam"
    num_beams: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    seed: int | None = None
    left_out: int = field(default=0, init=False)  # lines so far

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"`method` must be one of {', '.join(METHODS)}, but is {self.method!r} instead.")
        names = "num_beams", "temperature", "top_k", "seed"
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        for name in given:
            readers = [method for method, settings in METHODS.items() if name in settings]
            if self.method not in readers:
                raise ValueError(f"`{name}` is for {' and '.join(readers)}, and must be left out of {self.method}.")
        check_at_least(2, num_beams=self.num_beams)
        self._settings = METHODS[self.method] | given
        self._sampling = SeededSampling(**self._settings) if self.method == "sampling" else None

    def pairs(self, translator: Translator, lines: Iterable[str], **settings: Any) -> Iterator[dict[str, str]]:
        """Yield a `source` for each `target` in order. `settings` are for `Translator.translate_lines`."""
        check_are_several(lines, "lines")
        if self._sampling is None:
            _check_search(translator, self.method)
        given, targets = tee(lines)
        search = {"num_beams": self._settings.get("num_beams", 1), "sampling": self._sampling, **settings}
        found = translator.translate_lines(given, split=False, keep_going=True, **search)
        for number, (line, (best,)) in enumerate(zip(targets, found, strict=True), start=1):
            target = trimmed(line.removeprefix("\ufeff" if number == 1 else ""))
            source = trimmed(best.text)
            if target and source and is_useful(best):
                yield {"source": source, "target": target}
            else:
                self.left_out += 1


@dataclass
class SequenceDistillation:
    """Settings to make targets for given sources by a teacher's beam search (Kim and Rush, 2016, section 3.2).

    The same texts are left out as in `BackTranslation`.
    """

    num_beams: int = 5
    left_out: int = field(default=0, init=False)  # pairs so far

    def __post_init__(self) -> None:
        check_at_least(1, num_beams=self.num_beams)

    def pairs(
        self,
        translator: Translator,
        pairs: Iterable[Mapping[str, str]],
        choose: Callable[[Iterable[Candidates]], Iterator[dict[str, str]]] | None = None,
        **settings: Any,
    ) -> Iterator[dict[str, str]]:
        """Yield each pair's `source` with the teacher's `target`, from the whole beam if there is a `choose`."""
        check_at_least(1 if choose is None else 2, num_beams=self.num_beams)  # one output leaves no choice
        _check_search(translator, "distillation")
        given, kept = tee(pairs)
        search = {"num_beams": self.num_beams, "num_return_sequences": self.num_beams if choose else 1, **settings}
        found = translator.translate_lines((pair["source"] for pair in given), split=False, keep_going=True, **search)
        rows = ((pair["source"], _useful(made)) for pair, made in zip(kept, found, strict=True))
        if choose is not None:
            yield from choose(rows)
            return
        for source, outputs in rows:
            if outputs:
                yield {"source": source, "target": outputs[0][0]}
            else:
                self.left_out += 1


def _useful(made: Iterable[Translation]) -> list[tuple[str, float]]:
    return [(trimmed(each.text), each.score or 0.0) for each in made if trimmed(each.text) and is_useful(each)]


def _check_search(translator: Translator, purpose: str) -> None:
    if translator.model.generation_config.do_sample:
        raise ValueError(f"`do_sample` of the generation config must be False for {purpose}, but is True instead.")


def is_useful(made: Translation) -> bool:
    """Return whether a generated text is complete and does not loop."""
    return made.finished and not LOOP.search(f"{made.text} ")
