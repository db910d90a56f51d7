"""Tags, entities and placeholders: taken out before a model translates, and put back around the right words."""

import html
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, pairwise
from typing import Any, NamedTuple

import numpy as np

from heedful.data.labels import UNSPACED
from heedful.decoding.documents import Rows
from heedful.decoding.paragraphs import Paragraphs, Ranked
from heedful.decoding.scoring import cross_attention
from heedful.messages_heed import shortened, wrong
from heedful.sentences_heed import split_sentences

KINDS = ("html", "xml", "placeholders", "html,placeholders", "xml,placeholders")
# HTML's elements that need no end, and those inside sentences; elements that are not translated.
UNCLOSED = "area base body br col dd dt embed head hr html img input li link meta option p tbody td th thead tr wbr"
INLINE = """a abbr b bdi bdo big br button cite code data del dfn em font i img input ins kbd label map mark math meter
    object output q rp rt ruby s samp small span strike strong sub sup svg time tt u var wbr"""
KEPT = "code kbd math pre samp script style svg textarea var xliff:g"
IS_KEPT = re.compile(r"\stranslat(?:e|able)=[\"']?(?:no|false)\b")
ENDS = {"<!--": "-->", "<![CDATA[": r"\]\]>", "<?": r"\?>"}  # patterns
BREAK = re.compile(r"<br\b[^>]*>(?=\w)")  # a space for the model
TAG = (
    r"(?P<kept><!--|<!\[CDATA\[|<\?)|<![A-Za-z][^>]*>|"
    r"<(?P<end>/?)(?P<name>[A-Za-z_][\w:.-]*)(?P<tag>(?>[^<>\"']|\"[^\"]*\"|'[^']*')*+)>|"
    r"(?P<entity>&(?:#\d+|#[xX][\da-fA-F]+|[A-Za-z][\w.-]*);)"
)
PLACEHOLDER = (
    r"(?P<placeholder>%%|%(?:\d+\$|\(\w+\))?[-+#0]*(?:\d+|\*)?(?:\.(?:\d+|\*))?(?:hh?|ll?|[Lqjzt])?[@diouxXeEfFgGaAcs]|"
    r"[%#$]?\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})"  # with braces in braces, as ICU has them
)
WORD = re.compile(rf"[{UNSPACED}]|(?:(?![{UNSPACED}])\w)+(?:['’]\w+)*|[^\w\s]")
# Shares in a word's attention. Neighbours belong to a tag if their mean share for its source is above ENOUGH, or above
# NEAR_MOST of a small largest share; so do all words between two above STRONG.
ENOUGH, NEAR_MOST, STRONG = 0.4, 0.8, 0.7
Room = tuple[int, int]  # the first of some characters or words, and the one after the last
Placed = tuple[int, int, str]  # two places in a translation, and the tag instead of the characters between


class Tag(NamedTuple):
    """A tag at a place in a text. With a `length`, it replaces so many characters: a placeholder, or code."""

    place: int
    raw: str
    side: str = ""  # of its element, "begin" or "end"
    length: int = 0


class Marked(NamedTuple):
    """A model's input, and its tags in their order."""

    text: str
    tags: list[Tag]

    def sentences(self, line: str) -> "list[str | Marked]":
        """Return sentences, and the parts between them, or what the text is in its line if it has no words."""
        if not any(map(str.isalpha, self.text)):
            return [line]
        found, tags, start = list[str | Marked](), self.tags, 0
        for sentence, space in split_sentences(self.text):
            end = start + len(sentence)
            own = [tag._replace(place=tag.place - start) for tag in tags if tag.place <= end]
            found += [Marked(sentence, own) if sentence else "".join(tag.raw for tag in own), space]
            tags, start = tags[len(own) :], end + len(space)
        return [*found, *(tag.raw for tag in tags)]


