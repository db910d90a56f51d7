"""What `HeedSeq2SeqTrainer` reads: rows of any kind, divided into updates, and streams."""

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Seq2SeqTrainer
from transformers.utils import logging as transformers_logging

from heedful import HeedSeq2SeqTrainer
from heedful.data.batching import BatchingSettings, UpdateBatches
from heedful.training.trainer.batches import divide_update
from helpers import assert_refused
from row_lengths import lengths, natural_lengths, padding_share, rows_of, several
from trainer_process import Sized
from trainer_runs import (
    SOURCES,
    TARGETS,
    TRAINERS,
    collator,
    encoded_pairs,
    fresh_model,
    joint_tokenizers,
    logged,
    make_trainer,
    same_weights,
    trained,
)


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


def collate(rows):
    """Make tensors of rows that are pairs of texts or of ids."""
    sides = list(zip(*(row.values() if isinstance(row, dict) else row for row in rows), strict=True))
    if isinstance(sides[0][0], str):
        sides = joint_tokenizers().encode_source(sides[0]), joint_tokenizers().encode_target(sides[1])
    return collator()([{"input_ids": ids, "labels": labels} for ids, labels in zip(*sides, strict=True)])


ROWS = {
    "texts": [{"ko": ko, "en": en} for ko, en in zip(SOURCES, TARGETS, strict=True)],
    "tuples": list(zip(SOURCES, TARGETS, strict=True)),
    "tuples of ids": [tuple(row.values()) for row in encoded_pairs()],
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_rows_of_any_kind_train_as_encoded_ones_do(rows, tmp_path):
    # Three micro-batches an epoch, two an update: the last update of each has an empty one.
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4}
    options |= {"remove_unused_columns": False}
    given = {"train_dataset": rows, "eval_dataset": rows, "data_collator": collate}
    losses = {kind: logged(trained(kind, tmp_path, given=given, **options)) for kind in TRAINERS}
    assert losses[HeedSeq2SeqTrainer] == logged(trained(HeedSeq2SeqTrainer, tmp_path, **options))
    assert losses[HeedSeq2SeqTrainer] == pytest.approx(losses[Seq2SeqTrainer], rel=1e-5)


def test_updates_of_tokens_need_rows_whose_lengths_can_be_seen(tmp_path):
    given = {"train_dataset": ROWS["texts"], "data_collator": collator(), "tokens_per_update": 90}
    options = {"per_device_train_batch_size": 8, "train_sampling_strategy": "random"}
    with pytest.raises(ValueError, match="`train_dataset` must have rows with `input_ids` and `labels`"):
        trained(HeedSeq2SeqTrainer, tmp_path, given=given, **options)


def shuffled():
    """Return a stream of the six pairs and one more, in another order every epoch."""
    rows = datasets.Dataset.from_list([*encoded_pairs(), encoded_pairs()[0]])
    return rows.to_iterable_dataset(num_shards=2).shuffle(seed=3, buffer_size=7)


class Divided(Sized):
    """A stream of which each worker reads a share."""

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        return iter(self.rows if worker is None else self.rows[worker.id :: worker.num_workers])


@pytest.mark.parametrize("kind", [Sized, Divided])
def test_a_stream_gives_the_same_pairs_in_the_same_order_with_any_number_of_workers(kind, tmp_path, caplog):
    transformers_logging.enable_propagation()
    losses = []
    for workers in (0, 1, 2):
        given = {"train_dataset": kind(encoded_pairs())}
        options = {"per_device_train_batch_size": 2, "max_steps": 3, "dataloader_num_workers": workers}
        assert "One worker reads" not in caplog.text
        losses.append(logged(trained(HeedSeq2SeqTrainer, tmp_path, given=given, **options)))
    assert losses[0] == losses[1] == losses[2]
    assert "One worker reads a stream (`dataloader_num_workers`)" in caplog.text


STREAMS = {
    # Four micro-batches an epoch, three an update: all that is left over begins the next epoch.
    "left over": (shuffled, {"gradient_accumulation_steps": 3, "max_steps": 5}),
    "even": (shuffled, {"gradient_accumulation_steps": 2, "max_steps": 5}),
    "workers": (shuffled, {"gradient_accumulation_steps": 3, "max_steps": 4, "dataloader_num_workers": 2}),
    "sized": (lambda: Sized(encoded_pairs()), {"gradient_accumulation_steps": 2, "max_steps": 5}),
}


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_is_resumed_at_the_right_pair_in_every_epoch(name, strategy, tmp_path):
    stream, options = STREAMS[name]
    options = {**options, "per_device_train_batch_size": 2, "save_strategy": strategy, "save_steps": 1}
    options |= {"eval_strategy": "epoch"} if strategy == "epoch" else {}

    def run(checkpoint=None):
        given = {"train_dataset": stream()}
        trainer = make_trainer(HeedSeq2SeqTrainer, tmp_path, fresh_model(dropout=0.2), given, **options)
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer

    whole = run()
    checkpoints = sorted(tmp_path.glob("checkpoint-*"))
    assert len(checkpoints) >= (2 if strategy == "epoch" else 4)
    # Inside an epoch and at its end; all in the first kind, which has most to find again.
    for checkpoint in checkpoints if name == "left over" else checkpoints[1::3]:
        resumed = run(str(checkpoint))
        keys = ("loss", "grad_norm", "epoch", "eval_loss")
        found = [[{k: e.get(k) for k in keys} for e in t.state.log_history[:-1]] for t in (whole, resumed)]
        assert found[0] == found[1]
        assert same_weights(whole, resumed)


def test_a_stream_that_cannot_be_found_again_is_refused(tmp_path):
    options = {"per_device_train_batch_size": 2, "max_steps": 3, "save_strategy": "steps", "save_steps": 2}
    trained(HeedSeq2SeqTrainer, tmp_path, given={"train_dataset": shuffled()}, **options)
    other = make_trainer(HeedSeq2SeqTrainer, tmp_path, given={"train_dataset": shuffled().shuffle(seed=9)}, **options)
    with pytest.raises(ValueError, match="gives the pairs of the run that is resumed once more"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for name in ("stream.json", "manifest.json"):
        (tmp_path / "checkpoint-2" / name).unlink()
    with pytest.raises(ValueError, match=r"must hold stream.json where `train_dataset` is a stream"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_a_stream_that_cannot_be_divided_is_refused(tmp_path):
    cases = [
        (Sized(encoded_pairs(), 9), "the length that it says, which is 5 batches, but has 3"),
        (Sized(encoded_pairs(), 3), "the length that it says, which is 2 batches, but has more"),
        ((row for row in encoded_pairs()), "must have a length or be an IterableDataset, but is generator"),
    ]
    options = {"per_device_train_batch_size": 2, "max_steps": 9}
    assert_refused(cases, lambda rows: trained(HeedSeq2SeqTrainer, tmp_path, given={"train_dataset": rows}, **options))


def test_nothing_is_trained_after_the_last_update_is_resumed(tmp_path):
    for rows in (encoded_pairs(), shuffled()):
        options = {"per_device_train_batch_size": 2, "max_steps": 2, "save_strategy": "steps"}
        first = trained(HeedSeq2SeqTrainer, tmp_path, given={"train_dataset": rows}, **options)
        again = make_trainer(HeedSeq2SeqTrainer, tmp_path, given={"train_dataset": rows}, **options)
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert again.state.global_step == 2
        assert same_weights(first, again)
