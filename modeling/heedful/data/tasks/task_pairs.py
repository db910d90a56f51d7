"""Pairs for tasks that are no translation: of texts (spelling, spacing, scan) or by rule (numbers, dates, reverse)."""

import calendar
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from random import Random
from typing import Any, Literal, get_args

from heedful.data.epochs.augmentation import drawn_numbers, noisy
from heedful.data.mixture import AugmentationRules
from heedful.data.sources import read_pairs
from heedful.data.tasks.korean_nouns import KoreanNouns, read_nouns
from heedful.files import check_at_least

Pair = tuple[str, str]  # source, target
Task = Literal["spelling", "spacing", "scan", "numbers", "dates", "reverse"]
FROM_TEXTS = ("spelling", "spacing", "scan")
IN_WORDS = ("numbers", "dates")
LANGUAGES_OF_DATES = ("en", "ko")
KOREAN_MONTHS = {6: "유월", 10: "시월"}  # which lose a letter
FIRST_DAY, LAST_DAY = date(1900, 1, 1).toordinal(), date(2099, 12, 31).toordinal()
MOST_DIGITS = 9
LENGTHS = re.compile(r"(\d+)-(\d+)")
SCAN_LINE = re.compile("IN: (.+) OUT: (.+)")  # of github.com/brendenlake/SCAN


@dataclass
class TaskPairs:
    """What the pairs of a task are made of; the same settings always give the same pairs.

    Args:
        task: `spelling` turns words with typing mistakes, as `data.augmentation` makes them, into what was meant;
            `spacing` puts spaces where they belong; `scan` turns commands into actions (Lake and Baroni, 2018);
            `numbers` and `dates` are read out in words; `reverse` says symbols from the last to the first.
        texts: Of spelling and spacing: where the texts are, as `read_pairs` takes it. Of scan: a file of SCAN.
        column: Their column or language; None is the first of a table, and a line of a text file without tabs.
        typos: Of spelling: the share of words with a mistake; None is 0.1.
        language: Of numbers, a code that `num2words` knows; of dates en or ko. None is en.
        nouns: Of Korean spacing: a file with a noun in each line, as `read_nouns` takes it. Most nouns of the texts
            are replaced by others of these, and texts that have none are left out.
        lengths: The fewest and the most symbols of reverse, or actions of scan, such as "1-25". None is that for
            reverse, and all there are for scan.
        symbols: Of reverse: how many there are; None is 50.

    Raises:
        ValueError: If a setting is out of range, missing, or not one of the task's.
        ImportError: If the task needs `num2words`, which is not installed.
    """

    task: Task
    texts: str | None = None
    column: str | None = None
    typos: float | None = None
    language: str | None = None
    nouns: str | None = None
    lengths: str | None = None
    symbols: int | None = None

    def __post_init__(self):
        if self.task not in get_args(Task):
            raise ValueError(f"`task` must be one of {', '.join(get_args(Task))}, but is {self.task!r} instead.")
        readers = {"texts": FROM_TEXTS, "column": FROM_TEXTS[:2], "typos": FROM_TEXTS[:1], "language": IN_WORDS}
        readers |= {"nouns": ("spacing",), "lengths": ("reverse", "scan"), "symbols": ("reverse",)}
        for name, tasks in readers.items():
            if getattr(self, name) is not None and self.task not in tasks:
                raise ValueError(f"`{name}` is for {' and '.join(tasks)}, and must be left out of {self.task}.")
        if self.task in FROM_TEXTS and self.texts is None:
            raise ValueError(f"`texts` must be given for {self.task}, but is None instead.")
        if self.typos is not None and not 0 < self.typos <= 1:
            raise ValueError(f"`typos` must be above 0 and at most 1, but is {self.typos} instead.")
        check_at_least(1, symbols=self.symbols)
        self._in_words = _number_words(self.task, self.language or "en") if self.task in IN_WORDS else None

    def pairs(self, count: int | None, seed: int = 1) -> Iterator[Pair]:
        """Return an iterator over `count` pairs; None is one for each text, of tasks that have them.

        Raises:
            ValueError: If there are fewer texts, no `count` where nothing ends the pairs, or a line is not SCAN's.
        """
        check_at_least(1, count=count)
        if self.texts is not None:
            return iter(self._from_texts(count, seed))
        if count is None:
            raise ValueError(f"`count` must be given for {self.task}, but is None instead.")
        random = Random(seed)
        draw: Callable[[Random], Pair] = partial(_number, self._in_words)
        if self.task == "dates":
            draw = partial(_date, self._in_words, self.language or "en")
        elif self.task == "reverse":
            draw = partial(_reversed, *_shortest_and_longest(self.lengths or "1-25"), self.symbols or 50)
        return (draw(random) for _ in range(count))

    def _from_texts(self, count: int | None, seed: int) -> list[Pair]:
        column = self.column or "1"
        rows = read_pairs(str(self.texts), column, column)
        texts = [text for text in map(str.strip, rows["target"][:]) if text]
        if self.task == "scan":
            pairs = _scan_pairs(texts, self.lengths)
        elif self.task == "spacing":
            if self.nouns:
                texts = _with_other_nouns(texts, read_nouns(self.nouns), Random(seed))
            pairs = [("".join(text.split()), text) for text in texts]
        else:
            rules, draws = AugmentationRules(typos=0.1 if self.typos is None else self.typos), drawn_numbers(seed)
            pairs = [(noisy(text, rules, draws), text) for text in texts[:count]]
        if count is not None and len(pairs) < count:
            raise ValueError(f"`count` must be at most {len(pairs)}, as there are texts, but is {count} instead.")
        return pairs[:count]


