"""Checks on the texts of a corpus, before any tokenizer has seen them."""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from heedful.data.cleaning import CleaningRules, clean_pairs
from heedful.diagnosis.findings import Finding, Pairs, graded, percent

NO_RULES = CleaningRules(drop_empty=False, drop_overlap=False)
# A ratio this many times the usual one is an outlier, unless ratios spread so widely that it is ordinary here.
OUTLIER_FACTOR = 3.0
OUTLIER_SPREADS = 6.0
SHORT_TEXT = 8  # characters added to both sides, so that short texts, whose ratios say little, stay ordinary
WRONG_SCRIPT_SHARE = 0.05
LANGUAGES_OF_SCRIPTS = {
    "Hangul": "ko",
    "CJK": "ja zh yue",
    "Cyrillic": "ru uk bg be mk",
    "Greek": "el",
    "Arabic": "ar fa ur",
    "Hebrew": "he yi",
    "Thai": "th",
    "Devanagari": "hi mr ne",
    "Latin": "en de fr es it pt nl sv da nb nn no fi et lv lt pl cs sk sl hr hu ro tr vi id ms sw ca eu gl is ga cy",
}
SCRIPTS_OF_LANGUAGES = {code: script for script, codes in LANGUAGES_OF_SCRIPTS.items() for code in codes.split()}
SCRIPT_RANGES = {
    "Latin": "A-Za-zÀ-ÖØ-öø-ɏḀ-ỿ",
    "Hangul": "가-힣ᄀ-ᇿㄱ-ㆎ",
    "CJK": "ぁ-ヿ㐀-䶿一-鿿",
    "Cyrillic": "Ѐ-ԯ",
    "Greek": "Ͱ-Ͽἀ-῿",
    "Arabic": "؀-ۿݐ-ݿ",
    "Hebrew": "֐-׿",
    "Thai": "฀-๿",
    "Devanagari": "ऀ-ॿ",
}
SCRIPTS = {script: re.compile(f"[{characters}]") for script, characters in SCRIPT_RANGES.items()}


def cleaned(
    pairs: Pairs, rules: CleaningRules, held_out: Iterable[Mapping[str, str]] = ()
) -> tuple[Pairs, list[int], Counter[str]]:
    """Apply cleaning rules as training does.

    Args:
        pairs: The pairs.
        rules: The rules.
        held_out: Pairs of validation and test data.

    Returns:
        The pairs that are kept, the places of those that are dropped, and how many are dropped for each reason (no
        reasons are known where nothing is kept).
    """
    from datasets import Dataset

    places = list(range(len(pairs)))
    rows = Dataset.from_dict({"source": pairs.sources, "target": pairs.targets, "place": places})
    try:
        left, report = clean_pairs(rows, rules, held_out)
    except ValueError:  # no pair is left
        return pairs.chosen([]), places, Counter()
    kept = left["place"][:]
    return pairs.chosen(kept), sorted(set(places) - set(kept)), report.dropped


def check_cleaning(train: Pairs, rules: CleaningRules, held_out: Sequence[Pairs] = ()) -> list[Finding]:
    """Tell which training pairs the recipe's rules drop, with the reasons."""
    kept, dropped, reasons = cleaned(train, rules, [pair for split in held_out for pair in split])
    if not dropped:
        return []
    share = len(dropped) / len(train)
    why = ", ".join(f"{reason} {count:,}" for reason, count in reasons.items() if count)
    return [
        Finding(
            "error" if not len(kept) else graded(share, warning=0.3),
            "cleaning",
            "data.cleaning",
            f"The rules drop {len(dropped):,} of {len(train):,} training pairs ({percent(share)})"
            + (f": {why}." if why else "; nothing is left to train on."),
            "Look whether these pairs deserve it." if share >= 0.3 else "",
            train.examples(dropped),
        )
    ]


def check_pointless_pairs(pairs: Pairs, rules: CleaningRules | None) -> list[Finding]:
    """Find empty sides, copies of the source as target, and repeated pairs that nothing drops.

    Args:
        pairs: A split.
        rules: The recipe's cleaning rules for training pairs; `None` for a held-out split, which nothing cleans.
    """
    kinds = {
        "empty": ("have a side that is empty or only spaces", 0.001, 0.2),
        "identical": ("have the same text as source and target", 0.05, 0.5),
        "duplicate": ("repeat an earlier pair", 0.2, None),
    }
    findings = []
    for kind, (words, warning, error) in kinds.items():
        name = f"drop_{kind}s" if kind == "duplicate" else f"drop_{kind}"
        if rules is not None and getattr(rules, name):
            continue
        _, found, _ = cleaned(pairs, replace(NO_RULES, **{name: True}))
        if not found:
            continue
        share = len(found) / len(pairs)
        advice = f"`data.cleaning.{name}: true` drops them." if rules else "Scores measure them too: remove them."
        findings.append(
            Finding(
                graded(share, warning, error if rules else None),
                kind,
                pairs.key if rules is None else f"data.cleaning.{name}",
                f"{len(found):,} of {len(pairs):,} {pairs.name} pairs ({percent(share)}) {words}.",
                advice,
                pairs.examples(found),
            )
        )
    return findings


