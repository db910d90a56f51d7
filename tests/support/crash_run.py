"""Train a recipe, ended again and again by signals at random moments.

Every attempt is a process of its own, forked from this one, which has imported everything and prepared nothing.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from accelerate.state import AcceleratorState

from heedful.training.loop.loop import TrainingLoop
from heedful.training.processes.signals import TrainingInterrupted
from heedful.training.run import train
from tiny_runs import tiny_recipe

CHANGES = {"optimization.token_budget": 800, "logging.every_updates": 3, "data.train": "builtin:train:100"}
CHANGES |= {"checkpoints.every_updates": 1, "checkpoints.keep_last": 3, "validation.every_updates": 4}
CHANGES |= {"validation.sentences": 2, "checkpoints.keep_best": 2, "decoding.max_length": 8}


def attempt(folder: Path, updates: int) -> tuple[int, int]:
    """Start the run or go on with it; return the process, and a pipe that says when training begins, or ends."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    code = 1
    run = TrainingLoop.run

    def run_and_report(loop):
        os.write(writing, b"!")
        return run(loop)

    try:
        torch.set_num_threads(1)
        TrainingLoop.run = run_and_report
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123
        AcceleratorState._reset_state(reset_partial_state=True)
        train(tiny_recipe(folder, {**CHANGES, "optimization.max_updates": updates, "resume": True}))
        code = 0
    except TrainingInterrupted:
        code = 130
    finally:
        os._exit(code)


def finish(folder: Path, updates: int) -> tuple[int, float]:
    """Let the run come to its end; return the exit code and the seconds from the beginning of training."""
    child, pipe = attempt(folder, updates)
    os.read(pipe, 1)
    begun = time.perf_counter()
    os.close(pipe)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), time.perf_counter() - begun


def end_at_a_random_moment(folder: Path, updates: int, number: int, seconds: float, draw: random.Random) -> dict:
    """Start an attempt, send it a signal, and return what it was doing."""
    child, pipe = attempt(folder, updates)
    checkpoints = folder / "checkpoints"
    if draw.random() < 0.9:  # else while it loads
        os.read(pipe, 1)
    time.sleep(draw.uniform(0, seconds))
    if number == signal.SIGKILL and draw.random() < 0.3:  # while it saves, if the run is not over
        deadline = time.perf_counter() + 2
        while time.perf_counter() < deadline and not any(checkpoints.glob("*.partial")):
            time.sleep(0.0005)
    os.kill(child, number)
    signalled = time.perf_counter()
    _, status = os.waitpid(child, 0)
    os.close(pipe)
    return {
        "signal": number,
        "code": os.waitstatus_to_exitcode(status),
        "seconds": time.perf_counter() - signalled,
        "was_saving": any(checkpoints.glob("*.partial")),
        "finished": (folder / "model" / "metrics.json").is_file(),
    }


def end_again_and_again(folder: Path, kills: int, updates: int, seed: int) -> list[dict]:
    """Train one run undisturbed, and one that is ended that many times; return what it was doing each time."""
    code, seconds = finish(folder / "undisturbed", updates)
    assert code == 0
    draw, ends = random.Random(seed), []
    while len(ends) < kills:
        number = signal.SIGTERM if len(ends) % 4 == 3 else signal.SIGKILL
        # Short enough that the run is still going on at the last kill.
        ends.append(end_at_a_random_moment(folder / "killed", updates, number, 1.5 * seconds / kills, draw))
    code, _ = finish(folder / "killed", updates)
    assert code == 0
    return ends
