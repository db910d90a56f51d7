"""How long it takes until something can be done: imports, `heedful --help`, and loading a model, beside transformers.

    python scripts/benchmarks/startup.py
    python scripts/benchmarks/startup.py --cases load --sizes base --rounds 15

`import` and `process` are fresh processes, timed inside from their first line on (`process` imports the class and
loads the model); `help` is a whole `heedful --help`; `load` is `from_pretrained` again and again in one process. What
is compared takes turns, and medians are compared. Ratios of CPU seconds stand beside those of the clock, since other
processes disturb them less.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from peers import make_heed, make_marian, write_rows
from transformers import MarianMTModel
from transformers.utils import logging

from heedful import HeedForConditionalGeneration

CLASSES = {"marian": MarianMTModel, "heed": HeedForConditionalGeneration}
MODULES = {"marian": "transformers", "heed": "heedful"}

Seconds = tuple[float, float]  # of the clock, and of the CPU


def process_seconds(statement: str) -> Seconds:
    """Run a statement in a fresh process and return its seconds, without those that Python takes to start."""
    timed = f"import time\nstart = time.perf_counter(), time.process_time()\n{statement}\n"
    timed += "print(time.perf_counter() - start[0], time.process_time() - start[1])"
    process = subprocess.run([sys.executable, "-c", timed], capture_output=True, text=True, check=True)
    wall, cpu = process.stdout.split()[-2:]
    return float(wall), float(cpu)


def help_seconds() -> Seconds:
    """Run `heedful --help` and return the seconds of the whole process; of the CPU they are not known."""
    start = time.perf_counter()
    subprocess.run([Path(sys.executable).with_name("heedful"), "--help"], capture_output=True, check=True)
    return time.perf_counter() - start, float("nan")


def call_seconds(call: Callable[[], Any]) -> Seconds:
    """Call a function and return the seconds."""
    start = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - start[0], time.process_time() - start[1]


def compare(calls: dict[str, Callable[[], Seconds]], rounds: int) -> dict[str, Any]:
    """Let calls take turns, after one round that does not count, and return medians and ratios to Marian's."""
    found: dict[str, list[Seconds]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            seconds = call()
            if number:
                found[name].append(seconds)
    medians = {
        name: [statistics.median(each) for each in zip(*seconds, strict=True)] for name, seconds in found.items()
    }
    row: dict[str, Any] = {f"{name}_seconds": round(wall, 3) for name, (wall, _) in medians.items()}
    if "marian" in medians:
        ratios = [ours / theirs for ours, theirs in zip(medians["heed"], medians["marian"], strict=True)]
        row |= {"ratio": round(ratios[0], 3), "cpu_ratio": round(ratios[1], 3)}
    return row


def saved_models(size: str, vocabulary: int, folder: Path) -> dict[str, Path]:
    """Save both models with the same weights."""
    marian = make_marian(size, vocabulary)
    places = {name: folder / size / name for name in CLASSES}
    marian.save_pretrained(places["marian"])
    make_heed(marian).save_pretrained(places["heed"])
    return places


def case_rows(case: str, size: str, places: dict[str, Path], rounds: int) -> dict[str, Any]:
    """Measure one case."""
    calls: dict[str, Callable[[], Seconds]]
    if case == "import":
        calls = {name: lambda module=module: process_seconds(f"import {module}") for name, module in MODULES.items()}
        return {"case": case, **compare(calls, rounds)}
    if case == "help":
        return {"case": case, **compare({"heed": help_seconds}, rounds)}
    if case == "process":
        statements = {
            name: f"from {MODULES[name]} import {kind.__name__} as Model\nModel.from_pretrained({str(places[name])!r})"
            for name, kind in CLASSES.items()
        }
        calls = {name: lambda text=text: process_seconds(text) for name, text in statements.items()}
    else:
        loaders = {name: lambda name=name: CLASSES[name].from_pretrained(places[name]) for name in CLASSES}
        calls = {name: lambda loader=loader: call_seconds(loader) for name, loader in loaders.items()}
    return {"case": case, "size": size, **compare(calls, rounds)}


def main(
    sizes: Annotated[str, typer.Option(help="Of tiny, small and base, with commas.")] = "base",
    cases: Annotated[
        str, typer.Option(help="Of import, help, process and load, with commas.")
    ] = "import,help,process,load",
    vocabulary: Annotated[int, typer.Option(help="Number of tokens.")] = 37_000,
    rounds: Annotated[int, typer.Option(help="Timed runs of each.")] = 7,
    threads: Annotated[int, typer.Option(help="Of torch.")] = 1,
    json: Annotated[Path | None, typer.Option(help="File for the figures.")] = None,
):
    """Print one line per case, and per size where models are loaded."""
    torch.set_num_threads(threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes.split(","):
            places = saved_models(size, vocabulary, Path(folder))
            for case in cases.split(","):
                if case in ("import", "help") and any(row["case"] == case for row in rows):
                    continue
                rows.append(case_rows(case, size, places, rounds))
                print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    write_rows(rows, json)


if __name__ == "__main__":
    typer.run(main)
