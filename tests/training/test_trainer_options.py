"""The options of training and evaluation, datasets, collators and metrics do what they say, in either trainer."""

import os
import signal
import time
from copy import deepcopy
from types import SimpleNamespace
from unittest.mock import patch

import datasets
import evaluate
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import GenerationConfig, Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainingArguments
from transformers.trainer_callback import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_pt_utils import EvalLoopContainer

import trainer_runs
from heedful import HeedForConditionalGeneration, HeedSeq2SeqTrainer
from heedful.evaluation.translation_metric import TranslationMetric
from heedful.modeling_heed import HeedFeedForward
from heedful.versions_heed import CHECKPOINTING
from helpers import tiny_model
from memorised import PAIRS, memorised_model
from trainer_process import Stream
from trainer_runs import collator, encoded_pairs, fresh_model, joint_tokenizers, logged, make_trainer, trained

RANDOM = {"per_device_train_batch_size": 2, "train_sampling_strategy": "random", "max_steps": 5}
both = pytest.mark.parametrize("kind", trainer_runs.TRAINERS)


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
def test_labels_are_smoothed_once_however_an_update_is_accumulated(kind, tmp_path):
    for of_config, factor, used in ((0.1, 0.0, 0.1), (0.1, 0.3, 0.3), (0.0, 0.3, 0.3), (0.0, 0.0, 0.0)):
        norms = []
        for size, parts in ((6, 1), (2, 3), (4, 2)):
            split = {"per_device_train_batch_size": size, "gradient_accumulation_steps": parts, "max_steps": 1}
            model = fresh_model(label_smoothing=of_config)
            trainer = trained(kind, tmp_path, model, label_smoothing_factor=factor, **split)
            assert logged(trainer) == [pytest.approx(smoothed_loss(used), rel=1e-5)]
            norms += logged(trainer, "grad_norm")
        assert norms == pytest.approx(norms[:1] * 3, rel=1e-4)


