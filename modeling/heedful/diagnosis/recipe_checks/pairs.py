"""Checks of the texts of a corpus, before any tokenizer has seen them."""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from heedful.data.cleaning import CleaningRules, clean_pairs
from heedful.diagnosis.findings import EXAMPLES, Finding, RowCheck, collected, percent, shortened

NO_RULES = CleaningRules(drop_empty=False, drop_overlap=False)
# A ratio this many times the usual one is an outlier, unless ratios spread so widely that it is ordinary here.
OUTLIER_FACTOR = 3.0
OUTLIER_SPREADS = 6.0
SHORT_TEXT = 8  # characters added to both sides, so that short texts, whose ratios say little, stay ordinary


@dataclass
class Pairs:
    """The texts of one split, or of its beginning.

    Attributes:
        name: The split: train, validation, or the name of a test set.
        key: The recipe's key that says where it lies.
        sources: Source texts.
        targets: Target texts.
        rows: The number of each pair in the split, from 1.
        total: Pairs of the whole split; None where the end was not reached.
        looked_at: Pairs that were read, including those that have been taken out since.
    """

    name: str
    key: str
    sources: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    total: int | None = None
    looked_at: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, str]]:
        for source, target in zip(self.sources, self.targets, strict=True):
            yield {"source": source, "target": target}

    @classmethod
    def first(cls, pairs: Iterable[Mapping[str, str]], limit: int, name: str, key: str) -> "Pairs":
        """Take the first `limit` pairs of a corpus, in memory or streamed."""
        split = cls(name, key)
        for row, pair in enumerate(islice(pairs, limit), start=1):
            split.sources.append(pair["source"])
            split.targets.append(pair["target"])
            split.rows.append(row)
        split.looked_at = len(split)
        # Only a corpus in memory knows its length; of a stream it is known where it ended early.
        split.total = len(split) if len(split) < limit else None
        if isinstance(pairs, Sized):
            split.total = len(pairs)
        return split

    def chosen(self, numbers: Sequence[int]) -> "Pairs":
        """Return some of these pairs, counted from 0, with the row numbers that they have in the split."""
        sources, targets = ([column[number] for number in numbers] for column in (self.sources, self.targets))
        return replace(self, sources=sources, targets=targets, rows=[self.rows[number] for number in numbers])

    @property
    def is_whole(self) -> bool:
        """Whether every pair of the split was looked at."""
        return self.total == self.looked_at

    def examples(self, numbers: Iterable[int]) -> tuple[str, ...]:
        """Show the first few of some of these pairs, counted from 0."""
        return tuple(
            f"{self.name} row {self.rows[number]}: {shortened(self.sources[number])} → "
            f"{shortened(self.targets[number])}"
            for number in islice(numbers, EXAMPLES)
        )


def cleaned(
    pairs: Pairs, rules: CleaningRules, held_out: Iterable[Mapping[str, str]] = ()
) -> tuple[Pairs, list[int], Counter[str]]:
    """Apply cleaning rules as training does.

    Args:
        pairs: The pairs.
        rules: The rules.
        held_out: Pairs of validation and test data.

    Returns:
        The pairs that are kept, the numbers from 0 of those that are dropped, and how many are dropped for each reason
        (no reasons are known where nothing is kept).
    """
    from datasets import Dataset

    numbers = list(range(len(pairs)))
    rows = Dataset.from_dict({"source": pairs.sources, "target": pairs.targets, "number": numbers})
    try:
        left, report = clean_pairs(rows, rules, held_out)
    except ValueError:  # no pair is left
        return pairs.chosen([]), numbers, Counter()
    kept = left["number"][:]
    return pairs.chosen(kept), sorted(set(numbers) - set(kept)), report.dropped


