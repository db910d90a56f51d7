from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as st

from heedful.data.batching import BatchingSettings, UpdateBatches
from heedful.data.micro_batches import collate, micro_batches_of_rank, split_update
from row_lengths import lengths, natural_lengths, padded_tokens, rows_of, several


def split(update, source, target, token_budget, world_size):
    """Split an update of row numbers, and return the numbers."""
    rows = [
        [{"number": row, "input_ids": range(source[row]), "labels": range(target[row])} for row in b] for b in update
    ]
    parts = split_update(rows, token_budget, world_size)
    return [[[row["number"] for row in batch] for batch in batches] for batches in parts]


def updates_of(source, target, tokens, buckets):
    return UpdateBatches(source, target, BatchingSettings(tokens, buckets)).epoch(0)


@several
@given(lengths, st.integers(2, 300), st.integers(1, 4), st.integers(1, 300))
def test_an_update_is_divided_exactly(rows, tokens, buckets, token_budget):
    source, target = zip(*rows, strict=True)
    for update, world_size in product(updates_of(source, target, tokens * buckets, buckets), (1, 2, 3)):
        ranks = split(update, source, target, token_budget, world_size)
        assert len(ranks) == world_size
        assert len({len(batches) for batches in ranks}) == 1
        assert sorted(row for batches in ranks for batch in batches for row in batch) == rows_of(update)
        for batch in (batch for batches in ranks for batch in batches):
            assert len(batch) <= 1 or padded_tokens(batch, source, target) <= token_budget


def test_one_process_with_room_gets_every_bucket_whole():
    source, target = natural_lengths(2000)
    for update in updates_of(source, target, 4096, 4):
        (batches,) = split(update, source, target, 1024, 1)
        assert sorted(map(sorted, batches)) == sorted(map(sorted, update))


def test_ranks_get_the_same_work():
    source, target = natural_lengths(20_000)
    for buckets in (1, 2, 4):
        for update, world_size in product(updates_of(source, target, 8192, buckets)[:10], (2, 3, 5)):
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
