"""Checks on a corpus's texts before tokenization."""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from heedful.checking.findings import EXAMPLES, Level, RecipeFinding, RowCheck, graded, percent
from heedful.data.cleaning import Judge, Splits
from heedful.data.data_recipe import CleaningRules
from heedful.data.languages import SCRIPTS_OF_LANGUAGES, lacks_script, language_named, main_script, script_of
from heedful.evaluation.faults import length_ratios, usual_ratios
from heedful.messages_heed import shortened

NO_RULES = CleaningRules(drop_overlap=False)


@dataclass(frozen=True)
class Pairs:
    """A split's texts, or its first texts."""

    name: str  # train, validation, or a test set's name
    key: str  # the recipe's
    sources: list[str]
    targets: list[str]
    rows: list[int]  # each pair's number in the split, from 1
    parts: list[int]  # each pair's part of the training data, from 0
    lines: Sequence[int] = ()  # each row's line in the split's only table

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for source, target, part in zip(self.sources, self.targets, self.parts, strict=True):
            yield {"source": source, "target": target, "part": part}

    @classmethod
    def of(cls, name: str, key: str, pairs: Any, lines: Sequence[int] = ()) -> "Pairs":
        """Copy all pairs from a split in memory."""
        columns: Any = pairs[:]
        rows, parts = columns.get("row", range(1, len(pairs) + 1)), columns.get("part", [0] * len(pairs))
        return cls(name, key, columns["source"], columns["target"], [*rows], parts, lines)

    def chosen(self, numbers: Sequence[int]) -> "Pairs":
        """Return the pairs with these numbers, from 0; `rows` stay the split's."""
        names = ("sources", "targets", "rows", "parts")
        columns: Any = {name: [getattr(self, name)[number] for number in numbers] for name in names}
        return replace(self, **columns)

    def without(self, parts: Collection[int]) -> "Pairs":
        """Leave out the pairs from these parts."""
        return self.chosen([number for number, part in enumerate(self.parts) if part not in parts]) if parts else self

    def examples(self, numbers: Iterable[int]) -> tuple[str, ...]:
        """Show the first few pairs with these numbers, from 0."""
        few = self.chosen([*islice(numbers, EXAMPLES)])
        places = [f"line {self.lines[row - 1]}" if self.lines else f"row {row}" for row in few.rows]
        shown = zip(places, map(shortened, few.sources), map(shortened, few.targets), strict=True)
        return tuple(f"{self.name} {place}: {source} → {target}" for place, source, target in shown)

    def dropped_for(self, reason: str, rules: CleaningRules, held_out: Iterable[Mapping[str, str]] = ()) -> list[int]:
        """Return the numbers, from 0, of the pairs that the rules drop for this reason."""
        judge, seen = Judge(rules, held_out), set[bytes]()
        pairs = zip(self.sources, self.targets, self.parts, strict=True)
        reasons = (judge.reason_to_drop(source.strip(), target.strip(), part, seen) for source, target, part in pairs)
        return [number for number, found in enumerate(reasons) if found == reason]


def check_cleaning(train: Pairs, kept: Splits) -> Iterator[RecipeFinding]:
    """Report the training pairs that the recipe's rules drop."""
    if not (count := kept.report.dropped.total()):
        return
    left = {*kept.train["row"][:], *(kept.validation["row"][:] if kept.is_held_out else ())}
    dropped, share = [number for number, row in enumerate(train.rows) if row not in left], count / len(train)
    why = ", ".join(f"{reason} {count:,}" for reason, count in kept.report.dropped.items() if count)
    message = f"The rules drop {count:,} of {len(train):,} training pairs ({percent(share)}): {why}. "
    message += f"{len(left):,} are left."
    advice = "Check that these pairs should be dropped." if share >= 0.3 else ""
    # No rule drops pairs that share a text with held-out pairs.
    examples = train.examples(dropped) if len(dropped) == count else ()
    yield RecipeFinding("cleaning", graded(share, 0.3), message, "data.cleaning", advice, examples)


PAIRS_THAT = "{count} of {total} {split} pairs ({share}) "
KEEP_IDENTICAL = "{advice} Keep them if source and target may be equal, as in spelling."
# Keys: cleaning rules that drop them; pairs with an empty side are always dropped.
POINTLESS_PAIRS = {
    "": RowCheck("empty", PAIRS_THAT + "have a side that is empty or only spaces.", "{advice}", 0.001, 0.2),
    "drop_identical": RowCheck("identical", PAIRS_THAT + "have one text on both sides.", KEEP_IDENTICAL, 0.05, 0.95),
    "drop_duplicates": RowCheck("duplicate", PAIRS_THAT + "repeat an earlier pair.", "{advice}", 0.2),
}


