"""Measure the padding in batches, and its effect on whole training epochs on the CPU.

    python scripts/benchmarks/batching.py                                        # the built-in Korean-English corpus
    python scripts/benchmarks/batching.py --data corpora/multi30k --source de --target en --json out.json
    python scripts/benchmarks/batching.py --data corpora/multi30k --source de --target en --quality --sizes none

`--data` is a folder with train.jsonl.gz and validation.jsonl.gz, whose rows are {"translation": {…}}. It prints a line
for each measurement:

- `padding`: the share of padding among all positions of sources and targets, in random batches, in those of
  `group_by_length`, and in Heed's.
- `shapes`: the number of micro-batch shapes in three epochs, and the computed tokens for each real token: padded as
  they are; lengths in multiples of 8 with fixed rows for each pair of lengths; in multiples of 8 with rows in steps of
  a sixteenth; end to end, as a GPU trains.
- `training`, for each size: real target tokens per second of Seq2SeqTrainer with MarianMTModel and random batches, and
  of HeedSeq2SeqTrainer and Heed's loop with Heed's batches; the same weights, AdamW, float32. Random slices of a few
  updates take turns; all tokens are divided by all seconds, with data loading and the optimizer. `waiting` is the
  share of time that the step waits for data. Seconds are processor seconds of all threads; `wall_ratio` is by the
  clock.
- `quality` (`--quality`): validation losses after three epochs with Heed's batches, with random batches in the same
  number of updates, and with random batches of equal capacity, which are smaller and need more updates.

Equal capacity: a batch costs rows × (longest source + longest target) padded tokens. Heed's `--buckets` of an update
together stay below `--tokens`. A random batch, which is one update, has the largest number of rows with an average
cost of at most `--tokens`.
"""

import json as json_module
import math
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from accelerate import Accelerator
from harness import Json, Row, Threads, Vocabulary, begin, report
from peers import check_losses, make_heed, make_marian
from transformers import DataCollatorForSeq2Seq, PrinterCallback, Seq2SeqTrainer, Seq2SeqTrainingArguments

from heedful import HeedConfig, HeedForConditionalGeneration, HeedSeq2SeqTrainer
from heedful.data.epochs.batching import BatchingSettings, UpdateBatches
from heedful.data.epochs.corpus import Corpus, StoredRows
from heedful.data.epochs.encoding import EncodedPairs
from heedful.data.epochs.micro_batches import collate, laid_end_to_end
from heedful.host import keep_freed_memory
from heedful.training.loop.loop import TrainingLoop
from heedful.training.loop.validation import validation_loss
from heedful.training.preparation import prepare_corpus
from heedful.training.processes.devices import make_accelerator
from heedful.training.recipe import Recipe
from heedful.training.recipe_file import make_recipe

BUILT_IN = {"train": "builtin:train:20000", "validation": "builtin:validation:500"}
WARM_UP = 1  # untimed updates of a slice
EPOCHS = 3  # for the comparison of losses
MEGA_BATCHES = 50  # batches that transformers' LengthGroupedSampler sorts together


class Timed:
    """Additions to a trainer: start times of updates, their real target tokens, and waiting."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.beginnings: list[tuple[float, float]] = []
        self.tokens: list[int] = []
        self.waiting: list[float] = []

    def get_batch_samples(self, *args, **kwargs):
        """Record an update's start, the time for its data, and its labels."""
        self.beginnings.append(now())
        batches, items = super().get_batch_samples(*args, **kwargs)
        self.waiting.append(time.process_time() - self.beginnings[-1][1])
        self.tokens.append(sum(int((batch["labels"] != -100).sum()) for batch in batches))
        return batches, items


def padding_share(batches: list[list[int]], source: Any, target: Any) -> float:
    """Return the share of padding, from 0 to 1, in batches of row numbers."""
    padded = sum(len(batch) * (max(source[batch]) + max(target[batch])) for batch in batches if len(batch))
    return 1 - float(sum(source[row] + target[row] for batch in batches for row in batch) / padded)


