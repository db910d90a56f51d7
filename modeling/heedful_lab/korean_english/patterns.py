"""The sentence patterns of the built-in corpus: phrases that combine, and their order in both languages.

`patterns.tsv` lists them. A pattern has a *row* for each verb, adjective or location that fits: a tree of phrases for
each slot. `FILLINGS` fills the slots of verbs, `ROWS` makes all other rows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from heedful_lab.korean_english import phrases, predicates
from heedful_lab.korean_english.lexicon import Verb, lexicon, nouns_of, read_cells, words_of_kind
from heedful_lab.korean_english.phrases import Phrase, Tree, bare, counted, places, subjects, with_particle
from heedful_lab.korean_english.predicates import NOTHING, TENSES, Predicate, copula_forms, korean_forms

TABLE = Path(__file__).with_name("patterns.tsv")
TIMED_TENSES = ("past", "present", "future", "progressive", "past progressive")

SlotTrees = dict[str, Tree]


def adverbs(kind: str) -> Tree:
    """Return the adverbs of one kind, such as "manner" or a tense, as leaves."""
    return tuple(Phrase((korean, korean), english) for korean, english in words_of_kind(kind))


@dataclass(frozen=True)
class Clause:
    """The verb of a row, its form, and the tense if an adverb of time names it."""

    verb: Verb
    form: str = "statement"
    tense: str = ""

    def subjects(self) -> Tree:
        """Return the verb's subjects, with 이 or 가 after an adverb of time, otherwise 은 or 는."""
        by, particle = self.verb.combines["by"], "subject" if self.tense else "topic"
        return subjects(by, particle, asked=self.form == "question")

    def predicates(self, tenses: tuple[str, ...] = TENSES) -> Tree:
        """Return the verb's predicates in the clause's tense, or otherwise in `tenses`."""
        return predicates.predicates(self.verb.korean, self.form, (self.tense,) if self.tense else tenses)

    def predicates_of_who(self) -> Tree:
        """Return predicates that are questions in Korean, and statements after "who" in English."""
        return tuple(
            replace(leaf, korean=korean_forms(self.verb.korean, tense, "question"))
            for tense in TENSES
            for leaf in predicates.predicates(self.verb.korean, "statement", (tense,))
        )

    def destinations(self) -> Tree:
        """Return the verb's destinations with 에 or 으로."""
        role, particle = ("toward", "toward") if "toward" in self.verb.combines else ("to", "에")
        return bare(self.verb.combines[role], particle, "to the {}")


FILLINGS: dict[str, Callable[[Clause], Tree]] = {
    "subject": Clause.subjects,
    "subject=person": lambda clause: subjects(("person",)),
    "subject=counted": lambda clause: counted(clause.verb.combines["by"], "subject"),
    "subject=second": lambda clause: bare(("person",), "topic", number=phrases.PLURAL),
    "subject=who": lambda clause: (Phrase(("누가", "누가"), "who"),),
    "object": lambda clause: phrases.objects(clause.verb.objects),
    "object=counted": lambda clause: counted(clause.verb.objects, "object"),
    "asked=what": lambda clause: (Phrase(("무엇을", "무엇을"), "what"),),
    # Where, when and why; only why, the last, for a verb without a place.
    "asked=when": lambda clause: adverbs("question word")[0 if "at" in clause.verb.combines else -1 :],
    "predicate": Clause.predicates,
    "predicate=simple": lambda clause: clause.predicates(predicates.SIMPLE_TENSES),
    "predicate=who": Clause.predicates_of_who,
    "first": lambda clause: bare(("person",), "and", "the {} and"),
    "company": lambda clause: bare(("person",), "together", "with the {}"),
    "recipient": lambda clause: bare(("person",), "에게", "to the {}"),
    "destination": Clause.destinations,
    "destination=anywhere": lambda clause: bare(("building", "leisure", "nature"), "에", "to the {}"),
    "instrument": lambda clause: bare(clause.verb.combines["with"], "toward", "with the {}"),
    "transport": lambda clause: bare(("vehicle", "rail", "air"), "toward", "by {}"),
    "place": lambda clause: places(clause.verb.combines["at"]),
    "manner": lambda clause: adverbs("manner"),
    "time": lambda clause: adverbs(clause.tense),
}

