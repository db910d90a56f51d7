"""Rules that drop sentence pairs, and a report of what they dropped."""

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import count, repeat
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from heedful.data.data_recipe import CleaningRules
from heedful.files import shortened

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

logger = logging.getLogger(__name__)

REASONS = {
    "empty": "source or target is empty or only spaces",
    "ratio": "one side is more than `max_ratio` times as long as the other",
    "identical": "source and target are the same text",
    "overlap": "it is in held-out data",
    "duplicate": "repeated pair",
}
EXAMPLES_PER_REASON = 3
# A tag of a form, next to a word: V;PST;3;PL, N, 3sg, <past>, Case=Nom.
TAG = re.compile(r"(?:[!-`{-~]+|[0-9][!-~]*|[!-~]*[;:=+<>|#@&*/\[({][!-~]+)")
FEWEST_WORDS = 20  # distinct ones with tags; fewer may be commands
Rows = Iterable[Mapping[str, str]]
Item = TypeVar("Item")
SOURCES_FILE = "training_sources.bin"  # checksums, in the folder of a run


class CleaningReport:
    """Counts of kept pairs and of dropped ones by reason, with up to three examples each."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Start counting from zero."""
        self.kept = 0
        self.dropped: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self.examples: dict[str, list[tuple[str, str]]] = {reason: [] for reason in REASONS}

    def count(self, reason: str | None, source: str, target: str) -> None:
        """Count a pair as kept, or as dropped for a reason."""
        if reason is None:
            self.kept += 1
            return
        self.dropped[reason] += 1
        if len(self.examples[reason]) < EXAMPLES_PER_REASON:
            self.examples[reason].append((source, target))

    def to_dict(self) -> dict[str, Any]:
        """Return counts and examples as plain data."""
        return {
            "kept": self.kept,
            "dropped": {reason: count for reason, count in self.dropped.items() if count},
            "examples": {reason: list(map(list, pairs)) for reason, pairs in self.examples.items() if pairs},
        }

    def __str__(self) -> str:
        counts = [("kept", self.kept, f"of {self.kept + self.dropped.total():,}")]
        counts += [(reason, self.dropped[reason], why) for reason, why in REASONS.items() if self.dropped[reason]]
        lines = []
        for name, number, note in counts:
            lines.append(f"{name:<10} {number:>12,}  {note}")
            for source, target in self.examples.get(name, ()):
                lines.append(f"{'':<25}{shortened(source)} → {shortened(target)}")
        return "\n".join(lines)


def clean_pairs(
    pairs: "Dataset | IterableDataset", rules: CleaningRules, held_out: Rows = (), both_directions: bool = False
) -> "tuple[Dataset | IterableDataset, CleaningReport]":
    """Return the pairs that break no rule, and the report; a `ValueError` with the report if none is left.

    `held_out` are the rows of validation and test data. With `both_directions`, targets are sources too. The report of
    a stream starts anew with each pass.
    """
    from datasets import IterableDataset

    judge = Judge(rules, held_out, both_directions)
    if isinstance(pairs, IterableDataset):
        stream = IterableDataset.from_generator(partial(_clean_stream, pairs, judge), features=pairs.features)
        return cast("IterableDataset", stream), judge.report
    parts = pairs["part"][:] if "part" in pairs.column_names else repeat(0)
    kept = list(judge.kept(zip(count(), pairs["source"][:], pairs["target"][:], parts, strict=False)))
    return (pairs if len(kept) == len(pairs) else pairs.select(kept, keep_in_memory=True)), judge.report


def words_without_tags(texts: Sequence[str]) -> list[str]:
    """Return the one word of each text without its tags, if nine of ten texts are such; else the texts."""
    rests = [[word for word in text.split() if not TAG.fullmatch(word)] for text in texts]
    words = [rest[0] if len(rest) == 1 else text for rest, text in zip(rests, texts, strict=True)]
    left = (text.replace(word, "", 1) for word, text in zip(words, texts, strict=True))
    # Numbers alone are no tags.
    are_tagged = sum(re.search("[A-Za-z]", tags) is not None for tags in left) > 0.9 * len(texts)
    return words if are_tagged and len({*words}) >= FEWEST_WORDS else [*texts]


