"""How updates are divided for `HeedSeq2SeqTrainer`."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful.data.batching import BatchingSettings, UpdateBatches
from heedful.data.micro_batches import padding_share
from heedful.training.trainer.batches import divide_update
from row_lengths import lengths, natural_lengths, rows_of, several


@several
@given(lengths, st.integers(1, 4), st.integers(1, 9))
def test_an_update_is_divided_into_so_many_micro_batches(rows, buckets, parts):
    source, target = zip(*rows, strict=True)
    batches = UpdateBatches(source, target, BatchingSettings(tokens_per_update=200, buckets_per_update=buckets))
    for update in batches.epoch(0):
        divided = divide_update(update, np.array([source, target]).T, parts)
        assert len(divided) == parts
        assert sorted(row for part in divided for row in part) == rows_of(update)
        if len(update) <= parts:
            assert all(any(set(part) <= set(bucket) for bucket in update) for part in divided)


@pytest.mark.parametrize("parts", [4, 6, 8])
def test_the_micro_batches_of_an_update_are_padded_no_more_than_its_buckets(parts):
    source, target = natural_lengths(20_000)
    updates = UpdateBatches(source, target, BatchingSettings(tokens_per_update=8192, buckets_per_update=4)).epoch(0)
    divided = [part for update in updates for part in divide_update(update, np.array([source, target]).T, parts)]
    buckets = [bucket for update in updates for bucket in update]
    assert padding_share(divided, source, target) <= padding_share(buckets, source, target) < 0.05
