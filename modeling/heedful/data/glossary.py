"""Terms with their translations, marked in sources: `<term> cat <term-as> Katze <term-end>`.

The marks are control tokens, which no text becomes. A model learns them by `data.augmentation.terms` (Dinu et al.,
2019, "Training Neural Machine Translation to Apply Terminology Constraints", arXiv 1906.01105). Terms that an output
lacks are forced into it.
"""

import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import regex
from transformers import PreTrainedTokenizerBase

from heedful.data.labels import UNSPACED
from heedful.data.tokenization import MARKS, TokenizerPair
from heedful.files import read_lines
from heedful.messages_heed import wrong
from heedful.symbols_heed import unknown_id

Row = tuple[int, int, list[int]]  # a text's number, a place in it, and token ids
# A letter in a script without spaces, a word of other letters and digits, or a punctuation mark.
WORD = regex.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+|[^\w\s]")


class Word(NamedTuple):
    """A text's word, in Unicode's form NFC."""

    text: str
    start: int
    end: int


class Mark(NamedTuple):
    """A term in a text, and its right translations; the first is written next to it."""

    start: int
    end: int
    targets: tuple[str, ...]


def words_of(text: str) -> list[Word]:
    """Return a text's words and punctuation marks."""
    return [Word(unicodedata.normalize("NFC", each[0]), *each.span()) for each in WORD.finditer(text)]


def with_marks(
    tokenizer: PreTrainedTokenizerBase, given: Sequence[tuple[str, Sequence[int], Sequence[Mark]]]
) -> list[list[int]]:
    """Return rows with marks, from texts, their token ids (perhaps after a head), and their marks in order."""
    term, is_as, end = (tokenizer.added_tokens_encoder[mark] for mark in MARKS)
    targets = [f" {mark.targets[0]}" for *_, marks in given for mark in marks]  # as a word inside a sentence
    encoded = iter(tokenizer(targets, add_special_tokens=False, verbose=False)["input_ids"] if targets else ())
    texts, found = [text for text, *_ in given], []
    offsets = tokenizer(texts, return_offsets_mapping=True, verbose=False)["offset_mapping"] if texts else []
    for places, (_, ids, marks) in zip(offsets, given, strict=True):
        head, row, done = len(ids) - len(places), list[int](), 0
        for mark, target in zip(marks, encoded, strict=False):
            inside = [at for at, place in enumerate(places, head) if place[0] < mark.end and place[1] > mark.start]
            if inside and inside[0] >= done:  # a token may belong to two terms
                row += [*ids[done : inside[0]], term, *ids[inside[0] : inside[-1] + 1], is_as, *target, end]
                done = inside[-1] + 1
        found.append([*row, *ids[done:]])
    return found


class Glossary:
    """Terms and their translations from a file, found in texts as whole words.

    A line has a term and one or several translations, separated by tabs; a line without a tab keeps its term. The
    longest term wins, from left to right. A term in lower case is found in any case; one with a capital letter, such
    as a name, only as it is written.

    Args:
        path: The file, in UTF-8.
        tokenizers: The pair of the model.

    Raises:
        ValueError: If a line is incomplete, no line has a tab, or the model has no tokens for a translation.
    """

    def __init__(self, path: str | Path, tokenizers: TokenizerPair):
        self._terms: dict[tuple[str, ...], tuple[str, ...]] = {}  # translations by a term's words
        self._tokenizers, self._is_marked = tokenizers, {*MARKS} <= {*tokenizers.source.added_tokens_encoder}
        lines, given = read_lines(path, "glossary"), list[tuple[int, str]]()
        if not any("\t" in line for line in lines):
            advice = "to keep terms as they are, write each twice"
            raise wrong("glossary", "have a tab between term and translation", f"{path} without any", advice=advice)
        for number, line in enumerate(lines, start=1):
            cells = [cell.strip() for cell in line.split("\t")] if line.strip() else []
            if not all(map(words_of, cells)):
                found = f"{line!r} in line {number} of {path}"
                raise wrong("glossary", "have text before and after each tab", found, verb="has")
            key, targets = tuple(word.text for cell in cells[:1] for word in words_of(cell)), cells[1:] or cells
            self._terms[key] = (*self._terms.get(key, ()), *targets)
            given += [(number, target) for target in targets]
        self._longest = max(map(len, self._terms))
        unknown = unknown_id(tokenizers.target)
        for (number, target), ids in zip(given, tokenizers.encode_target([text for _, text in given]), strict=True):
            if unknown in ids:
                found = f"{target!r} in line {number} of {path}"
                raise wrong("glossary", "be in tokens of the target vocabulary", found, verb="has")

    def marks(self, text: str) -> list[Mark]:
        """Return a text's terms, in order; they do not overlap."""
        words, found, start = words_of(text), list[Mark](), 0
        while start < len(words):
            for end in range(min(start + self._longest, len(words)), start, -1):
                given = tuple(word.text for word in words[start:end])
                if targets := self._terms.get(given) or self._terms.get(tuple(map(str.lower, given))):
                    found.append(Mark(words[start].start, words[end - 1].end, targets))
                    start = end - 1
                    break
            start += 1
        return found

    def marked(self, texts: Sequence[str], rows: list[Row], most: int | None) -> list[Row]:
        """Return the texts' rows with marks if the model knows them, and a row has at most so many tokens."""
        if not self._is_marked:
            return rows
        given = [(text, ids, self.marks(text)) for text, (*_, ids) in zip(texts, rows, strict=True)]
        marked = zip(rows, with_marks(self._tokenizers.source, given), strict=True)
        return [row if most is not None and len(ids) > most else (*row[:2], ids) for row, ids in marked]

    def lacking(self, text: str, output: str) -> list[Mark]:
        """Return a text's terms that an output has in no form."""
        words = _keys(output)
        return [mark for mark in self.marks(text) if not any(_has(words, target) for target in mark.targets)]

    def counts(self, texts: Sequence[str], outputs: Sequence[str]) -> dict[str, int]:
        """Count the terms in texts, and those of them in the outputs."""
        given, lacking = map(self.marks, texts), map(self.lacking, texts, outputs)
        count = sum(map(len, given))
        return {"in_sources": count, "in_outputs": count - sum(map(len, lacking))}

    def forced(self, text: str, output: str) -> list[list[list[int]]]:
        """Return words to force into an output: for each term that it lacks, the token ids of its translations."""
        rows, special = list[list[list[int]]](), self._tokenizers.target.all_special_ids
        for targets in dict.fromkeys(mark.targets for mark in self.lacking(text, output)):
            ids = self._tokenizers.encode_target([f" {target}" for target in targets])  # as inside a sentence
            rows.append([[id_ for id_ in row if id_ not in special] for row in ids])
        return rows


def is_form(word: str, other: str) -> bool:
    """Return whether words in lower case are equal, or differ in a short ending, such as katze and katzen."""
    stem, is_close = word[: max(3, len(word) - 2)], len(other) < len(word) + 3
    return word == other or (word.isalpha() and len(stem) > 2 and is_close and other.startswith(stem))


def _has(words: list[str], target: str) -> bool:
    wanted = _keys(target)
    return any(all(map(is_form, wanted, words[at:])) for at in range(len(words) - len(wanted) + 1))


def _keys(text: str) -> list[str]:
    return [word.text.lower() for word in words_of(text)]
