"""Divide an update into tensors: among ranks, and into micro-batches that fit in memory, padded or end to end."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from heedful.configuration_base_heed import IGNORED_LABEL
from heedful.data.epochs.batching import Row, TokenCounts
from heedful.files import check_at_least
from heedful.packed_rows_heed import EndToEnd, Packing

WORTHWHILE_LOAD = 0.85  # an extra micro-batch must bring the busiest rank's load below this share
SHORTEST_LIMIT = 256  # tokens: rows up to this length share a program
# Each side is filled to a multiple of a step: a sixteenth of the token budget, in units for fast matrix products.
STEPS, UNIT, LARGEST_STEP = 16, 64, 2048
# Added rows at most, and tokens at least on each side: each row needs a token, as attention to no key is NaN.
FILLING_ROWS = 16
RankBatches = list[list[Row]]  # the rows of a rank's micro-batches
Tensors = dict[str, Any]  # by `collate` or `laid_end_to_end`
Lengths = tuple[int, int, int]  # source length, target length, row number


class MicroBatch(NamedTuple):
    """The input of one forward and backward pass."""

    tensors: Tensors
    # False if the rows only let a rank without rows take part in the all-reduce.
    counts: bool = True

    @property
    def padded_tokens(self) -> int:
        """The tokens of both sides with padding; 0 if the rows do not count."""
        return self.counts * sum(int(self.tensors[name].numel()) for name in ("input_ids", "labels"))


def split_update(update: Sequence[Sequence[Row]], token_budget: int, world_size: int) -> list[RankBatches]:
    """Divide an update's buckets among ranks, and return the rows of each rank's micro-batches.

    A micro-batch has at most `token_budget` padded tokens, or one row. All ranks get the same number of micro-batches,
    some perhaps empty, and about the same padded tokens. Every rank computes the same result.
    """
    check_at_least(1, token_budget=token_budget, world_size=world_size)
    rows = [row for bucket in update for row in bucket]
    lengths = ([len(row[name]) for row in rows] for name in ("input_ids", "labels"))
    numbers = iter(range(len(rows)))
    buckets = sorted_lengths([[next(numbers) for _ in bucket] for bucket in update], *lengths)
    needed = [len(_fill(bucket, token_budget)) for bucket in buckets]
    rounds = -(-sum(needed) // world_size)
    assigned = assign(buckets, needed, rounds, world_size)
    if world_size > 1 and buckets:
        # Another round is worth its cost if it relieves the busiest rank.
        finer = assign(buckets, needed, rounds + 1, world_size)
        if _largest_load(finer) < WORTHWHILE_LOAD * _largest_load(assigned):
            assigned = finer
    return [[[rows[number] for _, _, number in part] for part in parts] for parts in assigned]


def micro_batches_of_rank(
    parts: list[RankBatches], rank: int, make: Callable[[list[Row]], Tensors]
) -> list[MicroBatch]:
    """Make tensors from a rank's rows in an update; empty micro-batches get a row from any rank."""
    filler = next(row for part in parts for rows in part for row in rows)
    return [MicroBatch(make(rows or [filler]), counts=bool(rows)) for rows in parts[rank]]


