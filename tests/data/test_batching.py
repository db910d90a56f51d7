import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful.data.batching import BatchingSettings, UpdateBatches
from heedful.data.epochs.streaming import stream_updates
from helpers import assert_refused
from row_lengths import lengths, natural_lengths, padded_tokens, padding_share, rows_of, several

MANY = natural_lengths(30_000)


@several
@given(lengths, st.integers(4, 300), st.integers(1, 4), st.integers(0, 5))
def test_every_epoch_has_each_row_once_keeps_the_budget_and_has_as_many_updates(rows, tokens, buckets, seed):
    source, target = zip(*rows, strict=True)
    batches = UpdateBatches(source, target, BatchingSettings(tokens, buckets, seed))
    epochs = list(map(batches.epoch, range(6)))
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


@several
@given(lengths, st.integers(0, 2**40), st.integers(0, 1000))
def test_two_instances_agree(rows, seed, epoch):
    source, target = zip(*rows, strict=True)
    first = batches_of(source, target, 100, buckets_per_update=2, seed=seed)
    second = batches_of(np.array(source), np.array(target), 100, buckets_per_update=2, seed=seed)
    second.epoch(epoch + 1)
    assert first.epoch(epoch) == second.epoch(epoch)


def test_the_order_is_the_same_on_every_platform():
    batches = batches_of([3, 1, 2, 3, 1, 2, 9], [3, 1, 2, 3, 1, 2, 9], 12, seed=7)
    assert batches.epoch(3) == [[[1, 4]], [[6]], [[2, 5]], [[3, 0]]]


def test_epochs_and_seeds_differ_in_order_and_in_company():
    def epoch(seed, number):
        return batches_of(*natural_lengths(500), 512, seed=seed).epoch(number)

    def companies(updates):
        return {frozenset(bucket) for update in updates for bucket in update}

    assert epoch(0, 0) != epoch(0, 1) != epoch(1, 0)
    assert companies(epoch(0, 0)) != companies(epoch(0, 1))


def test_a_large_corpus_has_as_many_updates_in_every_epoch_and_hardly_more_than_it_needs():
    batches = batches_of(*MANY, 2048)
    (number,) = {len(batches.epoch(epoch)) for epoch in range(8)}
    assert number * 2048 < 1.05 * sum(map(sum, MANY))


def share_together_again(first, second):
    """Return which part of the pairs of rows that share a bucket share one again."""
    bucket_of = {row: number for number, bucket in enumerate(second) for row in bucket}
    counts = [np.unique([bucket_of[row] for row in bucket], return_counts=True)[1] for bucket in first]
    again = sum(int((count * (count - 1)).sum()) for count in counts)
    return again / sum(len(bucket) * (len(bucket) - 1) for bucket in first)


def test_most_rows_have_other_company_in_the_next_epoch():
    batches = batches_of(*MANY, 8192)
    epochs = [[bucket for update in batches.epoch(epoch) for bucket in update] for epoch in range(4)]
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


def test_a_row_longer_than_the_budget_is_alone_and_an_empty_corpus_has_no_updates():
    updates = batches_of([2, 50, 2, 2], [2, 50, 2, 2], 16).epoch(0)
    assert [[1]] in updates
    assert len(updates) == 2
    assert batches_of([], [], 10).epoch(0) == []


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