def reversed_symbols(symbols: Sequence[str]) -> Pair:
    """Return symbols with a space between them, and the same from the last to the first."""
    return " ".join(symbols), " ".join(reversed(symbols))


def _with_other_nouns(texts: Iterable[str], nouns: KoreanNouns, random: Random) -> list[str]:
    changed = ((" ".join(text.split()), nouns.replaced(text, random)) for text in texts)
    return [other for text, other in changed if other != text]


def _scan_pairs(lines: Iterable[str], lengths: str | None) -> list[Pair]:
    """Return commands and actions, those of as many actions as `lengths` says."""
    shortest, longest = _shortest_and_longest(lengths) if lengths else (1, sys.maxsize)
    pairs = []
    for line in lines:
        found = SCAN_LINE.fullmatch(line)
        if not found:
            raise ValueError(f"A line of SCAN must be like 'IN: jump OUT: I_JUMP', but is {line!r} instead.")
        command, actions = found.groups()
        if shortest <= len(actions.split()) <= longest:
            pairs.append((command, actions))
    return pairs


def _reversed(shortest: int, longest: int, symbols: int, random: Random) -> Pair:
    return reversed_symbols([str(random.randrange(symbols)) for _ in range(random.randint(shortest, longest))])


def _shortest_and_longest(lengths: str) -> tuple[int, int]:
    found = LENGTHS.fullmatch(lengths)
    shortest, longest = map(int, found.groups()) if found else (0, 0)
    if not 1 <= shortest <= longest:
        raise ValueError(f"`lengths` must be two numbers from 1 on, such as 1-25, but is {lengths!r} instead.")
    return shortest, longest


def _number(in_words: Any, random: Random) -> Pair:
    """Return a number of one to nine digits, perhaps with commas or some digits behind the point, and its words."""
    number = random.randrange(10 ** random.randint(1, MOST_DIGITS))
    kind = random.choice(("plain", "commas", "point"))
    if kind == "point":
        digits = f"{number % 10**4}.{random.randint(1, 99)}"
        return digits, in_words(digits)
    return (f"{number:,}" if kind == "commas" else str(number)), in_words(str(number))


def _date(in_words: Any, language: str, random: Random) -> Pair:
    day = date.fromordinal(random.randint(FIRST_DAY, LAST_DAY))
    if language == "ko":
        month = KOREAN_MONTHS.get(day.month, f"{in_words(day.month)}월")
        return day.isoformat(), f"{in_words(day.year)}년 {month} {in_words(day.day)}일"
    ordinal, year = in_words(day.day, to="ordinal"), in_words(day.year, to="year")
    return day.isoformat(), f"{calendar.month_name[day.month]} {ordinal}, {year}"


def _number_words(task: Task, language: str) -> Any:
    """Return `num2words` for a language."""
    try:
        from num2words import CONVERTER_CLASSES, num2words
    except ImportError as error:
        raise ImportError("Numbers in words need `num2words`: pip install 'heedful[tasks]'") from error
    known = LANGUAGES_OF_DATES if task == "dates" else tuple(CONVERTER_CLASSES)
    if language not in known:
        raise ValueError(f"`language` must be one of {', '.join(known)} for {task}, but is {language!r} instead.")
    return partial(num2words, lang=language)
