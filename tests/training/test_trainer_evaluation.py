"""The options of evaluation, the kinds of datasets and collators, and metrics, with either trainer."""

from copy import deepcopy
from unittest.mock import patch

import datasets
import evaluate
import numpy as np
import pytest
import torch
from transformers import GenerationConfig, Seq2SeqTrainer
from transformers.trainer_pt_utils import EvalLoopContainer

from heedful import HeedForConditionalGeneration, HeedSeq2SeqTrainer
from heedful.evaluation.translation_metric import TranslationMetric
from memorised import PAIRS, memorised_model
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
    trained,
)

both = pytest.mark.parametrize("kind", TRAINERS)


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
    assert joint_tokenizers().decode_target(output.predictions) == TARGETS
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

    for kind in TRAINERS:
        tokens, _ = predicted(kind, max_new_tokens=3, decoder_start_token_id=1, eos_token_id=2, pad_token_id=0)
        assert ((tokens >= 0) & (tokens != 0)).sum(1).max() == 1 + 3
    with pytest.raises(ValueError, match="decoder_start_token_id"):
        predicted(Seq2SeqTrainer)
    # One of them is longer than the 20 tokens at which generate() stops by itself.
    assert max(len(row["labels"]) for row in encoded_pairs()) > 20
    tokens, beams = predicted(HeedSeq2SeqTrainer)
    assert (joint_tokenizers().decode_target(tokens), beams) == (TARGETS, 2)


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
def test_metrics_are_given_sources_and_the_loss_of_every_pair(size, by_batch, tmp_path):
    model = fresh_model().eval()
    losses, sources = [], []

    def note(results, compute_result=True):
        losses.extend(float(loss) for loss in results.losses)
        inputs = results.inputs["input_ids"] if by_batch else results.inputs
        sources.extend([int(i) for i in row if i > 0] for row in inputs)
        return {"count": len(results.predictions)}

    options = {"include_for_metrics": ["inputs", "loss"], "batch_eval_metrics": by_batch}
    options |= {"per_device_eval_batch_size": size}
    make_trainer(HeedSeq2SeqTrainer, tmp_path, model, {"compute_metrics": note}, **options).evaluate()
    assert losses == pytest.approx(one_loss_per_pair(model), rel=1e-5)
    assert sources == [row["input_ids"] for row in encoded_pairs()]


@both
def test_metrics_are_summed_up_over_batches(kind, tmp_path):
    seen = []

    def count(results, compute_result):
        seen.append((len(results.predictions), compute_result))
        return {"count": sum(number for number, _ in seen)} if compute_result else {}

    options = {"batch_eval_metrics": True, "predict_with_generate": True, "per_device_eval_batch_size": 4}
    trainer = make_trainer(kind, tmp_path, given={"compute_metrics": count}, **options)
    assert trainer.evaluate()["eval_count"] == 6
    assert seen == [(4, False), (2, True)]


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
        tokenizers = joint_tokenizers()
        encoded = tokenizers.source(batch["ko"], text_target=batch["en"])
        return {name: encoded[name] for name in ("input_ids", "attention_mask", "labels")}

    return datasets.Dataset.from_dict({"ko": SOURCES, "en": TARGETS}).map(encode, batched=True)


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
@pytest.mark.parametrize("with_model", [False, True])
def test_labels_may_not_be_padded_on_the_left(kind, with_model, tmp_path):
    collate, model = on_the_left(), fresh_model()
    assert collate(encoded_pairs())["labels"][-2, 0] == -100
    collate.model = model if with_model else None
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