def check_overlap(train: Pairs, rules: CleaningRules, held_out: Sequence[Pairs]) -> list[Finding]:
    """Find held-out sentences in the training data, unless the recipe drops them (`drop_overlap`)."""
    if rules.drop_overlap:
        return []
    sources = {source.strip() for source in train.sources}
    whole = {(pair["source"].strip(), pair["target"].strip()) for pair in train}
    findings = []
    for split in held_out:
        seen = [place for place, source in enumerate(split.sources) if source.strip() in sources]
        if not seen:
            continue
        same = sum((pair["source"].strip(), pair["target"].strip()) in whole for pair in split)
        _, dropped, _ = cleaned(train, replace(NO_RULES, drop_overlap=True), split)
        share = len(seen) / len(split)
        is_test = split.key.startswith("data.test")
        findings.append(
            Finding(
                graded(share, warning=0.001, error=0.1 if is_test else None),
                "overlap",
                split.key,
                f"{len(seen):,} of {len(split):,} {split.name} sources ({percent(share)}) are training sources too, "
                f"{same:,} of them with the same target: scores on them tell what was learnt by heart.",
                f"`data.cleaning.drop_overlap: true` drops {len(dropped):,} training pairs "
                f"({percent(len(dropped) / len(train))}).",
                split.examples(seen),
            )
        )
    return findings


def check_length_ratios(pairs: Pairs) -> list[Finding]:
    """Find pairs one side of which is far too long for the other: rows that have slipped, or half translations.

    What is far follows from the corpus: from the median of the logarithm of target length by source length (in
    characters) and the median distance from it, which a few wrong pairs do not move.
    """
    if len(pairs) < 20:
        return []
    lengths = np.array(
        [[len(source), len(target)] for source, target in zip(pairs.sources, pairs.targets, strict=True)]
    )
    ratios = np.log((lengths[:, 1] + SHORT_TEXT) / (lengths[:, 0] + SHORT_TEXT))
    distances = ratios - np.median(ratios)
    spread = 1.4826 * float(np.median(np.abs(distances)))  # a normal distribution's standard deviation
    limit = max(np.log(OUTLIER_FACTOR), OUTLIER_SPREADS * spread)
    found = np.flatnonzero(np.abs(distances) > limit)
    if not len(found):
        return []
    worst = found[np.argsort(-np.abs(distances[found]), kind="stable")]
    share = len(found) / len(pairs)
    usual = float(np.exp(np.median(ratios)))
    return [
        Finding(
            graded(share, warning=0.01),
            "length_ratio",
            pairs.key,
            f"{len(found):,} of {len(pairs):,} {pairs.name} pairs ({percent(share)}) have a target more than "
            f"{np.exp(limit):.1f} times as long, or as short, for its source as usual (here {usual:.2f} characters "
            "for one of the source).",
            "Look whether rows have slipped; `data.cleaning.max_ratio` drops such pairs.",
            pairs.examples(worst.tolist()),
        )
    ]


class Defect(NamedTuple):
    """A defect of a text: what it is, how it is found, and from which share of the pairs on it is grave."""

    words: str
    finds: Callable[[str], object]
    advice: str
    warning: float
    error: float | None = None


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


DEFECTS = {
    "control_characters": Defect(
        "control characters",
        re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufeff]").search,
        "Remove them: the model learns to write them.",
        0.001,
    ),
    "replacement_characters": Defect(
        "the character U+FFFD, which stands where a letter was lost",
        re.compile("\ufffd").search,
        "Decode the original files again, with the encoding they are in.",
        0.001,
        0.1,
    ),
    "mojibake": Defect(
        "letters that were UTF-8 and read as Latin-1 or Windows-1252",
        has_mojibake,
        "Decode the original files as UTF-8.",
        0.001,
        0.1,
    ),
    "html": Defect(
        "HTML entities",
        re.compile(r"&(?:amp|lt|gt|quot|apos|nbsp|#\d{1,6}|#x[0-9A-Fa-f]{1,6});").search,
        "`html.unescape` in Python turns them into text.",
        0.01,
    ),
    "decomposed": Defect(
        "text that is not in Unicode's form NFC (Korean then costs 3 to 6 times the tokens), or loose jamo of it",
        # What is composed after reading cannot be decomposed, so jamo that are left have lost their syllable.
        lambda text: re.search("[ᄀ-ᇿ]", text) or not unicodedata.is_normalized("NFC", text),
        "Normalize the files to NFC.",
        0.001,
    ),
    "outer_spaces": Defect(
        "spaces at their beginning or end",
        lambda text: text != text.strip() and text.strip(),
        "Strip them: the model learns to write them.",
        0.05,
    ),
    "tabs": Defect(
        "tabs or line breaks inside",
        lambda text: re.search(r"[\t\n\r]", text.strip()),
        "Look whether columns or lines have run together.",
        0.01,
    ),
}


