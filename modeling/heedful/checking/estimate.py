"""Dry run of a recipe: sizes, batches, memory and time, measured on a few updates."""

import gc
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from heedful.checking.findings import percent
from heedful.checking.memory import MIB, HeldBytes, count_matrices, count_parameters, process_memory, state_memory
from heedful.checking.run_length import RunEnd, run_end
from heedful.data.epochs.batching import Row
from heedful.data.epochs.corpus import Corpus, StoredRows, StreamedRows
from heedful.data.epochs.micro_batches import split_update
from heedful.files import duration
from heedful.messages_heed import shortened
from heedful.protocols import TrainableModel
from heedful.training.model_of_recipe import make_engine, make_model
from heedful.training.preparation import corpus_of, earlier_tokenizers
from heedful.training.processes.collectives import all_reduce
from heedful.training.processes.devices import float32_products, hardware_in_words, make_accelerator
from heedful.training.recipe import OptimizationRecipe, Recipe
from heedful.training.recipe_file import to_yaml
from heedful.training.run_folder.folder import check_output_folder
from heedful.training.start_checks import check_installed, check_start, faults
from heedful.training.updates.model_size import memory_of_machine
from heedful.training.updates.schedule import learning_rate

LOOKED_AT_UPDATES = 500  # in the first epoch, for padding and the largest micro-batch
STREAMED_UPDATES = 20  # in a stream, whose epoch is not run to its end
TIMED_UPDATES = 12
TIMED_SECONDS = 20.0  # after which no further update is timed
PROBE_TOKENS = 512
SLOW_SECONDS = 60.0  # slower micro-batches do not run: the probe's speed counts
SHOWN_ROWS = 3
SHOWN_TEXT = 200

Parts = list[list[list[Row]]]  # for each rank, the rows in its micro-batches


@dataclass(frozen=True)
class Speed:
    """Seconds per update on the busiest rank."""

    of_token: float  # seconds for both passes, per padded token
    of_step: float  # seconds for the optimizer

    def seconds(self, tokens: float) -> float:
        """Return the seconds for an update with `tokens` padded tokens."""
        return self.of_token * tokens + self.of_step


@dataclass(frozen=True)
class BatchPlan:
    """A run's batches, as in its first epoch."""

    updates_per_epoch: int | None  # None for a stream
    padding: float  # share of padding in the micro-batches
    padded_tokens: float  # mean per update, on the busiest rank
    target_tokens: float  # mean per update, on all ranks together
    micro_batches: int  # most per update, on one rank
    costliest: list[list[Row]]  # micro-batches that may need the most memory
    first: list[Parts]  # the first updates, divided among the ranks


