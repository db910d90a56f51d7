"""Measure the speed of training, translation and evaluation while other processes keep cores busy.

    python scripts/benchmarks/busy.py runs/quickstart/model
    python scripts/benchmarks/busy.py runs/quickstart/model --settings ",GOMP_SPINCOUNT=300000" --rounds 3

Training counts target tokens a second after its first ten updates. Translation and evaluation are whole commands, in
sentences a second by the clock. The commands take turns, with and without busy processes; `kept` is the remaining
share of speed. An empty setting is the plain command. GOMP_SPINCOUNT=300000 is the default waiting of GNU's OpenMP.
"""

import json as json_module
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from harness import Json, Row, report

from heedful_lab.korean_english.pairs import korean_english_pairs

BUSY = "while True: pass"
HEEDFUL = (sys.executable, "-m", "heedful")
RARELY = 10**6  # updates


def train(model: Path, precision: str, environment: dict[str, str]) -> float:
    """Train the quickstart for a few updates, and return target tokens a second."""
    with tempfile.TemporaryDirectory() as folder:
        changes = [f"output={folder}/run", f"tokenizer.path={model}", f"optimization.mixed_precision={precision}"]
        changes += ["data.test={}", "optimization.max_updates=60", "optimization.max_minutes=null"]
        changes += [f"{section}.every_updates={RARELY}" for section in ("validation", "checkpoints")]
        run([*HEEDFUL, "train", "quickstart", *changes, "logging.every_updates=10"], environment)
        lines = [json_module.loads(line) for line in Path(folder, "run", "log.jsonl").read_text().splitlines()]
    speeds = [line["train/target_tokens_per_s"] for line in lines if "train/target_tokens_per_s" in line]
    return statistics.median(speeds[1:])


def run(command: list[str], environment: dict[str, str], text: str = "") -> float:
    """Run a command and return its seconds by the clock."""
    begun = time.perf_counter()
    options = {"input": text, "text": True, "check": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(command, env={**os.environ, "HF_HUB_OFFLINE": "1", **environment}, **options)
    return time.perf_counter() - begun


def speed(task: str, model: Path, sentences: int, environment: dict[str, str]) -> float:
    """Return a task's speed: training tokens a second, or sentences a second of the whole command."""
    if task.startswith("train"):
        return train(model, task.removeprefix("train "), environment)
    if task == "translate":
        text = "".join(pair["ko"] + "\n" for pair in korean_english_pairs("test", sentences))
        return sentences / run([*HEEDFUL, "translate", str(model)], environment, text)
    data = ["--data", f"builtin:test:{sentences}", "--source", "ko", "--target", "en", "--no-ter"]
    return sentences / run([*HEEDFUL, "evaluate", str(model), *data], environment)


def beside(busy: int, stack: ExitStack) -> None:
    """Start processes that each keep a core busy, until the stack is closed."""
    for _ in range(busy):
        process = subprocess.Popen([sys.executable, "-c", BUSY])
        stack.callback(process.wait)
        stack.callback(process.kill)


def measured(
    model: Path, tasks: list[str], settings: list[str], others: list[int], rounds: int, sentences: int
) -> Iterator[Row]:
    """Yield a row of median speeds for each task and setting."""
    for task in tasks:
        found: dict[str, dict[int, list[float]]] = {setting: {busy: [] for busy in others} for setting in settings}
        for _ in range(rounds):
            for setting in settings:
                environment = dict(each.split("=") for each in setting.split())
                for busy in others:
                    with ExitStack() as stack:
                        beside(busy, stack)
                        found[setting][busy].append(speed(task, model, sentences, environment))
        for setting, speeds in found.items():
            middle = {busy: statistics.median(each) for busy, each in speeds.items()}
            row: Row = {"task": task, "setting": setting or "as it is"}
            row |= {f"beside {busy}" if busy else "alone": round(each) for busy, each in middle.items()}
            yield row | {f"kept beside {busy}": round(middle[busy] / middle[others[0]], 2) for busy in others[1:]}


def main(
    model: Annotated[Path, typer.Argument(help="Folder with the trained quickstart.")],
    tasks: Annotated[str, typer.Option(help="With commas.")] = "train no,train bf16,translate,evaluate",
    settings: Annotated[
        str, typer.Option(help="Environment variables; separate sets with commas.")
    ] = ",GOMP_SPINCOUNT=300000",
    others: Annotated[
        str, typer.Option(help="Comma-separated numbers of busy processes; the first is the reference.")
    ] = "0,1,2",
    sentences: Annotated[int, typer.Option(help="Sentences to translate and to evaluate.")] = 5000,
    rounds: Annotated[int, typer.Option(help="Runs of each.")] = 3,
    json: Json = None,
):
    """Print a line for each task and setting."""
    numbers = [int(each) for each in others.split(",")]
    report(measured(model, tasks.split(","), settings.split(","), numbers, rounds, sentences), json)


if __name__ == "__main__":
    typer.run(main)