def check_cleaning(train: Pairs, dropped: Sequence[int], reasons: Counter[str]) -> list[Finding]:
    """Tell which training pairs the recipe's rules drop, and why; arguments as `cleaned` returns them."""
    why = ", ".join(f"{reason} {count:,}" for reason, count in reasons.items() if count)
    check = RowCheck(
        "cleaning",
        "The rules drop {count} of {total} training pairs ({share}){why}.",
        "Look whether these pairs deserve it." if len(dropped) >= 0.3 * len(train) else "",
        warning=0.3,
        error=1.0,
    )
    why = f": {why}" if why else "; nothing is left to train on"
    return check.findings(train, dropped, "data.cleaning", {"why": why})


PAIRS_THAT = "{count} of {total} {split} pairs ({share}) "
# By the cleaning rule that drops them.
POINTLESS_PAIRS = {
    "drop_empty": RowCheck("empty", PAIRS_THAT + "have a side that is empty or only spaces.", "{advice}", 0.001, 0.2),
    "drop_identical": RowCheck(
        "identical", PAIRS_THAT + "have the same text as source and target.", "{advice}", 0.05, 0.5
    ),
    "drop_duplicates": RowCheck("duplicate", PAIRS_THAT + "repeat an earlier pair.", "{advice}", 0.2),
}


@collected
def check_pointless_pairs(pairs: Pairs, rules: CleaningRules | None) -> Iterator[Finding]:
    """Find empty sides, copies of the source as target, and repeated pairs that nothing drops.

    Args:
        pairs: A split.
        rules: The recipe's cleaning rules for training pairs; None for a held-out split, which nothing cleans.
    """
    for rule, check in POINTLESS_PAIRS.items():
        if rules is not None and getattr(rules, rule):
            continue
        key, advice = pairs.key, "Scores measure them too: remove them."
        if rules is not None:
            key, advice = f"data.cleaning.{rule}", f"`data.cleaning.{rule}: true` drops them."
        _, found, _ = cleaned(pairs, replace(NO_RULES, **{rule: True}))
        yield from check.findings(pairs, found, key, {"advice": advice}, can_be_error=rules is not None)


OVERLAP = RowCheck(
    "overlap",
    "{count} of {total} {split} sources ({share}) are training sources too, {same} of them with the same target: "
    "scores on them tell what was learnt by heart.",
    "`data.cleaning.drop_overlap: true` drops {dropped} training pairs ({lost}).",
    warning=0.001,
    error=0.1,
)


@collected
def check_overlap(train: Pairs, rules: CleaningRules, held_out: Sequence[Pairs]) -> Iterator[Finding]:
    """Find held-out sentences in the training data, unless the recipe drops them (`drop_overlap`)."""
    if rules.drop_overlap:
        return
    sources = {source.strip() for source in train.sources}
    both = {(pair["source"].strip(), pair["target"].strip()) for pair in train}
    for split in held_out:
        seen = [number for number, source in enumerate(split.sources) if source.strip() in sources]
        if not seen:
            continue
        same = sum((pair["source"].strip(), pair["target"].strip()) in both for pair in split)
        _, dropped, _ = cleaned(train, replace(NO_RULES, drop_overlap=True), split)
        fields = {"same": f"{same:,}", "dropped": f"{len(dropped):,}", "lost": percent(len(dropped) / len(train))}
        is_test = split.key.startswith("data.test")
        yield from OVERLAP.findings(split, seen, split.key, fields, can_be_error=is_test)


LENGTH_RATIO = RowCheck(
    "length_ratio",
    PAIRS_THAT + "have a target more than {limit:.1f} times as long, or as short, for its source as usual "
    "(here {usual:.2f} characters for one of the source).",
    "Look whether rows have slipped; `data.cleaning.max_ratio` drops such pairs.",
    warning=0.01,
)


