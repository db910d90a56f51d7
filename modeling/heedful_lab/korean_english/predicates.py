"""The predicates of the built-in corpus: verbs, adjectives and nouns, conjugated in both languages."""

from dataclasses import dataclass
from functools import cache

from heedful_lab.korean_english import conjugation
from heedful_lab.korean_english.conjugation import attach, prospective, stem
from heedful_lab.korean_english.lexicon import Adjective, Verb, add_ing, add_s, inflect_first, lexicon
from heedful_lab.korean_english.phrases import Tree

Forms = tuple[str, ...]  # English after "I", "he" and "they"


@dataclass(frozen=True, slots=True)
class Predicate:
    """A predicate in Korean by style, in English by number; only questions separate `auxiliary` and `main`."""

    korean: tuple[str, str]
    auxiliary: Forms
    main: Forms
    lemma: str = ""
    nouns: tuple[str, ...] = ()
    described: tuple[str, str] | None = None


TENSES = ("present", "past", "future", "progressive", "past progressive", "can")
SIMPLE_TENSES = ("present", "past", "future")


def korean_forms(dictionary_form: str, tense: str, form: str, *, adjective: bool = False) -> tuple[str, str]:
    """Return a verb's or adjective's plain and polite form: "statement", "negative" or "question"."""
    negative = form == "negative"
    if "progressive" in tense:  # 먹고 있다, 먹고 있지 않다
        front, word = f"{stem(dictionary_form)}고 {'있지 ' if negative else ''}", "않다" if negative else "있다"
    elif tense == "can":  # 먹을 수 있다, 먹을 수 없다
        front, word = f"{prospective(dictionary_form)} 수 ", "없다" if negative else "있다"
    elif negative:  # 먹지 않는다, 크지 않다
        front, word = f"{stem(dictionary_form)}지 ", "않다"
    else:
        front, word = "", dictionary_form
    asked = form == "question"
    if "past" in tense:
        forms = conjugation.past_stem(word) + ("니" if asked else "다"), conjugation.past_stem(word) + "어요"
    elif tense == "future":
        forms = f"{prospective(word)} {'거니' if asked else '것이다'}", f"{prospective(word)} 거예요"
    else:
        # 있다, 없다 and 않다 after them use the dictionary form as plain present, like adjectives.
        statement = word if adjective or tense != "present" else conjugation.plain_present(word)
        forms = conjugation.question(word) if asked else statement, conjugation.infinitive(word) + "요"
    return front + forms[0], front + forms[1]


NOTHING: Forms = ("", "", "")
BE = {"present": ("am", "is", "are"), "past": ("was", "was", "were")}
HELPERS = {
    "present": ("do", "does", "do"),
    "past": ("did",) * 3,
    "future": ("will",) * 3,
    "progressive": BE["present"],
    "past progressive": BE["past"],
    "can": ("can",) * 3,
}


def _english_forms(helpers: Forms, main: Forms, form: str) -> tuple[Forms, Forms]:
    """Return auxiliaries and main verbs: separate in a question, otherwise joined."""
    if form == "question":
        return helpers, main
    negation = " not" if form == "negative" else ""
    joined = (f"{helper}{negation} {verb}" for helper, verb in zip(helpers, main, strict=True))
    return NOTHING, tuple(text.replace("can not", "cannot") for text in joined)


def verb_predicate(verb: Verb, tense: str, form: str, korean: tuple[str, str] | None = None) -> Predicate:
    """Conjugate a verb in both languages; `korean` overrides the Korean forms."""
    if form == "statement" and tense == "present":
        english: tuple[Forms, Forms] = NOTHING, (verb.english, inflect_first(verb.english, add_s), verb.english)
    elif form == "statement" and tense == "past":
        english = NOTHING, (verb.past,) * 3
    else:
        main = inflect_first(verb.english, add_ing) if "progressive" in tense else verb.english
        english = _english_forms(HELPERS[tense], (main,) * 3, form)
    return Predicate(korean or korean_forms(verb.korean, tense, form), *english, verb.korean)


@cache
def predicates(korean: str, form: str = "statement", tenses: tuple[str, ...] = TENSES) -> Tree:
    """Return a verb's predicates in `tenses`, without those that it lacks.

    "Cut" and "read" have no present statement, so that English shows the tense; `simple` verbs no progressive and no
    "can".
    """
    verb = next(verb for verb in lexicon()[1] if verb.korean == korean)
    possible = [tense for tense in tenses if tense in SIMPLE_TENSES or "simple" not in verb.flags]
    if verb.past == verb.english and form == "statement" and "present" in possible:
        possible.remove("present")
    return tuple(verb_predicate(verb, tense, form) for tense in possible)


def be_predicate(korean: tuple[str, str], complement: Forms, tense: str, form: str, lemma: str = "") -> Predicate:
    """Make a predicate with "be" from Korean forms and the English complement of each number."""
    if tense == "future":
        complement = tuple(f"be {each}" for each in complement)
    return Predicate(korean, *_english_forms(BE.get(tense, HELPERS[tense]), complement, form), lemma)


def adjective_predicate(adjective: Adjective, tense: str, form: str) -> Predicate:
    """Conjugate an adjective in both languages."""
    korean = korean_forms(adjective.korean, tense, form, adjective=True)
    return be_predicate(korean, (adjective.english,) * 3, tense, form, adjective.korean)


def copula_forms(noun: str, tense: str, form: str) -> tuple[str, str]:
    """Conjugate 이다 or 아니다 after a noun: 의사다, 의사예요, 학생이었다, 의사가 아니에요."""
    linked = f"{attach(noun, 'subject')} 아니" if form == "negative" else attach(noun, "copula")
    if tense == "present":
        return f"{linked}다", linked + ("예요" if linked == noun else "에요")
    past = linked + ("였" if linked == noun else "었")
    return f"{past}다", f"{past}어요"