def check_text(pairs: Pairs) -> list[Finding]:
    """Find characters that do not belong in sentences."""
    findings = []
    for name, defect in DEFECTS.items():
        sides = [
            [place for place, text in enumerate(texts) if defect.finds(text)]
            for texts in (pairs.sources, pairs.targets)
        ]
        found = sorted({*sides[0], *sides[1]})
        if not found:
            continue
        share = len(found) / len(pairs)
        findings.append(
            Finding(
                graded(share, defect.warning, defect.error),
                name,
                pairs.key,
                f"{len(sides[0]):,} sources and {len(sides[1]):,} targets of {len(pairs):,} {pairs.name} pairs have "
                f"{defect.words}.",
                defect.advice,
                pairs.examples(found),
            )
        )
    return findings


def script_of(text: str) -> str | None:
    """Return the script that most letters of a text are in, `None` where it has fewer than three letters."""
    if text.isascii():  # the usual case, and no other script is
        return "Latin" if sum(map(str.isalpha, text)) >= 3 else None
    counts = {script: len(pattern.findall(text)) for script, pattern in SCRIPTS.items()}
    best = max(counts, key=lambda script: counts[script])
    return best if counts[best] >= 3 else None


def lacks_script(text: str, script: str) -> bool:
    """Return whether hardly a letter of a text is in a script: names and code in Latin letters make no other text."""
    letters = sum(map(str.isalpha, text))
    return letters >= 3 and len(SCRIPTS[script].findall(text)) < 0.1 * letters


def main_script(scripts: Iterable[str | None]) -> str | None:
    """Return the script of at least four fifths of the texts that have one, `None` where they are mixed."""
    counts = Counter(script for script in scripts if script)
    if not counts:
        return None
    script, count = counts.most_common(1)[0]
    return script if count >= 0.8 * counts.total() else None


def check_scripts(train: Pairs, held_out: Sequence[Pairs], languages: tuple[str | None, str | None]) -> list[Finding]:
    """Find swapped languages, and targets in a script that is not theirs.

    Only scripts are looked at: German and French cannot be told apart here.

    Args:
        train: Training pairs.
        held_out: Validation and test pairs.
        languages: Codes of the source and target language; what has another script, or is unknown, says nothing.
    """
    of_train = [[script_of(text) for text in texts] for texts in (train.sources, train.targets)]
    mains = (main_script(of_train[0]), main_script(of_train[1]))
    findings = _languages_against_scripts(mains, languages)
    for split in held_out:
        theirs = (main_script(map(script_of, split.sources)), main_script(map(script_of, split.targets)))
        if None not in (*mains, *theirs) and theirs != mains:
            swapped = theirs == mains[::-1]
            findings.append(
                Finding(
                    "error" if swapped else "warning",
                    "scripts",
                    split.key,
                    f"The {split.name} pairs go from {theirs[0]} to {theirs[1]} script, the training pairs from "
                    f"{mains[0]} to {mains[1]}" + (": source and target are swapped." if swapped else "."),
                    "Swap them in one of the two.",
                    split.examples(range(len(split))),
                )
            )
    for side, main, texts in zip(("sources", "targets"), mains, (train.sources, train.targets), strict=True):
        wrong = [place for place, text in enumerate(texts) if main and lacks_script(text, main)]
        share = len(wrong) / max(1, len(train))
        if share >= WRONG_SCRIPT_SHARE:
            findings.append(
                Finding(
                    "warning",
                    "scripts",
                    train.key,
                    f"{len(wrong):,} of {len(train):,} training {side} ({percent(share)}) are in another script than "
                    f"the others' {main}.",
                    "Look whether they are translations at all.",
                    train.examples(wrong),
                )
            )
    return findings


def _languages_against_scripts(
    mains: tuple[str | None, str | None], languages: tuple[str | None, str | None]
) -> list[Finding]:
    expected = [SCRIPTS_OF_LANGUAGES.get((language or "").split("-")[0].split("_")[0]) for language in languages]
    wrong = [
        main is not None and want is not None and main != want for main, want in zip(mains, expected, strict=True)
    ]
    findings = []
    swapped = all(wrong) and tuple(expected) == mains[::-1]
    for side, main, language in zip(("source", "target"), mains, languages, strict=True):
        if not wrong[("source", "target").index(side)]:
            continue
        told = f"The {side} is called {language!r}, but its texts are in {main} script"
        findings.append(
            Finding(
                "error" if swapped else "warning",
                "scripts",
                f"data.{side}",
                told + (": source and target are swapped." if swapped else "."),
                "Swap `data.source` and `data.target`, or the files." if swapped else "Look whether it is the column.",
            )
        )
    return findings
