"""Count tags that come back around the right words, in sentences of the built-in corpus, whose phrases are known.

    python scripts/benchmarks/markup.py runs/quickstart/model

Only sentences that the model translates like the corpus count for words. A place is right if all content words of the
phrase are inside and no others; a lone tag is right before the phrase that followed it, or after the one before it;
a placeholder is right if it replaces its phrase, without or with its article.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from random import Random
from typing import Annotated, Any, NamedTuple

import typer
from harness import Json, Row, begin, report

from heedful import Translator
from heedful_lab.korean_english.pairs import Phrases, korean_english_phrases

FUNCTION = """the a an is are was were be am do does did will can cannot not to at in on by with from of and there next
    under behind front s"""
FUNCTION_WORDS = frozenset(FUNCTION.split())
PARTICLE = re.compile(r"(?:은|는|이|가|을|를|에서|에게|에|으로|로|와|과)$")
TAGS = re.compile(r"<[^>]*>")


class Case(NamedTuple):
    """A source with markup, and a check of its translation."""

    source: str
    is_right: Callable[[str], bool]


class Nesting(HTMLParser):
    """Tags in their order, and whether each closes the one that it should."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.is_valid = True
        self.feed(text)
        self.close()
        self.is_valid &= not self.open

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        """Open an element."""
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Close an element."""
        self.is_valid &= bool(self.open) and self.open.pop() == tag

    def handle_startendtag(self, tag: str, attributes: Any) -> None:
        """Leave a lone tag alone."""


def content(text: str) -> list[str]:
    """Return the content words of a text, without tags."""
    return [word for word in re.findall(r"\w+", TAGS.sub("", text).lower()) if word not in FUNCTION_WORDS]


def is_around(text: str, name: str, english: str, *phrases: Phrases) -> bool:
    """Return whether an element has all content words of phrases, and no others unless between these."""
    found = content(text.partition(f"<{name}>")[2].partition(f"</{name}>")[0])
    places = sorted(place for _, places in phrases for place in places)
    own = Counter(word for start, end in places for word in content(english[start:end]))
    return Counter(found) >= own and Counter(found) <= Counter(content(english[places[0][0] : places[-1][1]]))


def around(text: str, *spans: tuple[int, int, str]) -> str:
    """Return a text with elements around characters."""
    for start, end, name in sorted(spans, reverse=True):
        text = f"{text[:start]}<{name}>{text[start:end]}</{name}>{text[end:]}"
    return text


def cases_of(pair: dict[str, str], phrases: list[Phrases], random: Random) -> Iterator[tuple[str, Case]]:
    """Yield a case of each kind for a sentence."""
    korean, english = pair["ko"], pair["en"]
    phrases = [phrase for phrase in phrases if any(content(english[slice(*place)]) for place in phrase[1])]
    if len(phrases) < 2:
        return
    number, other = sorted(random.sample(range(len(phrases)), 2))
    first, second, before = phrases[number], phrases[other], phrases[other - 1]
    (start, end), (begun, stop) = first[0], second[0]
    yield "a pair", Case(around(korean, (start, end, "b")), lambda text: is_around(text, "b", english, first))
    particle = PARTICLE.search(korean[start:end])
    is_noun = particle and len(first[1]) == 1
    if is_noun:
        source = around(korean, (start, start + particle.start(), "b"))
        yield "a pair without the particle", Case(source, lambda text: is_around(text, "b", english, first))
    source = around(korean, (start, end, "b"), (begun, stop, "i"))
    yield (
        "two pairs",
        Case(source, lambda text: is_around(text, "b", english, first) and is_around(text, "i", english, second)),
    )
    source = f"{korean[: before[0][0]]}<u>{korean[before[0][0] : begun]}<i>{korean[begun:stop]}</i></u>{korean[stop:]}"
    yield (
        "nested pairs",
        Case(
            source,
            lambda text: is_around(text, "i", english, second) and is_around(text, "u", english, before, second),
        ),
    )

    def is_between(text: str) -> bool:
        left, right = map(content, text.split("<br/>"))
        follower, leader = (content(english[slice(*each[1][side])]) for each, side in ((second, -1), (before, -1)))
        return right[: len(follower)] == follower or left[-len(leader) :] == leader

    yield "a lone tag", Case(f"{korean[:begun]}<br/> {korean[begun:]}", is_between)
    left, right = first[1][0]
    if is_noun and re.fullmatch(r"(?:\w+ )?the \w+", english[left:right], re.IGNORECASE):
        source = f"{korean[:start]}%s{korean[start + particle.start() :]}"
        expected = [content(english[:left]), content(english[right:])]
        yield "a placeholder", Case(source, lambda text: [*map(content, text.split("%s"))] == expected)


def main(
    model: Annotated[str, typer.Argument(help="Folder of a Korean-English model.")],
    count: Annotated[int, typer.Option(help="Sentences.")] = 1000,
    num_beams: Annotated[int, typer.Option(help="Beam width.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the sentences and their tags.")] = 2,
    show: Annotated[int, typer.Option(help="Wrong lines of each kind to print.")] = 0,
    json: Json = None,
) -> None:
    """Print how many tags are back, and around the right words."""
    begin(1)
    translator, random = Translator.from_pretrained(model), Random(seed)
    pairs = list(korean_english_phrases("test", count, seed))
    plain = translator.translate([pair["ko"] for pair, _ in pairs], num_beams=num_beams)
    kinds: dict[str, list[tuple[Case, bool]]] = {}
    for (pair, phrases), (found, *_) in zip(pairs, plain, strict=True):
        for kind, case in cases_of(pair, phrases, random):
            kinds.setdefault(kind, []).append((case, found.text == pair["en"]))
    rows: list[Row] = []
    for kind, cases in kinds.items():
        markup = "placeholders" if "placeholder" in kind else "html"
        found = translator.translate([case.source for case, _ in cases], num_beams=num_beams, markup=markup)
        texts, back = [one.text for one, *_ in found], 0
        for (case, _), text in zip(cases, texts, strict=True):
            tags = [sorted(re.findall(r"<[^>]*>|%s", each)) for each in (case.source, text)]
            back += tags[0] == tags[1] and Nesting(text).is_valid
        known = [(case, text) for (case, is_known), text in zip(cases, texts, strict=True) if is_known]
        wrong = [(case, text) for case, text in known if not case.is_right(text)]
        for case, text in wrong[:show]:
            print(f"{case.source}\n  → {text}")
        right = round(100 * (1 - len(wrong) / max(len(known), 1)), 1)  # in per cent
        row = {"kind": kind, "lines": len(cases), "all tags back": round(100 * back / len(cases), 1)}
        rows.append(row | {"right": right, "of": len(known)})
    report(rows, json)


if __name__ == "__main__":
    typer.run(main)
