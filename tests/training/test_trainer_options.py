"""The options of training that people set: each does what it says, with transformers' trainer and with ours."""

import os
import signal
import time
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
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
from helpers import tiny_model
from trainer_process import Stream
from trainer_runs import TRAINERS, collator, encoded_pairs, fresh_model, logged, make_trainer, same_weights, trained

RANDOM = {"per_device_train_batch_size": 2, "train_sampling_strategy": "random", "max_steps": 5}
both = pytest.mark.parametrize("kind", TRAINERS)


@both
@pytest.mark.parametrize(("smoothing", "family"), [(0.0, "transformer"), (0.2, "transformer"), (0.0, "recurrent")])
def test_accumulated_updates_are_those_of_one_batch(kind, smoothing, family, tmp_path):
    def run(size: int, parts: int):
        settings = {"per_device_train_batch_size": size, "gradient_accumulation_steps": parts}
        model = tiny_model(family=family, vocab_size=272)
        return trained(kind, tmp_path, model, label_smoothing_factor=smoothing, **settings)

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
def test_labels_are_smoothed_once(kind, tmp_path):
    for of_config, factor, used in ((0.1, 0.0, 0.1), (0.1, 0.3, 0.3), (0.0, 0.3, 0.3)):
        model = fresh_model(label_smoothing=of_config)
        trainer = trained(kind, tmp_path, model, label_smoothing_factor=factor, max_steps=1)
        assert logged(trainer) == [pytest.approx(smoothed_loss(used), rel=1e-5)]


def test_the_evaluation_loss_is_smoothed_by_transformers_trainer_which_needs_a_collator_with_the_model(tmp_path):
    values = [make_trainer(kind, tmp_path, label_smoothing_factor=0.3).evaluate()["eval_loss"] for kind in TRAINERS]
    assert values == pytest.approx([smoothed_loss(0.3), smoothed_loss(0.0)], rel=1e-5)
    given = {"data_collator": collator()}
    with pytest.raises(ValueError, match=r"needs the collator `DataCollatorForSeq2Seq\(tokenizer, model\)`"):
        trained(Seq2SeqTrainer, tmp_path, given=given, label_smoothing_factor=0.1)
    trained(HeedSeq2SeqTrainer, tmp_path, given=given, label_smoothing_factor=0.1)


@both
def test_noise_on_embeddings_is_there_in_training_alone(kind, tmp_path):
    trainers = [make_trainer(kind, tmp_path, neftune_noise_alpha=alpha, max_steps=1) for alpha in (None, 5.0)]
    losses = [trainer.evaluate()["eval_loss"] for trainer in trainers]
    assert losses[0] == losses[1]
    plain, noisy = (trainer.train().training_loss for trainer in trainers)
    assert noisy != pytest.approx(plain, rel=1e-4)
    assert not trainers[1].model.get_input_embeddings()._forward_hooks


@both
def test_gradient_checkpointing_computes_activations_again_and_the_same_gradients(kind, tmp_path):
    counts, norms = [], []
    for reentrant in (None, False, True):
        options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
        with patch.object(HeedFeedForward, "forward", autospec=True, side_effect=HeedFeedForward.forward) as forward:
            trainer = trained(kind, tmp_path, max_steps=1, **({} if reentrant is None else options))
        norms += logged(trainer, "grad_norm")
        counts.append(forward.call_count)
    assert counts == [2, 4, 4]  # layers, and again
    assert norms == pytest.approx(norms[:1] * 3, rel=1e-5)


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


@both
def test_a_compiled_model_trains_alike_and_is_saved_under_its_own_names(kind, tmp_path):
    frames = torch._dynamo.utils.counters["frames"]
    torch._dynamo.reset()
    frames.clear()
    plain = trained(kind, tmp_path)
    assert frames["ok"] == 0
    trainer = trained(kind, tmp_path, torch_compile=True, torch_compile_backend="eager", save_strategy="steps")
    assert frames["ok"] > 0
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


