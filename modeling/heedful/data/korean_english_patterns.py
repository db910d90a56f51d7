"""The sentence patterns of the built-in corpus: which phrases combine, and their order in both languages."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from heedful.data.korean_english_conjugation import attach
from heedful.data.korean_english_phrases import (
    BE,
    PLAIN,
    PLURAL,
    SIMPLE_TENSES,
    STYLES,
    TENSES,
    YOU,
    Predicate,
    Tree,
    Verb,
    Words,
    adjective_predicate,
    bare,
    be_predicate,
    copula_forms,
    counted,
    korean_forms,
    lexicon,
    mark,
    noun_phrases,
    nouns_of,
    objects,
    places,
    predicates,
    pronouns,
    subjects,
    verb_predicate,
)

Row = dict[str, Tree]

TIMES = {
    "past": (("어제", "yesterday"), ("지난주에", "last week"), ("작년에", "last year")),
    "present": (("매일", "every day"), ("아침마다", "every morning"), ("주말에", "on weekends")),
    "future": (("내일", "tomorrow"), ("곧", "soon"), ("다음 주에", "next week")),
    "progressive": (("지금", "now"),),
    "past progressive": (("그때", "then"),),
}
MANNERS = (("천천히", "slowly"), ("빨리", "quickly"), ("조용히", "quietly"))
POSITIONS = (("위", "on"), ("아래", "under"), ("옆", "next to"), ("앞", "in front of"), ("뒤", "behind"))


def adverbs(words: tuple[tuple[str, str], ...]) -> Tree:
    """Return adverbs as leaves."""
    return tuple(Words((korean, korean), english) for korean, english in words)


def verbs(*keys: str, intransitive: bool = False) -> list[Verb]:
    """Return the verbs with people as subjects that have all of the keys (at, with, …) or flags (give, manner)."""
    return [
        verb
        for verb in lexicon()[1]
        if all(key in verb.combines or key in verb.flags for key in keys)
        and bool(verb.objects) != intransitive
        and ("give" in keys or "give" not in verb.flags)
    ]


def _subject(verb: Verb, particle: str = "topic", asked: bool = False) -> Tree:
    return subjects(verb.combines["by"], particle, asked=asked)


def transitive() -> Iterator[Row]:
    """소년은 사과를 먹었다. The boy ate the apple."""
    for verb in verbs():
        yield {"subject": _subject(verb), "object": objects(verb.objects), "predicate": predicates(verb.korean)}


def transitive_negative() -> Iterator[Row]:
    """소년은 사과를 먹지 않았다. The boy did not eat the apple."""
    for verb in verbs():
        negative = predicates(verb.korean, "negative")
        yield {"subject": _subject(verb), "object": objects(verb.objects), "predicate": negative}


def transitive_at_place() -> Iterator[Row]:
    """소년은 공원에서 책을 읽었다. The boy read the book in the park."""
    for verb in verbs("at"):
        yield {
            "subject": _subject(verb),
            "place": places(verb.combines["at"]),
            "object": objects(verb.objects),
            "predicate": predicates(verb.korean),
        }


def transitive_at_time() -> Iterator[Row]:
    """어제 소년이 책을 읽었다. The boy read the book yesterday."""
    for verb in verbs():
        for tense, times in TIMES.items():
            if predicate := predicates(verb.korean, "statement", (tense,)):
                yield {
                    "time": adverbs(times),
                    "subject": _subject(verb, "subject"),
                    "object": objects(verb.objects),
                    "predicate": predicate,
                }


def counted_object() -> Iterator[Row]:
    """소년은 책 세 권을 읽었다. The boy read three books."""
    for verb in verbs():
        if things := counted(verb.objects, "object"):
            yield {"subject": _subject(verb), "object": things, "predicate": predicates(verb.korean)}


def with_instrument() -> Iterator[Row]:
    """소년은 칼로 사과를 잘랐다. The boy cut the apple with the knife."""
    for verb in verbs("with"):
        yield {
            "subject": _subject(verb),
            "instrument": bare(verb.combines["with"], "toward", "with {}"),
            "object": objects(verb.objects),
            "predicate": predicates(verb.korean),
        }


def with_manner() -> Iterator[Row]:
    """소년은 문을 천천히 열었다. The boy opened the door slowly."""
    for verb in verbs("manner"):
        yield {
            "subject": _subject(verb),
            "object": objects(verb.objects),
            "manner": adverbs(MANNERS),
            "predicate": predicates(verb.korean),
        }


def giving() -> Iterator[Row]:
    """소년은 소녀에게 꽃을 주었다. The boy gave the flower to the girl."""
    for verb in verbs("give"):
        for form in ("statement", "negative"):
            yield {
                "subject": _subject(verb),
                "recipient": bare(("person",), "에게", "to {}"),
                "object": objects(verb.objects),
                "predicate": predicates(verb.korean, form),
            }


def _destinations(verb: Verb) -> Tree:
    if "toward" in verb.combines:
        return bare(verb.combines["toward"], "toward", "to {}")
    return bare(verb.combines["to"], "에", "to {}")


def _motion_verbs() -> list[Verb]:
    return [*verbs("to", intransitive=True), *verbs("toward", intransitive=True)]


def moving() -> Iterator[Row]:
    """소년은 버스로 학교에 갔다. The boy went to the school by bus."""
    transports = tuple(
        Words((attach(noun.korean, "toward"),) * 2, f"by {noun.english}", (noun.korean,))
        for noun in nouns_of("vehicle", "rail", "air")
    )
    for verb in verbs("to", intransitive=True):
        for form in ("statement", "negative"):
            yield {
                "subject": _subject(verb),
                "transport": transports,
                "destination": bare(("building", "leisure", "nature"), "에", "to {}"),
                "predicate": predicates(verb.korean, form),
            }


def moving_at_time() -> Iterator[Row]:
    """내일 소년이 학교에 갈 것이다. The boy will go to the school tomorrow."""
    for verb in _motion_verbs():
        for tense, times in TIMES.items():
            yield {
                "time": adverbs(times),
                "subject": _subject(verb, "subject"),
                "destination": _destinations(verb),
                "predicate": predicates(verb.korean, "statement", (tense,)),
            }


def intransitive() -> Iterator[Row]:
    """아이는 공원에서 놀고 있다. The child is having fun in the park."""
    for verb in verbs("at", intransitive=True):
        for form in ("statement", "negative"):
            yield {
                "subject": _subject(verb),
                "place": places(verb.combines["at"]),
                "predicate": predicates(verb.korean, form),
            }


def intransitive_at_time() -> Iterator[Row]:
    """지금 아이가 공원에서 달리고 있다. The child is running in the park now."""
    for verb in verbs("at", intransitive=True):
        for tense, times in TIMES.items():
            if predicate := predicates(verb.korean, "statement", (tense,)):
                yield {
                    "time": adverbs(times),
                    "subject": _subject(verb, "subject"),
                    "place": places(verb.combines["at"]),
                    "predicate": predicate,
                }


def in_company() -> Iterator[Row]:
    """소년은 소녀와 함께 강에서 수영했다. The boy swam in the river with the girl."""
    for verb in verbs("at", intransitive=True):
        if "person" in verb.combines["by"] and "simple" not in verb.flags:
            yield {
                "subject": subjects(("person",)),
                "company": tuple(
                    replace(words, korean=tuple(f"{korean} 함께" for korean in words.korean))
                    for words in bare(("person",), "and", "with {}")
                ),
                "place": places(verb.combines["at"]),
                "predicate": predicates(verb.korean),
            }


def counted_subject() -> Iterator[Row]:
    """학생 세 명이 공원에서 달렸다. Three students ran in the park."""
    for verb in verbs("at", intransitive=True):
        yield {
            "subject": counted(verb.combines["by"], "subject"),
            "place": places(verb.combines["at"]),
            "predicate": predicates(verb.korean),
        }


def coordinated_objects() -> Iterator[Row]:
    """소년은 빵과 치즈를 먹었다. The boy ate the bread and the cheese."""
    for verb in verbs():
        used: set[str] = set()  # a noun of two classes is coordinated within the first of them only
        for kind in verb.objects:
            nouns = {noun.korean for noun in nouns_of(kind)} - used
            used |= nouns
            if len(nouns) > 1 and kind not in ("relation", "building", "nature"):
                yield {
                    "subject": _subject(verb),
                    "first": tuple(words for words in bare((kind,), "and", "{} and") if words.nouns[0] in nouns),
                    "object": tuple(words for words in bare((kind,), "object") if words.nouns[0] in nouns),
                    "predicate": predicates(verb.korean),
                }


def coordinated_subjects() -> Iterator[Row]:
    """소년과 소녀는 책을 읽었다. The boy and the girl read the book."""
    second = tuple(
        Words(words.korean, words.english, words.nouns, number=PLURAL) for words in bare(("person",), "topic")
    )
    for verb in verbs():
        if "person" in verb.combines["by"]:
            yield {
                "first": bare(("person",), "and", "{} and"),
                "subject": second,
                "object": objects(verb.objects),
                "predicate": predicates(verb.korean),
            }


def described_by_adjective(form: str) -> Iterator[Row]:
    """이 사과는 달지 않다. This apple is not sweet."""
    for adjective in lexicon()[2]:
        yield {
            "subject": subjects(adjective.describes, asked=form == "question", described=False),
            "predicate": tuple(adjective_predicate(adjective, tense, form) for tense in ("present", "past")),
        }


def state_at_time() -> Iterator[Row]:
    """내일 소년이 바쁠 것이다. The boy will be busy tomorrow."""
    for adjective in lexicon()[2]:
        if adjective.is_state:
            for tense, form in (("past", "statement"), ("future", "statement"), ("past", "negative")):
                yield {
                    "time": adverbs(TIMES[tense][:2]),
                    "subject": subjects(("person",), "subject", described=False),
                    "predicate": (adjective_predicate(adjective, tense, form),),
                }


def being() -> Iterator[Row]:
    """그 남자는 의사다. That man is a doctor."""
    for job in nouns_of("job"):
        one = f"{'an' if job.english[0] in 'aeiou' else 'a'} {job.english}"
        for form in ("statement", "negative"):
            predicate = tuple(
                replace(
                    be_predicate(copula_forms(job.korean, tense, form), (one, one, job.plural), tense, form),
                    nouns=(job.korean,),
                )
                for tense in ("present", "past")
            )
            yield {"subject": _adults(), "predicate": predicate}


@cache
def _adults() -> Tree:
    nouns = nouns_of("adult", "relation")
    return pronouns() + tuple(mark(noun_phrases(noun, plural=True, described=False), "topic") for noun in nouns)


def belonging() -> Iterator[Row]:
    """이것은 소년의 책이다. This is the boy's book."""
    things = nouns_of("item", "volume", "toy", "garment", "wearable", "vehicle", "device", "furniture", "dish")
    for korean, english in (("이것은", "this"), ("그것은", "that")):
        for form, be in (("statement", "is"), ("negative", "is not")):
            predicate = tuple(
                Predicate(
                    copula_forms(noun.korean, "present", form), ("",) * 3, (noun.english,) * 3, nouns=(noun.korean,)
                )
                for noun in things
            )
            yield {
                "subject": (Words((korean, korean), f"{english} {be}"),),
                "owner": bare(("person",), "의", "{}'s"),
                "predicate": predicate,
            }