def now() -> tuple[float, float]:
    """Return seconds of the clock and of the processor."""
    return time.perf_counter(), time.process_time()


def batching_of(options: dict[str, Any], seed: int = 0) -> BatchingSettings:
    """Return Heed's settings for batches."""
    return BatchingSettings(tokens_per_update=options["tokens"], buckets_per_update=options["buckets"], seed=seed)


def recipe_of(folder: Path, options: dict[str, Any], max_updates: int = 1) -> Recipe:
    """Return the recipe of Heed's loop; only its batches matter here."""
    locations = BUILT_IN
    if options["data"] is not None:
        locations = {name: str(options["data"] / f"{name}.jsonl.gz") for name in BUILT_IN}
    start_from = {"start_from": str(folder / "heed")} if (folder / "heed").is_dir() else {}
    rarely = {"every_updates": 10**6}
    recipe = make_recipe(
        {
            "name": "batching",
            "output": str(folder / "run"),
            "overwrite": True,
            "data": {
                **locations,
                "source": options["source"],
                "target": options["target"],
                "max_source_tokens": options["max_length"],
                "max_target_tokens": options["max_length"],
            },
            "tokenizer": {"vocab_size": options["vocabulary"]},
            "model": {**start_from, "attn_implementation": "eager"},
            "optimization": {
                "optimizer": "adamw",
                "learning_rate": 1e-5,
                "schedule": "constant",
                "warmup_updates": 0,
                "max_updates": max_updates,
                "device": "cpu",
                "tokens_per_update": options["tokens"],
                "buckets_per_update": options["buckets"],
            },
            "validation": {**rarely, "sentences": 0},
            "checkpoints": rarely,
            "logging": {"every_updates": 1},
        }
    )
    recipe.folder.mkdir(exist_ok=True)
    return recipe