# Conditions on verbs besides roles and flags of the lexicon (at, with, give, …).
CONDITIONS: dict[str, Callable[[Verb], bool]] = {
    "transitive": lambda verb: bool(verb.objects),
    "intransitive": lambda verb: not verb.objects,
    "motion": lambda verb: "to" in verb.combines or "toward" in verb.combines,
    "person": lambda verb: "person" in verb.combines["by"],
    "thing": lambda verb: {"person", "building", "nature"}.isdisjoint(verb.objects),
    "lasting": lambda verb: "simple" not in verb.flags,
}


def verbs(*conditions: str) -> list[Verb]:
    """Return the verbs that meet all conditions; verbs with a recipient only with "give"."""

    def meets(verb: Verb, condition: str) -> bool:
        special = CONDITIONS.get(condition)
        return special(verb) if special else condition in verb.combines or condition in verb.flags

    return [
        verb
        for verb in lexicon()[1]
        if all(meets(verb, condition) for condition in conditions)
        and ("give" in conditions or "give" not in verb.flags)
    ]


def _verb_rows(conditions: Sequence[str], forms: Sequence[str], slots: Sequence[str]) -> Iterator[SlotTrees]:
    """Yield the rows of each verb that meets the conditions, in each form, or for each time if "timed"."""
    for verb in verbs(*conditions):
        clauses = [Clause(verb, form) for form in forms]
        if "timed" in forms:
            clauses = [Clause(verb, tense=tense) for tense in TIMED_TENSES]
        for clause in clauses:
            row = {slot.partition("=")[0]: FILLINGS[slot](clause) for slot in slots}
            if all(row.values()):  # some verbs lack countable objects or a tense
                yield row
            if clause.form == "question" and "subject" in slots and "person" in verb.combines["by"]:
                yield row | {"subject": (phrases.YOU,), "style": (phrases.PLAIN,)}  # 너 is not polite


def coordinated_objects(forms: Sequence[str]) -> Iterator[SlotTrees]:
    """Join two objects of one class; a noun with two classes counts for the first only."""
    for verb in verbs("transitive"):
        used: set[str] = set()
        for kind in verb.objects:
            nouns = {noun.korean for noun in nouns_of(kind)} - used
            used |= nouns
            if len(nouns) > 1 and kind not in ("relation", "building", "nature"):
                yield {
                    "subject": Clause(verb).subjects(),
                    "first": tuple(words for words in bare((kind,), "and", "the {} and") if words.nouns[0] in nouns),
                    "object": tuple(words for words in bare((kind,), "object") if words.nouns[0] in nouns),
                    "predicate": Clause(verb).predicates(),
                }


def adjectives(forms: Sequence[str]) -> Iterator[SlotTrees]:
    """Yield rows that describe a noun with an adjective."""
    (form,) = forms
    for adjective in lexicon()[2]:
        yield {
            "subject": subjects(adjective.describes, asked=form == "question", described=False),
            "predicate": tuple(predicates.adjective_predicate(adjective, one, form) for one in ("present", "past")),
        }


def states(forms: Sequence[str]) -> Iterator[SlotTrees]:
    """Yield rows about a person's state at a time."""
    for adjective in lexicon()[2]:
        if adjective.is_state:
            for tense, form in (("past", "statement"), ("future", "statement"), ("past", "negative")):
                yield {
                    "time": adverbs(tense)[:2],
                    "subject": subjects(("person",), "subject", described=False),
                    "predicate": (predicates.adjective_predicate(adjective, tense, form),),
                }


def jobs(forms: Sequence[str]) -> Iterator[SlotTrees]:
    """Yield rows about the professions of adults and relations."""
    nouns = nouns_of("adult", "relation")
    people = (phrases.noun_phrases(noun, plural=True, described=False) for noun in nouns)
    adults = phrases.pronouns() + tuple(with_particle(tree, "topic") for tree in people)
    for job in nouns_of("job"):
        one = f"{'an' if job.english[0] in 'aeiou' else 'a'} {job.english}"
        for form in forms:
            leaves = [
                predicates.be_predicate(copula_forms(job.korean, tense, form), (one, one, job.plural), tense, form)
                for tense in ("present", "past")
            ]
            yield {"subject": adults, "predicate": tuple(replace(leaf, nouns=(job.korean,)) for leaf in leaves)}


