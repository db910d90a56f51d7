"""Pairs for other tasks than translating sentences: from texts (spelling, spacing, scan) or by rule (the others).

The same arguments give the same pairs. `texts` is a location for `read_pairs`, `column` the texts' column or language,
and `count` the number of pairs; too few texts are a `ValueError`.
"""

import calendar
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import date
from functools import partial
from random import Random

from heedful.data.data_recipe import AugmentationRules
from heedful.data.epochs.draws import drawn_numbers, noisy
from heedful.data.sources import read_pairs
from heedful.files import check_at_least
from heedful_lab.korean_english.documents import document_pairs as document_pairs
from heedful_lab.tasks.korean_nouns import read_nouns

Pair = tuple[str, str]  # source, target
LANGUAGES_OF_DATES = ("en", "ko")
KOREAN_MONTHS = {6: "유월", 10: "시월"}  # irregular: they lose a letter
FIRST_DAY, LAST_DAY = date(1900, 1, 1).toordinal(), date(2099, 12, 31).toordinal()
MOST_DIGITS = 9
# Languages that write 15.455 or 15 455, and 2,5. The others write 15,455 and 2.5.
POINTS, SPACES = "ca da de es id is it nl pt ro sl sr tr vi", "az be ce cs eo fi fr hu kz lt lv no pl ru sk sv tg uk"
GROUPS = dict.fromkeys(POINTS.split(), ".") | dict.fromkeys(SPACES.split(), " ") | {"es_GT": "", "es_NI": ""}
TRIED_NUMBERS = ("0", "11", "3.49", "20.5", "1001", "15455", "999999999")  # some languages of num2words lack these
LENGTHS = re.compile(r"(\d+)-(\d+)")
SCAN_LINE = re.compile("IN: (.+) OUT: (.+)")  # of github.com/brendenlake/SCAN


def spelling_pairs(
    texts: str, column: str = "1", typos: float = 0.1, count: int | None = None, seed: int = 1
) -> list[Pair]:
    """Return texts with typing mistakes in a share of their words (as in `data.augmentation`), and the texts."""
    if not 0 < typos <= 1:
        raise ValueError(f"`typos` must be above 0 and at most 1, but is {typos} instead.")
    rules, draws = AugmentationRules(typos=typos), drawn_numbers(seed)
    return _first([(noisy(text, rules, draws), text) for text in _texts(texts, column)[:count]], count)


def spacing_pairs(
    texts: str, column: str = "1", nouns: str | None = None, count: int | None = None, seed: int = 1
) -> list[Pair]:
    """Return texts without spaces and with them; with `nouns`, only texts that get other nouns."""
    found = _texts(texts, column)
    if nouns:
        known, random = read_nouns(nouns), Random(seed)
        changed = ((" ".join(text.split()), known.replaced(text, random)) for text in found)
        found = [other for text, other in changed if other != text]
    return _first([("".join(text.split()), text) for text in found], count)


def scan_pairs(texts: str, lengths: str | None = None, count: int | None = None) -> list[Pair]:
    """Return commands and actions from a SCAN file (Lake and Baroni, 2018), with `lengths` actions (`1-25`) or all."""
    shortest, longest = _shortest_and_longest(lengths) if lengths else (1, sys.maxsize)
    pairs = []
    for line in _texts(texts, "1"):
        found = SCAN_LINE.fullmatch(line)
        if not found:
            raise ValueError(f"A line of SCAN must be like 'IN: jump OUT: I_JUMP', but is {line!r} instead.")
        command, actions = found.groups()
        if shortest <= len(actions.split()) <= longest:
            pairs.append((command, actions))
    return _first(pairs, count)


def number_pairs(count: int, language: str = "en", seed: int = 1) -> Iterator[Pair]:
    """Return numbers of one to nine digits in the language's notation, some with separators, and num2words' words."""
    groups = GROUPS.get(language, GROUPS.get(language.split("_")[0]))
    return _drawn(partial(_number, _number_words(language), groups), count, seed)