@both
def test_the_optimizer_its_schedule_and_its_gradients_are_those_asked_for(kind, tmp_path):
    for name, expected in {"adamw_torch": "AdamW", "adamw_torch_fused": "AdamW", "adafactor": "Adafactor"}.items():
        trainer = trained(kind, tmp_path, optim=name, learning_rate=1e-2)
        optimizer = trainer.optimizer.optimizer
        assert type(optimizer).__name__ == expected
        assert bool(optimizer.defaults.get("fused")) == (name == "adamw_torch_fused")
        assert logged(trainer)[-1] < logged(trainer)[0]
    with pytest.raises(ImportError, match="bitsandbytes"):
        trained(kind, tmp_path, optim="paged_adamw_8bit")
    trainer = trained(kind, tmp_path, lr_scheduler_type="inverse_sqrt", warmup_steps=2, max_steps=5, learning_rate=0.5)
    expected = [0.5 * min(step / 2, (2 / max(step, 1)) ** 0.5) for step in range(5)]  # as the paper has it
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
        for name, weight in model.named_parameters():
            assert decays[id(weight)] == (0.1 if weight.dim() > 1 else 0.0), name


@both
def test_runs_of_one_seed_are_alike_and_of_another_seed_not(kind, tmp_path):
    def run(**options):
        options |= RANDOM | {"max_steps": 2}
        return logged(trained(kind, tmp_path, fresh_model(dropout=0.2), **options))

    first = run(seed=1, data_seed=1)
    assert first == run(seed=1, data_seed=1)
    assert first not in (run(seed=2, data_seed=1), run(seed=1, data_seed=2))
    try:
        assert run(full_determinism=True) == run(full_determinism=True)
    finally:
        torch.use_deterministic_algorithms(False)


class Terminated(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)  # a timer of no seconds asks for the checkpoint


@both
def test_a_run_is_resumed_to_the_same_weights_without_false_alarm_also_where_it_was_terminated(kind, tmp_path):
    def make(name, *callbacks, **more):
        given = {"callbacks": list(callbacks)}
        return make_trainer(kind, tmp_path / name, fresh_model(dropout=0.2), given, **RANDOM, **more)

    saving = {"save_strategy": "steps", "save_steps": 2}
    whole = make("whole", **saving)
    whole.train()
    stopped = make("stopped", Terminated(), enable_jit_checkpoint=True)
    managers = [getattr(callback, "jit_manager", None) for callback in stopped.callback_handler.callbacks]
    next(manager for manager in managers if manager).kill_wait = 0
    stopped.train()  # saves at once
    assert stopped.state.global_step < 5
    for name, checkpoint, more in (("whole", str(tmp_path / "whole/checkpoint-2"), saving), ("stopped", True, {})):
        resumed = make(name, **more)
        with patch("transformers.trainer.logger.warning") as warning:
            resumed.train(resume_from_checkpoint=checkpoint)
        assert len(logged(resumed)) == 5
        assert same_weights(resumed, whole)
        # transformers takes tied weights, which are saved once, for missing.
        assert any("missing keys" in str(call) for call in warning.call_args_list) == (kind is Seq2SeqTrainer)


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
    with pytest.raises(ValueError, match="`fp16` must be False on the CPU"):
        make_trainer(HeedSeq2SeqTrainer, tmp_path / "run", fp16=True)
    assert not (tmp_path / "run").exists()
    for kind in TRAINERS:
        with pytest.raises(ValueError, match="fsdp only works in distributed training"):
            make_trainer(kind, tmp_path, fsdp="full_shard")
    # But pairs of a stream may be left unskipped.
    given = {"train_dataset": Stream(encoded_pairs())}
    assert trained(HeedSeq2SeqTrainer, tmp_path, given=given, ignore_data_skip=True).state.global_step == 2


def test_our_trainer_asks_for_no_logits_and_transformers_trainer_after_a_switch(tmp_path):
    def logits_of(kind, switch=False):
        model, kept = fresh_model(), []
        model.skips_logits_in_training = switch
        model.register_forward_hook(lambda module, inputs, outputs: kept.append("logits" in outputs))
        trained(kind, tmp_path, model, max_steps=1)
        return set(kept)

    assert logits_of(HeedSeq2SeqTrainer) == logits_of(Seq2SeqTrainer, switch=True) == {False}
    assert logits_of(Seq2SeqTrainer) == {True}