def belongings(forms: Sequence[str]) -> Iterator[SlotTrees]:
    """Yield rows about the owners of things."""
    things = nouns_of("item", "volume", "toy", "garment", "wearable", "vehicle", "device", "furniture", "dish")
    for korean, english in (("이것은", "this"), ("그것은", "that")):
        for form in forms:
            be = "is not" if form == "negative" else "is"
            copulas = ((noun, copula_forms(noun.korean, "present", form)) for noun in things)
            yield {
                "subject": (Phrase((korean, korean), f"{english} {be}"),),
                "owner": bare(("person",), "의", "the {}'s"),
                "predicate": tuple(
                    Predicate(copula, NOTHING, (noun.english,) * 3, nouns=(noun.korean,)) for noun, copula in copulas
                ),
            }


def _locations() -> list[tuple[Tree, tuple[str, ...]]]:
    """Return locations with 에, and the classes of things found there."""
    positions = words_of_kind("position")
    surfaces = tuple(
        tuple(phrases.noun_words(noun, f"{noun.korean} {ko}에", f"{en} the {noun.english}") for ko, en in positions)
        for noun in nouns_of("surface")
    )
    things = ("volume", "item", "toy", "stationery", "sheet", "wearable", "tool", "present", "collectible", "cloth")
    return [
        (surfaces, (*things, "dish", "food", "fruit")),
        (places(("home",), "에"), (*things, "dish", "furniture")),
        (places(("study",), "에"), ("volume", "stationery", "furniture")),
        (places(("green",), "에"), ("animal", "tree", "flower")),
        (places(("public", "outdoors", "leisure", "nature"), "에"), ("person",)),
        (places(("traffic",), "에"), ("vehicle",)),
    ]


def _there_is(tense: str, form: str) -> Predicate:
    """Make "there is" with 있다, and "there is no" with 없다."""
    dictionary_form = "없다" if form == "negative" else "있다"
    korean = korean_forms(dictionary_form, tense, "question" if form == "question" else "statement", adjective=True)
    if form == "question":
        there = tuple(f"{be} there" for be in predicates.BE[tense])
        return Predicate(korean, there, NOTHING, dictionary_form)
    there = tuple(f"there {be}{' no' if form == 'negative' else ''}" for be in predicates.BE[tense])
    return Predicate(korean, NOTHING, there, dictionary_form)


def existing(forms: Sequence[str]) -> Iterator[SlotTrees]:
    """Yield rows about the number of things somewhere, or that there are none."""
    (form,) = forms
    for location, classes in _locations():
        yield {
            "location": location,
            "subject": bare(classes, "subject", "{}") if form == "negative" else counted(classes, "subject"),
            "predicate": tuple(_there_is(tense, form) for tense in ("present", "past")),
        }


def possessions(forms: Sequence[str]) -> Iterator[SlotTrees]:
    """Yield rows about the number of things that somebody has."""
    have = Verb("가지다", "have", "had", (), {}, frozenset())
    owned = ("volume", "item", "toy", "device", "vehicle", "garment", "wearable", "stationery", "pet", "tool", "dish")
    things = counted((*owned, "glassware", "present", "collectible", "mail", "sheet", "cloth", "rail"), "object")
    for form in forms:
        predicate = tuple(
            predicates.verb_predicate(have, tense, form, korean_forms("가지다", continuing, form))
            for tense, continuing in (("present", "progressive"), ("past", "past progressive"))
        )
        yield {"subject": subjects(("person",)), "object": things, "predicate": predicate}


ROWS: dict[str, Callable[[Sequence[str]], Iterator[SlotTrees]]] = {
    make.__name__: make for make in (coordinated_objects, adjectives, states, jobs, belongings, existing, possessions)
}


@dataclass(frozen=True)
class Pattern:
    """A sentence pattern: its slots, and their order in each language."""

    name: str
    weight: int
    korean: tuple[str, ...]
    english: tuple[str, ...]
    punctuation: str
    rows: tuple[tuple[Tree, ...], ...]  # a tree for each Korean slot, then the row's styles
    example: str


@cache
def patterns() -> tuple[Pattern, ...]:
    """Return all patterns of the table."""
    built = []
    for name, weight, kind, forms, korean, english, example in read_cells(TABLE):
        kind, *conditions = kind.split()
        slots = korean.split()
        made = _verb_rows(conditions, forms.split(), slots) if kind == "verbs" else ROWS[kind](forms.split())
        names = tuple(slot.partition("=")[0] for slot in slots)
        rows = tuple((*(row[slot] for slot in names), row.get("style", phrases.STYLES)) for row in made)
        punctuation = "?" if forms == "question" else "."
        built.append(Pattern(name, int(weight), names, tuple(english.split()), punctuation, rows, example))
    return tuple(built)
