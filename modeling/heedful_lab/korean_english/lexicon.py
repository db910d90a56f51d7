"""The words of the built-in corpus (`lexicon.tsv`), and English plurals and verb forms by rule."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LEXICON = Path(__file__).with_name("lexicon.tsv")
CONSONANTS = "bcdfghjklmnpqrstvwxz"
HISSING = ("s", "x", "z", "ch", "sh")


@dataclass(frozen=True, slots=True)
class Noun:
    """A noun of the lexicon."""

    korean: str
    english: str
    plural: str
    classes: frozenset[str]
    detail: str  # its counter, or a place's English preposition

    def is_any(self, *classes: str) -> bool:
        """Return True if the noun belongs to one of the classes."""
        return not self.classes.isdisjoint(classes)


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb of the lexicon with its English past."""

    korean: str
    english: str
    past: str
    objects: tuple[str, ...]  # noun classes of its objects
    combines: dict[str, tuple[str, ...]]  # noun classes for by, at, to, toward, with
    flags: frozenset[str]  # give, manner, simple


@dataclass(frozen=True, slots=True)
class Adjective:
    """An adjective of the lexicon and the noun classes it describes."""

    korean: str
    english: str
    describes: tuple[str, ...]
    is_state: bool


def read_cells(path: Path) -> Iterator[list[str]]:
    """Yield a file's tab-separated cells; "-" is an empty cell, and lines with # are comments."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            yield ["" if cell == "-" else cell for cell in line.split("\t")]


@cache
def lexicon() -> tuple[tuple[Noun, ...], tuple[Verb, ...], tuple[Adjective, ...]]:
    """Return the words that have classes: nouns, verbs, adjectives."""
    nouns, verbs, adjectives = [], [], []
    for kind, korean, english, irregular, classes, detail in read_cells(LEXICON):
        if kind == "noun":
            nouns.append(Noun(korean, english, irregular or add_s(english), frozenset(classes.split()), detail))
        elif kind == "verb":
            past = irregular or inflect_first(english, add_ed)
            combines = {"by": "person"} | dict(item.split("=") for item in detail.split() if "=" in item)
            by_role = {role: tuple(names.split(",")) for role, names in combines.items()}
            flags = frozenset(item for item in detail.split() if "=" not in item)
            verbs.append(Verb(korean, english, past, tuple(classes.split()), by_role, flags))
        elif kind == "adjective":
            adjectives.append(Adjective(korean, english, tuple(classes.split()), detail == "state"))
    return tuple(nouns), tuple(verbs), tuple(adjectives)


@cache
def words_of_kind(kind: str) -> tuple[tuple[str, str], ...]:
    """Return (Korean, English) of each word of one kind: "number", "position", "past" (yesterday), …."""
    return tuple((korean, english) for own, korean, english, *_ in read_cells(LEXICON) if own == kind)


def nouns_of(*classes: str) -> list[Noun]:
    """Return the nouns of at least one of the classes, each once."""
    return [noun for noun in lexicon()[0] if noun.is_any(*classes)]


@cache
def adjectives_of(noun: Noun) -> tuple[Adjective, ...]:
    """Return the adjectives that may describe a noun."""
    return tuple(adjective for adjective in lexicon()[2] if noun.is_any(*adjective.describes))


def add_s(word: str) -> str:
    """Add the s of the plural or third person: boxes, parties, goes, plays."""
    if word == "have":
        return "has"
    if word.endswith(HISSING) or word == "go":
        return word + "es"
    return word[:-1] + "ies" if _ends_in_consonant_and_y(word) else word + "s"


def add_ed(word: str) -> str:
    """Form the regular past: opened, washed, hugged, studied, liked."""
    if word.endswith("e"):
        return word + "d"
    return word[:-1] + "ied" if _ends_in_consonant_and_y(word) else _doubled(word) + "ed"


def add_ing(word: str) -> str:
    """Form the progressive: opening, making, cutting."""
    return (word[:-1] if word.endswith("e") and not word.endswith("ee") else _doubled(word)) + "ing"


def inflect_first(phrase: str, inflect: Callable[[str], str]) -> str:
    """Inflect a verb's first word: turn on, turns on."""
    first, space, rest = phrase.partition(" ")
    return inflect(first) + space + rest


def _ends_in_consonant_and_y(word: str) -> bool:
    return word[-1] == "y" and word[-2] in CONSONANTS


def _doubled(word: str) -> str:
    """Double the last consonant if a one-syllable word ends in one vowel and one consonant."""
    vowels = [letter in "aeiou" for letter in word]
    doubles = sum(vowels) == 1 and len(word) > 2 and vowels[-2] and word[-1] in CONSONANTS and word[-1] not in "wx"
    return word + word[-1] * doubles
