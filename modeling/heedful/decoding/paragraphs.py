"""Lines with several sentences: split before translation, and joined afterwards."""

import math
import re
from dataclasses import dataclass, field, replace
from itertools import chain

from heedful.decoding.engines import Translation
from heedful.sentences_heed import LINE_BREAK, joined_sentences, split_sentences
from heedful.symbols_heed import trimmed

Ranked = list[Translation]  # a sentence's or line's `Translation`s, best first
FENCE = re.compile(r"\s*(`{3,}(?=[^`]*$)|~{3,}|\$\$(?=\s*$)|\\[][](?=\s*$))")
FRONT = "---", "+++"  # around a page's front matter
FRONT_MATTER = re.compile(r"[\w.-]+\s*[:=]|\s+\S|- |#")  # one line of it


@dataclass
class Paragraphs:
    """The texts of one call by number, each as lines or sentences with separators.

    List markers and lines without text stay; with `every_line` also code, formulas, and a page's front matter.
    """

    every_line: bool = False
    taken_apart: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
    fence: str = ""  # mark of open code, formula or front matter

    def divided(
        self, texts: list[tuple[int, str]], rows: list[tuple[int, int, list[int]]], trained: int | None
    ) -> tuple[list[tuple[int, int, list[int]]], list[tuple[int, int, str]]]:
        """Split long texts and those with several lines; return the others' rows, and (text, place, sentence)."""
        long = {number for number, _, row in rows if len(row) > (trained or math.inf)}
        for number, text in texts:
            is_long = self.every_line or number in long
            if is_long or LINE_BREAK.search(trimmed(text)):
                self.take_apart(number, text if self.every_line else trimmed(text), is_long)
        parts = [(n, place, part) for n, pieces in self.taken_apart.items() for place, (part, _) in enumerate(pieces)]
        return [row for row in rows if row[0] not in self.taken_apart], parts

    def take_apart(self, number: int, text: str, by_sentence: bool = True) -> list[str]:
        """Record and return a text's lines or sentences; untranslated parts become empty ones."""
        pieces = self.taken_apart[number] = list[tuple[str, str]]()
        lines = text.rstrip("\r\n")
        parts = LINE_BREAK.split(lines)
        for line, end in zip(parts[::2], [*parts[1::2], text[len(lines) :]], strict=True):
            before, own, after = line.partition(line.strip()) if trimmed(line) else (line, "", "")
            found = self._divided(line, number, len(pieces)) if by_sentence else [("", before), (own, after)]
            pieces += [*found, *[("", end)] * bool(end)]
        return [sentence for sentence, _ in pieces]

    def _divided(self, line: str, number: int, place: int) -> list[tuple[str, str]]:
        pieces = split_sentences(line, keeps_markup=True)
        if self.every_line and number == 1 and not place and line.strip() in FRONT:
            self.fence = line.strip()
        elif self.fence in FRONT:
            pieces = [("", line)] if FRONT_MATTER.match(line) else pieces
            self.fence = self.fence if FRONT_MATTER.match(line) else ""
        elif self.every_line and (fence := FENCE.match(line)):
            if not self.fence and fence[1] != "\\]":
                self.fence = fence[1].replace("[", "]")  # the end
            elif fence[1].startswith(self.fence) and line.strip() == fence[1]:
                self.fence = ""
        elif self.fence:
            pieces = [("", line)]
        return pieces

    def put_together(self, number: int, found: dict[int, Ranked], empty: Ranked) -> Ranked:
        """Return a line's translations, joined from its sentences' n-th best ones."""
        if (pieces := self.taken_apart.pop(number, None)) is None:
            return found.get(0, empty)
        results = []
        for rank, nothing in enumerate(empty):
            parts, text, between = {place: row[rank] for place, row in found.items()}, "", ""
            for place, (_, behind) in enumerate(pieces):
                text = joined_sentences(text, parts[place].text.strip() if place in parts else "", between) + behind
                between = behind
            ids = tuple(chain.from_iterable(part.token_ids for part in parts.values()))
            score = sum(part.score or 0.0 for part in parts.values()) / len(parts) if parts else None
            finished = all(part.finished for part in parts.values())
            results.append(replace(nothing, token_ids=ids, score=score, finished=finished, text=text))
        return results
