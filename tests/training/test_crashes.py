"""Whatever ends a run, or goes wrong in it: nothing is lost, and nothing is poisoned."""

import itertools
import json
import logging
import os
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
from safetensors.torch import load_file

import crash_run
import forked
from full_disk import FileTooLarge
from heedful.training.launch.heartbeat import Heartbeat
from heedful.training.loop import validation
from heedful.training.recipe_file import to_yaml
from heedful.training.run_folder import checkpoints
from heedful.training.run_folder.checkpoints import checkpoint_path, find_damage
from tiny_runs import logged, tiny_recipe

ROOT = Path(__file__).parents[2]
NO_DROPOUT = {"model.options.dropout": 0.0}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("kills", "updates", "seed"),
    [(3, 10, 3), *(pytest.param(20, 30, seed, marks=pytest.mark.slow) for seed in (1, 2))],
)
def test_a_run_that_is_killed_at_random_moments_ends_like_one_that_is_not(tmp_path, kills, updates, seed):
    ends = crash_run.end_again_and_again(tmp_path, kills, updates, seed)
    ours, theirs = (load_file(tmp_path / name / "model/model.safetensors") for name in ("killed", "undisturbed"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for name in ("train/loss", "train/gradient_norm", "validation/loss", "validation/chrf"):
        assert logged(tmp_path / "killed", name) == logged(tmp_path / "undisturbed", name), name
    metrics = [(tmp_path / name / "model/metrics.json").read_text() for name in ("killed", "undisturbed")]
    assert metrics[0] == metrics[1]
    for end in ends:
        # A signal that finds the run in training ends it politely, long before a cluster would lose its patience; one
        # that comes after its end finds a process that has exited.
        codes = (-signal.SIGKILL,) if end["signal"] == signal.SIGKILL else (130, -signal.SIGTERM, 0)
        assert end["code"] in codes or (end["finished"] and end["code"] == 0)
        assert end["seconds"] < 30
    assert len(ends) == kills
    assert sum(not end["finished"] for end in ends) >= min(kills - 2, 4)
    assert kills < 20 or any(end["was_saving"] for end in ends)


def fill_the_disk_at(monkeypatch, updates):
    save = checkpoints.save_checkpoint

    def save_with_little_room(folder, model, state, tokenizers, recipe):
        if state.progress.update not in updates:
            return save(folder, model, state, tokenizers, recipe)
        with FileTooLarge(5000):
            return save(folder, model, state, tokenizers, recipe)

    monkeypatch.setattr(checkpoints, "save_checkpoint", save_with_little_room)


def test_a_full_disk_is_told_and_training_goes_on(make_loop, tmp_path, monkeypatch, caplog, weights_of, saved_updates):
    changes = {"checkpoints.every_updates": 2}
    make_loop(changes, tmp_path / "straight").run()
    fill_the_disk_at(monkeypatch, {4})
    with caplog.at_level(logging.WARNING, logger="heedful"):
        make_loop(changes).run()
    assert "update-00000004 could not be written: " in caplog.text
    assert "Earlier checkpoints are unharmed, and training goes on." in caplog.text
    assert saved_updates(tmp_path / "run") == [2, 6]
    assert find_damage(checkpoint_path(tmp_path / "run/checkpoints", 2)) is None
    ours, theirs = weights_of(tmp_path / "run", 6), weights_of(tmp_path / "straight", 6)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_disk_that_is_full_at_the_end_is_an_error_and_the_run_can_be_resumed(
    make_loop, tmp_path, monkeypatch, saved_updates
):
    fill_the_disk_at(monkeypatch, {6})
    with pytest.raises(OSError, match="update-00000006 could not be written: "):
        make_loop({"checkpoints.every_updates": 2}).run()
    assert saved_updates(tmp_path / "run") == [2, 4]
    monkeypatch.undo()
    assert make_loop({"checkpoints.every_updates": 2, "resume": True}).run().update == 6


def test_a_validation_without_a_checkpoint_is_not_remembered_as_the_best(
    make_loop, monkeypatch, saved_updates, tmp_path
):
    fill_the_disk_at(monkeypatch, {2})
    values = iter([1.0, 3.0, 2.0])
    monkeypatch.setattr(validation, "validation_loss", lambda *_: next(values))
    progress = make_loop({"validation.every_updates": 2, "checkpoints.keep_last": 1}).run()
    assert progress.best == [(2.0, 6)]
    assert saved_updates(tmp_path / "run") == [6]


def test_a_log_that_cannot_be_written_ends_no_run(make_loop, tmp_path, monkeypatch, caplog):
    loop = make_loop()
    step = loop.engine.step

    def step_on_a_full_disk(*arguments):
        step(*arguments)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        full = loop.progress.update in (2, 3)
        size = (tmp_path / "run/log.jsonl").stat().st_size + 20 if full else limits[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))

    monkeypatch.setattr(loop.engine, "step", step_on_a_full_disk)
    loop.run()
    assert "a line of the log is lost" in caplog.text
    lines = (tmp_path / "run/log.jsonl").read_text().splitlines()
    assert [json.loads(line)["update"] for line in lines if line.endswith("}")] == [1, 2, 5, 6]
    make_loop({"resume": True})
    rewritten = map(json.loads, (tmp_path / "run/log.jsonl").read_text().splitlines())
    assert [line["update"] for line in rewritten] == [1, 2, 5, 6]


def spoil(loop, monkeypatch, updates):
    """Make the losses of updates not a number."""
    forward = loop.engine.model.forward

    def spoilt(**batch):
        output = forward(**batch)
        if loop.progress.update + 1 in updates:
            output.loss = output.loss * float("nan")
        return output

    monkeypatch.setattr(loop.engine.model, "forward", spoilt)


def test_an_update_that_is_not_a_number_is_skipped_and_counted_where_the_recipe_says_so(
    make_loop, monkeypatch, caplog
):
    loop = make_loop({"optimization.skip_nonfinite_updates": 1, "optimization.max_grad_norm": 1.0})
    spoil(loop, monkeypatch, {2, 4})
    weights, write = [], loop.log.write_training

    def note_and_write(*values):
        weights.append(torch.cat([weight.detach().flatten() for weight in loop.engine.model.parameters()]))
        return write(*values)

    monkeypatch.setattr(loop.log, "write_training", note_and_write)
    progress = loop.run()
    assert (progress.update, progress.skipped_updates, progress.skipped_in_a_row) == (6, 2, 0)
    assert "update 2 is skipped: the norm of its gradient is nan" in caplog.text
    assert all(vector.isfinite().all() for vector in weights)
    assert [torch.equal(weights[i], weights[i + 1]) for i in range(5)] == [True, False, True, False, False]


def test_more_updates_in_a_row_than_allowed_stop_the_run(make_loop, monkeypatch, saved_updates, tmp_path):
    loop = make_loop({"optimization.skip_nonfinite_updates": 2, "checkpoints.every_updates": 1})
    spoil(loop, monkeypatch, {2, 3, 4})
    with pytest.raises(FloatingPointError, match=r"diverged at update 4 .*`optimization.skip_nonfinite_updates`"):
        loop.run()
    assert saved_updates(tmp_path / "run") == [1, 2, 3]
    assert all(weight.isfinite().all() for weight in loop.engine.model.parameters())


def test_skipped_updates_are_logged_and_do_not_spoil_the_logged_loss(make_loop, monkeypatch, tmp_path):
    loop = make_loop({"optimization.skip_nonfinite_updates": 1, "logging.every_updates": 3})
    spoil(loop, monkeypatch, {2})
    loop.run()
    assert logged(tmp_path / "run", "train/skipped_updates") == [1, 1]
    assert all(0 < loss < 10 for loss in logged(tmp_path / "run", "train/loss"))


def test_poisoned_weights_are_never_saved(make_loop, monkeypatch, saved_updates, tmp_path):
    loop = make_loop({"checkpoints.every_updates": 2})
    step = loop.engine.step

    def step_and_poison(*arguments):
        step(*arguments)
        if loop.progress.update == 3:
            with torch.no_grad():
                next(iter(loop.engine.model.parameters()))[0, 0] = float("inf")

    monkeypatch.setattr(loop.engine, "step", step_and_poison)
    with pytest.raises(FloatingPointError, match=r"a weight is not finite. The last checkpoint is unharmed"):
        loop.run()
    assert saved_updates(tmp_path / "run") == [2]


def run_out_of_memory_above(loop, monkeypatch, tokens):
    """Let a forward pass of more padded tokens than that fail, as a GPU does."""
    forward, sizes = loop.engine.model.forward, []

    def limited(**batch):
        sizes.append(batch["input_ids"].numel() + batch["labels"].numel())
        if sizes[-1] > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(**batch)

    monkeypatch.setattr(loop.engine.model, "forward", limited)
    return sizes


def test_the_token_budget_shrinks_when_memory_runs_out_and_the_updates_stay_the_same(
    make_loop, tmp_path, monkeypatch, weights_of, caplog
):
    make_loop(NO_DROPOUT, tmp_path / "whole").run()
    changes = {**NO_DROPOUT, "optimization.shrink_token_budget": True}
    loop = make_loop({**changes, "optimization.max_updates": 3}, tmp_path / "shrunk")
    sizes = run_out_of_memory_above(loop, monkeypatch, 600)
    progress = loop.run()
    assert (progress.token_budget, progress.update) == (500, 3)
    assert [size for size in sizes if size > 600]
    assert all(size <= 600 for size in sizes[-6:])
    assert "the token budget is halved to 1000" in caplog.text
    assert "the token budget is halved to 500" in caplog.text
    resumed = make_loop({**changes, "resume": True}, tmp_path / "shrunk")
    assert resumed.token_budget == 500
    resumed.run()
    losses = [logged(tmp_path / name, "train/loss") for name in ("whole", "shrunk")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    ours, theirs = weights_of(tmp_path / "shrunk", 6), weights_of(tmp_path / "whole", 6)
    for name, weight in theirs.items():
        assert (ours[name] - weight).norm() <= 1e-4 * weight.norm(), name


@pytest.mark.parametrize(
    ("shrinks", "most", "message"),
    [
        (False, 600, r"Update 1 .* 2000 padded tokens: set `optimization.token_budget` lower"),
        (True, 3, r"or drop longer pairs with `data.max_source_tokens`"),  # a single pair
    ],
)
def test_memory_that_runs_out_ends_the_run_with_the_ways_out(make_loop, monkeypatch, shrinks, most, message):
    loop = make_loop({"optimization.shrink_token_budget": shrinks})
    run_out_of_memory_above(loop, monkeypatch, most)
    with pytest.raises(MemoryError, match=message):
        loop.run()


def test_what_the_cpu_refuses_counts_as_memory_that_ran_out_and_other_errors_do_not(make_loop, monkeypatch):
    loop = make_loop()
    monkeypatch.setattr(loop.engine.model, "forward", lambda **_: torch.empty(1 << 58))
    with pytest.raises(MemoryError, match="does not fit in memory"):
        loop.run()
    loop = make_loop({"optimization.shrink_token_budget": True})
    monkeypatch.setattr(loop.engine.model, "forward", lambda **_: torch.ones(2, 3) @ torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        loop.run()


def train_by_script(recipe: Path) -> None:
    sys.argv = ["train.py", str(recipe)]
    runpy.run_path(str(ROOT / "scripts" / "train.py"), run_name="__main__")


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
    """Wait until a file is there, while all processes live."""
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


STOPPED, KILLED = (signal.SIGSTOP, "has given no sign of life for 2 seconds"), (signal.SIGKILL, "has ended")


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


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_run_whose_other_process_hangs_ends_within_a_minute(tmp_path):
    recipe = tiny_recipe(tmp_path / "run", {"optimization.max_updates": 100_000, "checkpoints.every_updates": 5})
    (tmp_path / "recipe.yaml").write_text(to_yaml(recipe))
    processes = forked.start(2, tmp_path, train_by_script, tmp_path / "recipe.yaml")
    try:
        wait_for(tmp_path / "run/checkpoints/update-00000005", processes)
        os.kill(processes[1].pid, signal.SIGSTOP)
        processes[0].join(60)
    finally:
        for process in processes:
            process.kill()
    assert processes[0].exitcode == 1
    said = forked.told(tmp_path, 0).read_text()
    assert "heedful: Process 1 of this run has given no sign of life for 30 seconds" in said