class MarkedParagraphs(Paragraphs):
    """Lines with markup of one of the `KINDS`; an element may end in a later line, a tag may not."""

    def __init__(self, kinds: str):
        super().__init__(every_line=True)
        if kinds not in KINDS:
            raise wrong("markup", f"be one of {' '.join(KINDS)}", repr(kinds))
        self.is_html, self.has_tags = kinds.startswith("html"), kinds != "placeholders"
        self.placeholder = re.compile(PLACEHOLDER if kinds.endswith("placeholders") else "(?!)")  # perhaps none
        stray = "<(?=[A-Za-z/!?])" if self.is_html else "<"
        self.token = re.compile("|".join([*[TAG, stray] * self.has_tags, self.placeholder.pattern]))
        self.open: list[tuple[str, str, int]] = []  # elements and comments: name, tag, line
        self.until: re.Pattern[str] | None = None  # ends an open comment, or an element that stays
        self.marked: dict[tuple[int, int], Marked] = {}  # by a text's number and place
        self.doubtful = 0  # outputs with a tag that is perhaps in the wrong place

    def _divided(self, line: str, number: int, place: int) -> list[tuple[str, str]]:
        """Divide a line into sentences to translate, and parts that stay."""
        first, start = place, self._after_kept(line, 0)
        place = start
        found, text, tags = list[str | Marked]([line[:start]]), "", list[Tag]()
        numbers = (number for number in map(str, count(3)) if number not in line)
        while match := self.token.search(line, place):
            (begin, end), kind, raw, side, content = match.span(), match.lastgroup, match[0], "", "1"
            text += line[place:begin].lstrip() if text[-1:].isspace() else line[place:begin]
            place = end
            if kind == "entity" and html.unescape(raw) != raw:
                text += html.unescape(raw)
                continue
            if kind not in ("entity", "placeholder"):
                side, separates = self._noted(match, number)
                place = self._after_kept(line, end)
                if separates or self.until:
                    found += [*Marked(text, tags).sentences(line[start:begin]), line[begin:place]]
                    start, text, tags = place, "", []
                    continue
                content = "" if kind == "kept" else re.sub("<[^>]*>", "", line[end:place])
            literal = "%" if raw == "%%" else next(numbers) if content.strip() else ""  # models copy numbers
            tags.append(Tag(len(text), line[begin:place], side, len(literal)))
            text += literal or " " * (BREAK.match(line, begin) is not None)
        text += line[place:].lstrip() if text[-1:].isspace() else line[place:]
        found = [each for each in [*found, *Marked(text, tags).sentences(line[start:])] if each]
        self.marked |= {(number, index): each for index, each in enumerate(found, first) if isinstance(each, Marked)}
        return [("", each) if isinstance(each, str) else (each.text, "") for each in found]

    def end(self) -> None:
        """Raise a `ValueError` for an element or comment that is still open, and count tags in doubtful places."""
        for _, tag, number in self.open:
            raise _error(number, tag, "is never closed")
        if self.doubtful:
            what = "Sentences with a tag to whose words no output word attends"
            warnings.warn(f"{what}: {self.doubtful}.", stacklevel=4)

    def written(self, text: str, tags: Iterable[Placed]) -> str:
        """Write a text with tags; placeholders that the model invented are left out."""
        parts, place = [], 0
        for start, end, tag in [*tags, (len(text), len(text), "")]:
            plain = self.placeholder.sub("", text[place:start])
            parts += [html.escape(plain, quote=False).replace("\xa0", "&#160;") if self.has_tags else plain, tag]
            place = end
        return "".join(parts)

    def put_back(self, translator: Any, rows: Rows, parts: Any, empty: Ranked, budget: int) -> None:
        """Put tags into the translations, which `parts` has by number and place."""
        cases, pairs = list[tuple[Marked, Ranked, int]](), list[dict[str, list[int]]]()
        ids = {(number, place): row for number, place, row in rows}
        for key, marked in self.marked.items():
            ranked = parts[key[0]].setdefault(key[1], [*empty])
            for rank, one in enumerate(ranked):
                if marked.tags and one.token_ids:
                    cases.append((marked, ranked, rank))
                    pairs.append({"input_ids": ids[key], "labels": [*one.token_ids]})
                else:
                    text = self.written(one.text, [(0, 0, tag.raw) for tag in marked.tags])
                    ranked[rank] = replace(one, text=text)
        of_source = translator.tokenizers.source
        decode_source = partial(of_source.batch_decode, skip_special_tokens=True)
        for index, weights in cross_attention(translator.model, pairs, budget):
            marked, ranked, rank = cases[index]
            weights[:, np.isin(pairs[index]["input_ids"], of_source.all_special_ids)] = 0
            source = _spans(decode_source, pairs[index]["input_ids"], marked.text)
            target = _spans(translator.tokenizers.decode_target, pairs[index]["labels"], ranked[rank].text)
            placing = Placing(marked, ranked[rank].text, source, target, weights)
            ranked[rank] = replace(ranked[rank], text=self.written(ranked[rank].text, placing.found))
            self.doubtful += placing.is_doubtful
        self.marked.clear()

    def _after_kept(self, line: str, place: int) -> int:
        """Return the place after an open comment, or element that stays; if it is still open, the line's end."""
        match = self.until.search(line, place) if self.until else None
        if match:
            self.until, _ = None, self.open.pop()
        return match.end() if match else len(line) if self.until else place

    def _noted(self, match: re.Match[str], number: int) -> tuple[str, bool]:
        """Note what begins or ends; return a tag's side of its element, and whether it separates texts."""
        raw, tag = match[0], match["tag"] or ""
        if raw == "<":
            raise _error(number, match.string[match.start() :], "begins no tag that ends in its line")
        name = (match["name"] or "").lower() if self.is_html else match["name"]
        separates = self.is_html and bool(name) and name not in INLINE.split()
        is_lone = not (name or match["kept"]) or tag.endswith("/")
        if match["kept"] or not (is_lone or match["end"] or not (name in KEPT.split() or IS_KEPT.search(tag))):
            self.until = re.compile(ENDS.get(raw) or rf"</{re.escape(name)}\s*>", re.IGNORECASE)
        elif is_lone or (self.is_html and name in UNCLOSED.split()):
            return "", separates
        if not match["end"]:
            self.open.append((name, raw, number))
            return "" if self.until else "begin", separates
        if not self.open or self.open[-1][0] != name:
            other = ", where {1} of line {2} is open".format(*self.open[-1]) if self.open else ""
            raise _error(number, raw, f"closes nothing{other}")
        self.open.pop()
        return "end", separates