def collate(rows: Sequence[Mapping[str, Sequence[int]]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Make right-padded int64 tensors `(batch, length)`: `input_ids`, `attention_mask`, `labels` (filled by -100)."""

    def padded(sequences: list[Sequence[int]], padding: int) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
        is_token = np.arange(max(1, lengths.max())) < lengths[:, None]  # (batch, length)
        tokens = np.full(is_token.shape, padding, np.int64)
        tokens[is_token] = np.fromiter(chain.from_iterable(sequences), np.int64, int(lengths.sum()))
        return torch.from_numpy(tokens), torch.from_numpy(is_token.astype(np.int64))

    input_ids, attention_mask = padded([row["input_ids"] for row in rows], pad_token_id)
    labels, _ = padded([row["labels"] for row in rows], IGNORED_LABEL)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def laid_end_to_end(
    rows: Sequence[Mapping[str, Sequence[int]]], token_budget: int, pad_token_id: int, start_token_id: int
) -> dict[str, Any]:
    """Make a micro-batch's tensors from one or more rows of token ids.

    They are `input_ids` `(1, source tokens)`, filled up with padding, `decoder_input_ids` and `labels`
    `(1, target tokens)`, filled up with -100, all int64, and `packing`.
    """
    lengths = np.array([(len(row["input_ids"]), len(row["labels"])) for row in rows])  # (rows, 2)
    step = min(max(token_budget // STEPS // UNIT, 1) * UNIT, LARGEST_STEP)
    known = lengths.sum(0)
    filled = -(-(known + FILLING_ROWS) // step) * step
    longest = max(SHORTEST_LIMIT, 1 << int(lengths.max() - 1).bit_length())
    more = -(-int((filled - known).max()) // longest)  # rows to add
    source, target = (_end_to_end(lengths[:, side], int(filled[side]), more, longest) for side in range(2))
    ids = np.full(filled[0], pad_token_id, np.int64)
    ids[: known[0]] = np.concatenate([row["input_ids"] for row in rows])
    labels = np.full(filled[1], IGNORED_LABEL, np.int64)
    labels[: known[1]] = np.concatenate([row["labels"] for row in rows])
    # The input at each label: the previous label, or the start token at a row's start.
    shifted = np.full(filled[1], pad_token_id, np.int64)
    shifted[1 : known[1]] = labels[: known[1] - 1]
    shifted[target.bounds[: len(rows)].numpy()] = start_token_id
    named = {"input_ids": ids, "decoder_input_ids": shifted, "labels": labels}
    tensors: dict[str, Any] = {name: torch.from_numpy(values)[None] for name, values in named.items()}
    return tensors | {"packing": Packing(target, source)}


def _end_to_end(lengths: np.ndarray, filled: int, more: int, longest: int) -> EndToEnd:
    """Return the places of rows with `(rows,)` lengths, and of `more` rows that fill them up to `filled` tokens."""
    left = filled - int(lengths.sum())
    lengths = np.concatenate([lengths, np.diff(np.arange(more + 1) * left // more)])
    starts = np.concatenate([[0], lengths.cumsum()])
    positions = np.arange(filled) - np.repeat(starts[:-1], lengths)
    # Empty rows at the end round up the number of rows, because the batch's shape includes it.
    bounds = np.full(1 + (1 << (len(lengths) - 1).bit_length()), filled, np.int32)
    bounds[: len(starts)] = starts
    return EndToEnd(torch.from_numpy(bounds), torch.from_numpy(positions)[None], longest)


def sorted_lengths(
    batches: Iterable[Sequence[int]], source_lengths: TokenCounts, target_lengths: TokenCounts
) -> list[list[Lengths]]:
    """Return the row lengths of each nonempty batch, the shortest first."""
    lengths = (((int(source_lengths[row]), int(target_lengths[row]), row) for row in batch) for batch in batches)
    return [batch for batch in (sorted(rows, key=by_length) for rows in lengths) if batch]


def by_length(row: Lengths) -> tuple[int, Lengths]:
    """Return the sort key for rows: tokens of both sides, then source, then number."""
    return row[0] + row[1], row


def _padded_tokens(rows: Sequence[Lengths]) -> int:
    return len(rows) * (max(row[0] for row in rows) + max(row[1] for row in rows)) if rows else 0


def _fill(rows: list[Lengths], budget: int) -> list[list[Lengths]]:
    """Cut greedily into parts with at most `budget` padded tokens, or one row."""
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
    """Cut into at most `parts` parts, so that the costliest part costs least."""
    if parts == 1:
        return [rows]
    budgets = range(1, _padded_tokens(rows))
    return _fill(rows, 1 + bisect_left(budgets, True, key=lambda budget: len(_fill(rows, budget)) <= parts))


def assign(buckets: list[list[Lengths]], needed: list[int], rounds: int, world_size: int) -> list[list[list[Lengths]]]:
    """Cut buckets into `rounds` × `world_size` parts, more for costlier buckets, and distribute them to ranks."""
    parts_of = list(needed)
    costs = [_padded_tokens(bucket) for bucket in buckets]
    for _ in range(rounds * world_size - sum(needed)):
        divisible = [i for i, bucket in enumerate(buckets) if parts_of[i] < len(bucket)]
        if divisible:
            parts_of[max(divisible, key=lambda i: costs[i] / parts_of[i])] += 1
    parts = [part for bucket, number in zip(buckets, parts_of, strict=True) for part in _divide(bucket, number)]
    ranks: list[list[list[Lengths]]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for part in sorted(parts, key=_padded_tokens, reverse=True):
        free = [rank for rank in range(world_size) if len(ranks[rank]) < rounds]
        chosen = min(free, key=lambda rank: loads[rank])
        ranks[chosen].append(part)
        loads[chosen] += _padded_tokens(part)
    for assigned in ranks:
        assigned.extend([] for _ in range(rounds - len(assigned)))
    return ranks


def _largest_load(ranks: list[list[list[Lengths]]]) -> int:
    return max(sum(map(_padded_tokens, parts)) for parts in ranks)
