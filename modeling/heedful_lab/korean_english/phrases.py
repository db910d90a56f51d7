"""The noun phrases of the built-in corpus, with their particles.

The choices for a slot are a *tree*: nested tuples with leaves `Phrase` and `Predicate`. Drawing takes one child at
each level, so a noun with many adjectives is no more frequent than a noun with few.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from heedful_lab.korean_english.conjugation import attach, attributive
from heedful_lab.korean_english.lexicon import Noun, add_s, adjectives_of, nouns_of, words_of_kind

PLAIN, POLITE = STYLES = (0, 1)
FIRST, SINGULAR, PLURAL = 0, 1, 2  # I am, he is, they are

Tree = tuple[Any, ...]  # trees or leaves


@dataclass(frozen=True, slots=True)
class Phrase:
    """Words in a sentence: Korean in the plain and the polite style (나는, 저는), and English."""

    korean: tuple[str, str]
    english: str
    nouns: tuple[str, ...] = ()
    described: tuple[str, str] | None = None  # its adjective, and the noun
    number: int = SINGULAR


def noun_words(noun: Noun, korean: str, english: str, **more: Any) -> Phrase:
    """Return words with a noun, the same in both styles."""
    return Phrase((korean, korean), english, (noun.korean,), **more)


def with_particle(tree: Any, particle: str) -> Any:
    """Attach a particle (see `attach`) to each phrase in a tree."""
    if isinstance(tree, tuple):
        return tuple(with_particle(child, particle) for child in tree)
    plain, polite = (attach(korean, particle) for korean in tree.korean)
    return replace(tree, korean=(plain, polite))


PRONOUNS = (  # "we" includes "I", to exclude "I met us"
    Phrase(("나", "저"), "I", ("나",), number=FIRST),
    Phrase(("우리", "우리"), "we", ("나", "우리"), number=PLURAL),
    Phrase(("그", "그"), "he", ("그",)),
    Phrase(("그녀", "그녀"), "she", ("그녀",)),
    Phrase(("그들", "그들"), "they", ("그들",), number=PLURAL),
)
OBJECT_PRONOUNS = tuple(
    with_particle(replace(words, english=english), "object")
    for words, english in zip(PRONOUNS, ("me", "us", "him", "her", "them"), strict=True)
)
YOU = Phrase(("너는", "너는"), "you", ("너",), number=PLURAL)
PRONOUN_LEMMAS = frozenset(YOU.nouns).union(*(words.nouns for words in PRONOUNS))
DETERMINERS = (("이", "this"), ("그", "that"))
POSSESSIVES = (("내", "my"), ("우리", "our"), ("그의", "his"), ("그녀의", "her"), ("그들의", "their"))


def _determined(noun: Noun, determiners: tuple[tuple[str, str], ...]) -> Tree:
    return tuple(
        Phrase(
            (f"{korean} {noun.korean}", f"{'제' if korean == '내' else korean} {noun.korean}"),
            f"{english} {noun.english}",
            (noun.korean,),
        )
        for korean, english in determiners
    )


@cache
def noun_phrases(noun: Noun, *, plural: bool = False, described: bool = True) -> Tree:
    """Return a noun's phrases without a particle; a relation (친구, 딸) always has a possessor, other people never."""
    if noun.is_any("relation"):
        return _determined(noun, POSSESSIVES)
    has_owners = noun.is_any("pet") or not noun.is_any("person", "infant", "animal", "insect", "place", "water")
    determiners = DETERMINERS + POSSESSIVES if has_owners else DETERMINERS
    groups: list[Tree] = [(noun_words(noun, noun.korean, f"the {noun.english}"),), _determined(noun, determiners)]
    if plural and noun.is_any("person", "infant", "animal"):
        groups.append(
            tuple(
                noun_words(noun, f"{korean}{noun.korean}들", f"{english} {noun.plural}", number=PLURAL)
                for korean, english in (("", "the"), ("이 ", "these"), ("그 ", "those"))
            )
        )
    if described and adjectives_of(noun):
        groups.append(
            tuple(
                noun_words(
                    noun,
                    f"{attributive(adjective.korean)} {noun.korean}",
                    f"the {adjective.english} {noun.english}",
                    described=(adjective.korean, noun.korean),
                )
                for adjective in adjectives_of(noun)
            )
        )
    return tuple(groups)


def pronouns(asked: bool = False) -> Tree:
    """Return the pronouns as subjects, in one branch; questions leave out "I" and "we"."""
    return (tuple(with_particle(words, "topic") for words in PRONOUNS if not (asked and "나" in words.nouns)),)


@cache
def subjects(
    classes: tuple[str, ...], particle: str = "topic", *, asked: bool = False, described: bool = True
) -> Tree:
    """Return the subjects of the classes; pronouns keep the topic particle after an adverb of time."""
    people = "person" in classes
    nouns = nouns_of(*classes, *(("relation",) if people else ()))
    phrases = tuple(with_particle(noun_phrases(noun, plural=True, described=described), particle) for noun in nouns)
    # With people, a tenth of the subjects are pronouns.
    return (*pronouns(asked), *(phrases[start::9] for start in range(9))) if people else phrases


@cache
def objects(classes: tuple[str, ...]) -> Tree:
    """Return the objects of the classes with 을 or 를; with people, a tenth are pronouns."""
    nouns = tuple(with_particle(noun_phrases(noun), "object") for noun in nouns_of(*classes))
    return (OBJECT_PRONOUNS, *(nouns[start::9] for start in range(9))) if "relation" in classes else nouns


@cache
def bare(classes: tuple[str, ...], particle: str, english: str = "the {}", number: int = SINGULAR) -> Tree:
    """Return the nouns of the classes with a particle, in an English frame: "to the {}", "{detail} the {}"."""
    return tuple(
        noun_words(
            noun, attach(noun.korean, particle), english.format(noun.english, detail=noun.detail), number=number
        )
        for noun in nouns_of(*classes)
    )


def places(classes: tuple[str, ...], particle: str = "에서") -> Tree:
    """Return the places of the classes with their English prepositions."""
    return bare(classes, particle, "{detail} the {}")


def _counted(noun: Noun) -> Tree:
    counter, _, measure = noun.detail.partition(" ")
    one, many = noun.english, noun.plural
    if measure:
        one, many = (f"{text} of {noun.english}" for text in (measure, add_s(measure)))
    return tuple(
        noun_words(noun, f"{noun.korean} {korean} {counter}", f"{english} {things}", number=number)
        for korean, english in words_of_kind("number")
        for things, number in [(one, SINGULAR) if english == "one" else (many, PLURAL)]
    )


@cache
def counted(classes: tuple[str, ...], particle: str) -> Tree:
    """Return the countable nouns of the classes with each number: 책 세 권, three books."""
    return tuple(
        with_particle(_counted(noun), particle)
        for noun in nouns_of(*classes)
        if noun.detail and not noun.is_any("place", "water")
    )
