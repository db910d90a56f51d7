"""In which script a text is written, and in which ones languages are."""

import re
from collections import Counter
from collections.abc import Iterable

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


def script_of(text: str) -> str | None:
    """Return the script that most letters of a text are in, `None` where it has fewer than three letters."""
    if text.isascii():  # the usual case, and no other script is
        return "Latin" if sum(map(str.isalpha, text)) >= 3 else None
    counts = Counter({script: len(pattern.findall(text)) for script, pattern in SCRIPTS.items()})
    ((script, count),) = counts.most_common(1)
    return script if count >= 3 else None


def lacks_script(text: str, script: str) -> bool:
    """Return whether hardly a letter of a text is in a script: names and code in Latin letters make no other text."""
    letters = sum(map(str.isalpha, text))
    return letters >= 3 and len(SCRIPTS[script].findall(text)) < 0.1 * letters


def main_script(texts: Iterable[str]) -> str | None:
    """Return the script of at least four fifths of the texts that have one, `None` where they are mixed."""
    counts = Counter(filter(None, map(script_of, texts)))
    return next((script for script, count in counts.items() if count >= 0.8 * counts.total()), None)
