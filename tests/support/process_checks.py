"""What two processes are put through together; every function is called by both, and returns what JSON can hold."""

import os
import signal
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from heedful import HeedConfig, HeedForConditionalGeneration, TokenizerPair, Translator
from heedful.data.encoding import PairEncoder
from heedful.data.epochs.teacher import TeacherTokens
from heedful.data.micro_batches import split_update
from heedful.data.sources import read_pairs
from heedful.inference.teaching.distillation import write_teacher_tokens
from heedful.training.loop import feed, validation
from heedful.training.loop.feed import Feed
from heedful.training.loop.loop import TrainingLoop
from heedful.training.loop.schedule import make_optimizer
from heedful.training.preparation import prepare_corpus
from heedful.training.processes.signals import TrainingInterrupted
from heedful.training.run_folder import checkpoints
from heedful.training.run_folder.checkpoints import checkpoint_path, load_state
from row_lengths import padding_share
from tiny_runs import SIZES, logged, tiny_recipe

NO_DROPOUT = {"model.options.dropout": 0.0}
STREAM = {"data.streaming": True, "data.pool_size": 70}
R_DROP = {"optimization.r_drop": 5.0}
# Everything against overfitting, most of which draws random numbers or leaves something out.
REGULAR = {**R_DROP, "model.options.source_word_dropout": 0.1}
AVERAGED = {"optimization.ema_decay": 0.5, "checkpoints.publish": "ema", "validation.every_updates": 3}
SEVERAL = {"data.mixture": {"back": {"train": "builtin:train:40", "source": "en", "target": "ko", "to": "ko"}}}
SEVERAL |= {"data.temperature": 3.0, "data.augmentation": {"typos": 0.2, "joined": 0.2}}
END = 5  # updates; an epoch has four


def write_teacher(folder: Path, tokenizers: TokenizerPair, pairs: str = "builtin:train:300") -> dict:
    """Write what an untrained teacher says of pairs, and return the keys of a recipe that learns of it."""
    torch.manual_seed(3)
    sizes = {"vocab_size": len(tokenizers.source), **tokenizers.special_ids()}
    teacher = Translator(HeedForConditionalGeneration(HeedConfig(**SIZES, **sizes)).eval(), tokenizers)
    write_teacher_tokens(folder, teacher, read_pairs(pairs, "ko", "en"), ())
    return {"optimization.distillation": str(folder)}


def with_teacher(corpus, recipe):
    """Return a corpus with the teacher of a recipe."""
    folder = recipe.optimization.distillation
    return corpus if folder is None else replace(corpus, teacher=TeacherTokens(folder))


def make_loop(folder: Path, changes: dict, corpus, accelerator) -> TrainingLoop:
    recipe = tiny_recipe(folder, {"optimization.token_budget": 700, "optimization.max_updates": END, **changes})
    recipe.folder.mkdir(exist_ok=True)
    return TrainingLoop(recipe, with_teacher(corpus, recipe), accelerator)


def weights_of(folder: Path, update: int = END) -> dict[str, torch.Tensor]:
    return load_file(checkpoint_path(folder / "checkpoints", update) / "model.safetensors")


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Return the largest relative difference of a weight."""
    assert ours.keys() == theirs.keys()
    return max(((ours[name] - theirs[name]).norm() / theirs[name].norm()).item() for name in theirs)


def resumes(folder: Path, changes: dict, corpus, accelerator, stops: tuple[int, ...]) -> list[int]:
    """Return after which updates a run may be stopped and goes on to the same weights, losses and averages."""
    straight = folder / "straight"
    folder.mkdir(exist_ok=True)
    make_loop(straight, changes, corpus, accelerator).run()
    exact = []
    for stop in stops:
        resumed = folder / f"resumed-{stop}"
        make_loop(resumed, {**changes, "optimization.max_updates": stop}, corpus, accelerator).run()
        make_loop(resumed, {**changes, "resume": True}, corpus, accelerator).run()
        ours, theirs = ([*all_tensors(run), logged(run, "train/loss")] for run in (resumed, straight))
        if ours[-1] == theirs[-1] and all(map(equal, ours[:-1], theirs[:-1])):
            exact.append(stop)
    return exact


def all_tensors(run: Path) -> list[dict[str, torch.Tensor]]:
    """Return the weights, the optimizer's moments and the moving average that a run ended with."""
    state = load_state(checkpoint_path(run / "checkpoints", END))
    numbered = state.optimizer["state"].items()
    moments = {f"{number} {name}": value for number, values in numbered for name, value in values.items()}
    return [weights_of(run), moments, state.moving_average or {}]