def check_pointless_pairs(pairs: Pairs, rules: CleaningRules | None) -> Iterator[RecipeFinding]:
    """Find empty sides, identical sides and repeated pairs that no rules drop (None for tests)."""
    for rule, check in POINTLESS_PAIRS.items():
        key, advice = pairs.key, "Scores measure them too: remove them."
        if rules is not None:
            key, advice = f"data.cleaning.{rule}", f"`data.cleaning.{rule}: true` drops them."
        if rules is None or (rule and not getattr(rules, rule)):
            found = pairs.dropped_for(check.name, replace(NO_RULES, **({rule: True} if rule else {})))
            yield from check.findings(pairs, found, key, rules is not None, advice=advice)


def check_targets(pairs: Pairs) -> Iterator[RecipeFinding]:
    """Find sources with more than one target."""
    different = {(pair["source"].strip(), pair["target"].strip()) for pair in pairs}
    targets = Counter(source for source, _ in different)
    found = [number for number, source in enumerate(pairs.sources) if targets[source.strip()] > 1]
    message = PAIRS_THAT + "have a source that also has other targets: the source does not decide which is meant."
    advice = "If another column decides it, join both (`data.source: [lemma, features]`); or drop all targets but one."
    check = RowCheck("several_targets", message, advice, 0.3)
    yield from check.findings(pairs, found if len(found) > 0.1 * len(pairs) else (), "data.source")


def check_overlap(train: Pairs, rules: CleaningRules, held_out: Sequence[Pairs]) -> Iterator[RecipeFinding]:
    """Find held-out sources in the training data, unless `drop_overlap` drops them."""
    if rules.drop_overlap:
        return
    known = {(pair["source"].strip(), pair["target"].strip()) for pair in train}
    sources = {source for source, _ in known}
    for split in held_out:
        seen = [number for number, source in enumerate(split.sources) if source.strip() in sources]
        if not seen:
            continue
        same = sum((pair["source"].strip(), pair["target"].strip()) in known for pair in split)
        dropped = len(train.dropped_for("overlap", CleaningRules(), split))
        message = "{count} of {total} {split} sources ({share}) are also training sources, {same:,} with the "
        message += "same target: scores on them measure memorization."
        lost = f"{dropped:,} training pairs ({percent(dropped / len(train))})"
        check = RowCheck("overlap", message, f"`data.cleaning.drop_overlap: true` drops {lost}.", 0.001, 0.1)
        yield from check.findings(split, seen, split.key, split.key.startswith("data.test"), same=same)


def check_length_ratios(pairs: Pairs) -> Iterator[RecipeFinding]:
    """Find pairs with one side much too long: shifted rows, or half translations."""
    if (usual := usual_ratios(pairs.sources, pairs.targets)) is None:
        return
    _, middle, highest = usual
    distances = np.abs(np.log(length_ratios(pairs.sources, pairs.targets) / middle))
    limit, worst_first = highest / middle, np.argsort(-distances, kind="stable")
    found = worst_first[distances[worst_first] > np.log(limit)].tolist()
    message = PAIRS_THAT + "have a target more than {limit:.1f} times longer or shorter than usual for its source "
    message += "(usual here: {usual:.2f} target characters per source character)."
    advice = "Check for shifted rows. `data.cleaning.max_ratio` drops such pairs."
    check = RowCheck("length_ratio", message, advice, 0.01)
    yield from check.findings(pairs, found, pairs.key, limit=limit, usual=middle)


# Column names, apart from languages.
NAMES = {
    "source": "source src input question query prompt command 원문 질문 문의 입력",
    "target": "target tgt trg output answer response reply summary action translation 번역 번역문 답변 응답 요약 ipa",
    "text": "text sentence article document word headword lemma spelling sound 본문 문장",
    "other": "id sid no nr number index date time score label title lang language 번호 날짜 점수 제목 담당자",
}
KINDS: dict[str, Callable[[str], object]] = {
    "dates": re.compile(r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}([T ][\d:.+]*Z?)?").fullmatch,
    "numbers": lambda text: not any(map(str.isalpha, text)),
    "tags": re.compile(r"(?!https?:)[!-~]*\w[^\w\s][!-~]+").fullmatch,  # V;PST;3;PL, Case=Nom, v.past.3sg
    "ids": re.compile(r"[!-~]*\d[!-~]*|https?://\S+|\S+@\S+").fullmatch,
    "licenses": re.compile(r"CC[ -](BY|0)", re.IGNORECASE).match,
}
FEW = 0.02  # below this share of different texts, short texts are labels


