"""Whatever ends a run, or goes wrong in it: nothing is lost, and nothing is poisoned."""

import itertools
import json
import multiprocessing
import os
import random
import resource
import runpy
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

import forked
from heedful.training.loop import validation
from heedful.training.loop.loop import TrainingLoop
from heedful.training.processes.heartbeat import Heartbeat
from heedful.training.processes.signals import TrainingInterrupted
from heedful.training.recipe_file import to_yaml
from heedful.training.run import train
from heedful.training.run_folder import checkpoints
from heedful.training.run_folder.checkpoints import checkpoint_path, find_damage
from helpers import assert_error
from process_checks import equal, spoil, weights_of
from tiny_runs import around, full_disk, logged, saved_updates, tiny_recipe

NO_DROPOUT = {"model.options.dropout": 0.0}

CHANGES = {"optimization.token_budget": 800, "logging.every_updates": 3, "data.train": "builtin:train:100"}
CHANGES |= {"checkpoints.every_updates": 1, "checkpoints.keep_last": 3, "validation.every_updates": 4}
CHANGES |= {"validation.sentences": 2, "decoding.max_length": 8}


def train_and_report(folder: Path, updates: int, begun) -> None:
    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)
    around(TrainingLoop, "run", before=begun.set)
    try:
        train(tiny_recipe(folder, {**CHANGES, "optimization.max_updates": updates, "resume": True}))
    except TrainingInterrupted:
        sys.exit(130)


def attempt(folder: Path, updates: int) -> tuple:
    """Start the run or go on with it; return the process, and what is set when training begins."""
    fork = multiprocessing.get_context("fork")
    begun = fork.Event()
    process = fork.Process(target=train_and_report, args=(folder, updates, begun))
    process.start()
    return process, begun


def finish(folder: Path, updates: int) -> float:
    """Let the run come to its end; return the seconds from the beginning of training."""
    process, begun = attempt(folder, updates)
    assert begun.wait(100)
    start = time.perf_counter()
    process.join()
    assert process.exitcode == 0
    return time.perf_counter() - start