def date_pairs(count: int, language: str = "en", seed: int = 1) -> Iterator[Pair]:
    """Return dates from 1900 to 2099, such as 2001-02-03, and their words in English or Korean."""
    if language not in LANGUAGES_OF_DATES:
        raise ValueError(f"`language` must be one of {', '.join(LANGUAGES_OF_DATES)}, but is {language!r} instead.")
    return _drawn(partial(_date, _number_words(language), language), count, seed)


def reverse_pairs(count: int, lengths: str = "1-25", symbols: int = 50, seed: int = 1) -> Iterator[Pair]:
    """Return random sequences of `symbols` equally likely symbols, `lengths` long, and their reversals."""
    check_at_least(1, symbols=symbols)
    shortest, longest = _shortest_and_longest(lengths)

    def draw(random: Random) -> Pair:
        return reversed_symbols([str(random.randrange(symbols)) for _ in range(random.randint(shortest, longest))])

    return _drawn(draw, count, seed)


def reversed_symbols(symbols: Sequence[str]) -> Pair:
    """Return symbols separated by spaces, and the same in reverse order."""
    return " ".join(symbols), " ".join(reversed(symbols))


def _texts(location: str, column: str) -> list[str]:
    return [text for text in map(str.strip, read_pairs(location, column, column)["target"][:]) if text]


def _first(pairs: list[Pair], count: int | None) -> list[Pair]:
    check_at_least(1, count=count)
    if count is not None and len(pairs) < count:
        raise ValueError(f"`count` must be at most {len(pairs)}, the number of texts, but is {count} instead.")
    return pairs[:count]


def _drawn(draw: Callable[[Random], Pair], count: int, seed: int) -> Iterator[Pair]:
    check_at_least(1, count=count)
    random = Random(seed)
    return (draw(random) for _ in range(count))


def _shortest_and_longest(lengths: str) -> tuple[int, int]:
    found = LENGTHS.fullmatch(lengths)
    shortest, longest = map(int, found.groups()) if found else (0, 0)
    if not 1 <= shortest <= longest:
        raise ValueError(f"`lengths` must be two numbers from 1 on, such as 1-25, but is {lengths!r} instead.")
    return shortest, longest


def _number(in_words: Callable[..., str], groups: str | None, random: Random) -> Pair:
    number = random.randrange(10 ** random.randint(1, MOST_DIGITS))
    kind = random.choice(("plain", "commas", "point"))
    if kind == "point":
        digits = f"{number % 10**4}.{random.randint(1, 99)}"
        return digits.replace(".", "," if groups else "."), in_words(digits)
    return (f"{number:,}".replace(",", groups or ",") if kind == "commas" else str(number)), in_words(str(number))


def _date(in_words: Callable[..., str], language: str, random: Random) -> Pair:
    day = date.fromordinal(random.randint(FIRST_DAY, LAST_DAY))
    if language == "ko":
        month = KOREAN_MONTHS.get(day.month, f"{in_words(day.month)}월")
        return day.isoformat(), f"{in_words(day.year)}년 {month} {in_words(day.day)}일"
    ordinal, year = in_words(day.day, to="ordinal"), in_words(day.year, to="year")
    return day.isoformat(), f"{calendar.month_name[day.month]} {ordinal}, {year}"


def _number_words(language: str) -> Callable[..., str]:
    """Return `num2words` for a language."""
    try:
        from num2words import CONVERTER_CLASSES, num2words
    except ImportError as error:
        raise ImportError("Numbers in words need `num2words`: pip install 'heedful[tasks]'") from error

    def works(known: str) -> bool:
        with suppress(Exception):  # any kind: a missing attribute, or a number that a table lacks
            return all(num2words(number, lang=known) for number in TRIED_NUMBERS)
        return False

    if language not in CONVERTER_CLASSES or not works(language):
        known = ", ".join(filter(works, CONVERTER_CLASSES))
        raise ValueError(f"`language` must be one of {known}, but is {language!r} instead.")
    return partial(num2words, lang=language)
