"""What `HeedSeq2SeqTrainer` reads: rows of any kind, divided into updates, and streams."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainer_runs import SOURCES, TARGETS, TRAINERS, collator, encoded_pairs, joint_tokenizers, logged, trained
from transformers import Seq2SeqTrainer

from heedful import HeedSeq2SeqTrainer
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


def texts_into_tensors(pairs):
    """Tokenize `(source, target)` texts."""
    tokenizers = joint_tokenizers()
    columns = tokenizers.encode_source([pair[0] for pair in pairs]), tokenizers.encode_target([p[1] for p in pairs])
    return collator()([{"input_ids": ids, "labels": labels} for ids, labels in zip(*columns, strict=True)])


ROWS = {
    "texts": ([{"ko": ko, "en": en} for ko, en in zip(SOURCES, TARGETS, strict=True)], lambda row: row.values()),
    "tuples": (list(zip(SOURCES, TARGETS, strict=True)), tuple),
    "tuples of ids": ([tuple(row.values()) for row in encoded_pairs()], None),
}


@pytest.mark.parametrize("kind", ROWS)
def test_rows_of_any_kind_train_as_encoded_ones_do(kind, tmp_path):
    rows, texts_of = ROWS[kind]

    def collate(rows):
        if texts_of is None:
            return collator()([dict(zip(("input_ids", "labels"), row, strict=True)) for row in rows])
        return texts_into_tensors([tuple(texts_of(row)) for row in rows])

    # Three micro-batches an epoch, two an update: the last update of each has an empty one.
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4}
    options |= {"remove_unused_columns": False}
    given = {"train_dataset": rows, "eval_dataset": rows, "data_collator": collate}
    losses = {kind: logged(trained(kind, tmp_path, given=given, **options)) for kind in TRAINERS}
    assert losses[HeedSeq2SeqTrainer] == logged(trained(HeedSeq2SeqTrainer, tmp_path, **options))
    assert losses[HeedSeq2SeqTrainer] == pytest.approx(losses[Seq2SeqTrainer], rel=1e-5)


def test_updates_of_tokens_need_rows_whose_lengths_can_be_seen(tmp_path):
    rows, _ = ROWS["texts"]
    with pytest.raises(ValueError, match="`train_dataset` must have rows with `input_ids` and `labels`"):
        trained(
            HeedSeq2SeqTrainer,
            tmp_path,
            given={"train_dataset": rows, "data_collator": collator(), "tokens_per_update": 90},
            per_device_train_batch_size=8,
            train_sampling_strategy="random",
        )
