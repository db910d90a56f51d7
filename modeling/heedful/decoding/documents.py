"""Documents: each sentence is translated after the sentences before it."""

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import pairwise

from heedful.data.epochs.encoding import control_id, window_of
from heedful.data.tokenization import SEPARATOR, TokenizerPair
from heedful.decoding.engines import Hypothesis

Rows = list[tuple[int, int, list[int]]]  # a text's number, a place in it, and token ids
Found = list[list[Hypothesis]]


class Documents:
    """One call's windows: a row after up to `context` rows. Only the row's own translation is kept."""

    def __init__(self, tokenizers: TokenizerPair, context: int, limit: int):
        sides = tokenizers.source, tokenizers.target
        self._separator, self._of_target = (control_id(SEPARATOR, side, "context") for side in sides)
        self._limit = limit  # most tokens in a window
        self._before, self._last = deque[list[int]](maxlen=context), 0
        self.unmatched = 0  # windows whose outputs are cut off, or have other separators

    def search(self, rows: Rows, begins: Collection[int], search: Callable[[Rows], Found]) -> Found:
        """Return each row's hypotheses. A missing number ends a document, and the texts `begins` begin one."""
        windows = Rows()
        for number, place, row in rows:
            if number > self._last + 1 or (number in begins and number != self._last):
                self._before.clear()
            before = [*self._before]
            while len(window := window_of([*before, row], self._separator)) > self._limit and before:
                del before[0]
            windows.append((number, place, window))
            self._before.append(row)
            self._last = number
        both = zip(windows, search(windows), strict=True)
        found = [[self._own(one, ids.count(self._separator)) for one in row] for (*_, ids), row in both]
        alone = [index for index, row in enumerate(found) if None in row]
        again = dict(zip(alone, search([rows[index] for index in alone]), strict=True))
        self.unmatched += len(alone)
        return [again.get(index) or [one for one in row if one] for index, row in enumerate(found)]

    def _own(self, window: Hypothesis, before: int) -> Hypothesis | None:
        """Return a window's last sentence, or `None` unless `before` sentences precede it."""
        ids = window.token_ids
        ends = [-1, *(place for place, id_ in enumerate(ids) if id_ == self._of_target), len(ids) - 1]
        has_all = window.finished and len(ends) == before + 2 and all(end > start + 1 for start, end in pairwise(ends))
        return replace(window, token_ids=ids[ends[-2] + 1 :]) if has_all else None if before else window
