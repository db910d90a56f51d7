"""The checks of each process in test_multiprocess.py; functions return JSON values, and `main` writes them."""

import json
import os
import signal
import threading
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain, repeat
from pathlib import Path
from unittest.mock import Mock, patch

import torch
import torch.distributed
from accelerate import Accelerator, PartialState
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from heedful import HeedConfig, HeedForConditionalGeneration, TokenizerPair, Translator
from heedful.data.epochs.encoding import PairEncoder
from heedful.data.epochs.micro_batches import split_update
from heedful.data.epochs.teacher import TeacherTokens
from heedful.data.sources import read_pairs
from heedful.distillation.distillation import write_teacher_tokens
from heedful.training.loop import feed, validation
from heedful.training.loop.feed import Feed
from heedful.training.loop.loop import TrainingLoop
from heedful.training.loop.validation import translate_on_ranks, validation_loss
from heedful.training.preparation import prepare_corpus
from heedful.training.processes.devices import make_accelerator
from heedful.training.processes.signals import TrainingInterrupted
from heedful.training.run import train
from heedful.training.run_folder import checkpoints
from heedful.training.run_folder.checkpoints import checkpoint_path, load_state
from heedful.training.updates.optimizers import make_optimizer
from row_lengths import padding_share
from tiny_runs import SIZES, around, logged, tiny_recipe

END = 5  # updates; an epoch has four
NO_DROPOUT = {"model.options.dropout": 0.0, "optimization.max_grad_norm": 1.0}
# With this budget an update is several micro-batches.
PLAIN = {**NO_DROPOUT, "optimization.token_budget": 700, "optimization.max_updates": END, "decoding.bootstrap": 40}
PLAIN |= {"validation.every_updates": 2, "validation.sentences": 5, "validation.max_new_tokens": 24}
PLAIN |= {"data.test": {"small": "builtin:test:7"}, "decoding.max_length": 12}
STREAM = {"data.streaming": True, "data.pool_size": 70}
R_DROP = {"optimization.r_drop": 5.0}
# Everything against overfitting, most of which draws random numbers or leaves something out.
REGULAR = {**R_DROP, "model.options.source_word_dropout": 0.1}
SEVERAL = {"data.mixture": {"back": {"train": "builtin:train:40", "source": "en", "target": "ko", "to": "ko"}}}
SEVERAL |= {"data.temperature": 3.0, "data.documents": {"sentences": 3}}
SEVERAL |= {"data.augmentation": {"typos": 0.2, "title_case": 0.2, "joined": 0.2, "terms": 0.5}}


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
    if folder is None:
        return corpus
    return replace(corpus, training=replace(corpus.training, teacher=TeacherTokens(folder)))


def make_loop(folder: Path, changes: dict, corpus, accelerator) -> TrainingLoop:
    recipe = tiny_recipe(folder, {"optimization.token_budget": 700, "optimization.max_updates": END, **changes})
    recipe.folder.mkdir(exist_ok=True, parents=True)
    return TrainingLoop(recipe, with_teacher(corpus, recipe), accelerator)


def weights_of(folder: Path, update: int = END) -> dict[str, torch.Tensor]:
    """Return copies, because what is loaded changes with the file."""
    weights = load_file(checkpoint_path(folder / "checkpoints", update) / "model.safetensors")
    return {name: weight.clone() for name, weight in weights.items()}


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def resumes(folder: Path, changes: dict, corpus, accelerator, *stops: int) -> bool:
    """Return whether a run that is stopped after these updates goes on to the same weights, losses and averages."""
    for name, ends in (("straight", [END]), ("stopped", [*stops, END])):
        for end in ends:
            more = {"optimization.max_updates": end, "resume": end != ends[0]}
            make_loop(folder / name, {**changes, **more}, corpus, accelerator).run()
    ours, theirs = ([*all_tensors(folder / name), losses_of(folder / name)] for name in ("stopped", "straight"))
    return ours[-1] == theirs[-1] and all(map(equal, ours[:-1], theirs[:-1]))


