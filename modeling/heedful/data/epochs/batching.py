"""Plan updates: rows with similar lengths form buckets, and buckets form updates.

An *update* is one optimizer step. Its rows do not depend on the processes or their memory: `micro_batches.py` divides
it among ranks. Rows cost *padded tokens*: rows × (longest source + longest target).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import NamedTuple

import numpy as np

from heedful.files import check_at_least

Row = dict[str, list[int]]  # one pair's `input_ids` and `labels`
TokenCounts = Sequence[int] | np.ndarray

STRIPE_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)
PLANS_PER_EPOCH = 8  # random plans; the best is taken
WORST_PADDING = 1.15  # a plan's highest padding, relative to the best plan


@dataclass(frozen=True)
class BatchingSettings:
    """Sizes of updates. More buckets mix more lengths with less padding, but are slower."""

    tokens_per_update: int  # padded tokens
    buckets_per_update: int = 1
    seed: int = 0  # for the random order

    def __post_init__(self) -> None:
        check_at_least(1, buckets_per_update=self.buckets_per_update)
        check_at_least(self.buckets_per_update, tokens_per_update=self.tokens_per_update)
        check_at_least(0, seed=self.seed)


class UpdateBatches:
    """The updates of every epoch over a corpus with known lengths.

    Rows are sorted by length (ties in random order) and cut into buckets within the budget. Shuffled buckets form
    updates; several buckets in an update have short, middling and long rows. Each epoch cuts elsewhere, into the same
    number of buckets. Lengths `(rows,)`, seed and epoch decide everything. A row with more than `tokens_per_bucket`
    padded tokens is alone in its bucket.
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
        # Other cuts begin and end with partial buckets.
        self._buckets = min(self._cells.rows, buckets + min(2, buckets // 64))

    def epoch(self, epoch: int, pool: int = 0) -> list[list[list[int]]]:
        """Return an epoch's updates: lists of buckets of rows, each row once, equally many in all epochs (from 0)."""
        # Raw output: numpy never changes it.
        generator = np.random.PCG64(np.random.SeedSequence([self.settings.seed, epoch, pool]))
        cut = self._draw_cut(generator)
        positions = cut.positions[self._cells.of_row]
        rows = np.lexsort((generator.random_raw(len(positions)), positions)).tolist()
        buckets = [rows[start:end] for start, end in pairwise([0, *cut.ends])]
        while len(buckets) < self._buckets:
            fullest = max(range(len(buckets)), key=lambda i: len(buckets[i]))
            bucket, middle = buckets[fullest], len(buckets[fullest]) // 2
            buckets[fullest : fullest + 1] = [bucket[:middle], bucket[middle:]]
        # Buckets are sorted by length. An update takes one from each group, so all updates are alike. Only the last
        # update can lack some, because groups differ by one bucket at most.
        draws = generator.random_raw(len(buckets))
        groups = np.array_split(np.arange(len(buckets)), self.settings.buckets_per_update)
        shuffled = [group[np.argsort(draws[group], kind="stable")].tolist() for group in groups]
        updates = zip_longest(*shuffled)
        return [[buckets[i] for i in update if i is not None] for update in updates]

    def _draw_cut(self, generator: np.random.PCG64) -> "_Cut":
        """Draw some cuts, and return the one with the least padding that has few enough buckets."""
        cuts = []
        for _ in range(PLANS_PER_EPOCH):
            which, offset, first = generator.random_raw(3).tolist()
            plan = self._good[which % len(self._good)]
            plan = plan._replace(offset=offset % plan.width, first=1 + first % self.tokens_per_bucket)
            cuts.append(self._cells.cut(self.tokens_per_bucket, plan))
        fitting = [cut for cut in cuts if len(cut.ends) <= self._buckets and cut.padding <= self._most_padding]
        return min(fitting, key=lambda cut: cut.padding, default=self._best)


class _Plan(NamedTuple):
    swapped: int  # whether targets form the stripes
    width: int  # lengths in a stripe
    offset: int  # lengths by which stripes are moved
    first: int  # padded tokens in the first bucket


class _Cut(NamedTuple):
    padding: int  # in tokens
    positions: np.ndarray  # (cells,) in sorted order
    ends: list[int]  # bucket ends, counted in rows


class _Cells:
    """The distinct pairs of lengths: thousands for millions of rows."""

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

        Sources form stripes with a few lengths. In a stripe, rows are sorted by target, alternately up and down, so
        that neighbours are alike in both lengths. Small corpora need wide stripes. Equally long rows share a position.
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
