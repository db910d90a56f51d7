"""Language models that only count: the next token from the τ tokens before it, smoothed by interpolated Kneser-Ney.

With τ = 0 it is a unigram model, with τ = 1 a first-order Markov chain, with more a window of fixed width.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean

History = tuple[int, ...]

# Where few n-grams were seen once or twice the estimate may be 0 or 1, and some token would get nothing.
SMALLEST_DISCOUNT, LARGEST_DISCOUNT = 0.1, 0.9


class Level:
    """Counts of the tokens after histories of one length."""

    def __init__(self):
        # By history how often each token followed; below the longest ones, after how many different left contexts.
        self.counts: dict[History, Counter[int]] = defaultdict(Counter)
        self.totals: dict[History, int] = {}  # sums of these counts
        self.discount = 0.5  # taken from every count above 0 and given to the shorter history

    def close(self) -> None:
        """Sum up, and estimate the discount as n₁ / (n₁ + 2 n₂) from the n-grams that were counted once and twice."""
        self.totals = {history: sum(tokens.values()) for history, tokens in self.counts.items()}
        values = [count for tokens in self.counts.values() for count in tokens.values()]
        once, twice = values.count(1), values.count(2)
        if once + twice:
            self.discount = min(max(once / (once + 2 * twice), SMALLEST_DISCOUNT), LARGEST_DISCOUNT)


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
        self.levels = [Level() for _ in range(window + 1)]
        for row in rows:
            for place, token in enumerate(row):
                history = self._history(row, place)
                self.levels[len(history)].counts[history][token] += 1
        self._count_left_contexts()
        for level in self.levels:
            level.close()

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

    def _count_left_contexts(self) -> None:
        for longer, shorter in zip(self.levels[:0:-1], self.levels[-2::-1], strict=True):
            for history, tokens in longer.counts.items():
                for token in tokens:
                    shorter.counts[history[1:]][token] += 1
