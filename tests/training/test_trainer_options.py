"""The options of training and evaluation, datasets, collators and metrics do what they say."""

import os
import signal
import time
from copy import deepcopy
from types import SimpleNamespace
from unittest.mock import patch

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import GenerationConfig, Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainingArguments
from transformers.trainer_callback import TrainerCallback

import trainer_runs
from heedful import HeedForConditionalGeneration, HeedSeq2SeqTrainer
from heedful.versions_heed import CHECKPOINTING
from helpers import FAMILIES, assert_error, tiny_model
from memorised import PAIRS, memorised_model
from trainer_process import Stream
from trainer_runs import collator, encoded_pairs, fresh_model, joint_tokenizers, logged, make_trainer, trained

RANDOM = {"per_device_train_batch_size": 2, "train_sampling_strategy": "random", "max_steps": 5}


def smoothed_loss(model, smoothing: float) -> float:
    batch = collator()(encoded_pairs())
    logits = model(**batch).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), label_smoothing=smoothing).item()


@pytest.mark.parametrize("kind", trainer_runs.TRAINERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_updates_are_those_of_one_batch_and_labels_smoothed_once_however_they_are_accumulated(kind, family, tmp_path):
    for of_config, factor, used in ((0.1, 0.0, 0.1), (0.1, 0.3, 0.3), (0.0, 0.3, 0.3), (0.0, 0.0, 0.0)):
        norms = []
        for size, parts in ((6, 1), (2, 3), (4, 2)):
            split = {"per_device_train_batch_size": size, "gradient_accumulation_steps": parts, "max_steps": 1}
            model = tiny_model(family=family, vocab_size=272, label_smoothing=of_config)
            expected = smoothed_loss(model, used)
            trainer = trained(kind, tmp_path, model, label_smoothing_factor=factor, **split)
            assert logged(trainer) == [pytest.approx(expected, rel=1e-5)]
            norms += logged(trainer, "grad_norm")
        assert norms == pytest.approx(norms[:1] * 3, rel=1e-4)


def test_the_evaluation_loss_is_not_smoothed_and_the_collator_needs_no_model(tmp_path):
    trainer = make_trainer(HeedSeq2SeqTrainer, tmp_path, label_smoothing_factor=0.3)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(smoothed_loss(fresh_model(), 0.0), rel=1e-5)
    given = {"data_collator": collator()}
    with pytest.raises(ValueError, match=r"needs the collator `DataCollatorForSeq2Seq\(tokenizer, model\)`"):
        trained(Seq2SeqTrainer, tmp_path, given=given, label_smoothing_factor=0.1)
    trained(HeedSeq2SeqTrainer, tmp_path, given=given, label_smoothing_factor=0.1)


AGAIN = [{CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": each}} for each in (False, True)]
# What is asked for, and how near the gradient is to that of a plain update.
OPTIONS = [({}, 1e-6), *((each, 1e-5) for each in AGAIN), ({"bf16": True}, 2e-2)]
OPTIONS += [({"torch_compile": True, "torch_compile_backend": "eager"}, 1e-5)]


def test_options_of_transformers_change_an_update_as_they_say_and_no_more(tmp_path):
    frames = torch._dynamo.utils.counters["frames"]
    torch._dynamo.reset()
    frames.clear()
    plain = logged(trained(HeedSeq2SeqTrainer, tmp_path, max_steps=1), "grad_norm")
    for options, tolerance in OPTIONS:
        model, kinds = fresh_model(), []
        # Not the head: Accelerate has the outputs of the whole model back in float32.
        model.model.encoder.layers[0].feed_forward.fc1.register_forward_hook(
            lambda module, inputs, output, kinds=kinds: kinds.append(output.dtype)
        )
        trainer = trained(HeedSeq2SeqTrainer, tmp_path, model, max_steps=1, save_strategy="steps", **options)
        assert logged(trainer, "grad_norm") == pytest.approx(plain, rel=tolerance), options
        times = 2 if CHECKPOINTING in options else 1  # layers are computed again
        assert kinds == [torch.bfloat16 if "bf16" in options else torch.float32] * times, options
        assert bool(frames["ok"]) == ("torch_compile" in options)
        saved = HeedForConditionalGeneration.from_pretrained(tmp_path / "checkpoint-1").state_dict()
        assert {name: weight.dtype for name, weight in saved.items()} == dict.fromkeys(saved, torch.float32)
        assert saved.keys() == model.state_dict().keys()
    noisy = trained(HeedSeq2SeqTrainer, tmp_path, max_steps=1, neftune_noise_alpha=5.0)
    assert logged(noisy, "grad_norm") != pytest.approx(plain, rel=1e-4)


def test_weights_decay_and_biases_and_norms_do_not(tmp_path):
    modern = {"norm_placement": "pre", "norm_type": "rmsnorm", "activation_function": "swiglu"}
    biased = {"position_encoding": "learned", "embedding_norm": True, "output_bias": True, "attention_bias": True}
    for options in ({}, modern, biased):
        model = fresh_model(**options)
        optimizer = make_trainer(HeedSeq2SeqTrainer, tmp_path, model, weight_decay=0.1).create_optimizer()
        decays = {id(weight): group["weight_decay"] for group in optimizer.param_groups for weight in group["params"]}
        for name, weight in model.named_parameters():
            assert decays[id(weight)] == (0.1 if weight.dim() > 1 else 0.0), name


class Terminated(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)  # a timer of no seconds asks for the checkpoint


def test_a_run_that_was_terminated_is_resumed_to_the_same_weights_without_false_alarm(tmp_path):
    def make(name, *callbacks, **more):
        given = {"callbacks": list(callbacks)}
        return make_trainer(HeedSeq2SeqTrainer, tmp_path / name, fresh_model(dropout=0.2), given, **RANDOM, **more)

    whole = make("whole")
    whole.train()
    stopped = make("stopped", Terminated(), enable_jit_checkpoint=True)
    managers = [getattr(callback, "jit_manager", None) for callback in stopped.callback_handler.callbacks]
    next(manager for manager in managers if manager).kill_wait = 0
    stopped.train()  # saves at once
    assert stopped.state.global_step < 5
    resumed = make("stopped")
    with patch("transformers.trainer.logger.warning") as warning:
        resumed.train(resume_from_checkpoint=True)
    assert len(logged(resumed)) == 5
    assert trainer_runs.same_weights(resumed, whole)
    # transformers takes tied weights, which are saved once, for missing.
    assert not any("missing keys" in str(call) for call in warning.call_args_list)


def test_a_model_made_anew_keeps_the_generation_settings_of_the_arguments(tmp_path):
    given = {"model_init": lambda: fresh_model(), "data_collator": collator()}
    settings = GenerationConfig(num_beams=3)
    trainer = trained(HeedSeq2SeqTrainer, tmp_path, given=given, generation_config=settings)
    first = trainer.model.state_dict()
    kept = trainer.model.generation_config
    assert (kept.num_beams, kept.max_length, kept.eos_token_id, kept.decoder_start_token_id) == (3, 64, 2, 1)
    assert settings.eos_token_id is None
    trainer.train()
    assert all(map(torch.equal, first.values(), trainer.model.state_dict().values()))


REFUSED = {
    "use_liger_kernel": (True, "False, because Liger has no"),
    "eval_use_gather_object": (True, "False"),
    "label_names": (["target"], "None"),
    "length_column_name": ("size", "length"),
    "dataloader_in_order": (False, "True"),
    "ignore_data_skip": (True, "False"),
    "train_sampling_strategy": ("batch_rebalance", "random or sequential"),
    "parallelism_config": (SimpleNamespace(cp_size=2), "one that leaves sequences"),
    "auto_find_batch_size": (True, "False"),
    "dataloader_drop_last": (True, "False"),
}


def test_what_would_be_ignored_is_refused_before_a_folder_is_made(tmp_path):
    for name, (value, must) in REFUSED.items():
        arguments = Seq2SeqTrainingArguments(output_dir=str(tmp_path / "run"), use_cpu=True, report_to="none")
        setattr(arguments, name, value)
        with pytest.raises(ValueError, match=f"`{name}` must be {must}"):
            HeedSeq2SeqTrainer(fresh_model(), arguments, collator(), encoded_pairs(), encoded_pairs())
    with pytest.raises(ValueError, match="`args` must be Seq2SeqTrainingArguments, but is TrainingArguments instead"):
        HeedSeq2SeqTrainer(fresh_model(), TrainingArguments(output_dir=str(tmp_path / "run"), use_cpu=True))
    assert_error("`fp16` must be False on the CPU", make_trainer, HeedSeq2SeqTrainer, tmp_path / "run", fp16=True)
    assert not (tmp_path / "run").exists()
    # But pairs of a stream may be left unskipped.
    given = {"train_dataset": Stream(encoded_pairs())}
    assert trained(HeedSeq2SeqTrainer, tmp_path, given=given, ignore_data_skip=True).state.global_step == 2


def test_our_trainer_asks_for_no_logits(tmp_path):
    model, kept = fresh_model(), []
    model.register_forward_hook(lambda module, inputs, outputs: kept.append("logits" in outputs))
    trained(HeedSeq2SeqTrainer, tmp_path, model, max_steps=1)
    assert set(kept) == {False}


def test_generation_takes_a_config_from_the_arguments_and_what_it_or_the_call_leaves_open_from_the_model(tmp_path):
    learned = memorised_model(joint_tokenizers(), PAIRS)

    def predicted(call=None, **settings):
        options = {"predict_with_generate": True, "generation_config": GenerationConfig(num_beams=2, **settings)}
        trainer = make_trainer(HeedSeq2SeqTrainer, tmp_path, deepcopy(learned), **options)
        return trainer.predict(encoded_pairs(), **(call or {})).predictions, trainer.model.generation_config.num_beams

    for call, settings in (({}, {"max_new_tokens": 3}), ({"max_length": 4}, {})):
        tokens, _ = predicted(call, **settings)
        assert ((tokens >= 0) & (tokens != 0)).sum(1).max() == 1 + 3
    # One of them is longer than the 20 tokens at which generate() stops by itself.
    assert max(len(row["labels"]) for row in encoded_pairs()) > 20
    tokens, beams = predicted()
    assert (joint_tokenizers().decode_target(tokens), beams) == (trainer_runs.TARGETS, 2)


def test_generation_uses_the_cache_during_training_and_after_it(tmp_path):
    trainer, widths = trained(HeedSeq2SeqTrainer, tmp_path, predict_with_generate=True), []
    trainer.save_model(tmp_path / "saved")
    for model in (trainer.model, HeedForConditionalGeneration.from_pretrained(tmp_path / "saved")):
        model.model.decoder.register_forward_pre_hook(
            lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        model.generate(torch.tensor([[20, 30, 2]]), max_new_tokens=4, min_new_tokens=4)
    assert widths == [1] * 8


def test_prediction_of_the_loss_alone_generates_nothing(tmp_path):
    given = {"compute_metrics": lambda results: pytest.fail("metrics were computed")}
    options = {"prediction_loss_only": True, "predict_with_generate": True}
    trainer = make_trainer(HeedSeq2SeqTrainer, tmp_path, given=given, **options)
    assert trainer.evaluate()["eval_loss"] > 0
    assert trainer.predict(encoded_pairs()).predictions is None


def one_loss_per_pair(model) -> list[float]:
    return [model(**collator()([row])).loss.item() for row in encoded_pairs()]


@pytest.mark.parametrize("by_batch", [False, True])
@pytest.mark.parametrize("size", [1, 4])
def test_metrics_are_given_sources_and_the_loss_of_every_pair_and_summed_up_over_batches(size, by_batch, tmp_path):
    model = fresh_model().eval()
    losses, sources, seen = [], [], []

    def note(results, compute_result=True):
        losses.extend(float(loss) for loss in results.losses)
        inputs = results.inputs["input_ids"] if by_batch else results.inputs
        sources.extend([int(i) for i in row if i > 0] for row in inputs)
        seen.append((len(results.predictions), compute_result))
        return {"count": sum(number for number, _ in seen)} if compute_result else {}

    options = {"include_for_metrics": ["inputs", "loss"], "batch_eval_metrics": by_batch}
    options |= {"per_device_eval_batch_size": size, "predict_with_generate": True}
    trainer = make_trainer(HeedSeq2SeqTrainer, tmp_path, model, {"compute_metrics": note}, **options)
    assert trainer.evaluate()["eval_count"] == 6
    batches = {1: [(1, False)] * 5 + [(1, True)], 4: [(4, False), (2, True)]}
    assert seen == (batches[size] if by_batch else [(6, True)])
    assert losses == pytest.approx(one_loss_per_pair(model), rel=1e-5)
    assert sources == [row["input_ids"] for row in encoded_pairs()]


def test_another_evaluation_dataset_is_evaluated_where_workers_persist(tmp_path):
    options = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    trainer = make_trainer(HeedSeq2SeqTrainer, tmp_path, **options)
    first, other = (trainer.evaluate(rows)["eval_loss"] for rows in (None, encoded_pairs()[:1]))
    assert other == pytest.approx(one_loss_per_pair(trainer.model)[0], rel=1e-5)
    assert other != pytest.approx(first, rel=1e-3)


def test_every_form_of_dataset_trains_and_evaluates_like_a_list(tmp_path):
    arguments = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "max_steps": 3}
    listed = trained(HeedSeq2SeqTrainer, tmp_path, **arguments)
    loss, source = listed.evaluate()["eval_loss"], joint_tokenizers().source
    # A table of texts, as they come from the Hub, with the encoded pairs in it.
    texts = datasets.Dataset.from_dict({"ko": trainer_runs.SOURCES, "en": trainer_runs.TARGETS})
    mapped = texts.map(lambda row: {**source(row["ko"], text_target=row["en"])})
    for rows in (mapped, mapped.with_format("torch"), mapped.to_iterable_dataset(num_shards=2)):
        given = {"train_dataset": rows, "eval_dataset": rows}
        trainer = trained(HeedSeq2SeqTrainer, tmp_path, given=given, **arguments)
        assert logged(trainer) == pytest.approx(logged(listed), rel=1e-5)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-5)
    # A shuffled stream comes in another order every epoch.
    given = {"train_dataset": mapped.to_iterable_dataset().shuffle(seed=3, buffer_size=6)}
    options = {"per_device_train_batch_size": 1, "max_steps": 12, "learning_rate": 0.0}
    losses = logged(trained(HeedSeq2SeqTrainer, tmp_path, given=given, **options))
    assert sorted(losses[:6]) == pytest.approx(sorted(losses[6:]), rel=1e-6)
    assert losses[:6] != pytest.approx(losses[6:], rel=1e-6)
    # Batches left over at the end of a stream, which has three an epoch, begin the next update: as of a list of twice.
    arguments = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 5}
    listed = trained(HeedSeq2SeqTrainer, tmp_path, given={"train_dataset": encoded_pairs() * 2}, **arguments)
    given = {"train_dataset": mapped.to_iterable_dataset()}
    streamed = trained(HeedSeq2SeqTrainer, tmp_path, given=given, **arguments)
    assert logged(streamed) == pytest.approx(logged(listed), rel=1e-5)
    assert logged(streamed, "grad_norm") == pytest.approx(logged(listed, "grad_norm"), rel=1e-4)
    with pytest.raises(ValueError, match="must hold enough pairs for one update"):
        trained(HeedSeq2SeqTrainer, tmp_path, given=given, gradient_accumulation_steps=2)


def test_a_table_that_a_users_forward_makes_in_evaluation_can_be_trained_with(tmp_path):
    class Gated(HeedForConditionalGeneration):
        table = None

        def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
            outputs = super().forward(input_ids, attention_mask, labels=labels, **kwargs)
            if self.table is None:
                self.table = outputs["logits"].new_ones(outputs["logits"].shape[-1])
            outputs["logits"] = outputs["logits"] * self.table
            if labels is not None:
                outputs["loss"] = outputs["loss"] + 0 * outputs["logits"].mean()
            return outputs

    arguments = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True, "predict_with_generate": True}
    given = {"compute_metrics": lambda results: {"rows": len(results.predictions)}}
    trainer = trained(HeedSeq2SeqTrainer, tmp_path, Gated(fresh_model(label_smoothing=0.0).config), given, **arguments)
    assert logged(trainer, "eval_rows") == [6, 6, 6]


