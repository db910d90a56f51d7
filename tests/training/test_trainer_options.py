"""The options of training that people set: each does what it says, with transformers' trainer and with ours."""

import os
import signal
import time
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import IterableDataset
from transformers import (
    EarlyStoppingCallback,
    GenerationConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    TrainingArguments,
)

from heedful import HeedSeq2SeqTrainer
from heedful.modeling_heed import HeedFeedForward
from trainer_runs import TRAINERS, collator, encoded_pairs, fresh_model, logged, make_trainer, trained

RANDOM = {"per_device_train_batch_size": 2, "train_sampling_strategy": "random", "max_steps": 5}
both = pytest.mark.parametrize("kind", TRAINERS)


def same_weights(one, other) -> bool:
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


# Loss


@both
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_accumulated_updates_are_those_of_one_batch(kind, smoothing, tmp_path):
    def run(size: int, parts: int):
        settings = {"per_device_train_batch_size": size, "gradient_accumulation_steps": parts}
        return trained(kind, tmp_path, label_smoothing_factor=smoothing, **settings)

    whole = run(6, 1)
    for split in (run(2, 3), run(4, 2)):
        assert logged(split) == pytest.approx(logged(whole), rel=1e-5)
        assert logged(split, "grad_norm") == pytest.approx(logged(whole, "grad_norm"), rel=1e-4)


def smoothed_loss(smoothing: float) -> float:
    """Return the loss of the fresh model over all pairs."""
    batch = collator()(encoded_pairs())
    logits = fresh_model()(**batch, skip_logits=False).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), label_smoothing=smoothing).item()


@both
@pytest.mark.parametrize(("of_config", "factor", "used"), [(0.1, 0.0, 0.1), (0.1, 0.3, 0.3), (0.0, 0.3, 0.3)])
def test_labels_are_smoothed_once(kind, of_config, factor, used, tmp_path):
    trainer = trained(kind, tmp_path, fresh_model(label_smoothing=of_config), label_smoothing_factor=factor)
    assert logged(trainer)[0] == pytest.approx(smoothed_loss(used), rel=1e-5)


def test_the_evaluation_loss_is_smoothed_by_transformers_trainer_and_not_by_ours(tmp_path):
    values = [make_trainer(kind, tmp_path, label_smoothing_factor=0.3).evaluate()["eval_loss"] for kind in TRAINERS]
    assert values == pytest.approx([smoothed_loss(0.3), smoothed_loss(0.0)], rel=1e-5)


def test_labels_that_transformers_trainer_takes_away_are_asked_for_clearly(tmp_path):
    given = {"data_collator": collator()}
    with pytest.raises(ValueError, match=r"needs the collator `DataCollatorForSeq2Seq\(tokenizer, model\)`"):
        trained(Seq2SeqTrainer, tmp_path, given=given, label_smoothing_factor=0.1)
    trained(HeedSeq2SeqTrainer, tmp_path, given=given, label_smoothing_factor=0.1)


@both
def test_noise_on_embeddings_is_there_in_training_alone(kind, tmp_path):
    plain, noisy = (trained(kind, tmp_path, **options) for options in ({}, {"neftune_noise_alpha": 5.0}))
    assert logged(noisy)[0] != pytest.approx(logged(plain)[0], rel=1e-4)
    losses = [make_trainer(kind, tmp_path, neftune_noise_alpha=alpha).evaluate()["eval_loss"] for alpha in (None, 5.0)]
    assert losses[0] == losses[1]
    assert not noisy.model.get_input_embeddings()._forward_hooks


# Memory and speed


@both
def test_gradient_checkpointing_computes_activations_again_and_the_same_gradients(kind, tmp_path):
    counts, norms = [], []
    for reentrant in (None, False, True):
        options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
        options = {} if reentrant is None else options
        with patch.object(HeedFeedForward, "forward", autospec=True, side_effect=HeedFeedForward.forward) as forward:
            norms.append(logged(trained(kind, tmp_path, **options), "grad_norm"))
        counts.append(forward.call_count)
    assert counts == [2 * 2, 2 * 2 * 2, 2 * 2 * 2]  # layers × updates, and again
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    assert norms[2] == pytest.approx(norms[0], rel=1e-5)


