"""Detect languages and scripts from names and texts, with the table `languages.tsv`."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from locale import locale_alias
from pathlib import Path

from heedful.data.sources import sample

LANGUAGE_CODE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]+)*")
TAG = re.compile(r"([A-Za-z]{2,3})[-_]([A-Z][a-z]{3}|[A-Z]{2}|[0-9]{3})")  # kor_Hang, ko-KR, en_XX, es-419
NO_CODES = ["am", "as", "be", "he", "id", "is", "it", "my", "no", "or", "so", "to"]  # codes only as whole names
_ROWS = [row.split("\t") for row in Path(__file__).with_suffix(".tsv").read_text(encoding="utf-8").splitlines()[2:]]
_CODES = {spelling: row[0] for row in _ROWS for spelling in ", ".join(row[2:3]).split(", ") if spelling}
_CODES |= {row[0]: row[0] for row in _ROWS}
SCRIPTS_OF_LANGUAGES = {row[0]: row[1] for row in _ROWS if row[1:] and row[1]}
_FREQUENT_WORDS = {row[0]: row[3].split() for row in _ROWS if row[3:]}
LOOKED_AT = 1000  # texts for language detection
_OWNERS = Counter(word for words in _FREQUENT_WORDS.values() for word in words)
NO_SENTENCE = re.compile(r"[{}<>=_\\]")  # markup, code, JSON
PUNCTUATION = ".,;:!?…\"'()«»“”„।"
UNSPACED = ("CJK", "Thai", "Lao", "Khmer", "Myanmar", "Tibetan")  # scripts without spaces between words


def language_named(name: str) -> str | None:
    """Return the language code for a usual name, such as ko, kor_Hang, ko_KR, Korean, 한국어 or text_ko."""
    plain = unicodedata.normalize("NFC", name).strip()
    if plain.casefold() in _CODES:
        return _CODES[plain.casefold()]
    code, *region = re.split("[-_]", plain.lower())
    if TAG.fullmatch(plain) or (region and f"{code}_{region[0]}" in locale_alias):  # the module has ko_kr and the like
        return _CODES.get(code, code)
    words = re.findall(r"[^\W_]+", re.sub("(?<=[a-z])(?=[A-Z])", "_", plain))
    ends = () if " " in plain or len(words) > 3 else (words[:1] + words[-1:])
    likely = (word for word in words if len(word) > 3 or not word.isascii() or word.isupper() or word in ends)
    named = {_CODES[word] for word in map(str.casefold, likely) if word in _CODES and word not in NO_CODES}
    return named.pop() if len(named) == 1 else None


def code_of(language: str) -> str | None:
    """Return a language's code, also if the table lacks it."""
    return language_named(language) or (language if LANGUAGE_CODE.fullmatch(language) else None)


def language_of(name: str, texts: Sequence[str]) -> str | None:
    """Return the language code from a column's name, or from texts if they are certain."""
    if named := language_named(name):
        return named
    texts = sample(texts, LOOKED_AT)
    script = main_script(texts)
    if script is None or 10 * sum(map(bool, map(NO_SENTENCE.search, texts))) > len(texts):
        return None
    if script == "CJK":
        return "ja" if 2 * sum(bool(re.search("[ぁ-ヿ]", text)) for text in texts) > len(texts) else "zh"
    for code, words in _FREQUENT_WORDS.items():
        if words == ["*"] and SCRIPTS_OF_LANGUAGES.get(code) == script:
            return code
    counts = Counter(word.strip(PUNCTUATION) for text in texts for word in text.casefold().split())
    shares = {code: sum(counts[word] / _OWNERS[word] for word in words) for code, words in _FREQUENT_WORDS.items()}
    (first, most), (_, second) = Counter(shares).most_common(2)
    different = sum(word in counts for word in _FREQUENT_WORDS[first])
    return first if different > 1 and most >= 0.04 * counts.total() and most >= 1.7 * second else None


@cache
def _script_of_letter(letter: str) -> str:
    """Return a letter's script, the first word in its Unicode name; Chinese and kana are CJK."""
    name = unicodedata.name(letter, "?").removeprefix("FULLWIDTH ").removeprefix("HALFWIDTH ")
    script = re.split("[ -]", name)[0].capitalize()
    return "CJK" if script in ("Cjk", "Hiragana", "Katakana", "Bopomofo") else script


def _letters_by_script(text: str) -> Counter[str]:
    return Counter(map(_script_of_letter, filter(str.isalpha, text)))


def script_of(text: str) -> str | None:
    """Return the script of most letters, `None` if it has fewer than three."""
    if text.isascii():  # the usual case, always Latin
        return "Latin" if sum(map(str.isalpha, text)) >= 3 else None
    ((script, count),) = _letters_by_script(text).most_common(1) or [("", 0)]
    return script if count >= 3 else None


def lacks_script(text: str, script: str) -> bool:
    """Return whether less than a tenth of a text's letters are in a script."""
    counts = _letters_by_script(text)
    return counts.total() >= 3 and counts[script] < 0.1 * counts.total()


def main_script(texts: Iterable[str]) -> str | None:
    """Return the script of four fifths of the texts that have one, or `None`."""
    counts = Counter(filter(None, map(script_of, texts)))
    return next((script for script, count in counts.items() if count >= 0.8 * counts.total()), None)


def is_unspaced(texts: Sequence[str]) -> bool:
    """Return whether texts are in a script without spaces between words, and have no such spaces."""
    counts, spaces = _letters_by_script("".join(texts)), sum(text.strip().count(" ") for text in texts)
    letters = sum(counts[script] for script in UNSPACED)
    return 2 * letters > counts.total() and 4 * spaces <= letters
