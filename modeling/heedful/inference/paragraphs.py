"""Lines of several sentences, taken apart before they are translated and put together after it."""

import re
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING

from heedful.pipeline_heed import joined_sentences, split_sentences

if TYPE_CHECKING:
    from heedful.inference.translation import Translation

FENCE = re.compile(r"\s*(`{3,}|~{3,})")


@dataclass
class Paragraphs:
    """The lines of one call by their numbers, each as its sentences with what is behind them.

    What begins a line of a list stays as it is, and so do lines of tags. With `every_line`, so does what lies between
    two fences of code.
    """

    every_line: bool = False
    taken_apart: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
    fence: str = ""  # of the code that is open

    def take_apart(self, number: int, line: str) -> list[str]:
        """Note the sentences of a line, and return them; what stays as it is becomes an empty one."""
        line = line.rstrip("\r\n")
        pieces = split_sentences(line, keeps_markup=True)
        if self.every_line and (fence := FENCE.match(line)):
            if not self.fence:
                self.fence = fence[1]
            elif fence[1].startswith(self.fence):
                self.fence = ""
        elif self.fence:
            pieces = [("", line)]
        self.taken_apart[number] = pieces
        return [sentence for sentence, _ in pieces]

    def put_together(
        self, number: int, found: "dict[int, list[Translation]]", empty: "list[Translation]"
    ) -> "list[Translation] | None":
        """Join the translations of a line's sentences, n-th best with n-th best; `None` if it was not taken apart."""
        if (pieces := self.taken_apart.pop(number, None)) is None:
            return None
        results = []
        for rank, nothing in enumerate(empty):
            parts, text = {place: row[rank] for place, row in found.items()}, ""
            for place, (_, behind) in enumerate(pieces):
                text = joined_sentences(text, parts[place].text.strip() if place in parts else "") + behind
            ids = tuple(chain.from_iterable(part.token_ids for part in parts.values()))
            score = sum(part.score for part in parts.values()) / max(1, len(parts))
            finished = all(part.finished for part in parts.values())
            results.append(replace(nothing, token_ids=ids, score=score, finished=finished, text=text))
        return results