@both
def test_bf16_computes_in_it_and_keeps_float32_weights(kind, tmp_path):
    kinds = []
    model = fresh_model()
    # Not the head: Accelerate has the outputs of the whole model back in float32.
    model.model.encoder.layers[0].feed_forward.fc1.register_forward_hook(
        lambda module, inputs, output: kinds.append(output.dtype)
    )
    trainer = trained(kind, tmp_path, model, bf16=True)
    assert set(kinds) == {torch.bfloat16}
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert logged(trainer)[0] == pytest.approx(smoothed_loss(0.1), rel=1e-2)


def test_fp16_is_refused_on_the_cpu_where_it_would_be_ignored(tmp_path):
    with pytest.raises(ValueError, match="`fp16` must be False on the CPU"):
        make_trainer(HeedSeq2SeqTrainer, tmp_path, fp16=True)


@both
def test_a_compiled_model_trains_alike_and_is_saved_under_its_own_names(kind, tmp_path):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain = trained(kind, tmp_path)
    assert torch._dynamo.utils.counters["frames"]["ok"] == 0
    trainer = trained(kind, tmp_path, torch_compile=True, torch_compile_backend="eager", save_strategy="steps")
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0
    assert logged(trainer) == pytest.approx(logged(plain), rel=1e-5)
    saved = type(plain.model).from_pretrained(tmp_path / "checkpoint-2")
    assert saved.state_dict().keys() == plain.model.state_dict().keys()
    for name, weight in saved.state_dict().items():
        torch.testing.assert_close(weight, plain.model.state_dict()[name], rtol=0, atol=1e-5)


@both
def test_the_cache_is_emptied_as_often_as_asked_and_tokens_that_were_seen_are_counted(kind, tmp_path):
    with patch("transformers.trainer.clear_device_cache") as clear:
        trainer = trained(kind, tmp_path, torch_empty_cache_steps=1, include_num_input_tokens_seen="non_padding")
    assert clear.call_count == 2
    assert trainer.state.num_input_tokens_seen == 2 * sum(len(row["input_ids"]) for row in encoded_pairs())


# Optimizer


@both
def test_the_optimizer_its_schedule_and_its_gradients_are_those_asked_for(kind, tmp_path):
    for name, expected in {"adamw_torch": "AdamW", "adamw_torch_fused": "AdamW", "adafactor": "Adafactor"}.items():
        trainer = trained(kind, tmp_path, optim=name, max_steps=4, learning_rate=1e-2)
        optimizer = trainer.optimizer.optimizer
        assert type(optimizer).__name__ == expected
        assert bool(optimizer.defaults.get("fused")) == (name == "adamw_torch_fused")
        assert logged(trainer)[-1] < logged(trainer)[0]
    with pytest.raises(ImportError, match="bitsandbytes"):
        trained(kind, tmp_path, optim="paged_adamw_8bit")
    trainer = trained(kind, tmp_path, lr_scheduler_type="inverse_sqrt", warmup_steps=3, max_steps=8, learning_rate=0.5)
    expected = [0.5 * min(step / 3, (3 / max(step, 1)) ** 0.5) for step in range(8)]  # as the paper has it
    assert logged(trainer, "learning_rate") == pytest.approx(expected, abs=1e-6)
    model = fresh_model()
    before = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    trainer = trained(kind, tmp_path, model, optim="sgd", learning_rate=1.0, max_grad_norm=0.01, max_steps=1)
    after = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    assert (after - before).norm().item() == pytest.approx(0.01, rel=1e-3)
    assert logged(trainer, "grad_norm")[0] > 0.1


@both
def test_weights_decay_and_biases_and_norms_do_not(kind, tmp_path):
    modern = {"norm_placement": "pre", "norm_type": "rmsnorm", "activation_function": "swiglu"}
    biased = {"position_encoding": "learned", "embedding_norm": True, "output_bias": True, "attention_bias": True}
    for options in ({}, modern, biased):
        model = fresh_model(**options)
        optimizer = make_trainer(kind, tmp_path, model, weight_decay=0.1).create_optimizer()
        decays = {id(weight): group["weight_decay"] for group in optimizer.param_groups for weight in group["params"]}
        expected = {name: 0.1 if weight.dim() > 1 else 0.0 for name, weight in model.named_parameters()}
        assert {name: decays[id(weight)] for name, weight in model.named_parameters()} == expected
        assert {0.0, 0.1} == set(expected.values())


