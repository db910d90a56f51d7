"""Sources made for targets: a model of the other direction, its noise, and what of it is of no use."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import tee
from typing import Any, Literal, get_args

import numpy as np

from heedful.files import check_at_least
from heedful.inference.strategies.sampling import SeededSampling
from heedful.inference.translation import Translator

Method = Literal["greedy", "beam", "sampling", "noised"]
NOISE = 0.1  # the share of words that are deleted, and that are replaced
FILLER = "_"
FURTHEST_SWAP = 3  # words
LOOP = re.compile(r"(?<!\S)((?:\S+ ){1,4}?)\1{3}")  # up to four words, four times on end


@dataclass
class BackTranslation:
    """How sources are made for given targets.

    `sampling` draws from the model's distribution, `noised` is beam search whose words are then deleted (one in ten),
    replaced by `_` (one in ten) and moved by up to three places (Edunov et al., 2018, arXiv 1808.09381). Both are the
    same in every batch: their random numbers follow from `seed` and the number of the line. Lines without words, and
    sources that are empty, not ended or repeat themselves four times on end, are left out and counted.

    Args:
        method: Of decoding.
        num_beams: Of `beam` and `noised`; None is 5.
        temperature: Of `sampling`; None is 1.
        top_k: Of `sampling`; None is all tokens.
        seed: Of `sampling` and `noised`; None is 1.

    Raises:
        ValueError: If a setting is out of range, or not one of the method's.
    """

    method: Method = "beam"
    num_beams: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    seed: int | None = None
    left_out: int = field(default=0, init=False)  # lines so far

    def __post_init__(self):
        if self.method not in get_args(Method):
            raise ValueError(f"`method` must be one of {', '.join(get_args(Method))}, but is {self.method!r} instead.")
        readers = {"num_beams": ("beam", "noised"), "seed": ("sampling", "noised")}
        for name in ("num_beams", "temperature", "top_k", "seed"):
            methods = readers.get(name, ("sampling",))
            if getattr(self, name) is not None and self.method not in methods:
                raise ValueError(f"`{name}` is for {' and '.join(methods)}, and must be left out of {self.method}.")
        check_at_least(2, num_beams=self.num_beams)
        check_at_least(0, seed=self.seed)
        self.sampling()

    def sampling(self) -> SeededSampling | None:
        """Return how translations are drawn, or `None` if they are searched for."""
        if self.method != "sampling":
            return None
        seed, temperature = self.seed, self.temperature
        return SeededSampling(1 if seed is None else seed, 1.0 if temperature is None else temperature, self.top_k)

    def pairs(self, translator: Translator, lines: Iterable[str], **settings: Any) -> Iterator[dict[str, str]]:
        """Yield a `source` for each `target`, in order, without those that are left out.

        `settings` are keywords of `Translator.translate_lines`.
        """
        if translator.model.generation_config.do_sample and self.method != "sampling":
            raise ValueError(
                f"`do_sample` of the generation config must be False for {self.method}, but is True instead."
            )
        beams = (self.num_beams or 5) if self.method in ("beam", "noised") else 1
        given, targets = tee(lines)
        found = translator.translate_lines(
            given, num_beams=beams, sampling=self.sampling(), keep_going=True, **settings
        )
        for number, (line, (best,)) in enumerate(zip(targets, found, strict=True), start=1):
            target = line.rstrip("\r\n").removeprefix("\ufeff" if number == 1 else "")
            source = " ".join(best.text.split())
            if best.finished and self.method == "noised":
                source = noised(source, 1 if self.seed is None else self.seed, number)
            if target.strip() and source and best.finished and not LOOP.search(f"{best.text} "):
                yield {"source": source, "target": target}
            else:
                self.left_out += 1


def noised(text: str, seed: int, number: int) -> str:
    """Delete, replace and move words of the text with this number, as `BackTranslation` says."""
    words = text.split()
    # Raw output, the one thing that numpy promises never to change.
    raw = np.random.PCG64(np.random.SeedSequence([seed, number])).random_raw((3, max(len(words), 1)))
    deleted, replaced, moved = raw / 2.0**64
    kept = [
        (FILLER if replaced[place] < NOISE else word, place + (FURTHEST_SWAP + 1) * moved[place])
        for place, word in enumerate(words)
        if deleted[place] >= NOISE
    ]
    return " ".join(word for word, _ in sorted(kept, key=lambda each: each[1]))