def stand_in(states: torch.Tensor) -> torch.Tensor:
    """Drop other features in R-Drop's first pass, the first half of the rows, than in its second."""
    kept = torch.ones_like(states)
    middle = len(states) // 2
    kept[:middle, :, ::3] = 0.0
    kept[middle:, :, 1::3] = 0.0
    return states * kept


def with_stand_in_for_dropout(loop: TrainingLoop) -> TrainingLoop:
    """Let nothing in a loop's model draw random numbers, and the two passes of R-Drop differ all the same."""
    network = loop.engine.network
    for module in network.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for stack in (network.model.encoder, network.model.decoder):
        stack.dropout.forward = stand_in
    return loop


def regular(folder: Path, accelerator: Accelerator) -> dict:
    """Train on a stream with everything against overfitting, stop in its second epoch and go on."""
    recipe = tiny_recipe(folder, {**REGULAR, **STREAM})
    folder.mkdir(exist_ok=True)
    corpus = prepare_corpus(recipe, folder / "tokenizer", accelerator)
    with patch("heedful.data.epochs.streaming.CHUNK", 32):
        updates = list(corpus.updates(1))
    rows = [[*row["input_ids"], -1, *row["labels"]] for update in updates for bucket in update for row in bucket]
    exact = resumes(folder / "whole", {**REGULAR, **STREAM}, corpus, accelerator, (4,))
    # Without dropout that differs between the processes the losses are those of one.
    with_stand_in_for_dropout(make_loop(folder / "rows", {**R_DROP, **STREAM}, corpus, accelerator)).run()
    losses = [logged(folder / "rows", name) for name in ("train/loss", "train/r_drop")]
    mixed = prepare_corpus(tiny_recipe(folder, SEVERAL), folder / "tagged", accelerator)
    return {"rows": rows, "exact": exact, "losses": losses, "mixed": list(mixed.updates(1))}


def distilled(folder: Path, corpus, accelerator, teacher: Path) -> dict:
    """Train with a teacher, stop and go on; tell the losses of a run without dropout too."""
    changes = {"optimization.distillation": str(teacher), "optimization.r_drop": 5.0}
    exact = resumes(folder, changes, corpus, accelerator, (3,))
    with_stand_in_for_dropout(make_loop(folder / "alone", changes, corpus, accelerator)).run()
    return {"exact": exact, "losses": losses_of(folder / "alone")}


def losses_of(folder: Path) -> list[list[float]]:
    return [logged(folder, f"train/{name}") for name in ("loss", "r_drop", "distillation")]


def goes_on_with_another_number(folder: Path, corpus, accelerator, alone: Path) -> dict:
    """Go on with a run that one process began, and begin one that one process will go on with."""
    changes = {**NO_DROPOUT, "resume": True}
    loop = make_loop(alone, changes, corpus, accelerator)
    before = loop.progress.update
    loop.run()
    make_loop(folder, {**NO_DROPOUT, "optimization.max_updates": 3}, corpus, accelerator).run()
    return {"before": before, "losses": logged(alone, "train/loss")}