def test_the_evaluation_loss_is_smoothed_by_transformers_trainer_which_needs_a_collator_with_the_model(tmp_path):
    values = [
        make_trainer(kind, tmp_path, label_smoothing_factor=0.3).evaluate()["eval_loss"]
        for kind in trainer_runs.TRAINERS
    ]
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
def test_activation_checkpointing_computes_activations_again_and_the_same_gradients(kind, tmp_path):
    counts, norms = [], []
    for reentrant in (None, False, True):
        options = {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": reentrant}}
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
        assert trainer_runs.same_weights(resumed, whole)
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
    for kind in trainer_runs.TRAINERS:
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


@pytest.fixture(scope="module")
def learned():
    return memorised_model(joint_tokenizers(), PAIRS)


class SameLength(evaluate.Metric):
    """A metric of one's own, as the documentation of evaluate has it: the share of outputs as long as they should."""

    def _info(self):
        features = datasets.Features({name: datasets.Value("string") for name in ("predictions", "references")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        same = [len(one) == len(other) for one, other in zip(predictions, references, strict=True)]
        return {"same_length": sum(same) / len(same)}


def scores(results) -> dict[str, float]:
    """Compute metrics as transformers' example run_translation.py does."""
    tokenizer = joint_tokenizers().target
    predictions = results.predictions[0] if isinstance(results.predictions, tuple) else results.predictions
    predictions = np.where(predictions != -100, predictions, tokenizer.pad_token_id)
    labels = np.where(results.label_ids != -100, results.label_ids, tokenizer.pad_token_id)
    texts, references = (tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in (predictions, labels))
    found = evaluate.combine([TranslationMetric(), SameLength()]).compute(predictions=texts, references=references)
    return {name: found[name] for name in ("bleu", "exact_match", "same_length")}


@both
@pytest.mark.parametrize("size", [1, 4])
def test_what_is_generated_is_scored(kind, size, learned, tmp_path):
    options = {"predict_with_generate": True, "per_device_eval_batch_size": size}
    trainer = make_trainer(kind, tmp_path, learned, {"compute_metrics": scores}, **options)
    found = trainer.evaluate()
    values = [found[f"eval_{name}"] for name in ("bleu", "exact_match", "same_length")]
    assert values == [pytest.approx(100.0), 100.0, 1.0]
    output = trainer.predict(encoded_pairs())
    assert joint_tokenizers().decode_target(output.predictions) == trainer_runs.TARGETS
    assert output.metrics["test_exact_match"] == 100.0


@both
def test_generation_takes_length_and_beams_from_the_arguments_or_the_call(kind, learned, tmp_path):
    options = {"predict_with_generate": True, "generation_max_length": 4, "generation_num_beams": 3}
    trainer = make_trainer(kind, tmp_path, learned, **options)
    generate = HeedForConditionalGeneration.generate
    with patch.object(HeedForConditionalGeneration, "generate", autospec=True, side_effect=generate) as spied:
        short = trainer.predict(encoded_pairs()).predictions
        longer = trainer.predict(encoded_pairs(), max_length=6, num_beams=2).predictions
    asked = [(call.kwargs["max_length"], call.kwargs["num_beams"]) for call in spied.call_args_list]
    assert asked == [(4, 3), (6, 2)]
    words = [((tokens >= 0) & (tokens != 0)).sum(1).max() for tokens in (short, longer)]
    assert words == [4, 6]  # the start is one


def test_generation_takes_a_config_from_the_arguments_and_what_it_leaves_open_from_the_model(learned, tmp_path):
    def predicted(kind, **settings):
        options = {"predict_with_generate": True, "generation_config": GenerationConfig(num_beams=2, **settings)}
        trainer = make_trainer(kind, tmp_path, deepcopy(learned), **options)
        return trainer.predict(encoded_pairs()).predictions, trainer.model.generation_config.num_beams

    for kind in trainer_runs.TRAINERS:
        tokens, _ = predicted(kind, max_new_tokens=3, decoder_start_token_id=1, eos_token_id=2, pad_token_id=0)
        assert ((tokens >= 0) & (tokens != 0)).sum(1).max() == 1 + 3
    with pytest.raises(ValueError, match="decoder_start_token_id"):
        predicted(Seq2SeqTrainer)
    # One of them is longer than the 20 tokens at which generate() stops by itself.
    assert max(len(row["labels"]) for row in encoded_pairs()) > 20
    tokens, beams = predicted(HeedSeq2SeqTrainer)
    assert (joint_tokenizers().decode_target(tokens), beams) == (trainer_runs.TARGETS, 2)


@both
def test_generation_uses_the_cache_during_training_and_after_it(kind, tmp_path):
    trainer, widths = trained(kind, tmp_path, predict_with_generate=True), []
    trainer.save_model(tmp_path / "saved")
    for model in (trainer.model, HeedForConditionalGeneration.from_pretrained(tmp_path / "saved")):
        model.model.decoder.register_forward_pre_hook(
            lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        model.generate(torch.tensor([[20, 30, 2]]), max_new_tokens=4, min_new_tokens=4)
    assert widths == [1] * 8


@both
@pytest.mark.parametrize(("metric", "pick"), [("loss", min), ("exact_match", max), ("eval_short_loss", min)])
def test_the_best_checkpoint_is_kept_and_loaded(kind, metric, pick, tmp_path):
    values = iter([3.0, 9.0, 5.0, 4.0])
    given = {
        "exact_match": {"compute_metrics": lambda results: {"exact_match": next(values)}},
        "eval_short_loss": {"eval_dataset": {"short": encoded_pairs()[:2], "long": encoded_pairs()[2:]}},
    }
    options = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    options |= {"save_total_limit": 2, "load_best_model_at_end": True, "metric_for_best_model": metric}
    # A rate at which updates make the loss worse.
    options |= {"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "learning_rate": 1.0}
    trainer = trained(kind, tmp_path, given=given.get(metric), **options)
    seen = logged(trainer, f"eval_{metric.removeprefix('eval_')}")
    best = 1 + seen.index(pick(seen))
    assert trainer.state.best_global_step == best < len(seen) == 4
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [f"checkpoint-{best}", "checkpoint-4"]
    saved = HeedForConditionalGeneration.from_pretrained(tmp_path / f"checkpoint-{best}")
    assert all(map(torch.equal, saved.state_dict().values(), trainer.model.state_dict().values()))


@both
def test_prediction_of_the_loss_alone_or_of_logits_that_are_cut_down(kind, tmp_path):
    given = {"compute_metrics": lambda results: pytest.fail("metrics were computed")}
    trainer = make_trainer(kind, tmp_path, given=given, prediction_loss_only=True, predict_with_generate=True)
    assert trainer.evaluate()["eval_loss"] > 0
    assert trainer.predict(encoded_pairs()).predictions is None
    given = {
        "preprocess_logits_for_metrics": lambda outputs, labels: outputs[0].argmax(-1),
        "compute_metrics": lambda results: {"accuracy": float((results.predictions == results.label_ids).mean())},
    }
    trainer = make_trainer(kind, tmp_path, given=given)
    assert trainer.predict(encoded_pairs()).predictions.shape == (6, max(len(r["labels"]) for r in encoded_pairs()))
    assert 0 <= trainer.evaluate()["eval_accuracy"] < 1


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


@both
def test_predictions_are_moved_to_memory_as_often_as_asked(kind, tmp_path):
    found, move = [], EvalLoopContainer.to_cpu_and_numpy
    for every in (None, 2):
        trainer = make_trainer(kind, tmp_path, per_device_eval_batch_size=1, eval_accumulation_steps=every)
        with patch.object(EvalLoopContainer, "to_cpu_and_numpy", autospec=True, side_effect=move) as spied:
            found.append((trainer.predict(encoded_pairs()).predictions[0], spied.call_count))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert found[1][1] - found[0][1] == 4 * 3  # containers × moves


def test_another_evaluation_dataset_is_evaluated_where_workers_persist(tmp_path):
    options = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    trainer = make_trainer(HeedSeq2SeqTrainer, tmp_path, **options)
    first, other = (trainer.evaluate(rows)["eval_loss"] for rows in (None, encoded_pairs()[:1]))
    assert other == pytest.approx(one_loss_per_pair(trainer.model)[0], rel=1e-5)
    assert other != pytest.approx(first, rel=1e-3)


def columns() -> datasets.Dataset:
    """Return a table of texts, as they come from the Hub, with the encoded pairs beside them."""

    def encode(batch):
        encoded = joint_tokenizers().source(batch["ko"], text_target=batch["en"])
        return {name: encoded[name] for name in ("input_ids", "attention_mask", "labels")}

    texts = {"ko": trainer_runs.SOURCES, "en": trainer_runs.TARGETS}
    return datasets.Dataset.from_dict(texts).map(encode, batched=True)


@both
def test_every_form_of_dataset_trains_and_evaluates_like_a_list(kind, tmp_path):
    arguments = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "max_steps": 3}
    listed = trained(kind, tmp_path, **arguments)
    loss = listed.evaluate()["eval_loss"]
    mapped = columns()
    for rows in (mapped, mapped.with_format("torch"), mapped.to_iterable_dataset(num_shards=2)):
        trainer = trained(kind, tmp_path, given={"train_dataset": rows, "eval_dataset": rows}, **arguments)
        assert logged(trainer) == pytest.approx(logged(listed), rel=1e-5)
        assert len(set(logged(trainer))) == 3
        assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-5)
    # A shuffled stream comes in another order every epoch.
    shuffled = mapped.to_iterable_dataset().shuffle(seed=3, buffer_size=6)
    options = {"per_device_train_batch_size": 1, "max_steps": 12, "learning_rate": 0.0}
    losses = logged(trained(kind, tmp_path, given={"train_dataset": shuffled}, **options))
    assert sorted(losses[:6]) == pytest.approx(sorted(losses[6:]), rel=1e-6)
    assert losses[:6] != pytest.approx(losses[6:], rel=1e-6)
    # Texts that are left in it need a collator for them.
    with pytest.raises(ValueError, match="Unable to create tensor"):
        trained(kind, tmp_path, given={"train_dataset": mapped}, remove_unused_columns=False)


def test_batches_left_over_at_the_end_of_a_stream_begin_the_next_update(tmp_path):
    arguments = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 5}
    # Three batches an epoch: as those of a list that holds them twice.
    listed = trained(HeedSeq2SeqTrainer, tmp_path, given={"train_dataset": encoded_pairs() * 2}, **arguments)
    given = {"train_dataset": columns().to_iterable_dataset()}
    streamed = trained(HeedSeq2SeqTrainer, tmp_path, given=given, **arguments)
    assert logged(streamed) == pytest.approx(logged(listed), rel=1e-5)
    assert logged(streamed, "grad_norm") == pytest.approx(logged(listed, "grad_norm"), rel=1e-4)
    # transformers' trainer adds them up.
    added = trained(Seq2SeqTrainer, tmp_path, given=given, **arguments)
    assert logged(added)[1] == pytest.approx(2 * logged(listed)[1], rel=0.1)
    with pytest.raises(ValueError, match="must hold enough pairs for one update"):
        trained(HeedSeq2SeqTrainer, tmp_path, given=given, gradient_accumulation_steps=2)


@both
def test_padding_on_the_left_or_to_a_multiple_and_decoder_inputs_of_the_collator_change_nothing(kind, tmp_path):
    def padded_on_the_left(rows):
        batch = {**on_the_left()([{"input_ids": row["input_ids"]} for row in rows])}
        return {**batch, "labels": collator()(rows)["labels"]}

    assert padded_on_the_left(encoded_pairs())["input_ids"][3, 0] == 0
    batch = collator(pad_to_multiple_of=16, model=fresh_model())(encoded_pairs())
    assert {batch[name].shape[1] % 16 for name in ("input_ids", "labels", "decoder_input_ids")} == {0}
    collators = collator(), collator(pad_to_multiple_of=16), collator(model=fresh_model()), padded_on_the_left
    losses = [logged(trained(kind, tmp_path, given={"data_collator": collate})) for collate in collators]
    for found in losses[1:]:
        assert found == pytest.approx(losses[0], rel=1e-5)


def on_the_left():
    collate = collator()
    collate.tokenizer = type(collate.tokenizer)(
        tokenizer_object=collate.tokenizer.backend_tokenizer, pad_token="<pad>", padding_side="left"
    )
    return collate


@both
def test_labels_may_not_be_padded_on_the_left(kind, tmp_path):
    collate, model = on_the_left(), fresh_model()
    assert collate(encoded_pairs())["labels"][-2, 0] == -100
    for collate.model in (None, model):
        with pytest.raises(ValueError, match="`labels` must be padded on the right"):
            trained(kind, tmp_path, model, {"data_collator": collate})


@both
def test_a_table_that_a_users_forward_makes_in_evaluation_can_be_trained_with(kind, tmp_path):
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
    trainer = trained(kind, tmp_path, Gated(fresh_model(label_smoothing=0.0).config), given, **arguments)
    assert logged(trainer, "eval_rows") == [6, 6, 6]


@pytest.mark.parametrize("with_model", [False, True])
def test_sources_without_labels_are_translated_as_with_them(with_model, tmp_path):
    model = fresh_model()
    given = {"data_collator": collator(model=model) if with_model else None, "processing_class": joint_tokenizers()}
    trainer = make_trainer(HeedSeq2SeqTrainer, tmp_path, model, given, predict_with_generate=True)
    sources = [{"input_ids": row["input_ids"]} for row in encoded_pairs()]
    found, expected = trainer.predict(sources), trainer.predict(encoded_pairs())
    assert np.array_equal(found.predictions, expected.predictions)
    assert found.label_ids is None
    trainer.train_dataset = sources
    with pytest.raises(ValueError, match="A batch must hold `labels`, but holds input_ids, attention_mask instead"):
        trainer.train()


@pytest.mark.parametrize("with_model", [False, True])
@pytest.mark.parametrize("empty", [("labels",), ("input_ids",), ("input_ids", "labels")], ids=str)
def test_an_empty_row_alone_is_as_beside_others(empty, with_model, tmp_path):
    rows = encoded_pairs()[:4]
    rows[1] = rows[1] | {name: [] for name in empty}
    found = []
    for size in (1, 4):
        model = fresh_model()
        sizes = {"per_device_eval_batch_size": size, "per_device_train_batch_size": size, "max_steps": 1}
        given = {"train_dataset": rows, "data_collator": collator(model=model) if with_model else collator()}
        options = {**sizes, "gradient_accumulation_steps": 4 // size, "predict_with_generate": True}
        trainer = make_trainer(HeedSeq2SeqTrainer, tmp_path, model, given, **options)
        loss = trainer.evaluate(rows)["eval_loss"]
        tokens = trainer.predict(rows, max_new_tokens=5, min_new_tokens=5).predictions
        trainer.train()
        found.append((loss, tokens.tolist(), trainer.state.log_history[-1]["train_loss"]))
    assert found[0][1] == found[1][1]
    assert found[0][::2] == pytest.approx(found[1][::2], rel=1e-6)