def all_tensors(run: Path) -> list[dict[str, torch.Tensor]]:
    """Return the weights and the optimizer's moments that a run ended with."""
    state = load_state(checkpoint_path(run / "checkpoints", END))
    numbered = state.optimizer["state"].items()
    moments = {f"{number} {name}": value for number, values in numbered for name, value in values.items()}
    return [weights_of(run), moments]


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


@contextmanager
def ahead():
    """Make updates ahead, as for GPUs; give the names of the threads that make them."""
    threads = set()
    with (
        patch.object(Feed, "is_ahead", True),
        patch.object(feed, "pinned", lambda tensors: threads.add(threading.current_thread().name) or tensors),
    ):
        yield threads


def regular(folder: Path, accelerator: Accelerator) -> dict:
    """Train on a stream with everything against overfitting, stop in its second epoch and go on."""
    corpus = prepare_corpus(tiny_recipe(folder, {**REGULAR, **STREAM}), folder / "tokenizer", accelerator)
    with patch("heedful.data.epochs.corpus.CHUNK", 32):
        rows = rows_of(corpus, 1)
    is_exact = resumes(folder, {**REGULAR, **STREAM}, corpus, accelerator, 4)
    # Without dropout that differs between the processes the losses are those of one.
    with ahead() as threads:  # which is not for a stream that processes read together
        with_stand_in_for_dropout(make_loop(folder / "rows", {**R_DROP, **STREAM}, corpus, accelerator)).run()
    mixed = list(prepare_corpus(tiny_recipe(folder, SEVERAL), folder / "tagged", accelerator).training.updates(1))
    found = {"rows": rows, "exact": is_exact, "losses": losses_of(folder / "rows"), "mixed": mixed}
    return {**found, "threads": list(threads)}


def distilled(folder: Path, corpus, accelerator) -> dict:
    """Train with a teacher, stop and go on; return the losses of a run without dropout too."""
    changes = {**R_DROP, "optimization.distillation": str(folder.parent / "teacher")}
    is_exact = resumes(folder, changes, corpus, accelerator, 1, 4)
    with_stand_in_for_dropout(make_loop(folder / "alone", changes, corpus, accelerator)).run()
    return {"exact": is_exact, "losses": losses_of(folder / "alone")}


def losses_of(folder: Path) -> list[list[float]]:
    return [logged(folder, f"train/{name}") for name in ("loss", "r_drop", "distillation")]


def goes_on_with_another_number(folder: Path, corpus, accelerator) -> dict:
    """Go on with a run that one process began, and begin one that one process will go on with."""
    alone = folder.parent / "alone"
    loop = make_loop(alone, {**NO_DROPOUT, "resume": True}, corpus, accelerator)
    before = loop.progress.update
    loop.run()
    make_loop(folder, {**NO_DROPOUT, "optimization.max_updates": 3}, corpus, accelerator).run()
    return {"before": before, "losses": logged(alone, "train/loss")}


def rows_of(corpus, epoch: int) -> list[list[int]]:
    """Return the rows of an epoch in order, each as one list."""
    updates = list(corpus.training.updates(epoch))
    return [[*row["input_ids"], -1, *row["labels"]] for update in updates for bucket in update for row in bucket]


def stream(folder: Path, accelerator) -> dict:
    """Read a stream together; tell what came, and how many pairs this process encoded of them."""
    changes = {**STREAM, "data.max_source_tokens": 30, "data.train": "builtin:train:301"}
    encoded, encode = [], PairEncoder.rows

    def count_and_encode(encoder, pairs):
        pairs = list(pairs)
        encoded.append(len(pairs))
        return encode(encoder, pairs)

    corpus = prepare_corpus(tiny_recipe(folder, changes), folder / "tokenizer", accelerator)
    with patch.object(PairEncoder, "rows", count_and_encode), patch("heedful.data.epochs.corpus.CHUNK", 32):
        rows = rows_of(corpus, 0)
    return {"rows": rows, "encoded": sum(encoded)}


# Without its package the other checks have to run all the same.
HAS_FREE = find_spec("schedulefree") is not None
FREE = {"optimization.optimizer": "schedule_free" if HAS_FREE else "adamw", "validation.every_updates": 3}
MUON = {"optimization.optimizer": "muon", "validation.every_updates": 3}