def stream(folder: Path, accelerator) -> dict:
    """Read a stream together; tell what came, and how many pairs this process encoded of them."""
    changes = {**STREAM, "data.max_source_tokens": 30, "data.train": "builtin:train:301"}
    recipe = tiny_recipe(folder, changes)
    encoded, encoders, encode = [], [], PairEncoder.rows

    def count_and_encode(encoder, pairs):
        pairs = list(pairs)
        encoded.append(len(pairs))
        encoders.append(encoder)
        return encode(encoder, pairs)

    corpus = prepare_corpus(recipe, folder / "tokenizer", accelerator)
    with (
        patch.object(PairEncoder, "rows", count_and_encode),
        patch("heedful.data.epochs.streaming.CHUNK", 32),
    ):
        updates = list(corpus.updates(0))
    rows = [[*row["input_ids"], -1, *row["labels"]] for update in updates for bucket in update for row in bucket]
    return {"rows": rows, "encoded": sum(encoded), "too_long": encoders[-1].too_long}


@contextmanager
def sharding(accelerator: Accelerator):
    """Let `prepare` shard the weights as FSDP2 does: Accelerate itself does so on accelerators only."""
    mesh = init_device_mesh("cpu", (accelerator.num_processes,))

    def prepare(model, optimizer):
        for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, make_optimizer(model, settings)

    settings = tiny_recipe(Path("any")).optimization
    with patch.object(accelerator, "prepare", prepare):
        yield


def sharded(folder: Path, corpus, accelerator) -> dict:
    """Train with sharded weights; compare with weights that are not, and exchange checkpoints with them."""
    from transformers import AutoModelForSeq2SeqLM

    folder.mkdir(exist_ok=True)
    changes = {**NO_DROPOUT, "validation.every_updates": 2, "validation.sentences": 5}
    changes |= {"optimization.max_grad_norm": 1.0}
    make_loop(folder / "whole", changes, corpus, accelerator).run()
    with sharding(accelerator):
        loop = make_loop(folder / "parts", changes, corpus, accelerator)
        parameters = list(loop.engine.model.parameters())
        shares = [
            parameter.to_local().numel() / parameter.numel()
            for parameter in parameters
            if isinstance(parameter, DTensor)
        ]
        loop.run()
        exact = resumes(folder / "resume", {**REGULAR, **AVERAGED}, corpus, accelerator, (3,))
        # What one process without sharding began, sharded processes go on with, and the other way round.
        begun = {**NO_DROPOUT, "optimization.max_updates": 3}
    make_loop(folder / "mixed", begun, corpus, accelerator).run()
    with sharding(accelerator):
        make_loop(
            folder / "mixed", {**NO_DROPOUT, "optimization.max_updates": 4, "resume": True}, corpus, accelerator
        ).run()
    make_loop(folder / "mixed", {**NO_DROPOUT, "resume": True}, corpus, accelerator).run()
    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint_path(folder / "parts/checkpoints", END))
    logged_values = {
        name: [logged(folder / run, name) for run in ("whole", "parts")]
        for name in ("train/loss", "train/gradient_norm", "validation/loss", "validation/chrf")
    }
    return {
        "parameters": len(parameters),
        "shares": shares,
        "exact": exact,
        "logged": logged_values,
        "class": type(model).__name__,
        "difference": difference(weights_of(folder / "parts"), weights_of(folder / "whole")),
        "mixed_losses": logged(folder / "mixed", "train/loss"),
        "files": sorted(path.name for path in checkpoint_path(folder / "parts/checkpoints", END).iterdir()),
    }


def shrinks_together(folder: Path, corpus, accelerator) -> dict:
    """Let memory run out in the second process alone."""
    loop = make_loop(folder, {**NO_DROPOUT, "optimization.shrink_token_budget": True}, corpus, accelerator)
    network = accelerator.unwrap_model(loop.engine.model)
    forward = network.forward

    def limited(**batch):
        if accelerator.process_index == 1 and batch["input_ids"].numel() + batch["labels"].numel() > 400:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(**batch)

    network.forward = limited
    progress = loop.run()
    return {"budget": progress.token_budget, "losses": logged(folder, "train/loss")}


