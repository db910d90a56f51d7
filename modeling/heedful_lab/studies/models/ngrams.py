"""Language models that only count: the next token from the τ tokens before it, smoothed by interpolated Kneser-Ney.

With τ = 0 it is a unigram model, with τ = 1 a first-order Markov chain, with more a window of fixed width.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

History = tuple[int, ...]

# Where few n-grams were seen once or twice the estimate may be 0 or 1, and some token would get nothing.
SMALLEST_DISCOUNT, LARGEST_DISCOUNT = 0.1, 0.9


class Level(NamedTuple):
    """Counts of the tokens after histories of one length."""

    counts: dict[History, Counter[int]]  # how often each followed; below the longest, after how many left contexts
    totals: dict[History, int]  # sums of these counts
    discount: float  # taken from every count above 0 and given to the shorter history


def level_of(counts: dict[History, Counter[int]]) -> Level:
    """Sum up counts, and estimate the discount as n₁ / (n₁ + 2 n₂) from what was counted once and twice."""
    values = [count for tokens in counts.values() for count in tokens.values()]
    once, twice = values.count(1), values.count(2)
    estimate = once / (once + 2 * twice) if once + twice else 0.5
    totals = {history: tokens.total() for history, tokens in counts.items()}
    return Level(counts, totals, min(max(estimate, SMALLEST_DISCOUNT), LARGEST_DISCOUNT))


class NgramModel:
    """Predicts a token from the `window` tokens before it (interpolated Kneser-Ney: Chen & Goodman, 1999, section 3).

    p(w | h) = (max(c(h w) − D, 0) + D · N(h) · p(w | h′)) / c(h), with c the counts, D the discount of the histories'
    length, N(h) the number of different tokens after h, h′ the history without its first token, and 1 / `vocab_size`
    below the empty history. For a history that never occurred it is p(w | h′). Counts of shorter histories are numbers
    of different tokens to their left, save where a sentence begins, to the left of which nothing stands.

    Rows are sentences as token ids, each ending in </s>; `vocab_size` counts tokens, seen or not, and `start_id`
    stands before the first token of every sentence.
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
        """Return the number of n-grams that were counted, of all lengths."""
        return sum(len(tokens) for level in self.levels for tokens in level.counts.values())

    def probability(self, history: Sequence[int], token: int) -> float:
        """Return p(token | history), which is all tokens of the sentence before it, without the start token."""
        read = self._history(history, len(history))
        probability = 1 / self.vocab_size
        for length, level in enumerate(self.levels[: len(read) + 1]):
            known = read[len(read) - length :]  # its last tokens, from none of them to all
            if known in level.totals:
                tokens = level.counts[known]
                rest = level.discount * len(tokens)
                count = max(tokens.get(token, 0) - level.discount, 0)
                probability = (count + rest * probability) / level.totals[known]
        return probability

    def perplexity(self, rows: Iterable[Sequence[int]]) -> float:
        """Return the exponential of the mean negative log-likelihood per token, </s> included."""
        losses = [-math.log(self.probability(row[:place], token)) for row in rows for place, token in enumerate(row)]
        return math.exp(fmean(losses))

    def _history(self, row: Sequence[int], place: int) -> History:
        """Return the tokens that the model reads before a place of a row: fewer than `window` near its beginning."""
        first = place - self.window
        return tuple(row[first:place]) if first >= 0 else (self.start_id, *row[:place])
