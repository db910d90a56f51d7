"""Batches out of rows: buckets of similar length, updates, micro-batches per process, tensors.

An *update* is one optimizer step. Its rows are chosen before anybody knows how many processes there are or
how much memory one has, so that a run's updates are the same everywhere: `UpdateBatches` makes them (or
`stream_updates`, where the corpus does not fit in memory), `split_update` cuts one into micro-batches, and
`collate` makes tensors.

*Padded tokens* are what a group of rows costs: rows × (longest source + longest target).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, pairwise, zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch

LABEL_PADDING = -100  # the label that torch's cross-entropy ignores
TokenCounts = Sequence[int] | np.ndarray
STRIPE_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)
ATTEMPTS = 8  # plans that are drawn for an epoch; the best of them is taken
WORSE = 1.15  # times the padding of the best plan that another one may have


class UpdateBatches:
    """The updates of every epoch over a corpus whose lengths are known.

    Rows are sorted by length (ties in random order), cut into buckets within the budget, the buckets are
    shuffled and grouped into updates: with several buckets an update has short, middling and long rows, as the
    corpus has. Every epoch sorts and cuts in another way, into as many buckets, so that a row has other company.
    It all follows from the lengths, the seed and the epoch: neither platform nor process plays a part.

    Args:
        source_lengths: tokens of every row's source.
        target_lengths: tokens of every row's target.
        tokens_per_update: padded tokens of one update.
        buckets_per_update: buckets an update consists of; each gets its share of the budget. With more
            buckets one update sees more lengths, which training needs, and there is less padding; but smaller
            batches are slower.
        seed: starts the random order.

    Attributes:
        tokens_per_bucket: the padded tokens a bucket may have. A single row longer than that is alone in its
            bucket, without a warning: dropping it is the cleaning rules' business.

    Raises:
        ValueError: if the lengths do not match each other or a number is out of range.
    """

    def __init__(
        self,
        source_lengths: TokenCounts,
        target_lengths: TokenCounts,
        *,
        tokens_per_update: int,
        buckets_per_update: int = 1,
        seed: int = 0,
    ):
        _check_at_least("buckets_per_update", buckets_per_update, 1)
        _check_at_least("tokens_per_update", tokens_per_update, buckets_per_update)
        _check_at_least("seed", seed, 0)
        self.tokens_per_bucket = tokens_per_update // buckets_per_update
        self.buckets_per_update = buckets_per_update
        self.seed = seed
        self._cells = _Cells(*_length_arrays(source_lengths, target_lengths))
        whole = [_Plan(swapped, width, 0, self.tokens_per_bucket) for swapped in (0, 1) for width in STRIPE_WIDTHS]
        cuts = [self._cells.cut(self.tokens_per_bucket, plan) for plan in whole]
        self._best = min(cuts, key=lambda cut: cut.padding)
        self._most_padding = int(WORSE * self._best.padding)
        self._good = [plan for plan, cut in zip(whole, cuts, strict=True) if cut.padding <= self._most_padding]
        buckets = len(self._best.ends)
        # Other ways to cut begin and end with a part of a bucket.
        self._buckets = min(self._cells.rows, buckets + min(2, buckets // 64))

    def epoch(self, epoch: int) -> list[list[list[int]]]:
        """Return the updates of one epoch: each a list of buckets, each a list of row indices.

        Every row comes exactly once. The last update may have fewer buckets than the others; the number of
        updates is the same in every epoch.

        Raises:
            ValueError: if `epoch` is negative.
        """
        _check_at_least("epoch", epoch, 0)
        return self._updates(epoch, pool=0)

    def _updates(self, epoch: int, pool: int) -> list[list[list[int]]]:
        # The raw output of a bit generator is the one thing numpy promises never to change.
        generator = np.random.PCG64(np.random.SeedSequence([self.seed, epoch, pool]))
        cut = self._draw_cut(generator)
        ranks = cut.ranks[self._cells.of_row]
        rows = np.lexsort((generator.random_raw(len(ranks)), ranks)).tolist()
        buckets = [rows[start:end] for start, end in pairwise([0, *cut.ends])]
        while len(buckets) < self._buckets:
            fullest = max(range(len(buckets)), key=lambda i: len(buckets[i]))
            bucket, middle = buckets[fullest], len(buckets[fullest]) // 2
            buckets[fullest : fullest + 1] = [bucket[:middle], bucket[middle:]]
        # Buckets lie in order of length. An update takes one of each group of them, so that all updates are alike; and
        # only the last one can lack some, as the groups differ by one bucket at most.
        draws = generator.random_raw(len(buckets))
        groups = np.array_split(np.arange(len(buckets)), self.buckets_per_update)
        shuffled = [group[np.argsort(draws[group], kind="stable")].tolist() for group in groups]
        updates = zip_longest(*shuffled)
        return [[buckets[i] for i in update if i is not None] for update in updates]

    def _draw_cut(self, generator: np.random.PCG64) -> "_Cut":
        """Draw some ways to cut, and return the one with the least padding that does not give too many buckets."""
        cuts = []
        for _ in range(ATTEMPTS):
            which, offset, first = generator.random_raw(3).tolist()
            plan = self._good[which % len(self._good)]
            plan = plan._replace(offset=offset % plan.width, first=1 + first % self.tokens_per_bucket)
            cuts.append(self._cells.cut(self.tokens_per_bucket, plan))
        fitting = [cut for cut in cuts if len(cut.ends) <= self._buckets and cut.padding <= self._most_padding]
        return min(fitting, key=lambda cut: cut.padding, default=self._best)


def split_update(
    update: Sequence[Sequence[int]],
    source_lengths: Sequence[int] | Mapping[int, int],
    target_lengths: Sequence[int] | Mapping[int, int],
    token_budget: int,
    world_size: int,
) -> list[list[list[int]]]:
    """Divide one update among processes, and each process's part into micro-batches that fit in memory.

    Args:
        update: the update's buckets of row indices.
        source_lengths: tokens of every row's source, found by row index.
        target_lengths: tokens of every row's target, found by row index.
        token_budget: padded tokens of one micro-batch; only a single row may exceed it.
        world_size: number of processes.

    Returns:
        For every process its micro-batches. All processes get the same number of them (where rows are too
        few, some are empty lists) and, as far as rows can be divided, the same padded tokens; together they
        hold exactly the update's rows. The same arguments give the same answer in every process.

    Raises:
        ValueError: if `token_budget` or `world_size` is below 1.
    """
    _check_at_least("token_budget", token_budget, 1)
    _check_at_least("world_size", world_size, 1)
    buckets = []
    for bucket in update:
        lengths = [(int(source_lengths[row]), int(target_lengths[row]), row) for row in bucket]
        if lengths:
            buckets.append(sorted(lengths, key=_by_length))
    needed = [len(_fill(bucket, token_budget)) for bucket in buckets]
    rounds = -(-sum(needed) // world_size)
    assigned = _assign(buckets, needed, rounds, world_size)
    if world_size > 1 and buckets:
        # One round more costs a little, and is worth it where it takes a good part off the busiest process.
        finer = _assign(buckets, needed, rounds + 1, world_size)
        if _largest_load(finer) < 0.85 * _largest_load(assigned):
            assigned = finer
    return [[[row for _, _, row in part] for part in process] for process in assigned]


def divide_update(
    update: Sequence[Sequence[int]],
    source_lengths: TokenCounts,
    target_lengths: TokenCounts,
    parts: int,
) -> list[list[int]]:
    """Divide one update into so many micro-batches of about equal padded tokens.

    Args:
        update: the update's buckets of row indices.
        source_lengths: tokens of every row's source.
        target_lengths: tokens of every row's target.
        parts: number of micro-batches.

    Returns:
        Lists of row indices, the costliest first; where rows are too few, some are empty. Buckets stay apart where
        there are enough parts for all of them.

    Raises:
        ValueError: if `parts` is below 1.
    """
    _check_at_least("parts", parts, 1)
    buckets = [
        sorted(((int(source_lengths[row]), int(target_lengths[row]), row) for row in bucket), key=_by_length)
        for bucket in update
        if len(bucket)
    ]
    if len(buckets) > parts:
        buckets = [sorted((row for bucket in buckets for row in bucket), key=_by_length)]
    return [[row for _, _, row in part] for (part,) in _assign(buckets, [1] * len(buckets), 1, parts)]


def collate(rows: Sequence[Mapping[str, Sequence[int]]], pad_token_id: int) -> "dict[str, torch.Tensor]":
    """Make right-padded tensors of rows of token ids.

    Args:
        rows: at least one row with `input_ids` and `labels`.
        pad_token_id: fills up `input_ids`; labels are filled up with -100.

    Returns:
        `input_ids` (batch, source), `attention_mask` (batch, source), `labels` (batch, target), all int64.

    Raises:
        ValueError: if there are no rows.
    """
    import torch

    if not rows:
        raise ValueError("`rows` must hold at least one row, but is empty instead.")

    def padded(sequences: list[Sequence[int]], padding: int) -> "tuple[torch.Tensor, torch.Tensor]":
        lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
        is_token = np.arange(lengths.max()) < lengths[:, None]  # (batch, length)
        tokens = np.full(is_token.shape, padding, np.int64)
        tokens[is_token] = np.fromiter(chain.from_iterable(sequences), np.int64, int(lengths.sum()))
        return torch.from_numpy(tokens), torch.from_numpy(is_token.astype(np.int64))

    input_ids, attention_mask = padded([row["input_ids"] for row in rows], pad_token_id)
    labels, _ = padded([row["labels"] for row in rows], LABEL_PADDING)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def stream_updates(
    rows: Iterable[Mapping[str, Any]],
    *,
    pool_size: int,
    tokens_per_update: int,
    buckets_per_update: int = 1,
    seed: int = 0,
    epoch: int = 0,
) -> Iterator[list[list[Mapping[str, Any]]]]:
    """Make updates from a stream of rows: pools of rows are read, each treated like a small corpus.

    The last, usually incomplete, update of a pool goes back into the next pool.

    Args:
        rows: token ids, in `input_ids` and `labels`.
        pool_size: rows read at a time; the larger, the less padding and the better the shuffling.
        tokens_per_update: see `UpdateBatches`.
        buckets_per_update: see `UpdateBatches`.
        seed: see `UpdateBatches`.
        epoch: which epoch this is; each has its own order.

    Yields:
        Updates, each a list of buckets, each a list of the rows themselves.

    Raises:
        ValueError: if a number is out of range.
    """
    _check_at_least("pool_size", pool_size, 1)
    _check_at_least("epoch", epoch, 0)
    stream = iter(rows)
    waiting: list[Mapping[str, Any]] = []
    pool_number = 0
    while True:
        arrived = list(islice(stream, pool_size))
        pool = waiting + arrived
        at_the_end = len(arrived) < pool_size
        batches = UpdateBatches(
            [len(row["input_ids"]) for row in pool],
            [len(row["labels"]) for row in pool],
            tokens_per_update=tokens_per_update,
            buckets_per_update=buckets_per_update,
            seed=seed,
        )
        updates = [[[pool[i] for i in bucket] for bucket in update] for update in batches._updates(epoch, pool_number)]
        if at_the_end:
            yield from updates
            return
        *complete, last = updates
        yield from complete
        waiting = [row for bucket in last for row in bucket]
        pool_number += 1


def padding_share(batches: Iterable[Sequence[int]], source_lengths: TokenCounts, target_lengths: TokenCounts) -> float:
    """Return the part of all padded tokens that is padding, from 0 to 1.

    Args:
        batches: buckets or micro-batches of row indices; empty ones count nothing.
        source_lengths: tokens of every row's source.
        target_lengths: tokens of every row's target.
    """
    real = padded = 0
    for batch in batches:
        rows = [(int(source_lengths[row]), int(target_lengths[row])) for row in batch]
        if rows:
            real += sum(source + target for source, target in rows)
            padded += _padded_tokens(rows)
    return 1 - real / padded if padded else 0.0


def _check_at_least(name: str, value: int, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < minimum:
        raise ValueError(f"`{name}` must be a whole number of at least {minimum}, but is {value!r} instead.")


def _length_arrays(source_lengths: TokenCounts, target_lengths: TokenCounts) -> tuple[np.ndarray, np.ndarray]:
    if len(source_lengths) != len(target_lengths):
        raise ValueError(
            f"`source_lengths` and `target_lengths` must have the same number of rows, "
            f"but have {len(source_lengths)} and {len(target_lengths)} instead."
        )
    arrays = np.asarray(source_lengths, dtype=np.int64), np.asarray(target_lengths, dtype=np.int64)
    for name, lengths in zip(("source_lengths", "target_lengths"), arrays, strict=True):
        if lengths.size and lengths.min() < 0:
            raise ValueError(f"`{name}` must not be negative, but holds {lengths.min()} instead.")
    return arrays


class _Plan(NamedTuple):
    """How rows are sorted and cut.

    Attributes:
        swapped: Whether targets, not sources, are sorted into stripes.
        width: So many lengths are a stripe.
        offset: By so many lengths the stripes are moved.
        first: Padded tokens of the first bucket.
    """

    swapped: int
    width: int
    offset: int
    first: int


class _Cut(NamedTuple):
    """What became of a plan: all padding in tokens, every cell's place in the order, and where buckets end in it."""

    padding: int
    ranks: np.ndarray
    ends: list[int]


