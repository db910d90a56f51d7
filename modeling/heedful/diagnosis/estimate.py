"""What a recipe would do, without doing it: sizes, batches, memory and time, for `heedful train --dry-run`.

Data, tokenizer, model and micro-batches are made as training makes them. A few updates are taken by training's own
engine on this machine, to be measured; the model is thrown away and nothing is written into the run's folder.
"""

import gc
import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from heedful.data.batching import Row
from heedful.data.micro_batches import micro_batches_of_rank, split_update
from heedful.data.tokenization import TokenizerPair
from heedful.diagnosis.findings import percent, shortened
from heedful.diagnosis.memory import MIB, HeldBytes, available_memory, count_parameters, process_memory, state_memory
from heedful.diagnosis.recipe_checks.run_length import RunPlan
from heedful.training.loop.averaging import MovingAverage
from heedful.training.loop.schedule import learning_rate
from heedful.training.model_of_recipe import make_engine, make_model
from heedful.training.preparation import Corpus, StreamedCorpus, Update, prepare_corpus
from heedful.training.processes.collectives import all_reduce
from heedful.training.processes.devices import hardware_in_words, make_accelerator
from heedful.training.recipe import OptimizationRecipe, Recipe
from heedful.training.recipe_file import to_yaml

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOOKED_AT_UPDATES = 500  # of the first epoch, for padding and the largest micro-batch
STREAMED_UPDATES = 20  # of a stream, whose epoch is not read to its end
TIMED_UPDATES = 12
TIMED_SECONDS = 20.0  # after which no further update is timed
PROBE_TOKENS = 512
SLOW_SECONDS = 60.0  # a micro-batch that would take longer is not run: the probe's speed stands for it
SHOWN_ROWS = 3
SHOWN_TEXT = 200

Parts = list[list[list[Row]]]  # for every rank, the rows of its micro-batches


@dataclass
class BatchPlan:
    """The batches of a run, as far as its first epoch shows them.

    Attributes:
        updates_per_epoch: Updates of one pass; None for a stream.
        looked_at: Updates that the following figures are of.
        padding: Share of padding in their micro-batches.
        padded_tokens: Mean padded tokens of an update on the busiest rank.
        target_tokens: Mean target tokens of an update, on all ranks together.
        micro_batches: Most micro-batches of one update on one rank.
        costliest: Micro-batches that may need the most memory: the most tokens, logits, or attention weights.
        first: The first updates, divided among the ranks.
    """

    updates_per_epoch: int | None = None
    looked_at: int = 0
    padding: float = 0.0
    padded_tokens: float = 0.0
    target_tokens: float = 0.0
    micro_batches: int = 0
    costliest: list[list[Row]] = field(default_factory=list)
    first: list[Parts] = field(default_factory=list)


