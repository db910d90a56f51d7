"""HeedSeq2SeqTrainer and the loop: the same results for any batch size, accumulation, processes, rows and streams."""

from itertools import product

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForSeq2SeqLM
from transformers.utils import logging as transformers_logging

import contract_measures as contract
import forked
import trainer_process
import trainer_runs
from heedful import HeedSeq2SeqTrainer
from heedful.data.epochs.batching import BatchingSettings, UpdateBatches
from heedful.training.trainer.batches import divide_update, without_padding
from helpers import assert_error, assert_refused, tiny_model
from row_lengths import lengths, natural_lengths, padding_share, rows_of
from row_lengths import several as many_examples
from tiny_runs import around
from trainer_process import Sized
from trainer_runs import encoded_pairs, fresh_model, joint_tokenizers, logged, make_trainer, same_weights, trained

TOLERANCE = 1e-5
each_column = pytest.mark.parametrize("column", ["loop", "trainer"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    transformers_logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("contract")
    contract.prepare(folder, longest=(3, 2))
    return folder


@pytest.fixture(scope="module")
def one(folder):
    """What one process, this one, measured."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    return trainer_process.measure(folder)


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def several(request, folder, one):
    """What every process of two measured, and of three."""
    world = request.param
    forked.run(world, folder, trainer_process.main, folder)
    found = [torch.load(folder / f"found-{world}-{rank}.pt", weights_only=False) for rank in range(world)]
    assert [run["world"] for run in found] == [world] * world
    return found


def assert_same_updates(updates, references):
    """Compare losses and gradients, each under its smoothing, to the first of the references that has the same."""
    for smoothing, (loss, gradient) in updates:
        their_loss, their_gradient = next(update for theirs, update in references if theirs == smoothing)
        assert their_gradient.norm() > 0.1
        assert abs(loss / their_loss - 1) < TOLERANCE
        assert contract.relative_difference(gradient, their_gradient) < TOLERANCE


REFERENCES = {"loop": "trainer", "trainer": "trainer", "marian": "marian"}


@pytest.mark.parametrize("column", REFERENCES)
def test_loss_and_gradient_do_not_depend_on_micro_batches_accumulation_or_token_buckets(one, column):
    updates = one[column]["updates"]
    assert len(updates) == (4 if column == "marian" else 7)
    assert_same_updates(updates, one[REFERENCES[column]]["updates"])
    (_, plain), (_, smoothed) = updates[:2]
    assert abs(smoothed[0] / plain[0] - 1) > 1e-4
    assert contract.relative_difference(smoothed[1], plain[1]) > 1e-2


@pytest.mark.multiprocess
@pytest.mark.parametrize("column", REFERENCES)
def test_loss_and_gradient_do_not_depend_on_the_number_of_processes(one, several, column):
    for run in several:
        assert len(run[column]["updates"]) == (4 if column == "marian" else 5)
        assert_same_updates(run[column]["updates"], one[REFERENCES[column]]["updates"])


def assert_same_evaluation(ours, theirs):
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=TOLERANCE)
    assert ours["predictions"] == theirs["predictions"]
    assert ours["scores"] == theirs["scores"]
    assert ours["in_order"]


@each_column
def test_evaluation_does_not_depend_on_the_batch_size(one, column):
    evaluations = one[column]["evaluations"]
    assert list(evaluations) == [1, 8, 48]
    assert len(evaluations[1]["predictions"]) == 21
    assert len(set(evaluations[1]["predictions"])) > 10
    bleu, chrf = evaluations[1]["scores"]
    assert 5 < bleu < 95
    assert 5 < chrf < 95
    for evaluation in evaluations.values():
        assert_same_evaluation(evaluation, one["trainer"]["evaluations"][1])


@pytest.mark.multiprocess
@each_column
def test_evaluation_does_not_depend_on_the_number_of_processes(one, several, column):
    for run in several:
        for evaluation in run[column]["evaluations"].values():
            assert_same_evaluation(evaluation, one["trainer"]["evaluations"][1])


@pytest.mark.multiprocess
def test_marians_evaluation_is_mended_too(one, several):
    for run in [one, *several]:
        for evaluation in run["marian"]["evaluations"]:
            assert_same_evaluation(evaluation, one["marian"]["evaluations"][0])
    # What is mended: without it, samples are repeated.
    assert {run["stock predictions"] for run in several} == {{2: 32, 3: 24}[len(several)]}


@pytest.mark.multiprocess
def test_datasets_with_fewer_pairs_than_processes_or_without_a_length_are_evaluated(one, several):
    for run, count in product([one, *several], (1, 2)):
        assert len(run["few"][count]["tokens"]) == count
        assert run["few"][count]["tokens"] == one["few"][count]["tokens"]
        assert run["few"][count]["loss"] == pytest.approx(one["few"][count]["loss"], rel=TOLERANCE)


@pytest.mark.multiprocess
def test_epochs_that_end_unevenly_neither_hang_nor_repeat_nor_drop_pairs(one, several):
    for kind in ("losses", "losses by tokens"):
        assert len(one[kind]) == len(set(one[kind])) == 6
        for run in several:
            assert run[kind] == pytest.approx(one[kind], rel=1e-4)


@pytest.mark.multiprocess
def test_streams_give_the_same_updates_for_any_number_of_processes_and_are_resumed_exactly(one, several):
    for kind in ("streamed, shuffled", "streamed, sized"):
        expected, _ = one[kind]
        assert len(set(expected)) == 5
        for run in [one, *several]:
            losses, is_exact = run[kind]
            assert losses == pytest.approx(expected, rel=1e-4)
            assert is_exact


@pytest.mark.multiprocess
def test_a_stream_that_differs_between_processes_is_refused(one, several):
    assert one["divided stream"] == ""
    for run in several:
        assert "`train_dataset` must have the same pairs in every process" in run["divided stream"]


@pytest.mark.multiprocess
def test_a_run_of_one_process_is_resumed_by_several(one, several):
    assert one["losses after one process"] == one["losses"]
    for run in several:
        assert run["losses after one process"] == pytest.approx(one["losses"], rel=1e-4)


@each_column
def test_a_resumed_run_ends_with_the_same_weights(one, column):
    assert set(one[column]["resumed"]) == {0.0}


@pytest.mark.multiprocess
@each_column
def test_a_resumed_run_of_several_processes_ends_with_the_same_weights(several, column):
    for run in several:
        # With three, whose sums depend on DDP's buckets, also because it has settled them before the first update.
        assert max(run[column]["resumed"]) == 0.0
        assert run["resumed with settled buckets"] == [0.0, 0.0]


@pytest.mark.multiprocess
def test_a_loss_that_is_not_finite_in_one_process_stops_all(one, several):
    assert all(run["stops"] for run in [one, *several])


@pytest.fixture
def column(folder):
    return contract.column("trainer", folder)


def test_a_weight_that_is_not_finite_is_not_saved(column, tmp_path):
    trainer = column.trainer(save_strategy="steps", save_steps=1, learning_rate=1e-3)
    trainer.args.output_dir = str(tmp_path / "run")
    weight = next(trainer.model.parameters())
    around(trainer.create_optimizer(), "step", after=lambda: weight.data[0].fill_(float("inf")))
    assert_error("a weight is not finite", trainer.train, error=FloatingPointError)
    assert not list((tmp_path / "run").glob("checkpoint-*"))


SIZES = {"vocab_size": 400, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0}
SIZES |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 512, "attention_dropout": 0.0}
SIZES |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
SIZES |= {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
OF_T5 = {"vocab_size": 400, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
OF_T5 |= {"dropout_rate": 0.0, "decoder_start_token_id": 0}
PROPHET = {"vocab_size": 400, "hidden_size": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "dropout": 0.0}
PROPHET |= {"num_encoder_layers": 1, "num_decoder_layers": 1, "ngram": 2, "decoder_start_token_id": 1}
PROPHET |= {"num_encoder_attention_heads": 2, "num_decoder_attention_heads": 2}


def model_of(kind, sizes):
    return AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(kind, **sizes))


@pytest.mark.parametrize(("kind", "sizes"), [("bart", SIZES), ("m2m_100", SIZES), ("t5", OF_T5)])
def test_other_models_are_mended_too(column, kind, sizes, monkeypatch):
    torch.manual_seed(0)
    model = model_of(kind, sizes)
    make = type(column).trainer
    monkeypatch.setattr(type(column), "trainer", lambda self, *_, **kwargs: make(self, model, **kwargs))
    splits = [((48, 1), 0.0, False), ((48, 1), 0.1, False), ((8, 6), 0.1, False), ((8, 6), 0.0, True)]
    updates = [(smoothing, column.update(*split, smoothing, by_tokens)) for split, smoothing, by_tokens in splits]
    assert_same_updates(updates, updates)


def test_the_smoothing_of_the_arguments_is_that_of_the_saved_config(column):
    assert column.trainer(label_smoothing_factor=0.2).model.config.label_smoothing == 0.2
    model = tiny_model(label_smoothing=0.3)
    assert column.trainer(model).model.config.label_smoothing == 0.3
    trainer = column.kind(model_init=lambda: tiny_model(), args=column.trainer(label_smoothing_factor=0.2).args)
    assert trainer.call_model_init().config.label_smoothing == 0.2


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("by_tokens", [False, True])
def test_every_pair_comes_once_an_epoch_in_another_order_for_each_epoch_and_seed(column, by_tokens, workers):
    options = {"tokens_per_update": 900, "buckets_per_update": 2} if by_tokens else {}
    trainer = column.trainer(options=options, gradient_accumulation_steps=4, dataloader_num_workers=workers)
    orders = []
    updates = len(trainer.get_train_dataloader()) // 4
    for epoch, seed in ((0, None), (1, None), (0, 7)):
        trainer.state.global_step, trainer.args.data_seed = updates * epoch, seed
        batches = [batch["labels"] for batch in trainer.get_train_dataloader()]
        assert len(batches) == updates * 4
        orders.append([[i for i in row if i >= 0] for batch in batches for row in batch.tolist()])
        assert sorted(row for row in orders[-1] if row) == sorted(row["labels"] for row in trainer.train_dataset)
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_generated_tokens_end_once_whatever_generate_fills_up_with():
    tokens = torch.tensor([[1, 7, 4, 2, 2, 0], [2, 7, 8, 0, 0, 0], [1, 0, 9, 8, 2, 0]])
    kept = without_padding(tokens, prompt=1, pads=[0, None], ends=[2, 4]).tolist()
    assert kept == [[1, 7, 4, -100, -100], [2, 7, 8, -100, -100], [1, 0, 9, 8, 2]]


def test_what_would_be_ignored_or_break_a_promise_is_refused(column):
    tokens, by_length = {"tokens_per_update": 900}, {"train_sampling_strategy": "group_by_length"}
    cases = [
        (({"tokens_per_update": 0}, {}), "`tokens_per_update` must be a whole number of at least 1, but is 0 instead"),
        (({"buckets_per_update": 2}, {}), "`buckets_per_update` must be None without"),
        ((tokens, {"per_device_train_batch_size": 4}), "`per_device_train_batch_size` must be left"),
        ((tokens, {"train_sampling_strategy": "sequential"}), "`train_sampling_strategy` must be r"),
        (({}, by_length), "`train_sampling_strategy` must be random or sequential"),
        (({}, {"accelerator_config": {"split_batches": True}}), "`accelerator_config.split_batches` must be False"),
        (({"compute_loss_func": print}, {}), "`compute_loss_func` must be None"),
    ]
    assert_refused(cases, lambda given: column.trainer(options=given[0], **given[1]))
    with pytest.raises(ValueError, match="`model` must be trained only with its labels' cross-entropy"):
        column.trainer(model_of("prophetnet", PROPHET)).train()  # with that of the next two tokens
    trainer = column.trainer(options=tokens)
    of_texts = "rows with `input_ids` and `labels`"
    for rows, must in ((trainer_process.Stream(trainer.train_dataset), "a length"), (ROWS["texts"], of_texts)):
        trainer.train_dataset = rows
        assert_error(f"`train_dataset` must have {must}", trainer.train)
    with pytest.raises(ValueError, match="`labels` must hold at least one label"):
        column.trainer().evaluate([{"input_ids": [5, 2], "labels": [-100, -100]}])
    column.rows["training"] = [{**row, "labels": [-100] * len(row["labels"])} for row in column.rows["training"]]
    assert_error(r"`labels` must hold at least one .* other than -100, but update 1 has none", column.trainer().train)


@many_examples
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
    return trainer_runs.collator()([{"input_ids": ids, "labels": labels} for ids, labels in zip(*sides, strict=True)])


TEXTS = trainer_runs.SOURCES, trainer_runs.TARGETS
ROWS = {
    "texts": [{"ko": ko, "en": en} for ko, en in zip(*TEXTS, strict=True)],
    "tuples": list(zip(*TEXTS, strict=True)),
    "tuples of ids": [tuple(row.values()) for row in encoded_pairs()],
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_rows_of_any_kind_train_as_encoded_ones_do(rows, tmp_path):
    # Three micro-batches an epoch, two an update: the last update of each has an empty one.
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4}
    options |= {"remove_unused_columns": False}
    given = {"train_dataset": rows, "eval_dataset": rows, "data_collator": collate}
    losses = logged(trained(HeedSeq2SeqTrainer, tmp_path, given=given, **options))
    assert losses == logged(trained(HeedSeq2SeqTrainer, tmp_path, **options))


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
        assert "reads a stream" not in caplog.text
        losses.append(logged(trained(HeedSeq2SeqTrainer, tmp_path, given=given, **options)))
    assert losses[0] == losses[1] == losses[2]
    assert "Only one of `dataloader_num_workers` reads a stream" in caplog.text


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
        return trained(HeedSeq2SeqTrainer, tmp_path, fresh_model(dropout=0.2), given, checkpoint, **options)

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
    assert_error("repeat the resumed run's pairs", other.train, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for name in ("stream.json", "manifest.json"):
        (tmp_path / "checkpoint-2" / name).unlink()
    with pytest.raises(ValueError, match=r"must hold stream.json if `train_dataset` is a stream"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_a_stream_that_cannot_be_divided_is_refused(tmp_path):
    cases = [
        (Sized(encoded_pairs(), 9), "must have 5 batches, its length, but has 3"),
        (Sized(encoded_pairs(), 3), "must have 2 batches, its length, but has more"),
        (shuffled().take(0), "must hold at least one pair, but is empty in epoch 1"),
        ((row for row in encoded_pairs()), "must have a length or be an IterableDataset, but is generator"),
    ]
    options = {"per_device_train_batch_size": 2, "max_steps": 9}
    assert_refused(cases, lambda rows: trained(HeedSeq2SeqTrainer, tmp_path, given={"train_dataset": rows}, **options))
    for rows in (shuffled().take(0), []):
        trainer = make_trainer(HeedSeq2SeqTrainer, tmp_path, given={"eval_dataset": rows}, **options)
        assert_error("`eval_dataset` or `test_dataset` must hold at least one pair, but is empty", trainer.evaluate)


def test_nothing_is_trained_after_the_last_update_is_resumed(tmp_path):
    for rows in (encoded_pairs(), shuffled()):
        options = {"per_device_train_batch_size": 2, "max_steps": 2, "save_strategy": "steps"}
        options["given"] = {"train_dataset": rows}
        first = trained(HeedSeq2SeqTrainer, tmp_path, **options)
        again = trained(HeedSeq2SeqTrainer, tmp_path, resume=str(tmp_path / "checkpoint-2"), **options)
        assert again.state.global_step == 2
        assert same_weights(first, again)