def skips_together(folder: Path, corpus, accelerator) -> dict:
    """Let the loss of the second process alone be not a number, once."""
    loop = make_loop(folder, {"optimization.skip_nonfinite_updates": 1}, corpus, accelerator)
    network = accelerator.unwrap_model(loop.engine.model)
    forward = network.forward

    def spoilt(**batch):
        output = forward(**batch)
        if accelerator.process_index == 1 and loop.progress.update == 2:
            output.loss = output.loss * float("nan")
        return output

    network.forward = spoilt
    progress = loop.run()
    total = sum(weight.double().sum().item() for weight in network.parameters())
    return {"update": progress.update, "skipped": progress.skipped_updates, "sum": total}


def ends_together(folder: Path, corpus, accelerator) -> dict:
    """Let time, patience, a signal or a full disk concern one process alone."""
    folder.mkdir(exist_ok=True)
    late = make_loop(folder / "late", {"optimization.max_minutes": 5.0}, corpus, accelerator)
    train_on = late._train_on

    def be_late(update):
        if accelerator.process_index == 1 and late.progress.update == 2:
            late._started -= 3600
        train_on(update)

    late._train_on = be_late
    patient = make_loop(
        folder / "patient", {"validation.every_updates": 1, "validation.patience": 2}, corpus, accelerator
    )
    # The processes do not see the same values; those of the main process count.
    values = iter([3.0, 2.0, 2.5, 2.6, 1.0] if accelerator.is_main_process else [9.0, 8.0, 7.0, 6.0, 5.0, 4.0])
    with patch.object(validation, "validation_loss", lambda *_: next(values)):
        ends = {"late": late.run().update, "patient": patient.run().update}
    told = make_loop(folder / "told", {}, corpus, accelerator)
    step = told.engine.step

    def step_and_be_told(*arguments):
        step(*arguments)
        if accelerator.process_index == 1 and told.progress.update == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    told.engine.step = step_and_be_told
    try:
        told.run()
    except TrainingInterrupted as interruption:
        ends["told"] = str(interruption)
    full = make_loop(folder / "full", {"checkpoints.every_updates": 2}, corpus, accelerator)
    save = checkpoints.save_checkpoint

    def fail_once(path, model, state, *others):
        if state.progress.update == 4:
            raise OSError("No space left on device")
        return save(path, model, state, *others)

    with patch.object(checkpoints, "save_checkpoint", fail_once):
        full.run()
    ends["full"] = sorted(int(path.name[-1]) for path in full.checkpoints.folder.iterdir())
    unsaved = make_loop(folder / "unsaved", {"optimization.max_updates": 4}, corpus, accelerator)
    with patch.object(checkpoints, "save_checkpoint", fail_once):
        try:
            unsaved.run()
        except OSError as error:
            ends["unsaved"] = str(error)
    poisoned = make_loop(folder / "poisoned", {}, corpus, accelerator)
    if accelerator.process_index == 1:
        next(poisoned.engine.model.parameters()).data.view(-1)[0] = float("inf")
    try:
        poisoned.checkpoints.save(poisoned.progress, must=True)
    except FloatingPointError as error:
        ends["poisoned"] = str(error)
    return ends


def padding(folder: Path, corpus, accelerator) -> dict:
    """Return the padding that is logged, what it is by the rows that each process got, and the last update's seed."""
    loop = make_loop(folder, {"logging.every_updates": 3, "optimization.max_updates": 3}, corpus, accelerator)
    parts = [
        part
        for update in list(corpus.updates(0))[:3]
        for process in split_update(update, loop.token_budget, loop.accelerator.num_processes)
        for part in process
        if part
    ]
    rows = [row for part in parts for row in part]
    numbers = iter(range(len(rows)))
    batches = [[next(numbers) for _ in part] for part in parts]
    lengths = [[len(row[name]) for row in rows] for name in ("input_ids", "labels")]
    loop.run()
    share = padding_share(batches, *lengths)
    return {"logged": logged(folder, "train/padding_share"), "share": share, "seed": torch.initial_seed()}


