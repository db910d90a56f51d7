from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heedful.data.epochs.batching import BatchingSettings, UpdateBatches
from heedful.data.epochs.corpus import stream_updates
from heedful.data.epochs.micro_batches import collate, micro_batches_of_rank, split_update
from helpers import assert_refused
from row_lengths import lengths, natural_lengths, padded_tokens, padding_share, rows_of, several

MANY = natural_lengths(30_000)


@several
@given(lengths, st.integers(4, 300), st.integers(1, 4), st.integers(0, 2**40))
def test_every_epoch_has_each_row_once_keeps_the_budget_and_has_as_many_updates(rows, tokens, buckets, seed):
    source, target = zip(*rows, strict=True)
    batches = UpdateBatches(source, target, BatchingSettings(tokens, buckets, seed))
    epochs = list(map(batches.epoch, range(6)))
    # Another instance agrees, whatever it was asked before.
    again = UpdateBatches(*map(np.array, (source, target)), BatchingSettings(tokens, buckets, seed))
    assert again.epoch(4) == epochs[4]
    assert len({(len(updates), sum(map(len, updates))) for updates in epochs}) == 1
    for updates in epochs:
        assert sorted(row for update in updates for row in rows_of(update)) == list(range(len(rows)))
        assert all(len(update) == buckets for update in updates[:-1])
        assert 1 <= len(updates[-1]) <= buckets
        for bucket in (bucket for update in updates for bucket in update):
            assert bucket
            assert len(bucket) == 1 or padded_tokens(bucket, source, target) <= tokens // buckets


def batches_of(source, target, tokens, **settings):
    return UpdateBatches(source, target, BatchingSettings(tokens, **settings))


def test_the_order_is_the_same_on_every_platform_another_for_another_seed_and_none_of_no_rows():
    first, other = (batches_of([3, 1, 2, 3, 1, 2, 9], [3, 1, 2, 3, 1, 2, 9], 12, seed=seed) for seed in (7, 8))
    assert first.epoch(3) == [[[1, 4]], [[6]], [[2, 5]], [[3, 0]]] != other.epoch(3)
    assert batches_of([], [], 10).epoch(0) == []


def share_together_again(first, second):
    """Return which part of the pairs of rows that share a bucket share one again."""
    bucket_of = {row: number for number, bucket in enumerate(second) for row in bucket}
    counts = [np.unique([bucket_of[row] for row in bucket], return_counts=True)[1] for bucket in first]
    again = sum(int((count * (count - 1)).sum()) for count in counts)
    return again / sum(len(bucket) * (len(bucket) - 1) for bucket in first)


def test_most_rows_have_other_company_in_the_next_epoch():
    for buckets, share in ((1, 0.55), (4, 0.2)):
        batches = batches_of(*MANY, 8192, buckets_per_update=buckets)
        first, second = ([rows_of(update) for update in batches.epoch(epoch)] for epoch in range(2))
        assert share_together_again(first, first) == 1
        assert share_together_again(first, second) < share
    # An epoch has hardly more updates than it needs.
    assert len(batches_of(*MANY, 2048).epoch(0)) * 2048 < 1.05 * sum(map(sum, MANY))


def test_hardly_anything_is_padding():
    source, target = natural_lengths(100_000)
    buckets = [bucket for update in batches_of(source, target, 8192).epoch(0) for bucket in update]
    assert padding_share(buckets, source, target) < 0.05
    source, target = natural_lengths(5000)  # few are padded less than by sorting sources alone
    buckets = [bucket for update in batches_of(source, target, 8192).epoch(0) for bucket in update]
    by_source = sorted(range(len(source)), key=lambda row: (source[row], target[row]))
    size = len(source) // len(buckets)
    plain = [by_source[start : start + size] for start in range(0, len(source), size)]
    assert padding_share(buckets, source, target) < 0.8 * padding_share(plain, source, target)


def test_numbers_out_of_range_are_named():
    cases = [
        ({"tokens_per_update": 0}, "`tokens_per_update` must be at least 1, but is 0"),
        ({"tokens_per_update": 3, "buckets_per_update": 4}, "`tokens_per_update` must be at least 4, but is 3"),
        ({"tokens_per_update": 3, "buckets_per_update": 0}, "`buckets_per_update` must be"),
        ({"tokens_per_update": 3, "seed": -1}, "`seed` must be"),
    ]
    assert_refused(cases, lambda settings: BatchingSettings(**settings))


