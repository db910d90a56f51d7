"""Train Heed from a recipe, then Marian with Seq2SeqTrainer on the same pairs for the same time, and score both.

    python scripts/benchmarks/minutes.py ko-en data.folder=path/to/ko_en optimization.max_updates=1200

The recipe sets both models' sizes, optimization and decoding; its keys follow as for `heedful train`. Marian has
Heed's tokenizer, pairs, dropout, label smoothing, schedule, precision and average pairs per update, Adam, its own
initial weights, and transformers' faster options: `group_by_length`, the plain kernel, and kept freed memory. The time
of its first steps decides how many fit into Heed's minutes. `--learning-rate` is Marian's peak, if different from
Heed's, as for a recipe with Muon; `resume=true` keeps a finished run of Heed. The schedule must exist in transformers.
Each row is a model on a test set.
"""

import math
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from harness import Json, Row, Threads, begin, report
from transformers import (
    DataCollatorForSeq2Seq,
    MarianConfig,
    MarianMTModel,
    PrinterCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)

from heedful import Translator
from heedful.conversion.families import COPIED_FIELDS
from heedful.data.epochs.corpus import Corpus
from heedful.data.sources import read_pairs
from heedful.decoding.loading import load_model
from heedful.training.loop.validation import score_pairs
from heedful.training.processes.devices import make_accelerator
from heedful.training.publication import with_decoding
from heedful.training.recipe import Recipe
from heedful.training.recipe_file import read_recipe
from heedful.training.run import train

# `group_by_length` sorts this many batches, longest first. The second group decides the number of steps: the first one
# warms up.
SORTED = 50


class Clock(TrainerCallback):
    """Records the ends of steps, and stops a training after its time."""

    def __init__(self, seconds: float):
        self.seconds, self.ends = seconds, [time.perf_counter()]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the time."""
        self.ends.append(time.perf_counter())
        control.should_training_stop |= self.ends[-1] - self.ends[0] > self.seconds


def marian_trained(recipe: Recipe, corpus: Corpus, config: Any, seconds: float, steps: int, rate: float) -> Any:
    """Train a Marian model with a Heed config's sizes; return it and the end times of its steps."""
    rows = [row for update in corpus.training.updates(0) for bucket in update for row in bucket]
    sizes = {name: getattr(config, name) for name in (*COPIED_FIELDS, "vocab_size", "bos_token_id")}
    settings = recipe.optimization
    model = MarianMTModel(MarianConfig(**sizes, forced_eos_token_id=None, attn_implementation="eager"))
    tokens = sum(len(row["input_ids"]) + len(row["labels"]) for row in rows)
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(recipe.folder / "marian"),
        max_steps=steps,
        per_device_train_batch_size=round(settings.tokens_per_update * len(rows) / tokens),
        train_sampling_strategy="group_by_length",
        learning_rate=rate,
        lr_scheduler_type=settings.schedule,
        warmup_steps=round(steps * settings.warmup_updates / settings.max_updates),
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_epsilon=settings.epsilon,
        max_grad_norm=settings.max_grad_norm or 0.0,
        label_smoothing_factor=config.label_smoothing,
        bf16=settings.mixed_precision == "bf16",
        seed=recipe.seed,
        use_cpu=True,
        dataloader_pin_memory=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    collator = DataCollatorForSeq2Seq(corpus.tokenizers.source, model=model)
    trainer = Seq2SeqTrainer(model=model, args=arguments, train_dataset=rows, data_collator=collator)
    trainer.remove_callback(PrinterCallback)
    clock = Clock(seconds)
    trainer.add_callback(clock)
    trainer.train()
    return model.eval(), clock.ends


def translation_scores(model: Any, recipe: Recipe, corpus: Corpus) -> dict[str, dict[str, Any]]:
    """Return a model's scores on each of the recipe's test sets."""
    translator, data = Translator(model, corpus.tokenizers), recipe.data
    accelerator, budget = make_accelerator(recipe.optimization), recipe.optimization.micro_batch_tokens
    scoring = {"metrics": ("bleu", "chrf"), "tokenize": recipe.decoding.bleu_tokenizer}
    pairs = {
        name: list(read_pairs(location, data.source, data.target, split=name))
        for name, location in data.located.test.items()
    }
    return {
        name: score_pairs(translator, each, accelerator, scoring, token_budget=budget) for name, each in pairs.items()
    }


def measured(recipe: Recipe, rate: float | None) -> Iterator[Row]:
    """Yield the scores of both models."""
    heed = train(recipe)
    corpus, seconds, config = heed.corpus, heed.progress.seconds, load_model(heed.folder).config
    rate = recipe.optimization.learning_rate if rate is None else rate
    _, ends = marian_trained(recipe, corpus, config, math.inf, 2 * SORTED, rate)
    steps = int(seconds * SORTED / (ends[-1] - ends[-1 - SORTED]))
    marian, ends = marian_trained(recipe, corpus, config, seconds, steps, rate)
    marian.generation_config = with_decoding(marian.generation_config, recipe.decoding)
    found = translation_scores(marian, recipe, corpus)
    runs = {
        "heed": (heed.parameters, seconds, heed.progress.update, heed.metrics),
        "marian": (marian.num_parameters(), ends[-1] - ends[0], len(ends) - 1, found),
    }
    for name, (parameters, seconds, updates, metrics) in runs.items():
        row = {"model": name, "parameters": parameters, "minutes": round(seconds / 60, 2), "updates": updates}
        for test in recipe.data.test:
            scores = {key: round(metrics[test][key], 2) for key in ("bleu", "chrf")}
            yield row | {"test": test, **scores}


def main(
    recipe: Annotated[str, typer.Argument(help="A recipe with one vocabulary for both sides.")],
    changes: Annotated[list[str] | None, typer.Argument(help="Changed recipe keys, as key=value.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Marian's peak.")] = None,
    threads: Threads = 1,
    json: Json = None,
):
    """Print a line for each model and test set."""
    begin(threads)
    report(measured(read_recipe(recipe, changes), learning_rate), json)


if __name__ == "__main__":
    typer.run(main)