def optimized(folder: Path, corpus, accelerator) -> dict:
    """Train with the other optimizers, stop and go on; return the losses of runs without dropout too."""
    found = {}
    for name, changes in {"free": FREE, "muon": MUON}.items():
        is_exact = resumes(folder / name, changes, corpus, accelerator, 4)
        make_loop(folder / f"{name}-alone", {**NO_DROPOUT, **changes}, corpus, accelerator).run()
        names = "train/loss", "validation/loss"
        found[name] = {"exact": is_exact, "losses": [logged(folder / f"{name}-alone", each) for each in names]}
    return found


@contextmanager
def sharding(accelerator: Accelerator, optimizer: str = "adam"):
    """Let `prepare` shard the weights as FSDP2 does: Accelerate itself does so on accelerators only."""
    mesh = init_device_mesh("cpu", (accelerator.num_processes,))

    def prepare(model, optimizer):
        for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, make_optimizer(model, settings)

    settings = tiny_recipe(Path("any"), {"optimization.optimizer": optimizer}).optimization
    with patch.object(accelerator, "prepare", prepare):
        yield


def sharded(folder: Path, corpus, accelerator) -> dict:
    """Train with sharded weights; compare with weights that are not, and exchange checkpoints with them."""
    from transformers import AutoModelForSeq2SeqLM

    whole = folder.parent / "plain"
    with sharding(accelerator):
        loop = make_loop(folder / "parts", PLAIN, corpus, accelerator)
        weights = list(loop.engine.model.parameters())
        shares = [weight.to_local().numel() / weight.numel() for weight in weights if isinstance(weight, DTensor)]
        loop.run()
        is_exact = resumes(folder, REGULAR, corpus, accelerator, 3)
    with sharding(accelerator, FREE["optimization.optimizer"]):
        is_exact = is_exact and resumes(folder / "free", FREE, corpus, accelerator, 3)
    # What processes without sharding began, sharded ones go on with, and the other way round.
    for end in (3, 4, END):
        more = {**NO_DROPOUT, "optimization.max_updates": end, "resume": end > 3}
        with sharding(accelerator) if end == 4 else nullcontext():
            make_loop(folder / "mixed", more, corpus, accelerator).run()
    checkpoint = checkpoint_path(folder / "parts/checkpoints", END)
    names = "train/loss", "train/gradient_norm", "validation/loss", "validation/chrf"
    ours, theirs = weights_of(folder / "parts"), weights_of(whole)
    return {
        "parameters": len(weights),
        "shares": shares,
        "exact": is_exact,
        "logged": {name: [logged(run, name) for run in (whole, folder / "parts")] for name in names},
        "class": type(AutoModelForSeq2SeqLM.from_pretrained(checkpoint)).__name__,
        "difference": max(((ours[name] - weight).norm() / weight.norm()).item() for name, weight in theirs.items()),
        "mixed_losses": logged(folder / "mixed", "train/loss"),
        "files": sorted(path.name for path in checkpoint.iterdir()),
    }


def run_out_of_memory(loop: TrainingLoop, accelerator, after: int) -> TrainingLoop:
    """Let memory run out in the second process alone, once, after so many micro-batches."""
    errors = [torch.OutOfMemoryError("CUDA out of memory.")] * accelerator.process_index
    errors = chain([None] * after, errors, repeat(None))
    around(loop.engine, "backward", before=Mock(side_effect=errors))
    return loop


def shrinks_together(folder: Path, corpus, accelerator) -> dict:
    loop = make_loop(folder, {**NO_DROPOUT, "optimization.shrink_token_budget": True}, corpus, accelerator)
    budget = run_out_of_memory(loop, accelerator, after=1).run().token_budget
    return {"budget": budget, "losses": logged(folder, "train/loss")}


def spoil(loop: TrainingLoop, updates: set[int]) -> None:
    """Let the loss of some updates be not a number."""
    loss_of = loop.engine.network.loss_of
    loop.engine.network.loss_of = lambda *batch: (
        loss_of(*batch) * (float("nan") if loop.progress.update + 1 in updates else 1)
    )


