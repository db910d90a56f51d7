"""What transformers' own examples/pytorch/translation/run_translation.py does, done with folders of Heed's."""

from pathlib import Path

import numpy as np
import pytest
import transformers
from transformers.trainer_utils import get_last_checkpoint

from heedful import Translator
from heedful.evaluation import translation_metric
from helpers import FAMILIES, tiny_model
from memorised import PAIRS, saved_in
from trainer_runs import joint_tokenizers

LONGEST = 32


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place, tokenizers = tmp_path_factory.mktemp("translation"), joint_tokenizers()
    for family in FAMILIES:
        sizes = {"vocab_size": len(tokenizers.source), "encoder_layers": 1, "decoder_layers": 1}
        sizes |= {"max_position_embeddings": LONGEST} if family == "transformer" else {}
        saved_in(place / family, tiny_model(family=family, **sizes, **tokenizers.special_ids()), tokenizers)
    return place


def trainer_of(place: Path, family: str, output: Path, pads_rows: bool, **arguments):
    """Return a trainer of what the script would make of the folder, and its rows, which have a prefix each."""
    folder = str(place / family)
    options = {"trust_remote_code": True, "cache_dir": None, "revision": "main", "token": None}
    config = transformers.AutoConfig.from_pretrained(folder, **options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, use_fast=True, **options)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, from_tf=False, config=config, **options)
    tokenizer.add_tokens(["번역:"])
    assert len(tokenizer) > model.get_input_embeddings().weight.shape[0]
    model.resize_token_embeddings(len(tokenizer))
    assert model.config.decoder_start_token_id is not None
    pad = tokenizer.pad_token_id
    form = {"max_length": LONGEST, "padding": "max_length" if pads_rows else False, "truncation": True}
    rows = [
        {**tokenizer(f"번역: {source}", **form), "labels": tokenizer(text_target=target, **form)["input_ids"]}
        for source, target in PAIRS.items()
    ]
    for row in rows if pads_rows else []:
        row["labels"] = [-100 if token == pad else token for token in row["labels"]]

    def scores(predicted):
        ids = predicted.predictions, predicted.label_ids
        texts = [tokenizer.batch_decode(np.where(i != -100, i, pad), skip_special_tokens=True) for i in ids]
        references = [[text] for text in texts[1]]
        metric = translation_metric.TranslationMetric()
        return {"bleu": metric.compute(predictions=texts[0], references=references)["bleu"]}

    collator = transformers.DataCollatorForSeq2Seq(tokenizer, model=model, pad_to_multiple_of=8)
    settings = {"per_device_train_batch_size": 3, "per_device_eval_batch_size": 4, "learning_rate": 1e-3, **arguments}
    settings |= {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_steps": 2}
    # Smoothing needs the `decoder_input_ids` that only the collator of batches makes.
    settings |= {"predict_with_generate": True, "label_smoothing_factor": 0.0 if pads_rows else 0.1}
    trainer = transformers.Seq2SeqTrainer(
        model=model,
        args=transformers.Seq2SeqTrainingArguments(str(output), **settings),
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=tokenizer,
        data_collator=transformers.default_data_collator if pads_rows else collator,
        compute_metrics=scores,
    )
    return trainer, rows


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pads_rows", [False, True])
def test_a_folder_is_trained_evaluated_and_saved_as_the_script_does_it(place, tmp_path, family, pads_rows):
    trainer, rows = trainer_of(place, family, tmp_path, pads_rows, max_steps=2)
    trained = trainer.train()
    trainer.save_model()
    trainer.save_metrics("train", {**trained.metrics, "train_samples": len(rows)})
    trainer.save_state()
    metrics = trainer.evaluate(max_length=LONGEST, num_beams=2, metric_key_prefix="eval")
    assert {"eval_loss", "eval_bleu"} <= set(metrics)
    trainer.save_metrics("eval", metrics)
    predicted = trainer.predict(rows, metric_key_prefix="predict", max_length=LONGEST, num_beams=1)
    assert len(predicted.predictions) == len(PAIRS)
    assert 0 <= predicted.metrics["predict_bleu"] <= 100
    about = {"finetuned_from": str(place / family), "tasks": "translation", "language": ["ko", "en"]}
    trainer.create_model_card(**about, dataset_tags="pairs", dataset="pairs", dataset_args="all")
    assert "pairs" in (tmp_path / "README.md").read_text(encoding="utf-8")
    translator = Translator.from_pretrained(str(tmp_path))
    assert len(translator.translate(["번역: 네."])) == 1
    # The output folder is there now, and the script goes on from what it finds in it.
    trainer, _ = trainer_of(place, family, tmp_path, pads_rows, max_steps=3)
    assert trainer.train(resume_from_checkpoint=get_last_checkpoint(str(tmp_path))).global_step == 3
