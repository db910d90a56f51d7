"""The noun phrases of the built-in corpus, with their particles, and the nouns that stand alone in a frame.

What may stand in a slot of a sentence is a *tree* of choices: a nested tuple whose leaves are `Words` or `Predicate`s.
A sentence is drawn by walking down at random, one child at every level. So the shape of a tree, not the number of its
leaves, says how often something occurs: a noun with many adjectives is no more frequent than one with few.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from heedful.data.korean_english.conjugation import attach, attributive
from heedful.data.korean_english.inflection import add_s
from heedful.data.korean_english.lexicon import Noun, adjectives_of, nouns_of

PLAIN, POLITE = 0, 1
STYLES = (PLAIN, POLITE)
FIRST, SINGULAR, PLURAL = 0, 1, 2  # I am, he is, they are

Tree = tuple[Any, ...]  # of trees, or of leaves


@dataclass(frozen=True, slots=True)
class Words:
    """Some words of a sentence: Korean in the plain and the polite style (나는, 저는), and English."""

    korean: tuple[str, str]
    english: str
    nouns: tuple[str, ...] = ()
    described: tuple[str, str] | None = None  # an adjective inside, and the noun it describes
    number: int = SINGULAR


PRONOUNS = {  # subject and object; "we" holds "I", so that no sentence says "I met us"
    "나": Words(("나는", "저는"), "I", ("나",), number=FIRST),
    "우리": Words(("우리는", "우리는"), "we", ("나", "우리"), number=PLURAL),
    "그": Words(("그는", "그는"), "he", ("그",)),
    "그녀": Words(("그녀는", "그녀는"), "she", ("그녀",)),
    "그들": Words(("그들은", "그들은"), "they", ("그들",), number=PLURAL),
}
YOU = Words(("너는", "너는"), "you", ("너",), number=PLURAL)
OBJECT_PRONOUNS = (
    Words(("나를", "저를"), "me", ("나",)),
    Words(("우리를", "우리를"), "us", ("나", "우리")),
    Words(("그를", "그를"), "him", ("그",)),
    Words(("그녀를", "그녀를"), "her", ("그녀",)),
    Words(("그들을", "그들을"), "them", ("그들",)),
)
PRONOUN_LEMMAS = frozenset([*PRONOUNS, "너"])
POSSESSIVES = ((("내", "제"), "my"), ("우리", "our"), ("그의", "his"), ("그녀의", "her"), ("그들의", "their"))
NUMBERS = dict(
    zip(
        ["한", "두", "세", "네", "다섯", "여섯", "일곱", "여덟", "아홉", "열"],
        ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"],
        strict=True,
    )
)


def _with_determiner(noun: Noun, determiner: str | tuple[str, str], english: str) -> Words:
    korean = (determiner, determiner) if isinstance(determiner, str) else determiner
    plain, polite = (f"{word} {noun.korean}" for word in korean)
    return Words((plain, polite), f"{english} {noun.english}", (noun.korean,))


def _bare(noun: Noun) -> Words:
    return Words((noun.korean, noun.korean), f"the {noun.english}", (noun.korean,))


def _plurals(noun: Noun) -> Tree:
    forms = (("", "the"), ("이 ", "these"), ("그 ", "those"))
    return tuple(
        Words((f"{ko}{noun.korean}들",) * 2, f"{en} {noun.plural}", (noun.korean,), number=PLURAL) for ko, en in forms
    )


def _described(noun: Noun) -> Tree:
    return tuple(
        Words(
            (f"{attributive(adjective.korean)} {noun.korean}",) * 2,
            f"the {adjective.english} {noun.english}",
            (noun.korean,),
            (adjective.korean, noun.korean),
        )
        for adjective in adjectives_of(noun)
    )


@cache
def noun_phrases(noun: Noun, *, plural: bool = False, described: bool = True) -> Tree:
    """Return a noun's phrases, without a particle: bare, determined, plural, described by an adjective.

    A word for a relation (친구, 딸) always has a possessor; other people have none.
    """
    if noun.is_any("relation"):
        return tuple(_with_determiner(noun, korean, english) for korean, english in POSSESSIVES)
    determined = [_with_determiner(noun, "이", "this"), _with_determiner(noun, "그", "that")]
    if noun.is_any("pet") or not noun.is_any("person", "infant", "animal", "insect", "place", "water"):
        determined += [_with_determiner(noun, korean, english) for korean, english in POSSESSIVES]
    groups = [(_bare(noun),), tuple(determined)]
    if plural and noun.is_any("person", "infant", "animal"):
        groups.append(_plurals(noun))
    if described and adjectives_of(noun):
        groups.append(_described(noun))
    return tuple(groups)


def with_particle(tree: Any, particle: str) -> Any:
    """Attach a particle to every phrase of a tree; or any other text, such as 에서, that never changes its form."""
    if isinstance(tree, tuple):
        return tuple(with_particle(child, particle) for child in tree)
    if particle.isascii():
        plain, polite = (attach(korean, particle) for korean in tree.korean)
    else:
        plain, polite = (korean + particle for korean in tree.korean)
    return replace(tree, korean=(plain, polite))


def pronouns(asked: bool = False) -> Tree:
    """Return the pronouns as subjects, as one branch of a tree; nobody asks about "I" and "we"."""
    return (tuple(words for key, words in PRONOUNS.items() if not (asked and key in ("나", "우리"))),)


@cache
def subjects(
    classes: tuple[str, ...], particle: str = "topic", *, asked: bool = False, described: bool = True
) -> Tree:
    """Return the subjects of the classes; pronouns and relations where people are among them.

    A pronoun keeps its topic particle after an adverb of time, where a noun takes 이 or 가.
    """
    people = "person" in classes
    nouns = nouns_of(*classes, *(("relation",) if people else ()))
    phrases = tuple(with_particle(noun_phrases(noun, plural=True, described=described), particle) for noun in nouns)
    # With people, a tenth of the subjects are pronouns.
    return (*pronouns(asked), *(phrases[start::9] for start in range(9))) if people else phrases


@cache
def objects(classes: tuple[str, ...]) -> Tree:
    """Return the objects of the classes with 을 or 를; a tenth are pronouns where people are among them."""
    nouns = tuple(with_particle(noun_phrases(noun), "object") for noun in nouns_of(*classes))
    return (OBJECT_PRONOUNS, *(nouns[start::9] for start in range(9))) if "relation" in classes else nouns


@cache
def bare(classes: tuple[str, ...], particle: str, english: str = "{}") -> Tree:
    """Return the nouns of the classes alone ("the boy"), with a particle, inside an English frame ("to {}")."""
    return tuple(
        replace(with_particle(_bare(noun), particle), english=english.format(f"the {noun.english}"))
        for noun in nouns_of(*classes)
    )


@cache
def places(classes: tuple[str, ...], particle: str = "에서") -> Tree:
    """Return the places of the classes with the English preposition of each."""
    return tuple(
        replace(with_particle(_bare(noun), particle), english=f"{noun.detail} the {noun.english}")
        for noun in nouns_of(*classes)
    )


def _counted(noun: Noun) -> Tree:
    counter, _, measure = noun.detail.partition(" ")
    phrases = []
    for korean, english in NUMBERS.items():
        number = SINGULAR if english == "one" else PLURAL
        things = noun.english if number == SINGULAR else noun.plural
        if measure:
            things = f"{measure if number == SINGULAR else add_s(measure)} of {noun.english}"
        text = f"{noun.korean} {korean} {counter}"
        phrases.append(Words((text, text), f"{english} {things}", (noun.korean,), number=number))
    return tuple(phrases)


@cache
def counted(classes: tuple[str, ...], particle: str) -> Tree:
    """Return the countable nouns of the classes with each number: 책 세 권, three books."""
    return tuple(
        with_particle(_counted(noun), particle)
        for noun in nouns_of(*classes)
        if noun.detail and not noun.is_any("place", "water")
    )
