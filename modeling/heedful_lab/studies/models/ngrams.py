"""N-gram models: the next token from the τ previous tokens, with interpolated Kneser-Ney smoothing."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

History = tuple[int, ...]

# With few n-grams the estimate may be 0 or 1, and some tokens would get no probability.
SMALLEST_DISCOUNT, LARGEST_DISCOUNT = 0.1, 0.9


class Level(NamedTuple):
    """Counts of tokens after histories of one length."""

    counts: dict[History, Counter[int]]  # of each token; for shorter histories, numbers of left contexts
    totals: dict[History, int]  # sums of counts
    discount: float  # moved from each positive count to the shorter history


def level_of(counts: dict[History, Counter[int]]) -> Level:
    """Sum up counts, and estimate the discount n₁ / (n₁ + 2 n₂) from counts of 1 and 2."""
    values = [count for tokens in counts.values() for count in tokens.values()]
    once, twice = values.count(1), values.count(2)
    estimate = once / (once + 2 * twice) if once + twice else 0.5
    totals = {history: tokens.total() for history, tokens in counts.items()}
    return Level(counts, totals, min(max(estimate, SMALLEST_DISCOUNT), LARGEST_DISCOUNT))


class NgramModel:
    """A model of the next token after `window` tokens (interpolated Kneser-Ney: Chen & Goodman, 1999, section 3).

    p(w | h) = (max(c(h w) − D, 0) + D · N(h) · p(w | h′)) / c(h), with counts c, the discount D of the history's
    length, the number N(h) of different tokens after h, and h′ without h's first token; p(w | h′) after an unseen
    history, and 1 / `vocab_size` below the empty one. Counts of shorter histories are numbers of different tokens to
    their left, except where a sentence begins. Rows are sentences as token ids with </s>; `start_id` precedes each.
    """

    def __init__(self, rows: Iterable[Sequence[int]], window: int, vocab_size: int, start_id: int):
        self.window = window
        self.vocab_size = vocab_size
        self.start_id = start_id
        counts: list[dict[History, Counter[int]]] = [defaultdict(Counter) for _ in range(window + 1)]
        for row in rows:
            for place, token in enumerate(row):
                history = self._history(row, place)
                counts[len(history)][history][token] += 1
        for longer, shorter in zip(counts[:0:-1], counts[-2::-1], strict=True):
            for history, tokens in longer.items():
                for token in tokens:
                    shorter[history[1:]][token] += 1
        self.levels = list(map(level_of, counts))

    def size(self) -> int:
        """Return the number of counted n-grams of all lengths."""
        return sum(len(tokens) for level in self.levels for tokens in level.counts.values())

    def probability(self, history: Sequence[int], token: int) -> float:
        """Return p(token | history) for the sentence's earlier tokens, without the start token."""
        read = self._history(history, len(history))
        probability = 1 / self.vocab_size
        for length, level in enumerate(self.levels[: len(read) + 1]):
            known = read[len(read) - length :]  # its last `length` tokens
            if known in level.totals:
                tokens = level.counts[known]
                rest = level.discount * len(tokens)
                count = max(tokens.get(token, 0) - level.discount, 0)
                probability = (count + rest * probability) / level.totals[known]
        return probability

    def perplexity(self, rows: Iterable[Sequence[int]]) -> float:
        """Return the exponential of the mean negative log-likelihood per token, with </s>."""
        losses = [-math.log(self.probability(row[:place], token)) for row in rows for place, token in enumerate(row)]
        return math.exp(fmean(losses))

    def _history(self, row: Sequence[int], place: int) -> History:
        """Return the tokens before a place that the model uses: fewer than `window` near the beginning."""
        first = place - self.window
        return tuple(row[first:place]) if first >= 0 else (self.start_id, *row[:place])
