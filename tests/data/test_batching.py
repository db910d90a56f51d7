import random
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heedful.data.epochs.batching import BatchingSettings, UpdateBatches
from heedful.data.epochs.micro_batches import collate, micro_batches_of_rank, split_update
from heedful.data.epochs.streaming import stream_updates
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
    assert (
        UpdateBatches(*map(np.array, (source, target)), BatchingSettings(tokens, buckets, seed)).epoch(4) == epochs[4]
    )
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
    batches = batches_of(*MANY, 8192)
    epochs = [[bucket for update in batches.epoch(epoch) for bucket in update] for epoch in range(4)]
    # An epoch has hardly more updates than it needs.
    assert len(batches_of(*MANY, 2048).epoch(0)) * 2048 < 1.05 * sum(map(sum, MANY))
    assert share_together_again(epochs[0], epochs[0]) == 1
    for first, second in pairwise(epochs):
        assert share_together_again(first, second) < 0.55
    for epoch in epochs:
        assert padding_share(epoch, *MANY) < 0.08


def test_an_update_of_several_buckets_has_short_and_long_rows_and_other_company_in_the_next_epoch():
    for buckets in (2, 4):
        batches = batches_of(*MANY, 8192, buckets_per_update=buckets)
        for epoch in range(3):
            updates = [
                [np.mean([MANY[0][row] + MANY[1][row] for row in bucket]) for bucket in update]
                for update in batches.epoch(epoch)
            ]
            middle = np.median([length for update in updates for length in update])
            assert all(min(update) < 1.2 * middle and max(update) > 0.8 * middle for update in updates[:-1])
    assert share_together_again(*(list(map(rows_of, batches.epoch(epoch))) for epoch in range(2))) < 0.2


def test_hardly_anything_is_padding():
    source, target = natural_lengths(100_000)
    buckets = [bucket for update in batches_of(source, target, 8192).epoch(0) for bucket in update]
    assert padding_share(buckets, source, target) < 0.05
    shuffled = random.Random(0).sample(range(len(source)), len(source))
    unsorted = [shuffled[start : start + 200] for start in range(0, len(shuffled), 200)]
    assert padding_share(unsorted, source, target) > 0.5
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


def token_rows(count, seed=0):
    source, target = natural_lengths(count, seed)
    return [{"input_ids": [i] * s, "labels": [i] * t} for i, (s, t) in enumerate(zip(source, target, strict=True))]


@pytest.mark.parametrize(("count", "pool_size"), [(1000, 100), (1000, 1000), (999, 5000), (50, 1), (0, 10)])
@pytest.mark.parametrize("buckets", [1, 3])
def test_a_stream_gives_every_row_once_in_full_updates(count, pool_size, buckets):
    rows = token_rows(count)

    def updates(epoch):
        return list(stream_updates(iter(rows), BatchingSettings(600, buckets), pool_size=pool_size, epoch=epoch))

    flat = [row for update in updates(0) for bucket in update for row in bucket]
    assert sorted(row["input_ids"][0] for row in flat) == list(range(count))
    for update in updates(0)[:-1]:
        assert len(update) == buckets
        for bucket in update:
            source, target = [len(row["input_ids"]) for row in bucket], [len(row["labels"]) for row in bucket]
            assert len(bucket) == 1 or padded_tokens(range(len(bucket)), source, target) <= 600 // buckets
    assert updates(0) == updates(0)
    assert not count or updates(0) != updates(1)


def test_a_stream_needs_little_more_than_a_pool_at_a_time():
    taken = []
    rows = (taken.append(row) or row for row in token_rows(3000))
    next(stream_updates(rows, BatchingSettings(600), pool_size=200))
    assert len(taken) == 200


def test_each_pool_of_a_stream_has_its_own_order():
    rows = [{"input_ids": [number], "labels": [1]} for number in range(40)]
    updates = list(stream_updates(rows, BatchingSettings(2), pool_size=20))
    order = [row["input_ids"][0] for ((row,),) in updates]
    (carried_over,) = set(range(20)) - set(order[:19])
    second_pool = [carried_over, *range(20, 40)]
    first_order = UpdateBatches([1] * 21, [1] * 21, BatchingSettings(tokens_per_update=2)).epoch(0)
    assert sorted(order[19:39]) != order[19:39]
    assert order[19:39] != [second_pool[row] for ((row,),) in first_order[:20]]


def split(update, source, target, token_budget, world_size):
    """Split an update of row numbers, and return the numbers."""
    rows = [
        [{"number": row, "input_ids": range(source[row]), "labels": range(target[row])} for row in b] for b in update
    ]
    parts = split_update(rows, token_budget, world_size)
    return [[[row["number"] for row in batch] for batch in batches] for batches in parts]


@several
@given(lengths, st.integers(2, 300), st.integers(1, 4), st.integers(1, 300))
def test_an_update_is_divided_exactly(rows, tokens, buckets, token_budget):
    source, target = zip(*rows, strict=True)
    for update, world_size in product(
        batches_of(source, target, tokens * buckets, buckets_per_update=buckets).epoch(0), (1, 2, 3)
    ):
        ranks = split(update, source, target, token_budget, world_size)
        assert len(ranks) == world_size
        assert len({len(batches) for batches in ranks}) == 1
        assert sorted(row for batches in ranks for batch in batches for row in batch) == rows_of(update)
        for batch in (batch for batches in ranks for batch in batches):
            assert len(batch) <= 1 or padded_tokens(batch, source, target) <= token_budget


def test_one_process_with_room_gets_every_bucket_whole():
    source, target = natural_lengths(2000)
    for update in batches_of(source, target, 4096, buckets_per_update=4).epoch(0):
        (batches,) = split(update, source, target, 1024, 1)
        assert sorted(map(sorted, batches)) == sorted(map(sorted, update))


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
