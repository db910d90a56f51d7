"""Shared by all benchmarks: take turns, print and write rows of figures, describe the machine.

Ratios are of processor time, which other work hardly changes; ratios by the clock follow. With several threads the
clock counts, because waiting threads use processor time too.
"""

import json
import os
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from transformers.utils import logging

from heedful import processor_heed

# Shared options.
Sizes = Annotated[str, typer.Option(help="Comma-separated sizes: tiny, small, base, big.")]
Vocabulary = Annotated[int, typer.Option(help="Vocabulary size in tokens.")]
Rounds = Annotated[int, typer.Option(help="Timed calls of each kind.")]
Threads = Annotated[int, typer.Option(help="Number of torch threads.")]
Json = Annotated[Path | None, typer.Option(help="JSON file for the figures.")]

Row = dict[str, Any]


def begin(threads: int) -> None:
    """Set the number of threads, and silence transformers."""
    torch.set_num_threads(threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def take_turns(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """Let calls take turns after an uncounted round, and return their results by round."""
    results: dict[str, list[Any]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            result = call()
            if number:
                results[name].append(result)
    return results


class Seconds(NamedTuple):
    """The seconds that a call took."""

    clock: float
    processor: float  # of all threads of this process


def seconds_of(call: Callable[[], Any]) -> Seconds:
    """Call a function and return its seconds."""
    start = time.perf_counter(), time.process_time()
    call()
    return Seconds(time.perf_counter() - start[0], time.process_time() - start[1])


def median_seconds(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Seconds]:
    """Let calls take turns and return the median seconds of each."""
    found = take_turns({name: partial(seconds_of, call) for name, call in calls.items()}, rounds)
    return {name: Seconds(*map(statistics.median, zip(*each, strict=True))) for name, each in found.items()}


def ratios(seconds: dict[str, Seconds], to: str) -> Row:
    """Return the others' speeds relative to one, by processor time, then by the clock."""
    others = {name: each for name, each in seconds.items() if name != to}
    row = {name: round(seconds[to].processor / each.processor, 2) for name, each in others.items()}
    return row | {f"{name}, clock": round(seconds[to].clock / each.clock, 2) for name, each in others.items()}


def machine() -> Row:
    """Return the conditions besides the code: processor, instructions, versions, other load."""
    facts = torch.cpu.get_capabilities()
    names = ("avx2", "avx512_f", "avx512_vnni", "avx512_bf16", "amx_bf16", "bf16")
    packages = {name: version(name) for name in ("torch", "transformers", "ctranslate2") if find_spec(name)}
    return {
        "processor": facts.get("cpu_name"),
        "has": " ".join(name for name in names if facts.get(name)),
        "torch uses": processor_heed.registers(),
        "cores": processor_heed.usable_cores(),
        "load": os.getloadavg()[0],
        **packages,
    }


def plain_products(device: str = "cpu", width: int = 1024) -> Row:
    """Return the speed of plain matrix products in this run, in GFLOP/s, to compare runs.

    On the CPU: MKL (torch's `mm` in float32), oneDNN in float32, and oneDNN in bfloat16.
    """
    left, right = (torch.randn(width, width, device=device) for _ in range(2))
    halves = left.bfloat16(), right.bfloat16()
    calls = {"float32": lambda: torch.mm(left, right), "bfloat16": lambda: torch.mm(*halves)}
    if device == "cpu":
        calls = {"MKL": calls["float32"], "oneDNN bfloat16": calls["bfloat16"]}
        if torch.backends.mkldnn.is_available():
            calls["oneDNN"] = lambda: torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")
    with torch.no_grad():
        seconds = median_seconds({name: waiting(call, device) for name, call in calls.items()}, 5)
    of_clock = device != "cpu"
    speeds = {name: round(2e-9 * width**3 / each[not of_clock], 1) for name, each in seconds.items()}
    return {"plain products": "GFLOP/s", **speeds}


def waiting(call: Callable[[], Any], device: str) -> Callable[[], None]:
    """Return a function that calls another and waits for the device."""

    def wait() -> None:
        call()
        if device != "cpu":
            torch.cuda.synchronize()

    return wait


def report(rows: Iterable[Row], path: Path | None, device: str = "cpu", is_printed: bool = True) -> list[Row]:
    """Print the machine, the speed of plain products, and each row of figures; write and return all rows.

    Args:
        rows: Figures by name.
        path: JSON file to write, or None.
        device: Device for plain products.
        is_printed: Print the rows; False if they are printed in another form.
    """
    found = [machine(), plain_products(device)]
    print("\n".join(map(line, found)), flush=True)
    for row in rows:
        found.append(row)
        if is_printed:
            print(line(row), flush=True)
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def line(row: Row) -> str:
    """Return a row of figures on one line."""
    return "  ".join(f"{name} {value}" for name, value in row.items())