def end_at_a_random_moment(folder: Path, updates: int, number: int, seconds: float, draw: random.Random) -> tuple:
    """Start an attempt and send it a signal; return its exit code, and whether it was saving, and over."""
    process, begun = attempt(folder, updates)
    checkpoints = folder / "checkpoints"
    if draw.random() < 0.9:  # else while it loads
        assert begun.wait(100)
    time.sleep(draw.uniform(0, seconds))
    if number == signal.SIGKILL and draw.random() < 0.3:  # while it saves, if the run is not over
        deadline = time.perf_counter() + 2
        while time.perf_counter() < deadline and not any(checkpoints.glob("*.partial")):
            time.sleep(0.0005)
    os.kill(process.pid, number)
    process.join(30)  # long before a cluster would lose its patience
    return process.exitcode, any(checkpoints.glob("*.partial")), (folder / "model" / "metrics.json").is_file()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("kills", "updates", "seed"), [(3, 6, 3), *(pytest.param(20, 30, seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_a_run_that_is_killed_at_random_moments_ends_like_one_that_is_not(tmp_path, kills, updates, seed):
    seconds, draw, ends = finish(tmp_path / "undisturbed", updates), random.Random(seed), []
    for kill in range(kills):
        number = signal.SIGTERM if kill % 4 == 3 else signal.SIGKILL
        # Short enough that the run is still going on at the last kill.
        ends.append(end_at_a_random_moment(tmp_path / "killed", updates, number, 1.5 * seconds / kills, draw))
        # A signal that finds the run in training ends it politely; one that comes after its end finds no process.
        codes = (-signal.SIGKILL,) if number == signal.SIGKILL else (130, -signal.SIGTERM, 0)
        assert ends[-1][0] in codes or ends[-1] == (0, False, True)
    finish(tmp_path / "killed", updates)
    assert equal(*(load_file(tmp_path / name / "model/model.safetensors") for name in ("killed", "undisturbed")))
    for name in ("train/loss", "train/gradient_norm", "validation/loss", "validation/chrf"):
        assert logged(tmp_path / "killed", name) == logged(tmp_path / "undisturbed", name), name
    metrics = [(tmp_path / name / "model/metrics.json").read_text() for name in ("killed", "undisturbed")]
    assert metrics[0] == metrics[1]
    assert sum(not is_over for *_, is_over in ends) >= min(kills - 2, 4)
    assert kills < 20 or any(was_saving for _, was_saving, _ in ends)


def fill_the_disk_at(monkeypatch, updates):
    save = checkpoints.save_checkpoint

    def save_with_little_room(folder, model, state, tokenizers, recipe):
        if state.progress.update not in updates:
            return save(folder, model, state, tokenizers, recipe)
        with full_disk(5000):
            return save(folder, model, state, tokenizers, recipe)

    monkeypatch.setattr(checkpoints, "save_checkpoint", save_with_little_room)


def test_a_full_disk_is_told_and_training_goes_on(make_loop, tmp_path, monkeypatch, caplog):
    """And at the end it is an error, and the run can be resumed."""
    changes = {"checkpoints.every_updates": 1, "optimization.max_updates": 4}
    make_loop(changes, tmp_path / "straight").run()
    with monkeypatch.context() as patch:
        fill_the_disk_at(patch, {2, 4})
        assert_error("update-00000004 could not be written: ", make_loop(changes).run, error=OSError)
    assert "update-00000002 could not be written: " in caplog.text
    assert "Earlier checkpoints are unharmed, and training goes on." in caplog.text
    assert saved_updates(tmp_path / "run") == [1, 3]
    assert find_damage(checkpoint_path(tmp_path / "run/checkpoints", 1)) is None
    make_loop({**changes, "resume": True}).run()
    assert equal(*(weights_of(tmp_path / name, 4) for name in ("run", "straight")))


def test_a_validation_without_a_checkpoint_is_not_remembered_as_the_best(make_loop, monkeypatch, tmp_path):
    fill_the_disk_at(monkeypatch, {2})
    values = iter([1.0, 3.0, 2.0])
    monkeypatch.setattr(validation, "validation_loss", lambda *_: next(values))
    progress = make_loop({"validation.every_updates": 2, "checkpoints.keep_last": 1}).run()
    assert progress.best == (2.0, 6)
    assert saved_updates(tmp_path / "run") == [6]


def test_a_log_that_cannot_be_written_ends_no_run(make_loop, tmp_path, caplog):
    loop = make_loop()

    def fill_the_disk():
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        full = loop.progress.update in (2, 3)
        size = (tmp_path / "run/log.jsonl").stat().st_size + 20 if full else limits[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))

    around(loop.engine, "step", after=fill_the_disk)
    loop.run()
    assert "a log line is lost" in caplog.text
    lines = (tmp_path / "run/log.jsonl").read_text().splitlines()
    assert [json.loads(line)["update"] for line in lines if line.endswith("}")] == [1, 2, 5, 6]
    make_loop({"resume": True})
    rewritten = map(json.loads, (tmp_path / "run/log.jsonl").read_text().splitlines())
    assert [line["update"] for line in rewritten] == [1, 2, 5, 6]


def test_an_update_that_is_not_a_number_is_skipped_and_counted_where_the_recipe_says_so(make_loop, caplog, tmp_path):
    loop = make_loop({"optimization.skip_nonfinite_updates": 1, "logging.every_updates": 3})
    spoil(loop, {2, 4})
    weights, trained = [], list(loop.engine.model.parameters())
    around(loop.engine, "step", after=lambda: weights.append(torch.cat([each.detach().flatten() for each in trained])))
    progress = loop.run()
    assert (progress.update, progress.skipped_updates, progress.skipped_in_a_row) == (6, 2, 0)
    assert "update 2 is skipped: its gradient norm is nan" in caplog.text
    assert all(vector.isfinite().all() for vector in weights)
    assert [torch.equal(weights[i], weights[i + 1]) for i in range(5)] == [True, False, True, False, False]
    assert logged(tmp_path / "run", "train/skipped_updates") == [1, 2]
    assert all(0 < loss < 10 for loss in logged(tmp_path / "run", "train/loss"))


@pytest.mark.parametrize(("allowed", "log_every"), [(0, 1), (0, 100), (2, 1)])
def test_more_updates_in_a_row_than_allowed_stop_the_run(make_loop, tmp_path, allowed, log_every):
    message = "`optimization.skip_nonfinite_updates`" if allowed else "learning rate may be too high"
    changes = {"optimization.skip_nonfinite_updates": allowed, "checkpoints.every_updates": 1}
    loop = make_loop({**changes, "logging.every_updates": log_every})
    spoil(loop, {2, 3, 4})
    assert_error(rf"diverged at update {2 + allowed} .*{message}", loop.run, error=FloatingPointError)
    assert saved_updates(tmp_path / "run") == [1, 2, 3][: 1 + allowed]
    assert all(weight.isfinite().all() for weight in loop.engine.model.parameters())
    assert make_loop({**changes, "resume": True}).run().update == 6


def test_poisoned_weights_are_never_saved(make_loop, tmp_path):
    loop = make_loop({"checkpoints.every_updates": 2})

    def poison():
        if loop.progress.update == 3:
            next(iter(loop.engine.model.parameters())).data[0, 0] = float("inf")

    around(loop.engine, "step", after=poison)
    assert_error(r"a weight is not finite. The last checkpoint is unharmed", loop.run, error=FloatingPointError)
    assert saved_updates(tmp_path / "run") == [2]


def run_out_of_memory_above(loop, tokens):
    """Let a forward pass of more padded tokens than that fail, as a GPU does."""
    forward, sizes = loop.engine.model.forward, []

    def limited(batch, *others):
        sizes.append(batch["input_ids"].numel() + batch["labels"].numel())
        if sizes[-1] > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(batch, *others)

    loop.engine.model.forward = limited
    return sizes


def test_the_token_budget_shrinks_when_memory_runs_out_and_the_updates_stay_the_same(make_loop, tmp_path, caplog):
    make_loop({**NO_DROPOUT, "optimization.max_updates": 3}, tmp_path / "whole").run()
    changes = {**NO_DROPOUT, "optimization.shrink_token_budget": True}
    loop = make_loop({**changes, "optimization.max_updates": 2}, tmp_path / "shrunk")
    sizes = run_out_of_memory_above(loop, 600)
    progress = loop.run()
    assert (progress.token_budget, progress.update) == (500, 2)
    assert [size for size in sizes if size > 600]
    assert all(size <= 600 for size in sizes[-6:])
    assert "the token budget is halved to 1000" in caplog.text
    assert "the token budget is halved to 500" in caplog.text
    resumed = make_loop({**changes, "resume": True, "optimization.max_updates": 3}, tmp_path / "shrunk")
    assert resumed.token_budget == 500
    resumed.run()
    losses = [logged(tmp_path / name, "train/loss") for name in ("whole", "shrunk")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    ours, theirs = weights_of(tmp_path / "shrunk", 3), weights_of(tmp_path / "whole", 3)
    for name, weight in theirs.items():
        assert (ours[name] - weight).norm() <= 1e-4 * weight.norm(), name


def test_memory_that_runs_out_ends_the_run_with_the_ways_out(make_loop, tmp_path):
    for shrinks, most, message in (
        (False, 600, r"Update 1 .* 2000 padded tokens: set `optimization.token_budget` lower"),
        (True, 3, r"or drop longer pairs with `data.max_source_tokens`"),  # a single pair
    ):
        loop = make_loop({"optimization.shrink_token_budget": shrinks}, tmp_path / str(shrinks))
        run_out_of_memory_above(loop, most)
        assert_error(message, loop.run, error=MemoryError)
    # So does what the CPU refuses; another error is none of memory.
    loop.engine.model.forward = lambda *_: torch.empty(1 << 58)
    assert_error("does not fit in memory", loop.run, error=MemoryError)
    loop.engine.model.forward = lambda *_: torch.ones(2, 3) @ torch.ones(2, 3)
    assert_error("shapes cannot be multiplied", loop.run, error=RuntimeError)


def train_by_script(recipe: Path) -> None:
    sys.argv = ["train.py", str(recipe)]
    runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "train.py"), run_name="__main__")


def wait_for_nobody(folder: Path) -> None:
    """Work for a while, and wait for another process that never comes."""
    accelerator = Accelerator(cpu=True)
    with Heartbeat(accelerator, period=0.1, patience=2.0) as heartbeat:
        with heartbeat.paused():  # longer than the patience, which does not matter
            time.sleep(2.5)
        accelerator.wait_for_everyone()
        (folder / f"waiting-{accelerator.process_index}").touch()
        time.sleep(120)


def wait_for(path: Path, processes: list) -> None:
    deadline = time.monotonic() + 100
    while not path.exists():
        assert time.monotonic() < deadline
        assert [process.exitcode for process in processes] == [None, None]
        time.sleep(0.1)


@pytest.mark.multiprocess
def test_when_one_process_dies_the_other_ends_with_a_message_and_one_can_go_on(tmp_path, make_loop):
    changes = {"optimization.max_updates": 100_000, "checkpoints.every_updates": 5}
    recipe = tiny_recipe(tmp_path / "run", changes)
    (tmp_path / "recipe.yaml").write_text(to_yaml(recipe))
    processes = forked.start(2, tmp_path, train_by_script, tmp_path / "recipe.yaml")
    try:
        wait_for(tmp_path / "run/checkpoints/update-00000005", processes)
        processes[1].kill()
        processes[0].join(60)
    finally:
        for process in processes:
            process.kill()
    assert processes[0].exitcode == 1
    said = forked.told(tmp_path, 0).read_text()
    assert "heedful: Another process of this run has ended, so this one ends too" in said
    assert "Traceback" not in said
    # Another number of processes goes on from the same place.
    loop = make_loop({**changes, "resume": True})
    assert loop.progress.update >= 5
    assert loop.progress.processes == 1


STOPPED, KILLED = (signal.SIGSTOP, "has sent no heartbeat for 2 seconds"), (signal.SIGKILL, "has ended")


@pytest.mark.multiprocess
@pytest.mark.parametrize("cases", [[(1, STOPPED), (0, KILLED)], pytest.param([(0, STOPPED)], marks=pytest.mark.slow)])
def test_a_process_that_gives_no_sign_of_life_is_noticed_by_the_other(tmp_path, cases):
    folders = [tmp_path / str(lost) for lost, _ in cases]
    for folder in folders:
        folder.mkdir()
    runs = [forked.start(2, folder, wait_for_nobody, folder) for folder in folders]
    try:
        for folder, processes, (lost, (number, what)) in zip(folders, runs, cases, strict=True):
            for rank in (0, 1):
                wait_for(folder / f"waiting-{rank}", processes)
            os.kill(processes[lost].pid, number)
            processes[1 - lost].join(60)
            assert processes[1 - lost].exitcode == 1
            said = forked.told(folder, 1 - lost).read_text()
            assert f"heedful: Process {lost} of this run {what}, so process {1 - lost} ends too" in said
    finally:
        for process in itertools.chain(*runs):
            process.kill()


def test_a_process_that_stops_right_after_work_does_not_seem_paused_for_ever():
    words = {}
    heartbeat = Heartbeat(SimpleNamespace(process_index=1, is_main_process=False, num_processes=2))
    heartbeat._store, heartbeat._threads = SimpleNamespace(set=words.__setitem__), [threading.current_thread()]
    with heartbeat.paused():
        assert words == {"alive-1": "paused"}
    assert words == {"alive-1": "0"}
