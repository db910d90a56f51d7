"""Updates planned: rows of similar length in buckets, and buckets in updates.

An *update* is one optimizer step. Its rows are chosen before anybody knows how many processes there are or how much
memory one has, so that a run's updates are the same everywhere: `UpdateBatches` plans them, or `stream_updates` where
the corpus does not fit in memory. `micro_batches.py` then divides each among ranks.

*Padded tokens* are what a group of rows costs: rows × (longest source + longest target).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import NamedTuple

import numpy as np

from heedful.files import check_at_least

Row = dict[str, list[int]]  # `input_ids` and `labels` of one pair
TokenCounts = Sequence[int] | np.ndarray

STRIPE_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)
PLANS_PER_EPOCH = 8  # drawn at random; the best of them is taken
WORST_PADDING = 1.15  # the most padding of a plan, as a multiple of the best plan's


@dataclass(frozen=True)
class BatchingSettings:
    """How rows become updates: in buckets, of which more show more lengths with less padding, but slower."""

    tokens_per_update: int  # padded ones
    buckets_per_update: int = 1
    seed: int = 0  # of the random order

    def __post_init__(self) -> None:
        check_at_least(1, buckets_per_update=self.buckets_per_update)
        check_at_least(self.buckets_per_update, tokens_per_update=self.tokens_per_update)
        check_at_least(0, seed=self.seed)


class UpdateBatches:
    """The updates of every epoch over a corpus whose lengths are known.

    Rows are sorted by length (ties in random order) and cut into buckets within the budget; the buckets are shuffled
    and grouped into updates. With several buckets, an update has short, middling and long rows, as the corpus has.
    Every epoch sorts and cuts in another way, into the same number of buckets, so that rows meet other rows. All of it
    follows from the lengths, the seed and the epoch, and from neither platform nor rank.

    The lengths are the tokens of every row, `(rows,)`. A single row longer than `tokens_per_bucket`, the padded tokens
    a bucket may have, is alone in its bucket, without a warning: to drop it is what the cleaning rules are for.
    """

    def __init__(self, source_lengths: TokenCounts, target_lengths: TokenCounts, settings: BatchingSettings):
        self.settings = settings
        self.tokens_per_bucket = settings.tokens_per_update // settings.buckets_per_update
        self._cells = _Cells(source_lengths, target_lengths)
        plans = [_Plan(swapped, width, 0, self.tokens_per_bucket) for swapped in (0, 1) for width in STRIPE_WIDTHS]
        cuts = [self._cells.cut(self.tokens_per_bucket, plan) for plan in plans]
        self._best = min(cuts, key=lambda cut: cut.padding)
        self._most_padding = int(WORST_PADDING * self._best.padding)
        self._good = [plan for plan, cut in zip(plans, cuts, strict=True) if cut.padding <= self._most_padding]
        buckets = len(self._best.ends)
        # Other ways to cut begin and end with a part of a bucket.
        self._buckets = min(self._cells.rows, buckets + min(2, buckets // 64))

    def epoch(self, epoch: int, pool: int = 0) -> list[list[list[int]]]:
        """Return the updates of one epoch, from 0: each a list of buckets, each a list of row indices.

        Every row comes exactly once. The last update may have fewer buckets than the others; the number of updates is
        the same in every epoch. `pool` changes the random numbers as well.
        """
        # The raw output of a bit generator is the one thing numpy promises never to change.
        generator = np.random.PCG64(np.random.SeedSequence([self.settings.seed, epoch, pool]))
        cut = self._draw_cut(generator)
        positions = cut.positions[self._cells.of_row]
        rows = np.lexsort((generator.random_raw(len(positions)), positions)).tolist()
        buckets = [rows[start:end] for start, end in pairwise([0, *cut.ends])]
        while len(buckets) < self._buckets:
            fullest = max(range(len(buckets)), key=lambda i: len(buckets[i]))
            bucket, middle = buckets[fullest], len(buckets[fullest]) // 2
            buckets[fullest : fullest + 1] = [bucket[:middle], bucket[middle:]]
        # Buckets lie in order of length. An update takes one of each group of them, so that all updates are alike; and
        # only the last one can lack some, as the groups differ by one bucket at most.
        draws = generator.random_raw(len(buckets))
        groups = np.array_split(np.arange(len(buckets)), self.settings.buckets_per_update)
        shuffled = [group[np.argsort(draws[group], kind="stable")].tolist() for group in groups]
        updates = zip_longest(*shuffled)
        return [[buckets[i] for i in update if i is not None] for update in updates]

    def _draw_cut(self, generator: np.random.PCG64) -> "_Cut":
        """Draw some ways to cut, and return the one with the least padding that does not give too many buckets."""
        cuts = []
        for _ in range(PLANS_PER_EPOCH):
            which, offset, first = generator.random_raw(3).tolist()
            plan = self._good[which % len(self._good)]
            plan = plan._replace(offset=offset % plan.width, first=1 + first % self.tokens_per_bucket)
            cuts.append(self._cells.cut(self.tokens_per_bucket, plan))
        fitting = [cut for cut in cuts if len(cut.ends) <= self._buckets and cut.padding <= self._most_padding]
        return min(fitting, key=lambda cut: cut.padding, default=self._best)


class _Plan(NamedTuple):
    """How rows are sorted and cut."""

    swapped: int  # whether targets, not sources, are sorted into stripes
    width: int  # number of lengths in a stripe
    offset: int  # number of lengths by which the stripes are moved
    first: int  # padded tokens of the first bucket


class _Cut(NamedTuple):
    """What came of a plan."""

    padding: int  # in tokens
    positions: np.ndarray  # (cells,) of every cell in the order
    ends: list[int]  # of the buckets, in rows


class _Cells:
    """The distinct pairs of lengths: thousands of them for millions of rows."""

    def __init__(self, source_lengths: TokenCounts, target_lengths: TokenCounts):
        source, target = np.asarray(source_lengths, dtype=np.int64), np.asarray(target_lengths, dtype=np.int64)
        self.rows = len(source)
        self.tokens = int(source.sum() + target.sum())
        base = int(target.max()) + 1 if self.rows else 1
        cells, of_row, self.counts = np.unique(source * base + target, return_inverse=True, return_counts=True)
        self.of_row = of_row.reshape(-1)
        self.source, self.target = np.divmod(cells, base)

    def cut(self, budget: int, plan: _Plan) -> _Cut:
        """Sort by length and cut greedily.

        Sources are sorted into stripes of a few lengths. Inside a stripe, rows are sorted by target, up and down in
        turns, so that neighbours are alike in both lengths. Small corpora need wide stripes. Rows of equal lengths
        are interchangeable, and share a position.
        """
        stripes, inside = (self.target, self.source) if plan.swapped else (self.source, self.target)
        stripe = (stripes + plan.offset) // plan.width
        order = np.lexsort((stripes, np.where(stripe % 2, -inside, inside), stripe))
        positions = np.empty_like(order)
        positions[order] = np.arange(len(order))

        total = end = rows = longest_source = longest_target = 0
        limit = min(plan.first, budget)
        ends: list[int] = []
        columns = (self.source[order].tolist(), self.target[order].tolist(), self.counts[order].tolist())
        for source, target, left in zip(*columns, strict=True):
            remaining = left
            while remaining:
                new_source, new_target = max(longest_source, source), max(longest_target, target)
                # An empty bucket takes at least one row, however long.
                room = max(limit // max(new_source + new_target, 1) - rows, 0 if rows else 1)
                taken = min(room, remaining)
                if taken:
                    rows, longest_source, longest_target = rows + taken, new_source, new_target
                    remaining -= taken
                if remaining:
                    end += rows
                    ends.append(end)
                    total += rows * (longest_source + longest_target)
                    rows = longest_source = longest_target = 0
                    limit = budget
        if rows:
            ends.append(end + rows)
            total += rows * (longest_source + longest_target)
        return _Cut(total - self.tokens, positions, ends)