def kind_of(texts: Sequence[object]) -> str | None:
    """Return the kind of cells, such as numbers, or `None` for sentences."""
    filled = [text.strip() for text in texts if isinstance(text, str) and text.strip()]
    if 2 * len(filled) <= len(texts):
        return "no texts"
    for kind, is_it in KINDS.items():
        if sum(map(bool, map(is_it, filled))) > 0.9 * len(filled) and (kind != "tags" or _are_tags(filled)):
            return kind
    different, words = len(set(filled)), sum(len(text.split()) for text in filled)
    if len(filled) < 10 or different > max(9, FEW * len(filled)) or (different > 1 and words > 2.5 * len(filled)):
        return None
    return "one value" if different == 1 else "labels"


def _are_tags(texts: Sequence[str]) -> bool:
    """Decide between tags and ids: tags have marks inside, or repeat and share parts."""
    different = {*texts}
    parts = {part for text in different for part in re.split(r"\W+", text)}
    has_marks = sum(re.search("[;|=]", text) is not None for text in texts) > 0.9 * len(texts)
    return len(different) > 1 and (has_marks or (2 * len(different) <= len(texts) and len(parts) < len(different)))


def roles_of(name: str) -> set[str]:
    """Return the roles in a column's name: source, target, text, other, language."""
    words = re.findall(r"[^\W\d_]+", re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower())
    if len(words) > 3 or (len(words) > 1 and re.search("[.?!,]$", name.strip())):
        return set()
    roles = set[str]()
    for word in words:
        # A Korean compound's head is its last part.
        ends = {word, word.removesuffix("s")} if word.isascii() else {word[begin:] for begin in range(len(word))}
        roles |= {role for role, names in NAMES.items() if ends & {*names.split()}}
    is_language = language_named(name) or any(re.fullmatch("[가-힣]{1,5}어", word) for word in words)
    return roles | {"language"} if is_language else roles


def check_sides(pairs: Pairs) -> Iterator[RecipeFinding]:
    """Find sides that are no sentences, and column names in place of the first pair."""
    for side, texts in (("source", pairs.sources), ("target", pairs.targets)):
        kind = kind_of(texts)
        if kind in ("numbers", "dates", "ids", "one value"):
            message = f"The {side}s are {kind}, not sentences, such as {shortened(texts[0])}."
            yield RecipeFinding("sides", "warning", message, f"data.{side}", "Check the chosen column.")
    if len(pairs) > 1 and roles_of(pairs.sources[0]) and roles_of(pairs.targets[0]):
        message = "The first pair seems to be column names."
        advice = "Set `data.source` and `data.target` to these names instead of numbers."
        yield RecipeFinding("sides", "warning", message, "data.source", advice, pairs.examples([0]))


# Two to four bytes of UTF-8, lead byte and continuations, decoded as Windows-1252 or Latin-1.
MOJIBAKE = re.compile(r"[Â-ô][\x80-¿ŒœŠšŸŽžƒˆ˜–-”†-…‰‹›€™•‘’‚“”„]+")


def has_mojibake(text: str) -> bool:
    """Return whether a part of the text becomes other letters when its bytes are decoded as UTF-8."""
    for run in MOJIBAKE.findall(text):
        if len(run) == 2 and run[0] not in "ÂÃ" and run[1] in "“”‘’‚„–—":
            continue  # a capital letter before a closing quotation mark
        for encoding in ("cp1252", "latin-1"):
            try:
                repaired = run.encode(encoding).decode("utf-8")
            except UnicodeError:
                continue
            if repaired != run and all(unicodedata.category(letter)[0] in "LPSZ" for letter in repaired):
                return True
    return False


WITH = "{sources:,} sources and {targets:,} targets of {total} {split} pairs have "
IS_IN: dict[str, Callable[[str], object]] = {
    "control_characters": re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufeff]").search,
    "replacement_characters": re.compile("\ufffd").search,
    "mojibake": has_mojibake,
    "html": re.compile(
        r"&(?:[a-z]{2,8}|#\d{1,6}|#x[0-9a-f]{1,6});"
        r"|</?(?:[abipu]|br|div|em|font|h[1-6]|hr|img|li|[ou]l|small|span|strong|su[bp]|t[dhr]|table)"
        r"(?: [^<>]*=[^<>]*)? ?/?>",
        re.IGNORECASE,
    ).search,
    # Loading composes Unicode, so these jamo have lost their syllable.
    "decomposed": lambda text: re.search("[ᄀ-ᇿ]", text) or not unicodedata.is_normalized("NFC", text),
    "marks": re.compile(r'^".*(""|\\").*"$', re.DOTALL).search,
    "tabs": lambda text: re.search(r"[\t\n\r]", text.strip()),
}
# Defect, advice, and the shares at which it becomes grave.
DEFECTS: dict[str, tuple[Any, ...]] = {
    "control_characters": ("control characters.", "Remove them: the model learns to write them.", 0.001),
    "replacement_characters": ("U+FFFD in place of letters.", "Decode the files with their encoding.", 0.001, 0.1),
    "mojibake": ("UTF-8 that was decoded as Latin-1 or Windows-1252.", "Decode the files as UTF-8.", 0.001, 0.1),
    "html": ("HTML entities or tags.", "Remove tags, and convert entities with Python's `html.unescape`.", 0.01),
    "decomposed": (
        "text that is not in Unicode's form NFC (Korean then costs 3 to 6 times the tokens), or loose jamo.",
        "Normalize the files to NFC.",
        0.001,
    ),
    "marks": ("quotation marks around them, and doubled or escaped ones inside.", "Write the file as CSV.", 0.01),
    "tabs": ("tabs or line breaks inside.", "Check whether columns or lines were joined.", 0.01),
}