class Placing:
    """Finds the places of tags in a translation, whose tokens `(T, 2)` attend to those of the source `(S, 2)`."""

    def __init__(self, marked: Marked, translation: str, source: np.ndarray, target: np.ndarray, weights: np.ndarray):
        self.tags, self.source, self.is_doubtful = marked.tags, source, False
        self.source_words = [match.span() for match in WORD.finditer(marked.text)]
        self.words = [match.span() for match in WORD.finditer(translation)]
        self.weights = _shares(_shares(_overlap(self.words, target)) @ _shares(weights))  # (words, S)
        self.weights[[not translation[start].isalnum() for start, _ in self.words]] = 0
        self.last, begun = dict[int, int](), list[int]()  # an element's last tag by its first one
        for number, tag in enumerate(self.tags):
            if tag.side == "begin":
                begun.append(number)
            elif tag.side == "end" and begun:
                self.last[begun.pop()] = number
            span = tag.place, tag.place + tag.length
            is_copy = np.array([translation[slice(*word)] == marked.text[slice(*span)] for word in self.words], bool)
            self.weights[is_copy] = _shares(_overlap([span], source))
        self.found = self._placed(0, len(self.tags), (0, len(marked.text)), (0, len(self.words)))

    def _placed(self, number: int, end: int, source: Room, room: Room) -> list[Placed]:
        """Place tags by their numbers, in a valid nesting, from some characters of the source into a room of words."""
        is_inside = np.isin(np.arange(len(self.words)), range(*room))
        found, lone, is_free, least = list[tuple[int, int, int, list[Placed]]](), list[Room](), is_inside.copy(), 0
        while number < end:
            tag, last = self.tags[number], self.last.get(number, number)
            stop = max(tag.place + tag.length, self.tags[last].place)
            if tag.place == stop:
                lone.append((number, last))
            else:
                whole = tag.place <= source[0] and stop >= source[1]
                share, own = (1.0, room) if whole else self._most((tag.place, stop), is_free, room)
                self.is_doubtful |= share < ENOUGH
                is_free[slice(*own)] = False
                begin, close = self._characters(own)
                inner = [(begin, close, tag.raw)]
                if not tag.length:
                    inside = self._placed(number + 1, last, (tag.place, stop), own)
                    inner = [(begin, begin, tag.raw), *inside, (close, close, self.tags[last].raw)]
                found.append((begin, close, number, inner))
            number = last + 1
        for number, last in lone:  # in this order, because an element may begin or end in another text
            place, own = self.tags[number].place, room
            is_after = place > source[0]
            if source[0] < place < source[1]:
                before = max(word for word in self.source_words if word[0] < place)
                after = min(word for word in self.source_words if word[1] > place)
                sides = ((*self._most(word, is_inside, room), word is before) for word in (before, after))
                share, own, is_after = max(sides)
                self.is_doubtful |= share < ENOUGH
            place = max(self._characters(own)[is_after], least)
            around = ((begin, close)[is_after] for begin, close, *_ in found if begin < place < close)
            place = least = next(around, place)
            found.append((place, place, number, [(place, place, tag.raw) for tag in self.tags[number : last + 1]]))
        return [each for *_, inner in sorted(found, key=lambda each: each[:3]) for each in inner]

    def _characters(self, room: Room) -> Room:
        """Return the characters of words, or the place after the words before them."""
        close = self.words[room[1] - 1][1] if room[1] else 0
        return (self.words[room[0]][0] if room[0] < room[1] else close), close

    def _most(self, span: Room, is_free: np.ndarray, room: Room) -> tuple[float, Room]:
        """Return a word's most attention to some source characters, and the neighbours with much."""
        if not is_free.any():
            return 0.0, (room[1], room[1])
        shares = self.weights @ _overlap([span], self.source)[0]
        most = float(shares[is_free].max())
        gains = shares - min(ENOUGH, most * NEAR_MOST) + 9 * (shares >= STRONG)
        sums = np.cumsum([0.0, *np.where(is_free, gains, -1e9)])
        end = int((sums[1:] - np.minimum.accumulate(sums)[:-1]).argmax()) + 1
        return most, (int(sums[:end].argmin()), end)