def split_for_validation(sources: Sequence[str], targets: Sequence[str] = ()) -> tuple[list[int], list[int]]:
    """Return the numbers of training pairs and of held-out pairs: a twentieth of the sources, at most 500.

    The choice depends on the texts alone, not on their order. All pairs of a source, and all forms of a word, go
    together. With `targets`, for training in both directions, pairs that share a text with held-out ones are in
    neither.
    """
    sources = sources if targets else words_without_tags(sources)
    digests = {source.strip(): blake2b(source.strip().encode(), digest_size=16).digest() for source in sources}
    if len(digests) < 2:
        raise ValueError("`data.validation` must be given where the training pairs have fewer than two sources.")
    ordered = sorted(digests, key=lambda source: digests[source])
    held_out = set(ordered[: min(500, max(1, len(ordered) // 20))])
    numbers: tuple[list[int], list[int]] = ([], [])
    for number, source in enumerate(sources):
        numbers[source.strip() in held_out].append(number)
    if targets:
        texts = held_out | {targets[number].strip() for number in numbers[1]}
        kept = [n for n in numbers[0] if not texts & {sources[n].strip(), targets[n].strip()}]
        if len(kept) < len(numbers[0]):
            logger.info("%s training pairs share a text with held-out ones: left out", len(numbers[0]) - len(kept))
        return kept, numbers[1]
    return numbers


def sample(rows: Sequence[Item], most: int | None) -> list[Item]:
    """Return at most `most` rows in their order, drawn with a fixed seed because a file may be sorted."""
    if most is None or len(rows) <= most:
        return list(rows)
    return [rows[number] for number in sorted(Random(0).sample(range(len(rows)), most))]


def source_digests(pairs: Iterable[Mapping[str, Any]]) -> np.ndarray:
    """Return checksums of sources, to recognize those of the training."""
    digests = (blake2b(pair["source"].strip().encode(), digest_size=8).digest() for pair in pairs)
    return np.array([int.from_bytes(digest) for digest in digests], np.uint64)


def _clean_stream(pairs: "IterableDataset", judge: "Judge") -> Iterator[dict[str, str]]:
    return judge.kept((pair, pair["source"], pair["target"], pair.get("part", 0)) for pair in pairs)


class Judge:
    """Applies the rules to pairs."""

    def __init__(self, rules: CleaningRules, held_out: Rows = (), both_directions: bool = False):
        rows = list(held_out) if rules.drop_overlap else []
        self._sources, targets = ({row[side].strip() for row in rows} for side in ("source", "target"))
        self._held_out = self._sources | targets
        self._rules, self._both_directions, self.report = rules, both_directions, CleaningReport()

    def kept(self, rows: Iterable[tuple[Item, str, str, int]]) -> Iterator[Item]:
        """Yield the items whose source, target and number of part break no rule."""
        self.report.clear()
        seen: set[bytes] = set()
        for row, source, target, part in rows:
            reason = self.reason_to_drop(source.strip(), target.strip(), part, seen)
            self.report.count(reason, source, target)
            if reason is None:
                yield row
        if not self.report.kept:
            raise ValueError(f"The cleaning rules must leave at least one pair, but leave none:\n{self.report}")

    def reason_to_drop(self, source: str, target: str, part: int, seen: set[bytes]) -> str | None:
        """Return the first of `REASONS` to drop a pair of trimmed texts. `seen` are digests of earlier pairs."""
        rules = self._rules
        shorter, longer = sorted((len(source), len(target)))
        if not shorter:
            return "empty"
        if rules.max_ratio is not None and longer > rules.max_ratio * shorter:
            return "ratio"
        if rules.drop_identical and source == target:
            return "identical"
        is_either = part or self._both_directions
        if source in self._sources or (is_either and {source, target} & self._held_out):
            return "overlap"
        if rules.drop_duplicates:
            # 16 bytes instead of the text: 100 million pairs fit in memory.
            digest = blake2b(f"{len(source)} {source}{target}".encode(), digest_size=16).digest()
            if digest in seen:
                return "duplicate"
            seen.add(digest)
        return None