def test_sources_without_labels_are_translated_as_with_them(tmp_path):
    given = {"data_collator": None, "processing_class": joint_tokenizers()}
    trainer = make_trainer(HeedSeq2SeqTrainer, tmp_path, fresh_model(), given, predict_with_generate=True)
    sources = [{"input_ids": row["input_ids"]} for row in encoded_pairs()]
    found, expected = trainer.predict(sources), trainer.predict(encoded_pairs())
    assert np.array_equal(found.predictions, expected.predictions)
    assert found.label_ids is None
    trainer.train_dataset = sources
    assert_error("A batch must hold `labels`, but holds input_ids, attention_mask instead", trainer.train)


@pytest.mark.parametrize("with_model", [False, True])
@pytest.mark.parametrize("empty", [("labels",), ("input_ids",), ("input_ids", "labels")], ids=str)
def test_an_empty_row_alone_is_as_beside_others(empty, with_model, tmp_path):
    rows, found = encoded_pairs()[:4], []
    rows[1] = rows[1] | {name: [] for name in empty}
    for size in (1, 4):
        model = fresh_model()
        options = {"per_device_eval_batch_size": size, "per_device_train_batch_size": size, "max_steps": 1}
        given = {"train_dataset": rows, "data_collator": collator(model=model) if with_model else collator()}
        options |= {"gradient_accumulation_steps": 4 // size, "predict_with_generate": True}
        trainer = make_trainer(HeedSeq2SeqTrainer, tmp_path, model, given, **options)
        loss = trainer.evaluate(rows)["eval_loss"]
        tokens = trainer.predict(rows, max_new_tokens=5, min_new_tokens=5).predictions
        trainer.train()
        found.append((loss, tokens.tolist(), trainer.state.log_history[-1]["train_loss"]))
    assert found[0][1] == found[1][1]
    assert found[0][::2] == pytest.approx(found[1][::2], rel=1e-6)