def as_on_gpus(folder: Path, corpus, accelerator) -> dict:
    """Train as GPUs do: compiled inside of DDP, on updates made ahead, with results that are read late."""

    def make(name: str, changes: dict) -> TrainingLoop:
        changes = NO_DROPOUT | {"optimization.compile": True, "logging.every_updates": END} | changes
        loop = make_loop(folder / name, changes, corpus, accelerator)
        loop.engine.decides_on_device = True
        return loop

    folder.mkdir(exist_ok=True)
    compiler, kept = torch.compile, []
    with (
        patch.object(torch, "compile", lambda function, **_: compiler(function, dynamic=True, backend="eager")),
        patch.object(Feed, "is_ahead", True),
        patch.object(feed, "pinned", dict),
    ):
        straight = make("straight", {})
        straight.run()
        told = make("told", {})
        read = told._read_results

        def read_and_be_told(keep: float = 0) -> None:
            read(keep)
            kept.append(keep)
            if accelerator.process_index == 1 and told.progress.update == 2:
                os.kill(os.getpid(), signal.SIGTERM)

        told._read_results = read_and_be_told
        try:
            told.run()
        except TrainingInterrupted as interruption:
            end = str(interruption)
        make("told", {"resume": True}).run()
        small = make("small", {"optimization.shrink_token_budget": True})
        accumulate, sizes = small.engine.accumulate, []

        def run_out_of_memory_once(micro_batches, *args, **kwargs):
            sizes.append(len(micro_batches))
            if accelerator.process_index == 1 and len(sizes) == 1:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return accumulate(micro_batches, *args, **kwargs)

        with patch.object(small.engine, "accumulate", run_out_of_memory_once):
            small.run()
    ends = [weights_of(folder / name) for name in ("straight", "told")]
    return {
        "losses": logged(folder / "straight", "train/loss"),
        "told_losses": logged(folder / "told", "train/loss"),
        "small_losses": logged(folder / "small", "train/loss"),
        "end": end,
        "kept": kept,
        "resumed": all(torch.equal(weight, ends[1][name]) for name, weight in ends[0].items()),
        "is_compiled": straight.engine.body is not None,
    }


def threads_of_a_stream(folder: Path, corpus, accelerator) -> list[str]:
    """Return which threads read a stream together with other processes, for GPUs, when its end is known."""
    assert sum(1 for _ in corpus.updates(0))
    threads = []
    with (
        patch.object(Feed, "is_ahead", True),
        patch.object(feed, "pinned", lambda tensors: threads.append(threading.current_thread().name) or tensors),
    ):
        make_loop(folder, STREAM | {"optimization.max_updates": 2}, corpus, accelerator).run()
    return threads


def all_checks(folder: Path, corpus, accelerator) -> dict:
    """Put the processes through everything; each entry of the result is what one function above returned."""
    streamed = prepare_corpus(tiny_recipe(folder / "streamed", STREAM), folder / "tokenizer-of-streams", accelerator)
    calls = {
        "resumed": (resumes, AVERAGED, corpus, accelerator, (1, 4)),
        "threads": (threads_of_a_stream, streamed, accelerator),
        "distilled": (distilled, corpus, accelerator, folder / "teacher"),
        "number": (goes_on_with_another_number, corpus, accelerator, folder / "alone"),
        "stream": (stream, accelerator),
        "regular": (regular, accelerator),
        "sharded": (sharded, corpus, accelerator),
        "shrunk": (shrinks_together, corpus, accelerator),
        "skipped": (skips_together, corpus, accelerator),
        "padding": (padding, corpus, accelerator),
        "ends": (ends_together, corpus, accelerator),
        "gpus": (as_on_gpus, corpus, accelerator),
    }
    return {name: check(folder / name, *given) for name, (check, *given) in calls.items()}