def _locations() -> list[tuple[Tree, tuple[str, ...]]]:
    """Return locations with 에, and the classes of what is found there."""
    surfaces = tuple(
        tuple(
            Words((f"{noun.korean} {korean}에",) * 2, f"{english} the {noun.english}", (noun.korean,))
            for korean, english in POSITIONS
        )
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
    """Make "there is": 있다, and 없다 as the negative ("there is no")."""
    dictionary_form = "없다" if form == "negative" else "있다"
    korean = korean_forms(dictionary_form, tense, "question" if form == "question" else "statement", adjective=True)
    nothing = ("",) * 3
    if form == "question":
        first, one, many = (f"{be} there" for be in BE[tense])
        return Predicate(korean, (first, one, many), nothing, dictionary_form)
    first, one, many = (f"there {be}{' no' if form == 'negative' else ''}" for be in BE[tense])
    return Predicate(korean, nothing, (first, one, many), dictionary_form)


def existing(form: str) -> Iterator[Row]:
    """책상 위에 책 세 권이 있다. There are three books on the desk."""
    for location, classes in _locations():
        yield {
            "location": location,
            "subject": counted(classes, "subject"),
            "predicate": tuple(_there_is(tense, form) for tense in ("present", "past")),
        }


def lacking() -> Iterator[Row]:
    """방에 의자가 없다. There is no chair in the room."""
    for location, classes in _locations():
        yield {
            "location": location,
            "subject": tuple(
                Words((attach(noun.korean, "subject"),) * 2, noun.english, (noun.korean,))
                for noun in nouns_of(*classes)
            ),
            "predicate": tuple(_there_is(tense, "negative") for tense in ("present", "past")),
        }


def having() -> Iterator[Row]:
    """소년은 책 세 권을 가지고 있다. The boy has three books."""
    have = Verb("가지다", "have", "had", (), {}, frozenset())
    owned = ("volume", "item", "toy", "device", "vehicle", "garment", "wearable", "stationery", "pet", "tool", "dish")
    things = counted((*owned, "glassware", "present", "collectible", "mail", "sheet", "cloth", "rail"), "object")
    for form in ("statement", "negative"):
        predicate = tuple(
            verb_predicate(have, tense, form, korean_forms("가지다", continuing, form))
            for tense, continuing in (("present", "progressive"), ("past", "past progressive"))
        )
        yield {"subject": subjects(("person",)), "object": things, "predicate": predicate}


def _askers(verb: Verb, slots: Row) -> Iterator[Row]:
    """Ask about others in both styles, and ask "you" in the plain one: 너 is not polite."""
    yield {"subject": _subject(verb, asked=True), **slots}
    if "person" in verb.combines["by"]:
        yield {"subject": (YOU,), **slots, "style": (PLAIN,)}


def transitive_question() -> Iterator[Row]:
    """Ask as in: 너는 사과를 먹었니? Did you eat the apple? The style may be polite."""
    for verb in verbs():
        yield from _askers(verb, {"object": objects(verb.objects), "predicate": predicates(verb.korean, "question")})


def intransitive_question() -> Iterator[Row]:
    """Ask as in: 아이는 공원에서 놀았니? Did the child have fun in the park? The style may be polite."""
    for verb in verbs("at", intransitive=True):
        place = places(verb.combines["at"])
        yield from _askers(verb, {"place": place, "predicate": predicates(verb.korean, "question")})


def moving_question() -> Iterator[Row]:
    """Ask as in: 소년은 학교에 갈 거니? Will the boy go to the school? The style may be polite."""
    for verb in _motion_verbs():
        predicate = predicates(verb.korean, "question")
        yield from _askers(verb, {"destination": _destinations(verb), "predicate": predicate})


def asking_who() -> Iterator[Row]:
    """Ask as in: 누가 책을 읽었니? Who read the book? The style may be polite."""
    for verb in verbs():
        if "person" in verb.combines["by"]:
            yield {
                "subject": (Words(("누가", "누가"), "who"),),
                "object": objects(verb.objects),
                "predicate": tuple(
                    replace(leaf, korean=korean_forms(verb.korean, tense, "question"))
                    for tense in TENSES
                    for leaf in predicates(verb.korean, "statement", (tense,))
                ),
            }


def asking_what() -> Iterator[Row]:
    """Ask as in: 소년은 무엇을 먹었니? What did the boy eat? The style may be polite."""
    for verb in verbs():
        if not {"person", "building", "nature"} & set(verb.objects):
            predicate = predicates(verb.korean, "question")
            asked = (Words(("무엇을", "무엇을"), "what"),)
            yield from _askers(verb, {"asked": asked, "predicate": predicate})


def asking_when() -> Iterator[Row]:
    """Ask as in: 소년은 어디에서 책을 읽었니? Where did the boy read the book? The style may be polite."""
    where = ("어디에서", "where")
    for verb in verbs():
        asked = adverbs((where, ("언제", "when"), ("왜", "why")) if "at" in verb.combines else (("왜", "why"),))
        yield from _askers(
            verb,
            {
                "asked": asked,
                "object": objects(verb.objects),
                "predicate": predicates(verb.korean, "question", SIMPLE_TENSES),
            },
        )


@dataclass(frozen=True)
class Pattern:
    """A sentence pattern: what combines (`rows`), and in which order each language says it.

    A row is one tree for every Korean slot, and at last the styles that it has.
    """

    name: str
    weight: int
    korean: tuple[str, ...]
    english: tuple[str, ...]
    mark: str
    rows: tuple[tuple[Tree, ...], ...]


Definition = tuple[int, Callable[[], Iterator[Row]], str, str]

# Weight, rows, Korean order, English order. An English question takes its auxiliary out of the predicate.
STATEMENTS: dict[str, Definition] = {
    "transitive": (8, transitive, "subject object predicate", "subject predicate object"),
    "transitive negative": (6, transitive_negative, "subject object predicate", "subject predicate object"),
    "transitive at a place": (
        8,
        transitive_at_place,
        "subject place object predicate",
        "subject predicate object place",
    ),
    "transitive at a time": (
        8,
        transitive_at_time,
        "time subject object predicate",
        "subject predicate object time",
    ),
    "counted object": (7, counted_object, "subject object predicate", "subject predicate object"),
    "with an instrument": (
        4,
        with_instrument,
        "subject instrument object predicate",
        "subject predicate object instrument",
    ),
    "with a manner": (4, with_manner, "subject object manner predicate", "subject predicate object manner"),
    "giving": (5, giving, "subject recipient object predicate", "subject predicate object recipient"),
    "moving": (4, moving, "subject transport destination predicate", "subject predicate destination transport"),
    "moving at a time": (
        4,
        moving_at_time,
        "time subject destination predicate",
        "subject predicate destination time",
    ),
    "intransitive": (5, intransitive, "subject place predicate", "subject predicate place"),
    "intransitive at a time": (
        4,
        intransitive_at_time,
        "time subject place predicate",
        "subject predicate place time",
    ),
    "in company": (4, in_company, "subject company place predicate", "subject predicate place company"),
    "counted subject": (4, counted_subject, "subject place predicate", "subject predicate place"),
    "coordinated objects": (
        4,
        coordinated_objects,
        "subject first object predicate",
        "subject predicate first object",
    ),
    "coordinated subjects": (
        4,
        coordinated_subjects,
        "first subject object predicate",
        "first subject predicate object",
    ),
    "adjective": (6, lambda: described_by_adjective("statement"), "subject predicate", "subject predicate"),
    "adjective negative": (4, lambda: described_by_adjective("negative"), "subject predicate", "subject predicate"),
    "state at a time": (2, state_at_time, "time subject predicate", "subject predicate time"),
    "being": (3, being, "subject predicate", "subject predicate"),
    "belonging": (4, belonging, "subject owner predicate", "subject owner predicate"),
    "existing": (6, lambda: existing("statement"), "location subject predicate", "predicate subject location"),
    "lacking": (2, lacking, "location subject predicate", "predicate subject location"),
    "having": (4, having, "subject object predicate", "subject predicate object"),
}
QUESTIONS: dict[str, Definition] = {
    "transitive question": (
        6,
        transitive_question,
        "subject object predicate",
        "auxiliary subject predicate object",
    ),
    "intransitive question": (
        3,
        intransitive_question,
        "subject place predicate",
        "auxiliary subject predicate place",
    ),
    "moving question": (
        2,
        moving_question,
        "subject destination predicate",
        "auxiliary subject predicate destination",
    ),
    "adjective question": (
        3,
        lambda: described_by_adjective("question"),
        "subject predicate",
        "auxiliary subject predicate",
    ),
    "existing question": (
        2,
        lambda: existing("question"),
        "location subject predicate",
        "auxiliary subject location",
    ),
    "asking who": (3, asking_who, "subject object predicate", "subject predicate object"),
    "asking what": (2, asking_what, "subject asked predicate", "asked auxiliary subject predicate"),
    "asking when": (
        4,
        asking_when,
        "subject asked object predicate",
        "asked auxiliary subject predicate object",
    ),
}


@cache
def patterns() -> tuple[Pattern, ...]:
    """Build every pattern."""
    built = []
    for mark_, table in ((".", STATEMENTS), ("?", QUESTIONS)):
        for name, (weight, make_rows, korean, english) in table.items():
            slots = tuple(korean.split())
            rows = tuple((*(row[slot] for slot in slots), row.get("style", STYLES)) for row in make_rows())
            built.append(Pattern(name, weight, slots, tuple(english.split()), mark_, rows))
    return tuple(built)