@pytest.mark.parametrize(("count", "pool_size"), [(1000, 100), (1000, 1000), (999, 5000), (50, 1), (0, 10)])
@pytest.mark.parametrize("buckets", [1, 3])
def test_a_stream_gives_every_row_once_in_full_updates(count, pool_size, buckets):
    lengths, taken = enumerate(zip(*natural_lengths(count), strict=True)), []
    rows = [{"input_ids": [row] * source, "labels": [row] * target} for row, (source, target) in lengths]

    def updates(epoch):
        stream = (taken.append(row) or row for row in rows)
        return stream_updates(stream, BatchingSettings(600, buckets), pool_size=pool_size, epoch=epoch)

    next(updates(0), None)
    assert len(taken) <= max(pool_size, 100)  # no more of it is read than a pool
    first, again, other = (list(updates(epoch)) for epoch in (0, 0, 1))
    flat = [row for update in first for bucket in update for row in bucket]
    assert sorted(row["input_ids"][0] for row in flat) == list(range(count))
    for update in first[:-1]:
        assert len(update) == buckets
        for bucket in update:
            source, target = [len(row["input_ids"]) for row in bucket], [len(row["labels"]) for row in bucket]
            assert len(bucket) == 1 or padded_tokens(range(len(bucket)), source, target) <= 600 // buckets
    assert first == again
    assert not count or first != other


def split(update, source, target, token_budget, world_size):
    """Split an update of row numbers, and return the numbers."""
    rows = [[{"number": n, "input_ids": range(source[n]), "labels": range(target[n])} for n in b] for b in update]
    parts = split_update(rows, token_budget, world_size)
    return [[[row["number"] for row in batch] for batch in batches] for batches in parts]


@several
@given(lengths, st.integers(2, 300), st.integers(1, 4), st.integers(1, 300))
def test_an_update_is_divided_exactly(rows, tokens, buckets, token_budget):
    source, target = zip(*rows, strict=True)
    updates = batches_of(source, target, tokens * buckets, buckets_per_update=buckets).epoch(0)
    for update, world_size in product(updates, (1, 2, 3)):
        ranks = split(update, source, target, token_budget, world_size)
        assert len(ranks) == world_size
        assert len({len(batches) for batches in ranks}) == 1
        assert sorted(row for batches in ranks for batch in batches for row in batch) == rows_of(update)
        for batch in (batch for batches in ranks for batch in batches):
            assert len(batch) <= 1 or padded_tokens(batch, source, target) <= token_budget


def test_ranks_get_the_same_work():
    source, target = natural_lengths(20_000)
    for buckets in (1, 2, 4):
        updates = batches_of(source, target, 8192, buckets_per_update=buckets).epoch(0)[:10]
        for update, world_size in product(updates, (2, 3, 5)):
            ranks = split(update, source, target, 8192, world_size)
            loads = [sum(padded_tokens(batch, source, target) for batch in batches) for batches in ranks]
            assert max(loads) < 1.15 * sum(loads) / world_size


def test_more_ranks_than_rows_leave_some_without():
    row = {"input_ids": [5, 6], "labels": [7]}
    parts = split_update([[row]], 100, 3)
    assert sorted(parts, key=str) == [[[]], [[]], [[row]]]
    for rank, part in enumerate(parts):
        (micro_batch,) = micro_batches_of_rank(parts, rank, lambda rows: collate(rows, 0))
        assert micro_batch.counts == (part == [[row]])
        assert micro_batch.padded_tokens == (3 if micro_batch.counts else 0)
        assert micro_batch.tensors["labels"].tolist() == [[7]]


def test_collate_pads_on_the_right():
    batch = collate([{"input_ids": [5, 6], "labels": [7]}, {"input_ids": [8], "labels": [9, 9, 2]}], pad_token_id=3)
    assert batch["input_ids"].tolist() == [[5, 6], [8, 3]]
    assert batch["attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert batch["labels"].tolist() == [[7, -100, -100], [9, 9, 2]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    empty = collate([{"input_ids": [], "labels": []}], pad_token_id=3)
    assert [tensor.tolist() for tensor in empty.values()] == [[[3]], [[0]], [[-100]]]  # one column
