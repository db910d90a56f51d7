import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful.data.batching import BatchingSettings, UpdateBatches
from heedful.data.epochs.streaming import stream_updates
from row_lengths import lengths, natural_lengths, padded_tokens, padding_share, rows_of, several


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


@several
@given(lengths, st.integers(0, 2**40), st.integers(0, 1000))
def test_two_instances_agree(rows, seed, epoch):
    source, target = zip(*rows, strict=True)
    first = UpdateBatches(source, target, BatchingSettings(tokens_per_update=100, buckets_per_update=2, seed=seed))
    second = UpdateBatches(
        np.array(source), np.array(target), BatchingSettings(tokens_per_update=100, buckets_per_update=2, seed=seed)
    )
    second.epoch(epoch + 1)
    assert first.epoch(epoch) == second.epoch(epoch)


def test_the_order_is_the_same_on_every_platform():
    batches = UpdateBatches(
        [3, 1, 2, 3, 1, 2, 9], [3, 1, 2, 3, 1, 2, 9], BatchingSettings(tokens_per_update=12, seed=7)
    )
    assert batches.epoch(3) == [[[1, 4]], [[6]], [[2, 5]], [[3, 0]]]


def test_epochs_and_seeds_differ_in_order_and_in_company():
    source, target = natural_lengths(500)

    def epoch(seed, number):
        return UpdateBatches(source, target, BatchingSettings(tokens_per_update=512, seed=seed)).epoch(number)

    def companies(updates):
        return {frozenset(bucket) for update in updates for bucket in update}

    assert epoch(0, 0) != epoch(0, 1)
    assert epoch(0, 1) != epoch(1, 0)
    assert companies(epoch(0, 0)) != companies(epoch(0, 1))


def test_a_large_corpus_has_as_many_updates_in_every_epoch_and_hardly_more_than_it_needs():
    source, target = natural_lengths(30_000)
    batches = UpdateBatches(source, target, BatchingSettings(tokens_per_update=2048))
    numbers = {len(batches.epoch(epoch)) for epoch in range(8)}
    assert len(numbers) == 1
    assert max(numbers) * 2048 < 1.05 * (sum(source) + sum(target))


def share_together_again(first, second):
    """Return which part of the pairs of rows that share a bucket share one again."""
    bucket_of = {row: number for number, bucket in enumerate(second) for row in bucket}
    again = together = 0
    for bucket in first:
        counts = np.unique([bucket_of[row] for row in bucket], return_counts=True)[1]
        again += int((counts * (counts - 1)).sum())
        together += len(bucket) * (len(bucket) - 1)
    return again / together


def test_most_rows_have_other_company_in_the_next_epoch():
    source, target = natural_lengths(30_000)
    batches = UpdateBatches(source, target, BatchingSettings(tokens_per_update=8192))
    epochs = [[bucket for update in batches.epoch(epoch) for bucket in update] for epoch in range(4)]
    assert share_together_again(epochs[0], epochs[0]) == 1
    for first, second in pairwise(epochs):
        assert share_together_again(first, second) < 0.55
    for epoch in epochs:
        assert padding_share(epoch, source, target) < 0.08


def test_an_update_of_several_buckets_has_other_company_in_the_next_epoch():
    source, target = natural_lengths(30_000)
    batches = UpdateBatches(source, target, BatchingSettings(tokens_per_update=8192, buckets_per_update=4))
    assert share_together_again(*(list(map(rows_of, batches.epoch(epoch))) for epoch in range(2))) < 0.2


def test_every_update_of_several_buckets_has_short_and_long_rows():
    source, target = natural_lengths(30_000)
    for buckets in (2, 4):
        batches = UpdateBatches(source, target, BatchingSettings(tokens_per_update=8192, buckets_per_update=buckets))
        for epoch in range(3):
            updates = [
                [np.mean([source[row] + target[row] for row in bucket]) for bucket in update]
                for update in batches.epoch(epoch)
            ]
            middle = np.median([length for update in updates for length in update])
            assert all(min(update) < 1.2 * middle and max(update) > 0.8 * middle for update in updates[:-1])


def test_a_row_longer_than_the_budget_is_alone():
    updates = UpdateBatches([2, 50, 2, 2], [2, 50, 2, 2], BatchingSettings(tokens_per_update=16)).epoch(0)
    assert [[1]] in updates
    assert len(updates) == 2


def test_hardly_anything_is_padding():
    source, target = natural_lengths(100_000)
    updates = UpdateBatches(source, target, BatchingSettings(tokens_per_update=8192)).epoch(0)
    buckets = [bucket for update in updates for bucket in update]
    assert padding_share(buckets, source, target) < 0.05
    shuffled = random.Random(0).sample(range(len(source)), len(source))
    unsorted = [shuffled[start : start + 200] for start in range(0, len(shuffled), 200)]
    assert padding_share(unsorted, source, target) > 0.5


def test_a_small_corpus_is_padded_less_than_by_sorting_sources_alone():
    source, target = natural_lengths(5000)
    updates = UpdateBatches(source, target, BatchingSettings(tokens_per_update=8192)).epoch(0)
    buckets = [bucket for update in updates for bucket in update]
    by_source = sorted(range(len(source)), key=lambda row: (source[row], target[row]))
    size = len(source) // len(buckets)
    plain = [by_source[start : start + size] for start in range(0, len(source), size)]
    assert padding_share(buckets, source, target) < 0.8 * padding_share(plain, source, target)


def test_an_empty_corpus_has_no_updates():
    assert UpdateBatches([], [], BatchingSettings(tokens_per_update=10)).epoch(0) == []


def test_numbers_out_of_range_are_named():
    for settings, message in (
        ({"tokens_per_update": 0}, "`tokens_per_update` must be at least 1, but is 0"),
        ({"tokens_per_update": 3, "buckets_per_update": 4}, "`tokens_per_update` must be at least 4, but is 3"),
        ({"tokens_per_update": 3, "buckets_per_update": 0}, "`buckets_per_update` must be"),
        ({"tokens_per_update": 3, "seed": -1}, "`seed` must be"),
    ):
        with pytest.raises(ValueError, match=message):
            BatchingSettings(**settings)


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
    taken = 0

    def rows():
        nonlocal taken
        for row in token_rows(3000):
            taken += 1
            yield row

    next(stream_updates(rows(), BatchingSettings(600), pool_size=200))
    assert taken == 200


def test_each_pool_of_a_stream_has_its_own_order():
    rows = [{"input_ids": [number], "labels": [1]} for number in range(40)]
    updates = list(stream_updates(rows, BatchingSettings(2), pool_size=20))
    order = [row["input_ids"][0] for ((row,),) in updates]
    (carried_over,) = set(range(20)) - set(order[:19])
    second_pool = [carried_over, *range(20, 40)]
    first_order = UpdateBatches([1] * 21, [1] * 21, BatchingSettings(tokens_per_update=2)).epoch(0)
    assert sorted(order[19:39]) != order[19:39]
    assert order[19:39] != [second_pool[row] for ((row,),) in first_order[:20]]
