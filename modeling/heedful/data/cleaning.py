"""A recipe's pairs: loaded, cleaned by rules with a report of dropped pairs, and held out for validation."""

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from itertools import chain, count
from typing import TYPE_CHECKING, Any, cast

from heedful.data.data_recipe import CleaningRules, DataRecipe
from heedful.data.languages import LOOKED_AT
from heedful.data.sources import Item, numbers_of_parts, read_pairs, read_parts, references_of, sample, texts_of
from heedful.data.tokenization import TokenizerPair
from heedful.evaluation.metrics import fitting_tokenizer, references_left
from heedful.messages_heed import shortened

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

logger = logging.getLogger(__name__)

REASONS = {
    "empty": "source or target is empty or only spaces",
    "ratio": "one side is more than `max_ratio` times as long as the other",
    "identical": "source and target are the same text",
    "overlap": "also in held-out data",
    "duplicate": "repeated pair",
}
EXAMPLES_PER_REASON = 3
# Grammatical tags next to a word: V;PST;3;PL, N, 3sg, <past>, Case=Nom.
TAG = re.compile(r"(?:[!-`{-~]+|[0-9][!-~]*|[!-~]*[;:=+<>|#@&*/\[({][!-~]+)")
FEWEST_WORDS = 20  # distinct words with tags; fewer may be commands
Rows = Iterable[Mapping[str, str]]


class CleaningReport:
    """Counts kept pairs, and dropped pairs by reason with up to three examples each."""

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


@dataclass(frozen=True)
class Splits:
    """A recipe's pairs: rows with `source` and `target`, perhaps `references`, `part` and `row`."""

    train: "Dataset | IterableDataset"
    validation: Any  # a Dataset; `None` until `clean` holds some out
    tests: "dict[str, Dataset]"  # by recipe key
    total: int | None  # all training pairs; `None` if a stream may have more
    report: CleaningReport = field(default_factory=CleaningReport)  # a stream fills it during reading
    others: frozenset[str] = frozenset()  # further texts to keep out of training
    is_held_out: bool = False  # whether validation pairs come from the training pairs

    @property
    def own(self) -> int:
        """Number of pairs in `data.train`, which come first; not for a stream."""
        return int((numbers_of_parts(cast("Dataset", self.train)) == 0).sum())


def read_splits(data: DataRecipe, limit: int | None = None) -> Splits:
    """Read all pairs, or `limit` random training pairs (a stream's first) with their number as `row`."""
    from datasets import Dataset

    where = data.located
    more: Any = {"references": data.references, "documents": data.documents}
    read: Any = partial(read_pairs, source=data.source, target=data.target, **more)
    validation = None if where.validation is None else read(where.validation, split="validation")
    tests = {f"data.test.{name}": read(location, split=name) for name, location in where.test.items()}
    others = frozenset(t for name, place in data.held_out.items() for t in texts_of(place, name))
    train = read_parts(data.parts, streaming=data.streaming, documents=data.documents)
    total = len(train) if isinstance(train, Sized) else None
    if limit is not None:
        numbers = range(limit) if total is None else sample(range(total), limit)
        drawn: Any = train if total is None else train.select(numbers)
        rows = [{"part": 0, **pair, "row": number + 1} for number, pair in zip(numbers, drawn, strict=False)]
        total = len(rows) if total is None and len(rows) < limit else total
        train = Dataset.from_list(rows)
    return Splits(train, validation, tests, total, others=others)


def check_references(splits: Splits, ignore: str | None, bleu_tokenizer: str | None) -> None:
    """Raise a `ValueError` if a split's references contain nothing, or no words, to score."""
    first: Any = splits.validation or sample(cast("Dataset", splits.train).select(range(splits.own)), LOOKED_AT)
    for split in (first, *splits.tests.values()):
        references = references_of(split)
        left = references_left(ignore, references, "decoding.")
        fitting_tokenizer(bleu_tokenizer, left, "decoding.bleu_tokenizer")


def clean(splits: Splits, data: DataRecipe) -> Splits:
    """Apply the cleaning rules to the training pairs, and hold out validation pairs if there are none."""
    others = ({"source": text, "target": text} for text in splits.others)
    held_out = chain(splits.validation or (), *splits.tests.values(), others)
    train, report = clean_pairs(splits.train, data.cleaning, held_out)
    kept = replace(splits, train=train, report=report)
    if splits.validation is not None:
        return kept
    own, column = kept.own, "group" if "group" in train.column_names else "source"
    rest, held = split_for_validation(train[column][:own])
    logger.info("%s training pairs are held out for validation (`data.validation` is empty)", len(held))
    validation = train.select(held, keep_in_memory=True)
    train = train.select([*rest, *range(own, len(train))], keep_in_memory=True)
    if data.mixture:
        train, shared = clean_pairs(train, CleaningRules(), validation)
        logger.info("%s pairs of `data.mixture` share a text with them: left out", shared.dropped.total())
    return replace(kept, train=train, validation=validation, is_held_out=True)


