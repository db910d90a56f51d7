"""Train Marian with transformers' `Seq2SeqTrainer` for a Heed run's minutes, and score both.

    python scripts/benchmarks/trainer.py runs/ko-en

It has the run's pairs, tokenizer, sizes, dropout, label smoothing, peak and warm-up of a linear learning rate, and
padded tokens per update; batches are grouped by length. A measurement decides the number of steps.
"""

import json
import os
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from datasets import Dataset
from peers import marian_like
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments, set_seed

from heedful.data.epochs.corpus import Corpus, StoredRows
from heedful.data.sources import read_pairs
from heedful.decoding.loading import load_model
from heedful.decoding.translation import Translator
from heedful.evaluation.metrics import score_translations
from heedful.host import keep_freed_memory
from heedful.training.preparation import prepare_corpus
from heedful.training.processes.devices import runs_on_cpu
from heedful.training.recipe import Recipe
from heedful.training.recipe_file import read_recipe

MEASURED_STEPS = 60


def new_marian(run: Path) -> Any:
    """Return a Marian of the run's size with its class's random weights."""
    model = marian_like(load_model(run / "model"))
    fresh = type(model)(model.config)
    fresh.config.bos_token_id = model.config.decoder_start_token_id
    fresh.generation_config = model.generation_config
    return fresh


def train(run: Path, recipe: Recipe, corpus: Corpus, steps: int) -> tuple[Any, float]:
    """Return a Marian trained for `steps` steps, and its seconds."""
    set_seed(recipe.seed)
    model, rows = new_marian(run), corpus.training.rows
    columns = [rows[number] for number in range(len(rows))]
    tokens = (rows.source_lengths.mean() + rows.target_lengths.mean()) * 1.02  # grouping by length leaves some padding
    settings = recipe.optimization
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(run.with_name("marian")),
        max_steps=steps,
        per_device_train_batch_size=max(1, round(settings.tokens_per_update / tokens)),
        learning_rate=settings.learning_rate,
        warmup_steps=min(settings.warmup_updates, steps // 10),
        lr_scheduler_type="linear",
        adam_beta2=settings.beta2,
        label_smoothing_factor=0.1,
        train_sampling_strategy="group_by_length",
        save_strategy="no",
        report_to=[],
        use_cpu=runs_on_cpu(settings.device),
        bf16=settings.mixed_precision == "bf16",
        seed=recipe.seed,
        dataloader_pin_memory=False,
    )
    collator = DataCollatorForSeq2Seq(corpus.tokenizers.source, model=model)
    trainer = Seq2SeqTrainer(model, arguments, collator, Dataset.from_list(columns))
    start = time.perf_counter()
    trainer.train()
    return model.eval(), time.perf_counter() - start


def score(model: Any, recipe: Recipe, corpus: Corpus) -> dict[str, dict[str, float]]:
    """Return BLEU and chrF on each test set, decoded as in the recipe."""
    translator, found = Translator(model, corpus.tokenizers, engine="generate"), {}
    for name, location in recipe.data.located.test.items():
        pairs = list(read_pairs(location, recipe.data.source, recipe.data.target, split=name))
        search = {"num_beams": recipe.decoding.num_beams, "max_new_tokens": recipe.decoding.max_length}
        texts = [best.text for best, *_ in translator.translate([pair["source"] for pair in pairs], **search)]
        scores = score_translations(texts, [pair["target"] for pair in pairs], tokenize=recipe.decoding.bleu_tokenizer)
        found[name] = {key: round(scores[key], 2) for key in ("bleu", "chrf")}
    return found


def main(run: Path, threads: Annotated[int, typer.Option(help="Minutes. Default: those of the run.")] = 1):
    """Print both models' scores and conditions."""
    torch.set_num_threads(threads)
    keep_freed_memory()  # as in Heed's loop
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    recipe = read_recipe(run / "recipe.yaml")
    corpus = prepare_corpus(recipe, run / "tokenizer")
    assert isinstance(corpus.training, StoredRows)
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    seconds, updates = log[-1]["seconds"], log[-1]["update"]
    _, measured = train(run, recipe, corpus, MEASURED_STEPS)
    model, taken = train(run, recipe, corpus, round(seconds / measured * MEASURED_STEPS))
    model.save_pretrained(run.with_name("marian"))
    ours = json.loads((run / "model" / "metrics.json").read_text())
    shown = {name: {key: round(ours[name][key], 2) for key in ("bleu", "chrf")} for name in recipe.data.test}
    print(json.dumps({"heed": shown, "updates": updates, "minutes": round(seconds / 60, 1)}))
    print(json.dumps({"marian": score(model, recipe, corpus), "minutes": round(taken / 60, 1)}))


if __name__ == "__main__":
    typer.run(main)
