"""The words of the built-in corpus, and the noun phrases and predicates made of them.

Everything here is a *tree* of choices: a nested tuple whose leaves are `Words` or `Predicate`s. A sentence is drawn by
walking down at random, one child at every level, so that the shape of a tree, not the number of its leaves, says how
often something occurs: a noun with many adjectives is no more frequent than one with few.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from heedful.data.korean_english_conjugation import (
    attach,
    attributive,
    infinitive,
    past_stem,
    plain_present,
    prospective,
    question,
    stem,
)
from heedful.data.korean_english_inflection import add_ed, add_ing, add_s, inflect_first

LEXICON = Path(__file__).with_name("korean_english_lexicon.tsv")
PLAIN, POLITE = 0, 1
STYLES = (PLAIN, POLITE)
FIRST, SINGULAR, PLURAL = 0, 1, 2  # I am, he is, they are

Tree = tuple[Any, ...]  # of trees, or of leaves


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


@dataclass(frozen=True, slots=True)
class Words:
    """Some words of a sentence: Korean in the plain and the polite style (나는, 저는), and English."""

    korean: tuple[str, str]
    english: str
    nouns: tuple[str, ...] = ()
    described: tuple[str, str] | None = None  # an adjective inside, and the noun it describes
    number: int = SINGULAR


@dataclass(frozen=True, slots=True)
class Predicate:
    """A conjugated predicate: Korean by style, English by the subject's number.

    In a statement `auxiliary` is empty and `main` is complete ("does not eat"); in a question they stand apart.
    """

    korean: tuple[str, str]
    auxiliary: tuple[str, str, str]
    main: tuple[str, str, str]
    lemma: str = ""
    nouns: tuple[str, ...] = ()
    described: tuple[str, str] | None = None


@cache
def lexicon() -> tuple[tuple[Noun, ...], tuple[Verb, ...], tuple[Adjective, ...]]:
    """Read the words: nouns, verbs, adjectives."""
    nouns, verbs, adjectives = [], [], []
    for line in LEXICON.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        kind, korean, english, *rest = line.split("\t")
        irregular, classes, detail = ("" if cell == "-" else cell for cell in rest)
        if kind == "noun":
            plural = irregular or add_s(english)
            nouns.append(Noun(korean, english, plural, frozenset(classes.split()), detail))
        elif kind == "verb":
            combines = dict(item.split("=") for item in detail.split() if "=" in item)
            combines.setdefault("by", "person")
            verbs.append(
                Verb(
                    korean,
                    english,
                    irregular or inflect_first(english, add_ed),
                    tuple(classes.split()),
                    {key: tuple(value.split(",")) for key, value in combines.items()},
                    frozenset(item for item in detail.split() if "=" not in item),
                )
            )
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


# Noun phrases

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
NUMBERS = {
    "한": "one",
    "두": "two",
    "세": "three",
    "네": "four",
    "다섯": "five",
    "여섯": "six",
    "일곱": "seven",
    "여덟": "eight",
    "아홉": "nine",
    "열": "ten",
}


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


def mark(tree: Any, particle: str) -> Any:
    """Attach a particle to every phrase of a tree; or any other text, such as 에서, that never changes its form."""
    if isinstance(tree, tuple):
        return tuple(mark(child, particle) for child in tree)
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
    phrases = tuple(mark(noun_phrases(noun, plural=True, described=described), particle) for noun in nouns)
    # With people, a tenth of the subjects are pronouns.
    return (*pronouns(asked), *(phrases[start::9] for start in range(9))) if people else phrases


@cache
def objects(classes: tuple[str, ...]) -> Tree:
    """Return the objects of the classes with 을 or 를; a tenth are pronouns where people are among them."""
    nouns = tuple(mark(noun_phrases(noun), "object") for noun in nouns_of(*classes))
    return (OBJECT_PRONOUNS, *(nouns[start::9] for start in range(9))) if "relation" in classes else nouns


@cache
def bare(classes: tuple[str, ...], particle: str, english: str = "{}") -> Tree:
    """Return the nouns of the classes alone ("the boy"), with a particle, inside an English frame ("to {}")."""
    return tuple(
        replace(mark(_bare(noun), particle), english=english.format(f"the {noun.english}"))
        for noun in nouns_of(*classes)
    )


@cache
def places(classes: tuple[str, ...], particle: str = "에서") -> Tree:
    """Return the places of the classes with the English preposition of each."""
    return tuple(
        replace(mark(_bare(noun), particle), english=f"{noun.detail} the {noun.english}")
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
        mark(_counted(noun), particle)
        for noun in nouns_of(*classes)
        if noun.detail and not noun.is_any("place", "water")
    )


# Predicates

TENSES = ("present", "past", "future", "progressive", "past progressive", "can")
SIMPLE_TENSES = ("present", "past", "future")


def korean_forms(dictionary_form: str, tense: str, form: str, *, adjective: bool = False) -> tuple[str, str]:
    """Conjugate a Korean verb or adjective.

    Args:
        dictionary_form: the form in 다.
        tense: one of `TENSES`.
        form: "statement", "negative" or "question".
        adjective: whether it is an adjective, whose plain present is the dictionary form.

    Returns:
        The plain and the polite form.
    """
    root, past, will = stem(dictionary_form), past_stem(dictionary_form), prospective(dictionary_form)
    polite = infinitive(dictionary_form) + "요"
    plain = dictionary_form if adjective else plain_present(dictionary_form)
    not_plain = "않다" if adjective else "않는다"
    table = {
        "statement": {
            "present": (plain, polite),
            "past": (f"{past}다", f"{past}어요"),
            "future": (f"{will} 것이다", f"{will} 거예요"),
            "progressive": (f"{root}고 있다", f"{root}고 있어요"),
            "past progressive": (f"{root}고 있었다", f"{root}고 있었어요"),
            "can": (f"{will} 수 있다", f"{will} 수 있어요"),
        },
        "negative": {
            "present": (f"{root}지 {not_plain}", f"{root}지 않아요"),
            "past": (f"{root}지 않았다", f"{root}지 않았어요"),
            "future": (f"{root}지 않을 것이다", f"{root}지 않을 거예요"),
            "progressive": (f"{root}고 있지 않다", f"{root}고 있지 않아요"),
            "past progressive": (f"{root}고 있지 않았다", f"{root}고 있지 않았어요"),
            "can": (f"{will} 수 없다", f"{will} 수 없어요"),
        },
        "question": {
            "present": (question(dictionary_form), polite),
            "past": (f"{past}니", f"{past}어요"),
            "future": (f"{will} 거니", f"{will} 거예요"),
            "progressive": (f"{root}고 있니", f"{root}고 있어요"),
            "past progressive": (f"{root}고 있었니", f"{root}고 있었어요"),
            "can": (f"{will} 수 있니", f"{will} 수 있어요"),
        },
    }
    return table[form][tense]


BE = {"present": ("am", "is", "are"), "past": ("was", "was", "were")}


def _english_forms(auxiliaries: Iterable[str], mains: Iterable[str], form: str) -> tuple[tuple, tuple]:
    """Join auxiliary and main verb as the form asks."""
    auxiliaries, mains = tuple(auxiliaries), tuple(mains)
    if form == "question":
        return auxiliaries, mains
    negation = {"statement": "", "negative": " not"}[form]
    joined = (f"{auxiliary}{negation} {main}" for auxiliary, main in zip(auxiliaries, mains, strict=True))
    return ("",) * 3, tuple(text.replace("can not", "cannot") for text in joined)


def verb_predicate(verb: Verb, tense: str, form: str, korean: tuple[str, str] | None = None) -> Predicate:
    """Conjugate a verb in both languages; `korean` overrides the Korean forms."""
    base = (verb.english,) * 3
    if form == "statement" and tense == "present":
        auxiliary, main = ("",) * 3, (verb.english, inflect_first(verb.english, add_s), verb.english)
    elif form == "statement" and tense == "past":
        auxiliary, main = ("",) * 3, (verb.past,) * 3
    elif "progressive" in tense:
        be = BE["past" if "past" in tense else "present"]
        auxiliary, main = _english_forms(be, (inflect_first(verb.english, add_ing),) * 3, form)
    else:
        helper = {"present": ("do", "does", "do"), "past": ("did",) * 3}.get(tense)
        helper = helper or ("will" if tense == "future" else "can",) * 3
        auxiliary, main = _english_forms(helper, base, form)
    return Predicate(korean or korean_forms(verb.korean, tense, form), auxiliary, main, verb.korean)


@cache
def predicates(korean: str, form: str = "statement", tenses: tuple[str, ...] = TENSES) -> Tree:
    """Return a verb's predicates in those of the tenses that it has.

    A verb whose English past looks like its base ("they cut", "I read") has no present statement, so that English
    names the tense; a `simple` verb has neither progressive nor "can".
    """
    verb = next(verb for verb in lexicon()[1] if verb.korean == korean)
    possible = [tense for tense in tenses if tense in SIMPLE_TENSES or "simple" not in verb.flags]
    if verb.past == verb.english and form == "statement" and "present" in possible:
        possible.remove("present")
    return tuple(verb_predicate(verb, tense, form) for tense in possible)


def be_predicate(
    korean: tuple[str, str], complements: tuple[str, str, str], tense: str, form: str, lemma: str = ""
) -> Predicate:
    """Make a predicate with "be" from the Korean forms and the English complement for every number."""
    if tense == "future":
        auxiliary, main = _english_forms(("will",) * 3, [f"be {text}" for text in complements], form)
    else:
        auxiliary, main = _english_forms(BE[tense], complements, form)
    return Predicate(korean, auxiliary, main, lemma)


def adjective_predicate(adjective: Adjective, tense: str, form: str) -> Predicate:
    """Conjugate an adjective in both languages."""
    korean = korean_forms(adjective.korean, tense, form, adjective=True)
    return be_predicate(korean, (adjective.english,) * 3, tense, form, adjective.korean)


def copula_forms(noun: str, tense: str, form: str) -> tuple[str, str]:
    """Conjugate 이다 or 아니다 after a noun: 의사다, 의사예요, 학생이었다, 의사가 아니에요."""
    if form == "negative":
        negated = attach(noun, "subject")
        table = {"present": ("아니다", "아니에요"), "past": ("아니었다", "아니었어요")}
        plain, polite = table[tense]
        return f"{negated} {plain}", f"{negated} {polite}"
    linked = attach(noun, "copula")
    if tense == "present":
        return f"{linked}다", f"{noun}예요" if linked == noun else f"{linked}에요"
    past = f"{noun}였" if linked == noun else f"{linked}었"
    return f"{past}다", f"{past}어요"