def skips_together(folder: Path, corpus, accelerator) -> dict:
    """Let the loss of the second process alone be not a number, once."""
    loop = make_loop(folder, {"optimization.skip_nonfinite_updates": 1}, corpus, accelerator)
    spoil(loop, {3} if accelerator.process_index == 1 else set())
    progress = loop.run()
    total = sum(weight.double().sum().item() for weight in loop.engine.network.parameters())
    return {"update": progress.update, "skipped": progress.skipped_updates, "sum": total}


def message_of(call, *given, **named) -> str:
    """Return what the error says that a call raises."""
    try:
        call(*given, **named)
    except (TrainingInterrupted, OSError, FloatingPointError, ValueError) as error:
        return str(error)
    return ""


def tell_to_stop(loop: TrainingLoop, owner, name: str, accelerator) -> list:
    """Send the second process a signal when a method of its loop has ended in update 2; return what it was given."""
    method, given = getattr(owner, name), []

    def call_and_be_told(*arguments, **named):
        method(*arguments, **named)
        given.extend((*arguments, *named.values()))
        if accelerator.process_index == 1 and loop.progress.update == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    setattr(owner, name, call_and_be_told)
    return given


def ends_together(folder: Path, corpus, accelerator) -> dict:
    """Let time, patience, a signal or a full disk concern one process alone."""

    def make(name: str, changes: dict) -> TrainingLoop:
        return make_loop(folder / name, changes, corpus, accelerator)

    late = make("late", {"optimization.max_minutes": 5.0})

    def be_late():
        if accelerator.process_index == 1 and late.progress.update == 2:
            late._started -= 3600

    around(late, "_train_on", before=be_late)
    patient = make("patient", {"validation.every_updates": 1, "validation.patience": 2})
    # The processes do not see the same values; those of the main process count.
    values = iter([3.0, 2.0, 2.5, 2.6, 1.0] if accelerator.is_main_process else [9.0, 8.0, 7.0, 6.0, 5.0, 4.0])
    with patch.object(validation, "validation_loss", lambda *_: next(values)):
        ends = {"late": late.run().update, "patient": patient.run().update}
    told = make("told", {})
    tell_to_stop(told, told.engine, "step", accelerator)
    ends["told"] = message_of(told.run)
    full, unsaved = make("full", {"checkpoints.every_updates": 2}), make("unsaved", {"optimization.max_updates": 4})
    save = checkpoints.save_checkpoint

    def fail_once(path, model, state, *others):
        if state.progress.update == 4:
            raise OSError("No space left on device")
        return save(path, model, state, *others)

    with patch.object(checkpoints, "save_checkpoint", fail_once):
        full.run()
        ends["unsaved"] = message_of(unsaved.run)
    ends["full"] = sorted(int(path.name[-1]) for path in full.checkpoints.folder.iterdir())
    poisoned = make("poisoned", {})
    if accelerator.process_index == 1:
        next(poisoned.engine.model.parameters()).data.view(-1)[0] = float("inf")
    ends["poisoned"] = message_of(poisoned.checkpoints.save, poisoned.progress, must=True)
    return ends


def share_of_padding(loop: TrainingLoop, updates: int) -> float:
    """Return the share of padding in the first updates, by the rows that each process gets."""
    rows, batches = [], []
    for update in list(loop.corpus.training.updates(0))[:updates]:
        for part in chain(*split_update(update, loop.token_budget, loop.accelerator.num_processes)):
            batches.append(range(len(rows), len(rows) + len(part)))
            rows += part
    lengths = [[len(row[name]) for row in rows] for name in ("input_ids", "labels")]
    return padding_share([batch for batch in batches if batch], *lengths)


def padding(folder: Path, corpus, accelerator) -> dict:
    """Return the padding that is logged, what it is, and the last update's seed."""
    loop = make_loop(folder, {"logging.every_updates": 3, "optimization.max_updates": 3}, corpus, accelerator)
    share = share_of_padding(loop, 3)
    loop.run()
    return {"logged": logged(folder, "train/padding_share"), "share": share, "seed": torch.initial_seed()}