def check_length_ratios(pairs: Pairs) -> list[Finding]:
    """Find pairs one side of which is far too long for the other: rows that have slipped, or half translations.

    What is far follows from the corpus: from the median of the logarithm of target length by source length (in
    characters) and the median distance from it, which a few wrong pairs do not move.
    """
    if len(pairs) < 20:
        return []
    sources, targets = (np.array([len(text) for text in texts]) for texts in (pairs.sources, pairs.targets))
    ratios = np.log((targets + SHORT_TEXT) / (sources + SHORT_TEXT))
    usual = np.median(ratios)
    distances = np.abs(ratios - usual)
    spread = 1.4826 * float(np.median(distances))  # a normal distribution's standard deviation
    limit = max(np.log(OUTLIER_FACTOR), OUTLIER_SPREADS * spread)
    worst_first = np.argsort(-distances, kind="stable")
    found = worst_first[distances[worst_first] > limit].tolist()
    return LENGTH_RATIO.findings(pairs, found, pairs.key, {"limit": np.exp(limit), "usual": np.exp(usual)})


# Two to four bytes of UTF-8 that were read as Windows-1252 or Latin-1: a lead byte and its continuations.
MOJIBAKE = re.compile(r"[Â-ô][\x80-¿ŒœŠšŸŽžƒˆ˜–-”†-…‰‹›€™•‘’‚“”„]+")


def has_mojibake(text: str) -> bool:
    """Tell whether a part of the text turns into other letters when its bytes are read as UTF-8."""
    for run in MOJIBAKE.findall(text):
        if len(run) == 2 and run[0] not in "ÂÃ" and run[1] in "“”‘’‚„–—":
            continue  # a capital before a closing quotation mark
        for encoding in ("cp1252", "latin-1"):
            try:
                repaired = run.encode(encoding).decode("utf-8")
            except UnicodeError:
                continue
            if repaired != run and all(unicodedata.category(letter)[0] in "LPSZ" for letter in repaired):
                return True
    return False


WITH = "{sources:,} sources and {targets:,} targets of {total} {split} pairs have "
# Defects of a text, and what tells whether a text has one.
DEFECTS: dict[RowCheck, Callable[[str], object]] = {
    RowCheck(
        "control_characters",
        WITH + "control characters.",
        "Remove them: the model learns to write them.",
        0.001,
    ): re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufeff]").search,
    RowCheck(
        "replacement_characters",
        WITH + "the character U+FFFD, which stands where a letter was lost.",
        "Decode the original files again, with the encoding they are in.",
        0.001,
        0.1,
    ): re.compile("\ufffd").search,
    RowCheck(
        "mojibake",
        WITH + "letters that were UTF-8 and read as Latin-1 or Windows-1252.",
        "Decode the original files as UTF-8.",
        0.001,
        0.1,
    ): has_mojibake,
    RowCheck(
        "html",
        WITH + "HTML entities.",
        "`html.unescape` in Python turns them into text.",
        0.01,
    ): re.compile(r"&(?:amp|lt|gt|quot|apos|nbsp|#\d{1,6}|#x[0-9A-Fa-f]{1,6});").search,
    RowCheck(
        "decomposed",
        WITH
        + "text that is not in Unicode's form NFC (Korean then costs 3 to 6 times the tokens), or loose jamo of it.",
        "Normalize the files to NFC.",
        0.001,
    ): (
        # Reading composes what can be composed, so jamo that are left have lost their syllable.
        lambda text: re.search("[ᄀ-ᇿ]", text) or not unicodedata.is_normalized("NFC", text)
    ),
    RowCheck(
        "outer_spaces",
        WITH + "spaces at their beginning or end.",
        "Strip them: the model learns to write them.",
        0.05,
    ): lambda text: text != text.strip() and text.strip(),
    RowCheck(
        "tabs",
        WITH + "tabs or line breaks inside.",
        "Look whether columns or lines have run together.",
        0.01,
    ): lambda text: re.search(r"[\t\n\r]", text.strip()),
}


@collected
def check_text(pairs: Pairs) -> Iterator[Finding]:
    """Find characters that do not belong in sentences."""
    for check, is_in in DEFECTS.items():
        sources, targets = (
            {n for n, text in enumerate(texts) if is_in(text)} for texts in (pairs.sources, pairs.targets)
        )
        fields = {"sources": len(sources), "targets": len(targets)}
        yield from check.findings(pairs, sorted(sources | targets), pairs.key, fields)
