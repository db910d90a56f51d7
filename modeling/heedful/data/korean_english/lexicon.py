"""The words of the built-in corpus, as `lexicon.tsv` lists them: nouns, verbs and adjectives with their classes."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from heedful.data.korean_english.inflection import add_ed, add_s, inflect_first

LEXICON = Path(__file__).with_name("lexicon.tsv")


@dataclass(frozen=True, slots=True)
class Noun:
    """A noun of the lexicon; `detail` is its counter, or a place's English preposition."""

    korean: str
    english: str
    plural: str
    classes: frozenset[str]
    detail: str

    def is_any(self, *classes: str) -> bool:
        """Tell whether it belongs to one of the classes."""
        return not self.classes.isdisjoint(classes)


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb of the lexicon: its English forms, the classes it combines with, and its flags."""

    korean: str
    english: str
    past: str
    objects: tuple[str, ...]
    combines: dict[str, tuple[str, ...]]  # by, at, to, toward, with
    flags: frozenset[str]  # give, manner, simple


@dataclass(frozen=True, slots=True)
class Adjective:
    """An adjective of the lexicon and the classes of nouns it describes."""

    korean: str
    english: str
    describes: tuple[str, ...]
    is_state: bool


def read_cells(path: Path) -> Iterator[list[str]]:
    """Read a file of tab-separated cells, in which "-" is an empty cell and a line with # a comment."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            yield ["" if cell == "-" else cell for cell in line.split("\t")]


@cache
def lexicon() -> tuple[tuple[Noun, ...], tuple[Verb, ...], tuple[Adjective, ...]]:
    """Read the words: nouns, verbs, adjectives."""
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
        else:
            adjectives.append(Adjective(korean, english, tuple(classes.split()), detail == "state"))
    return tuple(nouns), tuple(verbs), tuple(adjectives)


def nouns_of(*classes: str) -> list[Noun]:
    """Return the nouns that belong to at least one of the classes, each once."""
    return [noun for noun in lexicon()[0] if noun.is_any(*classes)]


@cache
def adjectives_of(noun: Noun) -> tuple[Adjective, ...]:
    """Return the adjectives that may describe a noun."""
    return tuple(adjective for adjective in lexicon()[2] if noun.is_any(*adjective.describes))