def check_text(pairs: Pairs) -> Iterator[RecipeFinding]:
    """Find characters that do not belong in sentences."""
    for name, (what, *advice_and_shares) in DEFECTS.items():
        check, is_in = RowCheck(name, WITH + what, *advice_and_shares), IS_IN[name]
        sides = (pairs.sources, pairs.targets)
        sources, targets = ({n for n, text in enumerate(texts) if is_in(text)} for texts in sides)
        counts: Any = {"sources": len(sources), "targets": len(targets)}
        yield from check.findings(pairs, sorted(sources | targets), pairs.key, **counts)


WRONG_SCRIPT_SHARE = 0.05
Sides = tuple[str | None, str | None]  # scripts or languages of sources and targets
SWAPPED = ": source and target are swapped."


def check_scripts(train: Pairs, held_out: Sequence[Pairs], languages: Sides) -> Iterator[RecipeFinding]:
    """Find swapped languages, and targets in the wrong script. Unknown languages are not checked."""
    train = train.chosen([number for number, part in enumerate(train.parts) if part == 0])  # one language
    ours, *others = ((main_script(split.sources), main_script(split.targets)) for split in (train, *held_out))
    yield from _languages_against_scripts(ours, languages)
    for split, theirs in zip(held_out, others, strict=True):
        if None not in (*ours, *theirs) and theirs != ours:
            level: Level = "error" if theirs == ours[::-1] else "warning"
            message = f"The {split.name} pairs go from {theirs[0]} to {theirs[1]} script, the training pairs from "
            message += f"{ours[0]} to {ours[1]}{SWAPPED if level == 'error' else '.'}"
            examples = split.examples(range(len(split)))
            yield RecipeFinding("scripts", level, message, split.key, "Swap the sides in one of them.", examples)
    ways = list(zip(map(script_of, train.sources), map(script_of, train.targets), strict=True))
    counts = Counter(way for way in ways if None not in way and way[0] != way[1])
    ((usual, _),) = counts.most_common(1) or [((None, None), 0)]
    swapped = [number for number, way in enumerate(ways) if way == usual[::-1] and way != usual]
    message = "{count} of {total} training pairs ({share}) go from {usual[1]} to {usual[0]} script, and most others "
    check = RowCheck("scripts", message + "from {usual[0]} to {usual[1]}: they are swapped.", "Swap them.", 0.01)
    yield from check.findings(train, swapped, train.key, usual=usual)
    for side, script, texts in zip(("sources", "targets"), ours, (train.sources, train.targets), strict=True):
        lacking = (number for number, text in enumerate(texts) if script and lacks_script(text, script))
        wrong = sorted({*lacking} - {*swapped})
        if len(wrong) >= WRONG_SCRIPT_SHARE * len(train):
            message = "{count} of {total} training {side} ({share}) are in another script than the others' {script}."
            check = RowCheck("scripts", message, "Check whether they belong there.")
            yield from check.findings(train, wrong, train.key, side=side, script=script)


def _languages_against_scripts(scripts: Sides, languages: Sides) -> Iterator[RecipeFinding]:
    expected = tuple(SCRIPTS_OF_LANGUAGES.get(language_named(language or "") or "") for language in languages)
    wrong = [None not in (found, wanted) and found != wanted for found, wanted in zip(scripts, expected, strict=True)]
    is_swapped = all(wrong) and expected == scripts[::-1]
    level: Level = "error" if is_swapped else "warning"
    advice = "Swap `data.source` and `data.target`, or the files." if is_swapped else "Check the chosen column."
    for side, script, language, is_wrong in zip(("source", "target"), scripts, languages, wrong, strict=True):
        if is_wrong:
            message = f"The {side} is called {language!r}, but its texts are in {script} script"
            yield RecipeFinding("scripts", level, message + (SWAPPED if is_swapped else "."), f"data.{side}", advice)