def _error(number: int, tag: str, what: str) -> ValueError:
    return ValueError(f"`markup` must be well-formed, but in line {number} {shortened(tag.rstrip())} {what}.")


def _spans(decode: Callable[[list[Sequence[int]]], list[str]], ids: Sequence[int], text: str) -> np.ndarray:
    """Return the characters of each token without white space, `(tokens, 2)`; bytes belong to a whole character."""
    ends = [len(each) for each in decode([ids[:end] for end in range(len(ids) + 1)])]
    spans = [(min(start, end - 1), end) for start, end in pairwise(ends)]
    return np.array([(end - len(text[start:end].lstrip()), end) for start, end in spans], int).reshape(-1, 2)


def _overlap(parts: Sequence[Room], spans: np.ndarray) -> np.ndarray:
    """Return the share of each span in each part, `(parts, spans)`."""
    ends = np.array(parts, int).reshape(-1, 2)
    inside = np.minimum(ends[:, None, 1], spans[:, 1]) - np.maximum(ends[:, None, 0], spans[:, 0])
    return np.asarray(inside.clip(0) / np.maximum(spans[:, 1] - spans[:, 0], 1))


def _shares(weights: np.ndarray) -> np.ndarray:
    """Let each row sum to 1, or 0."""
    return np.asarray(weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-9))
