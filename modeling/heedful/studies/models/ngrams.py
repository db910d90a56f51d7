"""Language models that only count: the next token from the τ tokens before it, smoothed by interpolated Kneser-Ney.

With τ = 0 it is a unigram model, with τ = 1 a first-order Markov chain, with more a window of fixed width.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

History = tuple[int, ...]

# Where few n-grams were seen once or twice the estimate may be 0 or 1, and some token would get nothing.
SMALLEST_DISCOUNT, LARGEST_DISCOUNT = 0.1, 0.9


@dataclass
class Level:
    """Counts of the tokens after histories of one length.

    Attributes:
        counts: For every history that was seen, how often each token followed. Below the longest histories it is in
            how many different left contexts, see `NgramModel`.
        totals: The sums of these counts.
        discount: What is taken from every count above 0 and given to the shorter history.
    """

    counts: dict[History, dict[int, int]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(int)))
    totals: dict[History, int] = field(default_factory=dict)
    discount: float = 0.5

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

    Args:
        rows: Training sentences as token ids, each ending in </s>.
        window: Number τ of earlier tokens that are read.
        vocab_size: Number of tokens, seen or not.
        start_id: Stands before the first token of every sentence.

    Raises:
        ValueError: If `window` is negative, there is no row, or a token id is out of range.
    """

    def __init__(self, rows: Iterable[Sequence[int]], window: int, vocab_size: int, start_id: int):
        if window < 0:
            raise ValueError(f"`window` must be at least 0, but is {window} instead.")
        self.window = window
        self.vocab_size = vocab_size
        self.start_id = start_id
        self.levels = [Level() for _ in range(window + 1)]
        for row in rows:
            self._count(self._checked(row))
        if not any(level.counts for level in self.levels):
            raise ValueError("`rows` must hold at least one sentence, but is empty instead.")
        self._count_left_contexts()
        for level in self.levels:
            level.close()

    def size(self) -> int:
        """Return the number of n-grams that were counted, of all lengths."""
        return sum(len(tokens) for level in self.levels for tokens in level.counts.values())

    def probability(self, history: Sequence[int], token: int) -> float:
        """Return p(token | history), of which the last `window` tokens are read.

        Args:
            history: All tokens of the sentence before it, without the start token.
            token: The token to predict.

        Raises:
            ValueError: If the token id is out of range.
        """
        self._checked([token])
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
        """Return the exponential of the mean negative log-likelihood per token, </s> included.

        Args:
            rows: Sentences as token ids, each ending in </s>.

        Raises:
            ValueError: If there is no row, or a token id is out of range.
        """
        loss, tokens = 0.0, 0
        for row in rows:
            for place, token in enumerate(row):
                loss -= math.log(self.probability(row[:place], token))
                tokens += 1
        if not tokens:
            raise ValueError("`rows` must hold at least one sentence, but is empty instead.")
        return math.exp(loss / tokens)

    def _checked(self, row: Sequence[int]) -> Sequence[int]:
        for token in row:
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"A token must be at least 0 and below `vocab_size` ({self.vocab_size}), but is {token} instead."
                )
        return row

    def _history(self, row: Sequence[int], place: int) -> History:
        """Return the tokens that the model reads before a place of a row: fewer than `window` near its beginning."""
        first = place - self.window
        return tuple(row[first:place]) if first >= 0 else (self.start_id, *row[:place])

    def _count(self, row: Sequence[int]) -> None:
        for place, token in enumerate(row):
            history = self._history(row, place)
            self.levels[len(history)].counts[history][token] += 1

    def _count_left_contexts(self) -> None:
        for longer, shorter in zip(self.levels[:0:-1], self.levels[-2::-1], strict=True):
            for history, tokens in longer.counts.items():
                for token in tokens:
                    shorter.counts[history[1:]][token] += 1
