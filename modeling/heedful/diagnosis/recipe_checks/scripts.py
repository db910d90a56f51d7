"""Checks of the scripts that texts are written in: swapped languages, and texts in another script than the rest."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from heedful.diagnosis.findings import Finding, Level, RowCheck, collected
from heedful.diagnosis.recipe_checks.pairs import Pairs

LATIN = "en de fr es it pt nl sv da nb nn no fi et lv lt pl cs sk sl hr hu ro tr vi id ms sw ca eu gl is ga cy"
# The characters of each script, and the codes of the languages that are written in it.
SCRIPTS_AND_LANGUAGES = {
    "Latin": ("A-Za-zÀ-ÖØ-öø-ɏḀ-ỿ", LATIN),
    "Hangul": ("가-힣ᄀ-ᇿㄱ-ㆎ", "ko"),
    "CJK": ("ぁ-ヿ㐀-䶿一-鿿", "ja zh yue"),
    "Cyrillic": ("Ѐ-ԯ", "ru uk bg be mk"),
    "Greek": ("Ͱ-Ͽἀ-῿", "el"),
    "Arabic": ("؀-ۿݐ-ݿ", "ar fa ur"),
    "Hebrew": ("֐-׿", "he yi"),
    "Thai": ("฀-๿", "th"),
    "Devanagari": ("ऀ-ॿ", "hi mr ne"),
}
SCRIPTS = {script: re.compile(f"[{characters}]") for script, (characters, _) in SCRIPTS_AND_LANGUAGES.items()}
SCRIPTS_OF_LANGUAGES = {code: script for script, (_, codes) in SCRIPTS_AND_LANGUAGES.items() for code in codes.split()}
WRONG_SCRIPT_SHARE = 0.05

SWAPPED = ": source and target are swapped."
OTHER_SCRIPTS = RowCheck(
    "scripts",
    "The {split} pairs go from {theirs[0]} to {theirs[1]} script, the training pairs from {ours[0]} to {ours[1]}{end}",
    "Swap them in one of the two.",
    error=0.0,
)
WRONG_SCRIPT = RowCheck(
    "scripts",
    "{count} of {total} training {side} ({share}) are in another script than the others' {script}.",
    "Look whether they are translations at all.",
)


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


@collected
def check_scripts(
    train: Pairs, held_out: Sequence[Pairs], languages: tuple[str | None, str | None]
) -> Iterator[Finding]:
    """Find swapped languages, and targets in a script that is not theirs.

    Only scripts are looked at: German and French cannot be told apart here.

    Args:
        train: Training pairs.
        held_out: Validation and test pairs.
        languages: Codes of the source and target language; what has another script, or is unknown, says nothing.
    """
    ours = _main_scripts(train)
    yield from _languages_against_scripts(ours, languages)
    for split in held_out:
        theirs = _main_scripts(split)
        if None not in (*ours, *theirs) and theirs != ours:
            is_swapped = theirs == ours[::-1]
            words = {"ours": ours, "theirs": theirs, "end": SWAPPED if is_swapped else "."}
            yield from OTHER_SCRIPTS.findings(split, range(len(split)), split.key, words, can_be_error=is_swapped)
    for side, script, texts in zip(("sources", "targets"), ours, (train.sources, train.targets), strict=True):
        wrong = [number for number, text in enumerate(texts) if script and lacks_script(text, script)]
        if len(wrong) >= WRONG_SCRIPT_SHARE * len(train):
            yield from WRONG_SCRIPT.findings(train, wrong, train.key, {"side": side, "script": script})


def _main_scripts(pairs: Pairs) -> tuple[str | None, str | None]:
    return main_script(map(script_of, pairs.sources)), main_script(map(script_of, pairs.targets))


def _languages_against_scripts(
    scripts: tuple[str | None, str | None], languages: tuple[str | None, str | None]
) -> Iterator[Finding]:
    expected = tuple(SCRIPTS_OF_LANGUAGES.get(re.split("[-_]", language or "")[0]) for language in languages)
    wrong = [None not in (found, wanted) and found != wanted for found, wanted in zip(scripts, expected, strict=True)]
    is_swapped = all(wrong) and expected == scripts[::-1]
    level: Level = "error" if is_swapped else "warning"
    advice = "Swap `data.source` and `data.target`, or the files." if is_swapped else "Look whether it is the column."
    for side, script, language, is_wrong in zip(("source", "target"), scripts, languages, wrong, strict=True):
        if is_wrong:
            told = f"The {side} is called {language!r}, but its texts are in {script} script"
            yield Finding("scripts", level, told + (SWAPPED if is_swapped else "."), f"data.{side}", advice)