def check_symbols(tokenizers: TokenizerPair, kept: Splits, ignore: str | None) -> None:
    """Raise a `ValueError` if a closed vocabulary lacks a symbol in the pairs; training streams are not checked."""
    tokenizers.check_symbols(kept.validation, "`data.validation`")
    for key, test in kept.tests.items():
        tokenizers.check_symbols(test, f"`{key}`", ignore)
    if isinstance(kept.train, Sized):
        tokenizers.check_symbols(cast("Dataset", kept.train), "`data.train` after cleaning")


def clean_pairs(
    pairs: "Dataset | IterableDataset", rules: CleaningRules, held_out: Rows = ()
) -> "tuple[Dataset | IterableDataset, CleaningReport]":
    """Return the pairs that break no rule, and the report; raise a `ValueError` with the report if none is left.

    `held_out` are validation and test rows. A stream's report starts again with each pass.
    """
    from datasets import IterableDataset

    judge = Judge(rules, held_out)
    if isinstance(pairs, IterableDataset):
        stream = IterableDataset.from_generator(partial(_clean_stream, pairs, judge), features=pairs.features)
        return cast("IterableDataset", stream), judge.report
    rows = zip(count(), pairs["source"][:], pairs["target"][:], numbers_of_parts(pairs), strict=False)
    kept = list(judge.kept(rows))
    return (pairs if len(kept) == len(pairs) else pairs.select(kept, keep_in_memory=True)), judge.report


def words_without_tags(texts: Sequence[str]) -> list[str]:
    """Return each text's only word, without its tags, if nine texts in ten are tagged words; else return the texts."""
    rests = [[word for word in text.split() if not TAG.fullmatch(word)] for text in texts]
    words = [rest[0] if len(rest) == 1 else text for rest, text in zip(rests, texts, strict=True)]
    left = (text.replace(word, "", 1) for word, text in zip(words, texts, strict=True))
    # A number is no tag.
    are_tagged = sum(re.search("[A-Za-z]", tags) is not None for tags in left) > 0.9 * len(texts)
    return words if are_tagged and len({*words}) >= FEWEST_WORDS else [*texts]


def split_for_validation(sources: Sequence[str]) -> tuple[list[int], list[int]]:
    """Return the indices of training pairs and held-out pairs: a twentieth of the sources, at most 500.

    The choice depends on the texts, not on their order. Pairs of one source, or of one word's forms, stay together.
    """
    sources = words_without_tags(sources)
    digests = {source.strip(): blake2b(source.strip().encode(), digest_size=16).digest() for source in sources}
    if len(digests) < 2:
        raise ValueError("`data.validation` must be given if the training pairs have fewer than two sources.")
    ordered = sorted(digests, key=lambda source: digests[source])
    held_out = set(ordered[: min(500, max(1, len(ordered) // 20))])
    numbers: tuple[list[int], list[int]] = ([], [])
    for number, source in enumerate(sources):
        numbers[source.strip() in held_out].append(number)
    return numbers


def _clean_stream(pairs: "IterableDataset", judge: "Judge") -> Iterator[dict[str, str]]:
    return judge.kept((pair, pair["source"], pair["target"], pair.get("part", 0)) for pair in pairs)


class Judge:
    """Applies the rules to pairs."""

    def __init__(self, rules: CleaningRules, held_out: Rows = ()):
        rows = list(held_out) if rules.drop_overlap else []
        self._sources, targets = ({row[side].strip() for row in rows} for side in ("source", "target"))
        self._held_out = self._sources | targets
        self._rules, self.report = rules, CleaningReport()

    def kept(self, rows: Iterable[tuple[Item, str, str, int]]) -> Iterator[Item]:
        """Yield the items whose source, target and part number break no rule."""
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
        """Return the first of `REASONS` to drop these trimmed texts; `seen` contains digests of earlier pairs."""
        rules = self._rules
        shorter, longer = sorted((len(source), len(target)))
        if not shorter:
            return "empty"
        if rules.max_ratio is not None and longer > rules.max_ratio * shorter:
            return "ratio"
        if rules.drop_identical and source == target:
            return "identical"
        if source in self._sources or (part and {source, target} & self._held_out):
            return "overlap"
        if rules.drop_duplicates:
            # 16 bytes instead of the text: 100 million pairs fit in memory.
            digest = blake2b(f"{len(source)} {source}{target}".encode(), digest_size=16).digest()
            if digest in seen:
                return "duplicate"
            seen.add(digest)
        return None
