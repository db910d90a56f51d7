"""The predicates of the built-in corpus: verbs, adjectives and nouns, conjugated in both languages."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from heedful.data.korean_english.conjugation import (
    attach,
    infinitive,
    past_stem,
    plain_present,
    prospective,
    question,
    stem,
)
from heedful.data.korean_english.inflection import add_ing, add_s, inflect_first
from heedful.data.korean_english.lexicon import Adjective, Verb, lexicon
from heedful.data.korean_english.phrases import Tree


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


TENSES = ("present", "past", "future", "progressive", "past progressive", "can")
SIMPLE_TENSES = ("present", "past", "future")


def korean_forms(dictionary_form: str, tense: str, form: str, *, adjective: bool = False) -> tuple[str, str]:
    """Conjugate a Korean verb or adjective.

    Args:
        dictionary_form: The form in 다.
        tense: One of `TENSES`.
        form: "statement", "negative" or "question".
        adjective: Whether it is an adjective, whose plain present is the dictionary form.

    Returns:
        The plain and the polite form.
    """
    negative = form == "negative"
    if "progressive" in tense:  # 먹고 있다, 먹고 있지 않다
        front, word = f"{stem(dictionary_form)}고 {'있지 ' if negative else ''}", "않다" if negative else "있다"
    elif tense == "can":  # 먹을 수 있다, 먹을 수 없다
        front, word = f"{prospective(dictionary_form)} 수 ", "없다" if negative else "있다"
    elif negative:  # 먹지 않는다, 크지 않다
        front, word = f"{stem(dictionary_form)}지 ", "않다"
    else:
        front, word = "", dictionary_form
    simple = {"progressive": "present", "past progressive": "past", "can": "present"}.get(tense, tense)
    # Like an adjective, 있다 and 없다 have their dictionary form as the plain present; so has 않다 after them.
    plain, polite = _simple_forms(word, simple, form == "question", adjective or simple != tense)
    return front + plain, front + polite


def _simple_forms(word: str, tense: str, asked: bool, adjective: bool) -> tuple[str, str]:
    """Conjugate a word that has no helper in one of `SIMPLE_TENSES`."""
    if tense == "past":
        return past_stem(word) + ("니" if asked else "다"), past_stem(word) + "어요"
    if tense == "future":
        return f"{prospective(word)} {'거니' if asked else '것이다'}", f"{prospective(word)} 거예요"
    statement = word if adjective else plain_present(word)
    return question(word) if asked else statement, infinitive(word) + "요"


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