@dataclass
class DryRun:
    """Everything that `heedful train --dry-run` tells; `str()` writes it out."""

    recipe: Recipe
    corpus: Corpus
    batches: BatchPlan
    plan: RunPlan
    parameters: dict[str, int]
    memory: dict[str, int]
    available: int | None
    hardware: str
    processes: int
    d_model: int

    def __str__(self) -> str:
        sections = {
            "recipe": [to_yaml(self.recipe).rstrip()],
            "model": [f"{name:<12}{count:>14,} parameters" for name, count in self.parameters.items()],
            "data": self._data_lines(),
            "first micro-batch": list(self._first_lines()),
            "learning rate": list(self._rate_lines()),
            "memory, estimated, of each process": self._memory_lines(),
            "time, estimated": self._time_lines(),
        }
        parts = [f"--- {title}\n" + "\n".join(lines) for title, lines in sections.items()]
        return "\n\n".join([*parts, "Nothing was trained, and nothing was written."])

    def _data_lines(self) -> list[str]:
        batches, settings = self.batches, self.recipe.optimization
        per_epoch = batches.updates_per_epoch
        lines = [
            f"training pairs       {_count(self.corpus.pairs)}"
            + ("" if per_epoch is None else f" ({self.corpus.encoder.too_long:,} more are too long)"),
            f"validation pairs     {len(self.corpus.validation):,}",
            f"tokens per update    {settings.tokens_per_update:,} at most, padding included; "
            f"{batches.target_tokens:,.0f} target tokens on average",
            f"micro-batches        up to {batches.micro_batches} of {settings.micro_batch_tokens:,} padded tokens on "
            f"each of {self.processes} process{'' if self.processes == 1 else 'es'}",
            f"padding              {percent(batches.padding)} of the tokens in micro-batches",
            f"updates per epoch    {_count(per_epoch)}",
        ]
        end = self.plan.end(self.recipe)
        if end is None:
            return [*lines, "updates of the run   unknown"]
        lines.append(f"updates of the run   {end.updates:,.0f} ({end})")
        epochs = f"{end.updates / per_epoch:,.1f}" if per_epoch else _count(None)
        return [*lines, f"epochs of the run    {epochs}"]

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
        settings, end = self.recipe.optimization, self.plan.end(self.recipe)
        last = int(end.updates) if end else max(1, 10 * settings.warmup_updates)
        shown = {1, settings.warmup_updates // 2, settings.warmup_updates, last // 4, last // 2, 3 * last // 4, last}
        for update in sorted(update for update in shown if 1 <= update <= last):
            yield f"update {update:>9,}  {learning_rate(update, settings, self.d_model):.3g}"

    def _memory_lines(self) -> list[str]:
        sizes = {**self.memory, "together": sum(self.memory.values())}
        if self.available is not None:
            sizes["there are here"] = self.available
        lines = [f"{name:<38}{size / MIB:>10,.0f} MiB" for name, size in sizes.items()]
        if self.available is not None and sizes["together"] > self.available:
            lines.append("More than there is: set `optimization.token_budget` lower.")
        lines.append("Validation may add to it.")
        if "freed, but kept by the allocator" in self.memory:
            lines.append("Long runs on the CPU were seen to take up to five times as much, above all in bf16.")
        return lines

    def _time_lines(self) -> list[str]:
        seconds, end = self.plan.seconds_per_update, self.plan.end(self.recipe)
        if seconds is None:
            return ["unknown"]
        lines = [f"{seconds:.3g} s an update on {self.hardware}, measured on a few updates"]
        if end is not None:
            lines.append(f"{_duration(seconds * end.updates)} of training, validation, saving and tests not counted")
        return lines


def dry_run(recipe: Recipe) -> DryRun:
    """Prepare a run, measure a few of its updates, and forget it.

    Args:
        recipe: The run; with several processes, each calls this.

    Raises:
        FileNotFoundError: If a file of the recipe does not exist.
        ValueError: If the recipe, the data or the model cannot be used.
        MemoryError: If a micro-batch does not fit into a GPU.
    """
    settings = recipe.optimization
    accelerator = make_accelerator(settings)
    set_seed(recipe.seed)
    earlier = recipe.folder / "tokenizer"
    with tempfile.TemporaryDirectory() as temporary:
        is_there = recipe.resume and earlier.is_dir()
        corpus = prepare_corpus(recipe, earlier if is_there else Path(temporary) / "tokenizer")
    batches = plan_batches(corpus, settings.micro_batch_tokens, accelerator.num_processes)
    process = process_memory()
    model = make_model(recipe.model, corpus.tokenizers)
    parameters, d_model = count_parameters(model), model.config.d_model
    memory = {"Python, libraries and data": process} if accelerator.device.type == "cpu" else {}
    memory |= state_memory(parameters["together"], settings, accelerator.num_processes, accelerator.distributed_type)
    try:
        rehearsal = Rehearsal(accelerator, model, settings, corpus.tokenizers)
        speed = rehearsal.seconds_per_token(batches.first)
        activations = max(rehearsal.activation_memory(rows, speed) for rows in batches.costliest)
    except torch.OutOfMemoryError as error:
        raise MemoryError(
            f"A micro-batch of {settings.micro_batch_tokens:,} padded tokens does not fit in memory beside "
            f"{sum(memory.values()) / MIB:,.0f} MiB for weights and optimizer: set `optimization.token_budget` lower."
        ) from error
    memory["activations of the largest micro-batch"] = activations
    if accelerator.device.type == "cpu":
        # Freed memory stays with the process, in pieces that the next tensors do not quite fit into.
        memory["freed, but kept by the allocator"] = max(0, process_memory() - sum(memory.values()))
    return DryRun(
        recipe=recipe,
        corpus=corpus,
        batches=batches,
        plan=RunPlan(batches.updates_per_epoch, speed * batches.padded_tokens),
        parameters=parameters,
        memory=memory,
        available=available_memory(accelerator.device),
        hardware=hardware_in_words(accelerator),
        processes=accelerator.num_processes,
        d_model=d_model,
    )


def plan_batches(corpus: Corpus, token_budget: int, world_size: int = 1) -> BatchPlan:
    """Make the first epoch's updates and micro-batches, and describe them.

    Args:
        corpus: The data of the run; of a stream only the beginning is read.
        token_budget: Padded tokens of a micro-batch.
        world_size: Number of ranks.

    Raises:
        ValueError: If the data hold no pair.
    """
    plan = BatchPlan()
    costliest: dict[str, tuple[int, list[Row]]] = {}
    real_tokens = padded_tokens = 0
    updates = corpus.updates(0)
    is_stream = isinstance(corpus, StreamedCorpus)
    for update in islice(updates, STREAMED_UPDATES if is_stream else LOOKED_AT_UPDATES):
        parts = split_update(update, token_budget, world_size)
        for rows in (rows for part in parts for rows in part if rows):
            real_tokens += sum(len(row["input_ids"]) + len(row["labels"]) for row in rows)
            padded_tokens += _padded_tokens(rows)
            for kind, cost in _costs(rows).items():
                if cost > costliest.get(kind, (0, []))[0]:
                    costliest[kind] = (cost, rows)
        if len(plan.first) < TIMED_UPDATES:
            plan.first.append(parts)
        plan.looked_at += 1
        plan.micro_batches = max(plan.micro_batches, len(parts[0]))
        plan.padded_tokens += _busiest(parts)
        plan.target_tokens += _target_tokens(parts)
    if not plan.looked_at:
        raise ValueError("The training data hold no pair.")
    plan.padding = 1 - real_tokens / padded_tokens
    plan.padded_tokens /= plan.looked_at
    plan.target_tokens /= plan.looked_at
    plan.costliest = list({id(rows): rows for _, rows in costliest.values()}.values())
    if not is_stream:
        plan.updates_per_epoch = plan.looked_at + sum(1 for _ in updates)
    return plan


def _costs(rows: list[Row]) -> dict[str, int]:
    """Return the numbers that the memory of a micro-batch grows with."""
    source, target = (max(len(row[name]) for row in rows) for name in ("input_ids", "labels"))
    attention = source * source + source * target + target * target
    return {
        "tokens": len(rows) * (source + target),
        "logits": len(rows) * target,
        "attention": len(rows) * attention,
    }


def _padded_tokens(rows: list[Row]) -> int:
    return _costs(rows)["tokens"] if rows else 0


def _busiest(parts: Parts) -> int:
    """Return the padded tokens of an update on the rank that has the most."""
    return max(sum(map(_padded_tokens, part)) for part in parts)


def _target_tokens(parts: Parts) -> int:
    return sum(len(row["labels"]) for part in parts for rows in part for row in rows)


class Rehearsal:
    """A run that takes its real steps at a learning rate of 0, to be measured and thrown away.

    All ranks must call the same methods with the same arguments.

    Args:
        accelerator: The processes and devices.
        model: The model.
        settings: The recipe's section.
        tokenizers: The model's tokenizers.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: "PreTrainedModel",
        settings: OptimizationRecipe,
        tokenizers: TokenizerPair,
    ):
        self.accelerator, self.settings = accelerator, settings
        self.pad_token_id = tokenizers.source.pad_token_id
        self.engine = make_engine(accelerator, model, settings)
        self.engine.model.train()
        decay = settings.ema_decay
        self.moving_average = None if decay is None else MovingAverage(self.engine.network, decay)

    def take_update(self, parts: Parts) -> float:
        """Take an update as training does, and return its seconds, the mean over the ranks.

        Args:
            parts: For every rank the rows of its micro-batches.
        """
        begun = self._now()
        self._accumulate(parts)
        if math.isfinite(self.engine.gradient_norm(self.settings.max_grad_norm)):
            self.engine.step(rate=0.0)
        else:
            self.engine.discard()
            self.engine.lower_scale()
        if self.moving_average is not None:
            self.moving_average.update(1)
        return all_reduce(self.accelerator, self._now() - begun)[0] / self.accelerator.num_processes

    def _accumulate(self, parts: Parts, **options: Any) -> None:
        micro_batches = micro_batches_of_rank(parts, self.accelerator.process_index, self.pad_token_id)
        self.engine.accumulate(micro_batches, _target_tokens(parts), **options)

    def _now(self) -> float:
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize(self.accelerator.device)
        return time.perf_counter()

    def _on_all_ranks(self, rows: list[Row]) -> Parts:
        return [[rows]] * self.accelerator.num_processes

    def seconds_per_token(self, updates: list[Parts]) -> float:
        """Time whole updates, and return the seconds for each padded token of the busiest rank.

        A few rows go first, to warm up. Where their speed says that the largest micro-batch takes more than a minute,
        no whole one is run, and their speed is the answer.

        Args:
            updates: A few updates, divided among the ranks.
        """
        largest = max((rows for parts in updates for part in parts for rows in part), key=_padded_tokens)
        probe = largest[: max(1, PROBE_TOKENS * len(largest) // _padded_tokens(largest))]
        self.take_update(self._on_all_ranks(probe))
        speed = self.take_update(self._on_all_ranks(probe)) / _padded_tokens(probe)
        if speed * _padded_tokens(largest) > SLOW_SECONDS:
            return speed
        self.take_update(self._on_all_ranks(largest))  # warms up the allocator, and what libraries keep by shape
        seconds, tokens = 0.0, 0
        for parts in updates:
            seconds += self.take_update(parts)
            tokens += _busiest(parts)
            if seconds > TIMED_SECONDS:
                break
        return seconds / tokens

    def activation_memory(self, rows: list[Row], speed: float) -> int:
        """Measure the bytes that a micro-batch needs beside weights, gradients and moments, at its worst moment.

        On the CPU, the tensors of every operation are added up while they live, forwards and backwards; what an
        operation needs inside is not seen. Where the micro-batch would take more than a minute, a small part of it
        is run, and the result scaled up by its rows.

        Args:
            rows: The micro-batch.
            speed: Seconds for each padded token.
        """
        part = rows[: max(1, len(rows) // 16)] if speed * _padded_tokens(rows) > SLOW_SECONDS else rows
        self._accumulate(self._on_all_ranks(rows[:1]), all_reduce=False)  # gradients exist from here on
        gc.collect()
        device = self.accelerator.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        held = HeldBytes() if device.type != "cuda" else None
        with held or nullcontext():
            self._accumulate(self._on_all_ranks(part))
        peak = held.peak if held is not None else torch.cuda.max_memory_allocated(device) - before
        self.engine.discard()
        return peak * len(rows) // len(part)


def seconds_per_token(recipe: Recipe, tokenizers: TokenizerPair, updates: list[Update]) -> float:
    """Return the seconds that training takes on this machine for each padded token of an update.

    Args:
        recipe: The run.
        tokenizers: The model's tokenizers.
        updates: A few updates, each a list of buckets of rows.
    """
    settings = recipe.optimization
    accelerator = make_accelerator(settings)
    rehearsal = Rehearsal(accelerator, make_model(recipe.model, tokenizers), settings, tokenizers)
    parts = [split_update(update, settings.micro_batch_tokens, accelerator.num_processes) for update in updates]
    return rehearsal.seconds_per_token(parts)


def _count(number: int | None) -> str:
    return "unknown, because the data are streamed" if number is None else f"{number:,}"


def _duration(seconds: float) -> str:
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (172800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 86400:.3g} days"