@dataclass(frozen=True)
class DryRun:
    """The output of `heedful train --dry-run`."""

    recipe: Recipe
    corpus: Corpus
    batches: BatchPlan
    seconds_per_update: float
    end: RunEnd | None
    parameters: dict[str, int]
    matrices: dict[str, dict[str, int]]  # encoder's and decoder's, in Transformers
    memory: dict[str, int]  # bytes
    accelerator: Accelerator
    d_model: int

    def __str__(self) -> str:
        sections: dict[str, Iterable[str]] = {
            "recipe": [to_yaml(self.recipe).rstrip()],
            "model": self._model_lines(),
            "data": self._data_lines(),
            "first micro-batch": self._first_lines(),
            "learning rate": self._rate_lines(),
            "memory, estimated, for each process": self._memory_lines(),
            "time, estimated": self._time_lines(),
        }
        parts = ("\n".join((f"--- {title}", *lines)) for title, lines in sections.items())
        return "\n\n".join((*parts, "Nothing was trained, and nothing was written."))

    def _model_lines(self) -> Iterator[str]:
        for name, count in self.parameters.items():
            yield f"{name:<20}{count:>14,} parameters"
            yield from (f"  {matrix:<18}{own:>14,}" for matrix, own in self.matrices.get(name, {}).items())

    def _data_lines(self) -> list[str]:
        batches, settings, processes = self.batches, self.recipe.optimization, self.accelerator.num_processes
        per_epoch = batches.updates_per_epoch
        training, too_long = self.corpus.training, ""
        if isinstance(training, StoredRows):
            too_long = f" ({training.rows.left_out:,} more are too long)"
        lines = [
            f"training pairs       {_count(training.pairs)}{too_long}",
            *(f"  of {key} {count:,}" for key, count in training.parts.items()),
            f"validation pairs     {len(self.corpus.validation):,}",
            f"tokens per update    {settings.tokens_per_update:,} at most, padding included; "
            f"{batches.target_tokens:,.0f} target tokens on average",
            f"micro-batches        up to {batches.micro_batches} of {settings.micro_batch_tokens:,} padded tokens on "
            f"each of {processes} process{'' if processes == 1 else 'es'}",
            f"padding              {percent(batches.padding)} of the tokens in micro-batches",
            f"updates per epoch    {_count(per_epoch)}",
        ]
        if self.end is None:
            return [*lines, "updates of the run   unknown"]
        epochs = f"{self.end.updates / per_epoch:,.1f}" if per_epoch else _count(None)
        return [*lines, f"updates of the run   {self.end.updates:,.0f} ({self.end})", f"epochs of the run    {epochs}"]

    def _first_lines(self) -> Iterator[str]:
        rows, tokenizers = self.batches.first[0][0][0], self.corpus.tokenizers
        longest = [max(len(row[name]) for row in rows) for name in ("input_ids", "labels")]
        yield f"{len(rows)} rows of {longest[0]} source and {longest[1]} target tokens"
        for row in rows[:SHOWN_ROWS]:
            for name, key in (("source", "input_ids"), ("target", "labels")):
                text = str(getattr(tokenizers, name).decode(row[key], skip_special_tokens=False))
                yield f"  {name}  {shortened(text, SHOWN_TEXT)}"
                yield f"          {' '.join(map(str, row[key]))}"

    def _rate_lines(self) -> Iterator[str]:
        settings, warmup = self.recipe.optimization, self.recipe.optimization.warmup_updates
        last = int(self.end.updates) if self.end else max(1, 10 * warmup)
        for update in sorted({1, warmup // 2, warmup, last // 4, last // 2, 3 * last // 4, last}):
            if 1 <= update <= last:
                yield f"update {update:>9,}  {learning_rate(update, settings, self.d_model):.3g}"

    def _memory_lines(self) -> Iterator[str]:
        together, device = sum(self.memory.values()), self.accelerator.device
        on_cuda = device.type == "cuda"
        available = torch.cuda.get_device_properties(device).total_memory if on_cuda else memory_of_machine()
        sizes = self.memory | {"together": together} | ({} if available is None else {"available here": available})
        yield from (f"{name:<38}{size / MIB:>10,.0f} MiB" for name, size in sizes.items())
        if available is not None and together > available:
            yield "Too much for this machine: set `optimization.token_budget` lower."
        yield "Validation may need more."
        if "freed, but kept by the allocator" in self.memory:
            yield "Some long runs on the CPU took up to five times as much, above all in bf16."

    def _time_lines(self) -> Iterator[str]:
        hardware = hardware_in_words(self.accelerator)
        yield f"{self.seconds_per_update:.3g} s per update on {hardware}, measured on a few updates"
        if self.end is not None:
            estimated = duration(self.seconds_per_update * self.end.updates)
            yield f"{estimated} of training, without validation, saving and tests"


def dry_run(recipe: Recipe) -> DryRun:
    """Prepare a run and measure a few updates. With several processes, all must call it."""
    settings = recipe.optimization
    check_installed(settings, recipe.decoding.bleu_tokenizer, recipe.logging.trackers)
    try:
        check_output_folder(recipe)
    except ValueError as error:
        warnings.warn(f"Training would refuse the recipe: {error}", stacklevel=2)
    accelerator = make_accelerator(settings)
    set_seed(recipe.seed)
    corpus = corpus_of(recipe, earlier_tokenizers(recipe))
    batches = plan_batches(corpus, settings.micro_batch_tokens, accelerator.num_processes)
    process = process_memory()
    model = make_model(recipe.model, corpus.tokenizers)
    check_start(faults(recipe, corpus, model.config))
    parameters, matrices, d_model = count_parameters(model), count_matrices(model), model.config.d_model
    memory = {"Python, libraries and data": process} if accelerator.device.type == "cpu" else {}
    memory |= state_memory(parameters["together"], accelerator.num_processes, accelerator.distributed_type)
    try:
        rehearsal = Rehearsal(accelerator, model, settings)
        speed = rehearsal.speed(batches.first)
        activations = max(rehearsal.activation_memory(rows, speed.of_token) for rows in batches.costliest)
    except torch.OutOfMemoryError as error:
        what = f"A micro-batch of {settings.micro_batch_tokens:,} padded tokens does not fit in memory with "
        what += f"{sum(memory.values()) / MIB:,.0f} MiB for weights and optimizer"
        raise MemoryError(f"{what}: set `optimization.token_budget` lower.") from error
    memory["activations of the largest micro-batch"] = activations
    if accelerator.device.type == "cpu":
        # The process keeps freed memory in pieces that fit no later tensor.
        memory["freed, but kept by the allocator"] = max(0, process_memory() - sum(memory.values()))
    seconds = speed.seconds(batches.padded_tokens)
    end = run_end(settings, batches.updates_per_epoch, seconds)
    return DryRun(recipe, corpus, batches, seconds, end, parameters, matrices, memory, accelerator, d_model)


def plan_batches(corpus: Corpus, token_budget: int, world_size: int = 1) -> BatchPlan:
    """Describe the first epoch's first updates and micro-batches."""
    most: list[tuple[int, list[Row]]] = [(0, [])] * 3  # by each cost
    first, sums, micro_batches = list[Parts](), Counter[str](), 0
    updates, is_stream = corpus.training.updates(0), isinstance(corpus.training, StreamedRows)
    for update in islice(updates, STREAMED_UPDATES if is_stream else LOOKED_AT_UPDATES):
        parts = split_update(update, token_budget, world_size)
        first += [parts] * (len(first) < TIMED_UPDATES)
        for rows in (rows for part in parts for rows in part if rows):
            real = sum(len(row["input_ids"]) + len(row["labels"]) for row in rows)
            sums.update(real=real, padded=_padded_tokens(rows))
            for kind, cost in enumerate(_costs(rows)):
                most[kind] = max(most[kind], (cost, rows), key=itemgetter(0))
        sums.update(updates=1, busiest=_busiest(parts), target=_target_tokens(parts))
        micro_batches = max(micro_batches, len(parts[0]))
    return BatchPlan(
        updates_per_epoch=None if is_stream else sums["updates"] + sum(1 for _ in updates),
        padding=1 - sums["real"] / sums["padded"],
        padded_tokens=sums["busiest"] / sums["updates"],
        target_tokens=sums["target"] / sums["updates"],
        micro_batches=micro_batches,
        costliest=[*{id(rows): rows for _, rows in most}.values()],
        first=first,
    )


def _costs(rows: list[Row]) -> tuple[int, int, int]:
    """Return a micro-batch's costs in memory: the numbers of padded tokens, logits and attention scores."""
    source, target = (max(len(row[name]) for row in rows) for name in ("input_ids", "labels"))
    attention = source * source + source * target + target * target
    return len(rows) * (source + target), len(rows) * target, len(rows) * attention


def _padded_tokens(rows: list[Row]) -> int:
    return _costs(rows)[0] if rows else 0


def _busiest(parts: Parts) -> int:
    return max(sum(map(_padded_tokens, part)) for part in parts)


def _target_tokens(parts: Parts) -> int:
    return sum(len(row["labels"]) for part in parts for rows in part for row in rows)


class Rehearsal:
    """Real steps at learning rate 0, to measure a run."""

    def __init__(self, accelerator: Accelerator, model: TrainableModel, settings: OptimizationRecipe):
        self.accelerator, self.settings = accelerator, settings
        self.engine = make_engine(accelerator, model, settings)
        self.engine.model.train()

    def take_update(self, parts: Parts) -> tuple[float, float]:
        """Take an update, and return the ranks' mean seconds for passes and step."""
        begun = self._now()
        self._accumulate(parts)
        passed = self._now()
        self.engine.step(0.0, self.engine.gradient_norm(self.settings.max_grad_norm))
        passes, step = all_reduce(self.accelerator, passed - begun, self._now() - passed)
        return passes / self.accelerator.num_processes, step / self.accelerator.num_processes

    def _accumulate(self, parts: Parts, **options: Any) -> None:
        with float32_products(self.settings.mixed_precision):
            self.engine.accumulate(self.engine.feed.micro_batches(parts), _target_tokens(parts), **options)

    def _now(self) -> float:
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize(self.accelerator.device)
        return time.perf_counter()

    def _on_all_ranks(self, rows: list[Row]) -> Parts:
        return [[rows]] * self.accelerator.num_processes

    def speed(self, updates: list[Parts]) -> Speed:
        """Measure whole updates, or a few rows if updates are slow."""
        largest = max((rows for parts in updates for part in parts for rows in part), key=_padded_tokens)
        probe = largest[: max(1, PROBE_TOKENS * len(largest) // _padded_tokens(largest))]
        with float32_products(self.settings.mixed_precision):
            self.engine.warm_up(probe[0])
        self.take_update(self._on_all_ranks(probe))
        passes, step = self.take_update(self._on_all_ranks(probe))
        if passes / _padded_tokens(probe) * _padded_tokens(largest) > SLOW_SECONDS:
            return Speed(passes / _padded_tokens(probe), step)
        self.take_update(self._on_all_ranks(largest))  # warms up the allocator, and caches for this shape
        times: list[tuple[float, float]] = []
        for parts in updates:
            if sum(map(sum, times)) <= TIMED_SECONDS:
                times.append(self.take_update(parts))
        passes, step = map(sum, zip(*times, strict=True))
        return Speed(passes / sum(map(_busiest, updates[: len(times)])), step / len(times))

    def activation_memory(self, rows: list[Row], of_token: float) -> int:
        """Measure a micro-batch's peak bytes apart from weights and moments; a slow one is measured on a part."""
        part = rows[: max(1, len(rows) // 16)] if of_token * _padded_tokens(rows) > SLOW_SECONDS else rows
        self._accumulate(self._on_all_ranks(rows[:1]), all_reduce=False)  # gradients exist from here on
        gc.collect()
        device, before = self.accelerator.device, 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        with nullcontext() if device.type == "cuda" else HeldBytes() as held:
            self._accumulate(self._on_all_ranks(part))
        peak = torch.cuda.max_memory_allocated(device) - before if held is None else held.peak
        self.engine.discard()
        return peak * len(rows) // len(part)


def _count(number: int | None) -> str:
    return "unknown, because the data are streamed" if number is None else f"{number:,}"