class _Cells:
    """The distinct pairs of lengths, of which there are thousands where there are millions of rows.

    Args:
        source: `(rows,)` tokens of sources.
        target: `(rows,)` tokens of targets.
    """

    def __init__(self, source: np.ndarray, target: np.ndarray):
        self.rows = len(source)
        self.tokens = int(source.sum() + target.sum())
        base = int(target.max()) + 1 if self.rows else 1
        cells, of_row, self.counts = np.unique(source * base + target, return_inverse=True, return_counts=True)
        self.of_row = of_row.reshape(-1)
        self.source, self.target = np.divmod(cells, base)

    def cut(self, budget: int, plan: _Plan) -> _Cut:
        """Sort by length and cut greedily.

        Sources are sorted into stripes of a few lengths, and inside a stripe rows are sorted by target, up and down
        in turns, so that neighbours are alike in both lengths. Small corpora need wide stripes. Equal lengths are
        interchangeable, and share a place in the order.
        """
        stripes, inside = (self.target, self.source) if plan.swapped else (self.source, self.target)
        stripe = (stripes + plan.offset) // plan.width
        order = np.lexsort((stripes, np.where(stripe % 2, -inside, inside), stripe))
        ranks = np.empty_like(order)
        ranks[order] = np.arange(len(order))

        total = end = rows = longest_source = longest_target = 0
        limit = min(plan.first, budget)
        ends: list[int] = []
        columns = (self.source[order].tolist(), self.target[order].tolist(), self.counts[order].tolist())
        for source, target, left in zip(*columns, strict=True):
            count = left
            while count:
                new_source, new_target = max(longest_source, source), max(longest_target, target)
                # An empty bucket takes at least one row, however long.
                room = max(limit // max(new_source + new_target, 1) - rows, 0 if rows else 1)
                taken = min(room, count)
                if taken:
                    rows, longest_source, longest_target = rows + taken, new_source, new_target
                    count -= taken
                if count:
                    end += rows
                    ends.append(end)
                    total += rows * (longest_source + longest_target)
                    rows = longest_source = longest_target = 0
                    limit = budget
        if rows:
            ends.append(end + rows)
            total += rows * (longest_source + longest_target)
        return _Cut(total - self.tokens, ranks, ends)


Lengths = tuple[int, int, int]  # source length, target length, row index


def _by_length(row: Lengths) -> tuple[int, Lengths]:
    return row[0] + row[1], row


def _padded_tokens(rows: Sequence[tuple[int, ...]]) -> int:
    return len(rows) * (max(row[0] for row in rows) + max(row[1] for row in rows)) if rows else 0


def _fill(rows: list[Lengths], budget: int) -> list[list[Lengths]]:
    """Greedy cut into parts of at most `budget` padded tokens, or of one row."""
    parts = []
    start = longest_source = longest_target = 0
    for position, (source, target, _) in enumerate(rows):
        longest_source, longest_target = max(longest_source, source), max(longest_target, target)
        if position > start and (position + 1 - start) * (longest_source + longest_target) > budget:
            parts.append(rows[start:position])
            start, longest_source, longest_target = position, source, target
    parts.append(rows[start:])
    return parts


def _divide(rows: list[Lengths], parts: int) -> list[list[Lengths]]:
    """Cut into at most `parts` parts, the costliest of which is as cheap as possible."""
    if parts == 1:
        return [rows]
    low, high = 1, _padded_tokens(rows)
    while low < high:
        middle = (low + high) // 2
        if len(_fill(rows, middle)) <= parts:
            high = middle
        else:
            low = middle + 1
    return _fill(rows, low)


def _assign(
    buckets: list[list[Lengths]], needed: list[int], rounds: int, world_size: int
) -> list[list[list[Lengths]]]:
    """Cut the buckets into `rounds` × `world_size` parts, more parts for the costlier, and deal them out."""
    parts_of = list(needed)
    costs = [_padded_tokens(bucket) for bucket in buckets]
    for _ in range(rounds * world_size - sum(needed)):
        divisible = [i for i, bucket in enumerate(buckets) if parts_of[i] < len(bucket)]
        if divisible:
            parts_of[max(divisible, key=lambda i: costs[i] / parts_of[i])] += 1
    parts = [part for bucket, number in zip(buckets, parts_of, strict=True) for part in _divide(bucket, number)]
    processes: list[list[list[Lengths]]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for part in sorted(parts, key=_padded_tokens, reverse=True):
        free = [process for process in range(world_size) if len(processes[process]) < rounds]
        chosen = min(free, key=lambda process: loads[process])
        processes[chosen].append(part)
        loads[chosen] += _padded_tokens(part)
    for process in processes:
        process.extend([] for _ in range(rounds - len(process)))
    return processes


def _largest_load(processes: list[list[list[Lengths]]]) -> int:
    return max(sum(map(_padded_tokens, process)) for process in processes)