# Order, seeds, and going on


@both
def test_runs_of_one_seed_are_alike_and_of_another_seed_not(kind, tmp_path):
    def run(**options):
        return logged(trained(kind, tmp_path, fresh_model(dropout=0.2), **RANDOM | {"max_steps": 2}, **options))

    first = run(seed=1, data_seed=1)
    assert first == run(seed=1, data_seed=1)
    assert first != run(seed=2, data_seed=1)
    assert first != run(seed=1, data_seed=2)
    try:
        assert run(full_determinism=True) == run(full_determinism=True)
    finally:
        torch.use_deterministic_algorithms(False)


@both
def test_a_resumed_run_ends_with_the_same_weights_and_without_false_alarm(kind, tmp_path):
    saving = {**RANDOM, "save_strategy": "steps", "save_steps": 2}
    whole = trained(kind, tmp_path, fresh_model(dropout=0.2), **saving)
    resumed = make_trainer(kind, tmp_path, fresh_model(dropout=0.2), **saving)
    with patch("transformers.trainer.logger.warning") as warning:
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert len(logged(resumed)) == 5
    assert same_weights(resumed.model, whole.model)
    # transformers takes tied weights, which are saved once, for missing.
    assert any("missing keys" in str(call) for call in warning.call_args_list) == (kind is Seq2SeqTrainer)


class Terminated(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)  # a timer of no seconds asks for the checkpoint


@both
def test_a_terminated_run_saves_at_once_and_goes_on_from_there(kind, tmp_path):
    whole = trained(kind, tmp_path / "whole", fresh_model(dropout=0.2), **RANDOM)
    given, saving = {"callbacks": [Terminated()]}, {"enable_jit_checkpoint": True, **RANDOM}
    stopped = make_trainer(kind, tmp_path, fresh_model(dropout=0.2), given, **saving)
    managers = [getattr(callback, "jit_manager", None) for callback in stopped.callback_handler.callbacks]
    next(manager for manager in managers if manager).kill_wait = 0
    stopped.train()
    assert stopped.state.global_step < 5
    resumed = make_trainer(kind, tmp_path, fresh_model(dropout=0.2), **RANDOM)
    resumed.train(resume_from_checkpoint=True)
    assert len(logged(resumed)) == 5
    assert same_weights(resumed.model, whole.model)


@both
def test_training_stops_early_where_nothing_gets_better(kind, tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss", "save_strategy": "best"}
    given = {"callbacks": [EarlyStoppingCallback(early_stopping_patience=2)]}
    trainer = trained(kind, tmp_path, given=given, learning_rate=0.0, max_steps=9, **options)
    assert trainer.state.global_step == 3


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


# What HeedSeq2SeqTrainer refuses


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
        assert not (tmp_path / "run").exists()


def test_arguments_of_another_trainer_are_refused(tmp_path):
    with pytest.raises(ValueError, match="`args` must be Seq2SeqTrainingArguments, but is TrainingArguments instead"):
        HeedSeq2SeqTrainer(fresh_model(), TrainingArguments(output_dir=str(tmp_path), use_cpu=True))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(encoded_pairs())


def test_pairs_of_a_stream_may_be_left_unskipped(tmp_path):
    given = {"train_dataset": Stream()}
    assert trained(HeedSeq2SeqTrainer, tmp_path, given=given, ignore_data_skip=True).state.global_step == 2


@both
def test_fsdp_needs_several_processes(kind, tmp_path):
    with pytest.raises(ValueError, match="fsdp only works in distributed training"):
        make_trainer(kind, tmp_path, fsdp="full_shard")


def test_our_trainer_asks_for_no_logits_and_transformers_trainer_after_a_switch(tmp_path):
    def logits_of(kind, switch=False):
        model, kept = fresh_model(), []
        model.skips_logits_in_training = switch
        model.register_forward_hook(lambda module, inputs, outputs: kept.append("logits" in outputs))
        trained(kind, tmp_path, model, max_steps=1)
        return set(kept)

    assert logits_of(HeedSeq2SeqTrainer) == logits_of(Seq2SeqTrainer, switch=True) == {False}
    assert logits_of(Seq2SeqTrainer) == {True}