def rows_of_random_batches(source: np.ndarray, target: np.ndarray, tokens: int) -> int:
    """Return the largest number of rows whose random batches cost at most `tokens` padded tokens on average."""
    order = np.random.default_rng(0).permutation(len(source))

    def mean_cost(rows: int) -> float:
        whole = order[: len(order) // rows * rows].reshape(-1, rows)
        return rows * float((source[whole].max(1) + target[whole].max(1)).mean())

    low, high = 1, len(order)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if mean_cost(middle) <= tokens else (low, middle - 1)
    return low


def random_batches(rows: int, size: int, seed: int) -> list[list[int]]:
    """Cut shuffled row numbers into batches of `size`."""
    order = np.random.default_rng(seed).permutation(rows).tolist()
    return [order[start : start + size] for start in range(0, rows, size)]


def grouped_batches(lengths: np.ndarray, size: int, seed: int) -> list[list[int]]:
    """Return the batches of `group_by_length`: `MEGA_BATCHES` together are sorted by source length."""
    batches = []
    for mega in random_batches(len(lengths), size * MEGA_BATCHES, seed):
        ordered = sorted(mega, key=lambda row: -lengths[row])
        batches += [ordered[start : start + size] for start in range(0, len(ordered), size)]
    return batches


def compare_padding(rows: EncodedPairs, size: int, options: dict[str, Any]) -> Row:
    """Return the shares of padding in batches of equal capacity.

    Args:
        rows: Training rows.
        size: Rows of a random batch.
        options: Options of the command line.
    """
    lengths = rows.source_lengths, rows.target_lengths
    batches = {
        "random": random_batches(len(rows), size, 0),
        "group_by_length": grouped_batches(lengths[0], size, 0),
        "heed": [bucket for update in UpdateBatches(*lengths, batching_of(options)).epoch(0) for bucket in update],
    }
    shares = {name: round(padding_share(each, *lengths), 4) for name, each in batches.items()}
    capacity = {"tokens": options["tokens"], "buckets": options["buckets"], "random_rows": size}
    return {"measured": "padding", "pairs": len(rows), **capacity, "heed_batches": len(batches["heed"]), **shares}


def compare_shapes(rows: EncodedPairs, options: dict[str, Any]) -> Row:
    """Return the shapes, and computed tokens for each real one, of ways to reduce micro-batch shapes."""
    ways = "padded", "fixed rows", "stepped", "end to end"
    shapes: dict[str, set[tuple[int, ...]]] = {name: set() for name in ways}
    computed, real, most = Counter[str](), 0, options["tokens"] // options["buckets"]
    planned = UpdateBatches(rows.source_lengths, rows.target_lengths, batching_of(options))
    for bucket in (bucket for epoch in range(EPOCHS) for update in planned.epoch(epoch) for bucket in update):
        source, target, count = rows.source_lengths[bucket], rows.target_lengths[bucket], len(bucket)
        longest = int(source.max()), int(target.max())
        eights = [-(-length // 8) * 8 for length in longest]
        shortest = max(2, sum(eights) - 14)  # of both sides, in rows of these lengths
        step = max(8, 1 << max(0, count.bit_length() - 5))
        packed = laid_end_to_end([rows[row] for row in bucket], most, 0, 1)
        found = {
            "padded": (count, *longest),
            "fixed rows": (max(most // shortest, count), *eights),
            "stepped": (-(-count // step) * step, *eights),
        }
        for name, (height, *widths) in found.items():
            computed[name] += height * sum(widths)
        found["end to end"] = tuple(packed[name].shape[1] for name in ("input_ids", "labels"))
        computed["end to end"] += sum(found["end to end"])
        for name, shape in found.items():
            shapes[name].add(shape)
        real += int(source.sum() + target.sum())
    counted = {name: f"{len(shapes[name])} shapes, {computed[name] / real:.2f} computed" for name in shapes}
    return {"measured": "shapes", "tokens": options["tokens"], "buckets": options["buckets"], **counted}


class Training:
    """Slices of training with one model size.

    Args:
        folder: For models and runs.
        corpus: Its tokenizers and updates.
        size: One of `SIZES`.
        random_rows: Rows of a random batch.
        options: Of the command line.
    """

    def __init__(self, folder: Path, corpus: Corpus, size: str, random_rows: int, options: dict[str, Any]):
        self.folder, self.corpus, self.options, self.random_rows = folder, corpus, options, random_rows
        tokenizer = corpus.tokenizers.source
        self.marian = make_marian(size, len(tokenizer))
        for name, value in corpus.tokenizers.special_ids().items():
            setattr(self.marian.config, name, value)
        self.heed = make_heed(self.marian)
        self.heed.config.bos_token_id = tokenizer.bos_token_id
        self.heed.set_attn_implementation("eager")
        self.heed.save_pretrained(folder / "heed")
        corpus.tokenizers.save_pretrained(folder / "heed")
        self.rows = [row for update in corpus.training.updates(0) for bucket in update for row in bucket]
        batch = collate(self.rows[:4], tokenizer.pad_token_id)
        with torch.no_grad():
            check_losses(*(float(model.eval()(**batch).loss) for model in (self.marian, self.heed)))

    def slice_of_trainer(self, is_ours: bool, number: int) -> Counter[str]:
        """Train a slice with a trainer, and return its `figures`."""
        model, trainer_class, own = self.marian, Seq2SeqTrainer, {}
        how = {"per_device_train_batch_size": self.random_rows}
        if is_ours:
            tokens, buckets = self.options["tokens"], self.options["buckets"]
            model, trainer_class, how = self.heed, HeedSeq2SeqTrainer, {"gradient_accumulation_steps": buckets}
            own = {"tokens_per_update": tokens, "buckets_per_update": buckets}
        arguments = Seq2SeqTrainingArguments(
            output_dir=str(self.folder / "trainer"),
            max_steps=self.options["updates"] + WARM_UP + 1,
            data_seed=number,
            learning_rate=1e-5,
            use_cpu=True,
            dataloader_pin_memory=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **how,
        )
        collator = DataCollatorForSeq2Seq(self.corpus.tokenizers.source, model=model)
        timed: Any = type(f"Timed{trainer_class.__name__}", (Timed, trainer_class), {})
        trainer = timed(model=model, args=arguments, train_dataset=self.rows, data_collator=collator, **own)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return self.figures(trainer.tokens, trainer.beginnings, trainer.waiting)

    def slice_of_loop(self, number: int) -> Counter[str]:
        """Train a slice with Heed's loop, and return its `figures`."""
        recipe = recipe_of(self.folder, self.options, max_updates=self.options["updates"] + WARM_UP + 1)
        log = recipe.folder / "log.jsonl"
        log.unlink(missing_ok=True)
        beginnings, tokens = [now()], []

        class Noting(StoredRows):
            def updates(self, epoch: int) -> Iterator[Any]:
                # The loop fetches an update after the previous one.
                for update in super().updates(epoch + number):
                    tokens.append(sum(len(row["labels"]) for bucket in update for row in bucket))
                    yield update
                    beginnings.append(now())

        corpus = replace(self.corpus, training=Noting(**vars(self.corpus.training)))
        TrainingLoop(recipe, corpus, make_accelerator(recipe.optimization)).run()
        lines = [json_module.loads(line) for line in log.read_text().splitlines()]
        shares = [line["train/waiting_share"] for line in lines if "train/waiting_share" in line]
        seconds = [second[1] - first[1] for first, second in pairwise(beginnings)]
        return self.figures(tokens, beginnings, [share * each for share, each in zip(shares, seconds, strict=False)])

    def figures(self, tokens: list[int], beginnings: list[tuple[float, float]], waiting: list[float]) -> Counter[str]:
        """Sum the timed updates: `wall` is by the clock, the other seconds by the processor."""
        timed = slice(WARM_UP, WARM_UP + self.options["updates"])
        wall, seconds = np.subtract(beginnings[timed.stop], beginnings[timed.start]).tolist()
        return Counter(tokens=sum(tokens[timed]), wall=wall, seconds=seconds, waiting=sum(waiting[timed]))


def compare_training(training: Training, size: str) -> Row:
    """Return tokens per second, ratios to Marian and waiting, over all slices."""
    found = {name: Counter[str]() for name in ("marian", "heed_trainer", "heed_loop")}
    for number in range(training.options["rounds"]):
        found["marian"] += training.slice_of_trainer(False, number)
        found["heed_trainer"] += training.slice_of_trainer(True, number)
        found["heed_loop"] += training.slice_of_loop(number)
    row: Row = {"measured": "training", "size": size}
    for name, figures in found.items():
        row[f"{name}_tokens_per_s"] = round(figures["tokens"] / figures["seconds"])
        row[f"{name}_waiting"] = round(figures["waiting"] / figures["seconds"], 4)
        for clock, title in (("seconds", "ratio"), ("wall", "wall_ratio")) if name != "marian" else ():
            speeds = [each["tokens"] / each[clock] for each in (figures, found["marian"])]
            row[f"{name}_{title}"] = round(speeds[0] / speeds[1], 2)
    return row


def compare_quality(corpus: Corpus, rows: EncodedPairs, random_rows: int, options: dict[str, Any]) -> Iterator[Row]:
    """Yield, for each seed, validation losses of a small model after three epochs with each kind of batches."""
    chosen = np.random.default_rng(0).permutation(len(rows))[: options["pairs"]]
    rows = EncodedPairs([rows[row] for row in chosen.tolist()])
    lengths = rows.source_lengths, rows.target_lengths
    updates = len(UpdateBatches(*lengths, batching_of(options)).epoch(0))
    as_many = math.ceil(len(rows) / updates)

    def random_updates(size: int, seed: int, epoch: int) -> list[list[list[int]]]:
        return [[batch] for batch in random_batches(len(rows), size, 1000 * seed + epoch)]

    ways = {
        "heed": lambda seed, epoch: UpdateBatches(*lengths, batching_of(options, seed)).epoch(epoch),
        "random": partial(random_updates, as_many),
        "random_of_equal_capacity": partial(random_updates, random_rows),
    }
    for seed in range(options["seeds"]):
        losses = {}
        for name, way in ways.items():
            epochs = [way(seed, epoch) for epoch in range(EPOCHS)]
            losses[name] = round(_loss_after(rows, corpus, epochs, seed), 4)
        yield {"measured": "quality", "seed": seed, "pairs": len(rows), "updates": updates * EPOCHS, **losses}


def _loss_after(rows: EncodedPairs, corpus: Corpus, epochs: list[list[list[list[int]]]], seed: int) -> float:
    """Train a small model in bfloat16 and return its validation loss in nats per target token."""
    torch.manual_seed(seed)
    pad = corpus.tokenizers.source.pad_token_id
    sizes = {"d_model": 128, "dropout": 0.1, "vocab_size": len(corpus.tokenizers.source)}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 512}
    config = HeedConfig(**sizes, **corpus.tokenizers.special_ids())
    config._attn_implementation = "eager"
    model = HeedForConditionalGeneration(config)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9, fused=True)
    updates = [update for epoch in epochs for update in epoch]
    warm_up = len(updates) // 8
    for number, update in enumerate(updates, start=1):
        # The same schedule over three epochs for any number of updates.
        rate = 0.003 * min(number / warm_up, (len(updates) - number + 1) / (len(updates) - warm_up))
        optimizer.param_groups[0]["lr"] = rate
        tokens = sum(int(rows.target_lengths[bucket].sum()) for bucket in update)
        for bucket in update:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**collate([rows[row] for row in bucket], pad), num_items_in_batch=tokens).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return validation_loss(model, corpus.validation, 4096, Accelerator(cpu=True))


def measured(options: dict[str, Any]) -> Iterator[Row]:
    """Yield a row for each measurement."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = prepare_corpus(recipe_of(folder, options), folder / "tokenizer")
        rows = EncodedPairs(row for update in corpus.training.updates(0) for bucket in update for row in bucket)
        random_rows = rows_of_random_batches(rows.source_lengths, rows.target_lengths, options["tokens"])
        yield compare_padding(rows, random_rows, options)
        yield compare_shapes(rows, options)
        for size in [] if options["sizes"] == "none" else options["sizes"].split(","):
            yield compare_training(Training(folder, corpus, size, random_rows, options), size)
        if options["quality"]:
            yield from compare_quality(corpus, rows, random_rows, options)


def main(
    data: Annotated[Path | None, typer.Option(help="Folder of the corpus. Default: the built-in corpus.")] = None,
    source: Annotated[str, typer.Option(help="Source language.")] = "ko",
    target: Annotated[str, typer.Option(help="Target language.")] = "en",
    sizes: Annotated[str, typer.Option(help="Comma-separated sizes: tiny, small, base; or none.")] = "small",
    tokens: Annotated[int, typer.Option(help="Padded source and target tokens per update.")] = 4096,
    buckets: Annotated[int, typer.Option(help="Heed's batches per update.")] = 4,
    updates: Annotated[int, typer.Option(help="Timed updates per slice.")] = 8,
    rounds: Annotated[int, typer.Option(help="Slices of each.")] = 5,
    vocabulary: Vocabulary = 5000,
    max_length: Annotated[int, typer.Option(help="Longest source and target in tokens.")] = 100,
    quality: Annotated[bool, typer.Option(help="Also compare losses after three epochs.")] = False,
    pairs: Annotated[int, typer.Option(help="Training pairs for the losses.")] = 10_000,
    seeds: Annotated[int, typer.Option(help="Runs of each kind for the losses.")] = 2,
    threads: Threads = 1,
    json: Json = None,
):
    """Print a line for each measurement."""
    options = {key: value for key, value in locals().items() if key != "json"}
    begin(threads)
    keep_freed_memory()  # for all models, as in Heed's loop
    report(measured(options), json)


if __name__ == "__main__":
    typer.run(main)