def as_on_gpus(folder: Path, corpus, accelerator) -> dict:
    """Train as GPUs do: compiled inside of DDP, on updates made ahead, with results that are read late."""

    def make(name: str, changes: dict) -> TrainingLoop:
        changes = NO_DROPOUT | {"optimization.compile": True, "logging.every_updates": END} | changes
        loop = make_loop(folder / name, changes, corpus, accelerator)
        loop.engine.decides_on_device = True
        return loop

    compiler = torch.compile
    # What resumes is not traced as well: that takes seconds for each run.
    with patch.object(torch, "compile", lambda function, **_: function), ahead():
        make("straight", {}).run()
        told = make("told", {})
        kept = tell_to_stop(told, told, "_read_results", accelerator)
        end = message_of(told.run)
        make("told", {"resume": True}).run()
    with (
        patch.object(torch, "compile", lambda function, **_: compiler(function, dynamic=True, backend="eager")),
        ahead(),
    ):
        small = make("small", {"optimization.shrink_token_budget": True})
        run_out_of_memory(small, accelerator, after=0).run()
    return {
        **{f"{name}_losses": logged(folder / name, "train/loss") for name in ("straight", "told", "small")},
        "end": end,
        "kept": kept,
        "resumed": equal(*(weights_of(folder / name) for name in ("straight", "told"))),
        "is_compiled": small.engine.body is not None,
    }


def losses_of_single_rows(folder: Path, accelerator) -> list[float]:
    """Train on updates of one pair each, which leave every process but one without rows."""
    # Adam does not mind a gradient half as long; with this epsilon its step is nearly proportional to the gradient.
    changes = {**PLAIN, "optimization.epsilon": 1e3, "optimization.learning_rate": 300.0}
    changes |= {"optimization.tokens_per_update": 1, "optimization.max_grad_norm": None}
    corpus = prepare_corpus(tiny_recipe(folder / "lonely", changes), folder / "plain" / "tokenizer")
    assert [len(bucket) for bucket in next(iter(corpus.training.updates(0)))] == [1]
    make_loop(folder / "lonely", changes, corpus, accelerator).run()
    return logged(folder / "lonely", "train/loss")


def measure(folder: Path) -> dict:
    """Train, validate and translate; return all that must not depend on the number of processes."""
    recipe = tiny_recipe(folder / "plain", PLAIN)
    # A finished run dissolves its processes' group, and these have more to do.
    with patch.object(PartialState, "destroy_process_group"):
        result = train(recipe)
    accelerator = make_accelerator(recipe.optimization)
    translator = Translator.from_pretrained(result.folder, "cpu")
    sources = [pair["source"] for pair in result.corpus.validation_pairs[:9]]
    loss = validation_loss(translator.model, result.corpus.validation, 300, accelerator)
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    losses = *logged(folder / "plain", "validation/loss"), result.metrics["validation"]["loss"], loss
    return {
        "processes": [accelerator.num_processes, result.processes, world],
        "training_losses": logged(folder / "plain", "train/loss"),
        "validation_losses": losses,
        "scores": [*logged(folder / "plain", "validation/chrf"), result.metrics["small"]["chrf"]],
        "count": result.metrics["small"]["count"],
        "translations": [
            best.text for best in translate_on_ranks(translator, sources, accelerator, max_new_tokens=12)
        ],
        "target_tokens": result.progress.target_tokens,
        "losses_of_single_rows": losses_of_single_rows(folder, accelerator),
    }


def main(folder: Path) -> None:
    """Measure, and put the processes through all checks; each entry is what one function above returned."""
    measured = measure(folder)
    recipe = tiny_recipe(folder / "plain", PLAIN)
    accelerator = make_accelerator(recipe.optimization)
    corpus = prepare_corpus(recipe, folder / "plain" / "tokenizer", accelerator)
    checks = {"distilled": distilled, "number": goes_on_with_another_number, "sharded": sharded}
    checks |= {"shrunk": shrinks_together, "skipped": skips_together, "padding": padding}
    checks |= {"ends": ends_together, "gpus": as_on_gpus, "optimized": optimized}
    measured |= {name: check(folder / name, corpus, accelerator) for name, check in checks.items()}
    measured["stream"] = stream(folder / "stream", accelerator)
    measured["regular"] = regular(folder / "regular", accelerator)
    (folder / f"result-{torch.distributed.get_rank()}.json").write_text(json.dumps(measured))
