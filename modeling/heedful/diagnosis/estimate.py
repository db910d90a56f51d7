"""What a recipe would do, without doing it: sizes, batches, memory and time, for `heedful train --dry-run`.

Data, tokenizer, model and micro-batches are made as training makes them. A few micro-batches run forwards and
backwards on this machine, to be measured; the model is thrown away and nothing is written into the run's folder.
"""

import gc
import os
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from heedful.data.batching import collate, padding_share, split_update
from heedful.data.tokenization import TokenizerPair
from heedful.diagnosis.findings import percent, shortened
from heedful.diagnosis.recipe_checks.run_length import RunPlan
from heedful.training.averaging import MovingAverage
from heedful.training.devices import hardware_in_words, make_accelerator
from heedful.training.preparation import Corpus, Row, make_model, prepare_corpus
from heedful.training.recipe import Recipe
from heedful.training.schedule import learning_rate, make_optimizer

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
MIB = 2**20


@dataclass
class BatchPlan:
    """The batches of a run, as far as its first epoch shows them.

    Attributes:
        updates_per_epoch: Updates of one pass; `None` for a stream.
        looked_at: Updates the following figures are of.
        padding: Share of padding in their micro-batches.
        padded_tokens: Mean padded tokens of an update on the busiest process.
        target_tokens: Mean target tokens of an update, all processes together.
        micro_batches: Most micro-batches of one update on one process.
        first: First micro-batch of the first process.
        hungry: Micro-batches that may need the most memory: the most tokens, logits, or attention weights.
        timed: Micro-batches of the first updates, of this process.
    """

    updates_per_epoch: int | None = None
    looked_at: int = 0
    padding: float = 0.0
    padded_tokens: float = 0.0
    target_tokens: float = 0.0
    micro_batches: int = 0
    first: list[Row] = field(default_factory=list)
    hungry: list[list[Row]] = field(default_factory=list)
    timed: list[list[list[Row]]] = field(default_factory=list)


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
            "recipe": [self.recipe.to_yaml().rstrip()],
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
        whole = batches.updates_per_epoch
        lines = [
            f"training pairs       {_count(self.corpus.pairs)}"
            + ("" if whole is None else f" ({self.corpus.encoder.too_long:,} more are too long)"),
            f"validation pairs     {len(self.corpus.validation):,}",
            f"tokens per update    {settings.tokens_per_update:,} at most, padding included; "
            f"{batches.target_tokens:,.0f} target tokens on average",
            f"micro-batches        up to {batches.micro_batches} of {self.recipe.token_budget:,} padded tokens on "
            f"each of {self.processes} process{'' if self.processes == 1 else 'es'}",
            f"padding              {percent(batches.padding)} of the tokens in micro-batches",
            f"updates per epoch    {_count(whole)}",
        ]
        end = self.plan.end(self.recipe)
        if end is None:
            return [*lines, "updates of the run   unknown"]
        key, updates = end
        speed = ", by the speed measured here" if key == "optimization.max_minutes" else ""
        lines.append(f"updates of the run   {updates:,.0f} (`{key}`{speed})")
        epochs = "unknown, because the data are streamed" if not whole else f"{updates / whole:,.1f}"
        return [*lines, f"epochs of the run    {epochs}"]

    def _first_lines(self) -> Iterator[str]:
        rows, tokenizers = self.batches.first, self.corpus.tokenizers
        longest = [max(len(row[name]) for row in rows) for name in ("input_ids", "labels")]
        yield f"{len(rows)} rows of {longest[0]} source and {longest[1]} target tokens"
        for row in rows[:SHOWN_ROWS]:
            source = str(tokenizers.source.decode(row["input_ids"], skip_special_tokens=False))
            target = str(tokenizers.target.decode(row["labels"], skip_special_tokens=False))
            yield f"  source  {shortened(source, SHOWN_TEXT)}"
            yield f"          {' '.join(map(str, row['input_ids']))}"
            yield f"  target  {shortened(target, SHOWN_TEXT)}"
            yield f"          {' '.join(map(str, row['labels']))}"

    def _rate_lines(self) -> Iterator[str]:
        settings, end = self.recipe.optimization, self.plan.end(self.recipe)
        last = int(end[1]) if end else max(1, 10 * settings.warmup_updates)
        places = {1, settings.warmup_updates // 2, settings.warmup_updates, last // 4, last // 2, 3 * last // 4, last}
        for update in sorted(place for place in places if 1 <= place <= last):
            yield f"update {update:>9,}  {learning_rate(update, settings, self.d_model):.3g}"

    def _memory_lines(self) -> list[str]:
        lines = [f"{name:<38}{size / MIB:>10,.0f} MiB" for name, size in self.memory.items()]
        total = sum(self.memory.values())
        lines.append(f"{'together':<38}{total / MIB:>10,.0f} MiB")
        if self.available is not None:
            lines.append(f"{'there are here':<38}{self.available / MIB:>10,.0f} MiB")
            if total > self.available:
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
            lines.append(f"{_duration(seconds * end[1])} of training, validation, saving and tests not counted")
        return lines


def dry_run(recipe: Recipe) -> DryRun:
    """Prepare a run, measure a few of its micro-batches, and forget it.

    Args:
        recipe: The run; with several processes, each calls this.

    Raises:
        FileNotFoundError: If a file of the recipe does not exist.
        ValueError: If the recipe, the data or the model cannot be used.
        MemoryError: If a micro-batch does not fit into a GPU.
    """
    accelerator = make_accelerator(recipe)
    set_seed(recipe.seed)
    earlier = recipe.folder / "tokenizer"
    with tempfile.TemporaryDirectory() as temporary:
        is_there = recipe.resume and earlier.is_dir()
        corpus = prepare_corpus(recipe, earlier if is_there else Path(temporary) / "tokenizer")
    batches = plan_batches(recipe, corpus, accelerator.num_processes, accelerator.process_index)
    process = process_memory()
    trial = Trial(recipe, corpus.tokenizers, accelerator)
    parameters = count_parameters(trial.model)
    memory = {"Python, libraries and data": process} if accelerator.device.type == "cpu" else {}
    memory |= state_memory(parameters["together"], recipe, accelerator.num_processes, accelerator.distributed_type)
    try:
        speed = trial.seconds_per_token(batches.timed)
        activations = max(map(trial.activation_memory, batches.hungry))
    except torch.OutOfMemoryError as error:
        raise MemoryError(
            f"A micro-batch of {recipe.token_budget:,} padded tokens does not fit in memory beside "
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
        d_model=trial.model.config.d_model,
    )


def plan_batches(recipe: Recipe, corpus: Corpus, processes: int = 1, rank: int = 0) -> BatchPlan:
    """Make the first epoch's updates and micro-batches, and describe them.

    Args:
        recipe: The run.
        corpus: Its data; of a stream only the beginning is read.
        processes: Number of processes.
        rank: This process.
    """
    plan = BatchPlan()
    hungriest: dict[str, tuple[int, list[Row]]] = {}
    real = padded = 0.0
    updates = corpus.updates(0)
    streamed = recipe.data.streaming
    for update in islice(updates, STREAMED_UPDATES if streamed else LOOKED_AT_UPDATES):
        parts = split_rows(update, recipe.token_budget, processes)
        for batch in (rows for micro_batches in parts for rows in micro_batches if rows):
            shape = _shape(batch)
            real += (1 - _padding(batch)) * _padded(batch)
            padded += _padded(batch)
            for kind, size in _sizes(*shape).items():
                if size > hungriest.get(kind, (0, []))[0]:
                    hungriest[kind] = (size, batch)
        if len(plan.timed) < TIMED_UPDATES:
            plan.timed.append([rows for rows in parts[rank] if rows])
        plan.first = plan.first or parts[0][0]
        plan.looked_at += 1
        plan.micro_batches = max(plan.micro_batches, len(parts[0]))
        plan.padded_tokens += max(sum(map(_padded, micro_batches)) for micro_batches in parts)
        plan.target_tokens += sum(len(row["labels"]) for bucket in update for row in bucket)
    if not plan.looked_at:
        raise ValueError("The training data hold no pair.")
    plan.padding = 1 - real / padded
    plan.padded_tokens /= plan.looked_at
    plan.target_tokens /= plan.looked_at
    plan.hungry = list({id(batch): batch for _, batch in hungriest.values()}.values())
    if not streamed:
        plan.updates_per_epoch = plan.looked_at + sum(1 for _ in updates)
    return plan


def split_rows(update: list[list[Row]], token_budget: int, processes: int) -> list[list[list[Row]]]:
    """Split an update of rows into the micro-batches of every process, as training does."""
    rows = [row for bucket in update for row in bucket]
    numbers = iter(range(len(rows)))
    parts = split_update(
        [[next(numbers) for _ in bucket] for bucket in update],
        [len(row["input_ids"]) for row in rows],
        [len(row["labels"]) for row in rows],
        token_budget,
        processes,
    )
    return [[[rows[number] for number in part] for part in micro_batches] for micro_batches in parts]


def _shape(rows: list[Row]) -> tuple[int, int, int]:
    """Return rows, longest source and longest target of a micro-batch."""
    return len(rows), max(len(row["input_ids"]) for row in rows), max(len(row["labels"]) for row in rows)


def _sizes(rows: int, source: int, target: int) -> dict[str, int]:
    """Return what the memory of a micro-batch grows with."""
    attention = source * source + source * target + target * target
    return {"tokens": rows * (source + target), "logits": rows * target, "attention": rows * attention}


def _padded(rows: list[Row]) -> int:
    return _sizes(*_shape(rows))["tokens"] if rows else 0


def _padding(rows: list[Row]) -> float:
    lengths = [[len(row[name]) for row in rows] for name in ("input_ids", "labels")]
    return padding_share([range(len(rows))], *lengths)


def count_parameters(model: torch.nn.Module) -> dict[str, int]:
    """Count the parameters of embeddings (and the output layer), encoder, decoder and the rest, tied ones once."""
    whole: Any = model
    counts = dict.fromkeys(("embeddings", "encoder", "decoder", "other"), 0)
    kinds: dict[int, str] = {}
    embeddings = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    for kind, modules in (
        ("embeddings", [*embeddings, whole.get_output_embeddings()]),
        ("encoder", [whole.get_encoder()]),
        ("decoder", [whole.get_decoder()]),
    ):
        for parameter in (parameter for module in modules if module is not None for parameter in module.parameters()):
            kinds.setdefault(id(parameter), kind)
    for parameter in model.parameters():
        counts[kinds.get(id(parameter), "other")] += parameter.numel()
    return {**{kind: count for kind, count in counts.items() if count}, "together": sum(counts.values())}


def state_memory(parameters: int, recipe: Recipe, processes: int, kind: DistributedType) -> dict[str, int]:
    """Return the bytes of what a process holds all the time, in float32 under every precision.

    Weights and gradients take 4 bytes a parameter, Adam's two moments 8, a moving average 4. Processes that exchange
    gradients (DDP) hold a second copy of them in buckets. FSDP divides everything by the processes, ZeRO-2 gradients
    and moments.

    Args:
        parameters: Number of parameters, tied ones once.
        recipe: The run.
        processes: Number of processes.
        kind: How Accelerate spreads the run over them.
    """
    sizes = {"weights": 4, "gradients": 4, "Adam's moments": 8}
    if recipe.optimization.ema_decay is not None:
        sizes["moving average"] = 4
    if kind in (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
        sizes["gradients in exchange"] = 4
    divided = {DistributedType.FSDP: set(sizes), DistributedType.DEEPSPEED: {"gradients", "Adam's moments"}}
    shared = divided.get(kind, set())
    return {name: parameters * size // (processes if name in shared else 1) for name, size in sizes.items()}


class Trial:
    """A model as training has it, to be measured and thrown away: its learning rate stays 0.

    Args:
        recipe: The run.
        tokenizers: The model's tokenizers.
        accelerator: Device and precision. Gradients are not exchanged between processes.
    """

    def __init__(self, recipe: Recipe, tokenizers: TokenizerPair, accelerator: Accelerator):
        self.accelerator = accelerator
        self.pad_token_id = tokenizers.source.pad_token_id
        self.model: PreTrainedModel = make_model(recipe, tokenizers)
        if recipe.model.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
        self.model.to(accelerator.device).train()  # type: ignore[arg-type]
        self.optimizer = make_optimizer(self.model, recipe.optimization)
        decay = recipe.optimization.ema_decay
        self.moving_average = None if decay is None else MovingAverage(self.model, decay)
        self.max_grad_norm = recipe.optimization.max_grad_norm

    def backward(self, rows: list[Row]) -> None:
        """Run a micro-batch forwards and backwards, as training does."""
        batch = collate(rows, self.pad_token_id)
        batch = {name: values.to(self.accelerator.device) for name, values in batch.items()}
        with self.accelerator.autocast():
            output = self.model(**batch, num_items_in_batch=batch["labels"].numel())
        # Accelerate makes all outputs float32, and keeps them till the loss is done.
        kept = None if output.logits is None else output.logits.float()
        output.loss.float().backward()
        del kept

    def step(self) -> None:
        """Do what follows the gradients, with a learning rate of 0."""
        limit = float("inf") if self.max_grad_norm is None else self.max_grad_norm
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.moving_average is not None:
            self.moving_average.update(1)

    def seconds_per_token(self, updates: list[list[list[Row]]]) -> float:
        """Time whole updates, and return the seconds for each of their padded tokens.

        A few rows go first, to warm up. Where their speed says that the next micro-batch takes more than a minute,
        no micro-batch is run, and their speed is the answer.

        Args:
            updates: Micro-batches of a few updates.
        """
        batches = [rows for update in updates for rows in update]
        largest = max(batches, key=_padded)
        probe = largest[: max(1, PROBE_TOKENS * len(largest) // _padded(largest))]
        self._seconds([probe])
        speed = self._seconds([probe]) / _padded(probe)
        if speed * _padded(largest) > SLOW_SECONDS:
            return speed
        self._seconds([largest])  # the allocator, and what libraries keep for each shape, warm up too
        seconds, tokens = 0.0, 0
        for update in updates:
            seconds += self._seconds(update)
            tokens += sum(map(_padded, update))
            if seconds > TIMED_SECONDS:
                break
        return seconds / tokens

    def _seconds(self, batches: list[list[Row]]) -> float:
        self._wait()
        begun = time.perf_counter()
        for rows in batches:
            self.backward(rows)
        self.step()
        self._wait()
        return time.perf_counter() - begun

    def _wait(self) -> None:
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize(self.accelerator.device)

    def activation_memory(self, rows: list[Row]) -> int:
        """Measure the bytes that a micro-batch needs beside weights, gradients and moments, at its worst moment.

        On the CPU, the tensors of every operation are added up while they live, forwards and backwards; what an
        operation needs inside is not seen. Where the micro-batch would take more than a minute, a small part of it
        is run, and the result scaled up by its rows.
        """
        device, part = self.accelerator.device, rows
        begun = time.perf_counter()
        self.backward(rows[:1])  # and gradients exist from here on
        if (time.perf_counter() - begun) * len(rows) > 4 * SLOW_SECONDS:
            part = rows[: max(1, len(rows) // 16)]
        gc.collect()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        counter = LiveMemory(self.model.parameters()) if device.type != "cuda" else None
        with counter or nullcontext():
            self.backward(part)
        peak = counter.peak if counter is not None else torch.cuda.max_memory_allocated(device) - before
        self.optimizer.zero_grad()
        return peak * len(rows) // len(part)


class LiveMemory(TorchDispatchMode):
    """Adds up the memory of all tensors that operations make while it is entered, and notes the highest sum.

    Args:
        known: Tensors that are there already, and do not count.

    Attributes:
        now: Bytes alive.
        peak: Most bytes that were alive at a time.
    """

    def __init__(self, known: Any = ()):
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        for tensor in known:
            for held in (tensor, tensor.grad):
                if held is not None:
                    self._sizes[held.untyped_storage()._cdata] = 0

    def __torch_dispatch__(self, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count what it made."""
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


def seconds_per_token(recipe: Recipe, tokenizers: TokenizerPair, updates: list[list[list[Row]]]) -> float:
    """Return the seconds that training takes on this machine for each padded token of an update.

    Args:
        recipe: The run.
        tokenizers: The model's tokenizers.
        updates: A few updates, each a list of buckets of rows.
    """
    trial = Trial(recipe, tokenizers, make_accelerator(recipe))
    return trial.seconds_per_token([split_rows(update, recipe.token_budget, 1)[0] for update in updates])


def process_memory() -> int:
    """Return the most bytes of memory that this process has had so far, 0 where the system does not tell."""
    with suppress(ImportError):
        import resource

        size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return size if sys.platform == "darwin" else size * 1024
    return 0


def available_memory(device: torch.device) -> int | None:
    """Return the bytes of memory that a device has in all, `None` where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    with suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _count(number: int | None) -> str:
    return "unknown, because the data are streamed" if number is None else f"{number:,}"


def _duration(seconds: float) -> str:
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (172800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 86400:.3g} days"
