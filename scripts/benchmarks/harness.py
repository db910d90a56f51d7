"""What every benchmark does: calls take turns, rows of figures are printed and written, plain products are timed."""

import json
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers.utils import logging

# The options that the benchmarks share.
Sizes = Annotated[str, typer.Option(help="Of tiny, small, base and big, with commas.")]
Vocabulary = Annotated[int, typer.Option(help="Number of tokens.")]
Rounds = Annotated[int, typer.Option(help="Timed calls of each.")]
Threads = Annotated[int, typer.Option(help="Of torch.")]
Json = Annotated[Path | None, typer.Option(help="File for the figures.")]

Row = dict[str, Any]


def begin(threads: int) -> None:
    """Set the number of threads, and keep transformers from printing."""
    torch.set_num_threads(threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def take_turns(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """Let calls take turns, after one round that does not count; return what each returned, round by round."""
    results: dict[str, list[Any]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            result = call()
            if number:
                results[name].append(result)
    return results


def seconds_of(call: Callable[[], Any]) -> tuple[float, float]:
    """Call a function and return its seconds, by the clock and of the processor."""
    start = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - start[0], time.process_time() - start[1]


def median_seconds(calls: dict[str, Callable[[], Any]], rounds: int, of_processor: bool = False) -> dict[str, float]:
    """Let calls take turns and return the median seconds of each, by the clock or of the processor."""
    timed = {name: lambda call=call: seconds_of(call)[of_processor] for name, call in calls.items()}
    return {name: statistics.median(seconds) for name, seconds in take_turns(timed, rounds).items()}


def plain_products(device: str = "cpu", width: int = 1024) -> Row:
    """Return how fast plain matrix products are in this run, in GFLOP/s, to compare its other figures with.

    On the CPU they are those of MKL (torch's `mm` in float32), of oneDNN in float32, and of oneDNN in bfloat16.
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
    return {"plain products": "GFLOP/s", **{name: round(2e-9 * width**3 / each, 1) for name, each in seconds.items()}}


def waiting(call: Callable[[], Any], device: str) -> Callable[[], None]:
    """Return a function that calls another and waits until the device has finished."""

    def wait() -> None:
        call()
        if device != "cpu":
            torch.cuda.synchronize()

    return wait


def report(rows: Iterable[Row], path: Path | None, device: str = "cpu", is_printed: bool = True) -> list[Row]:
    """Print what plain products give and each row of figures as it comes, write all rows as JSON, and return them.

    Args:
        rows: Each a figure by its name.
        path: File to write; None writes none.
        device: Where plain products are timed.
        is_printed: Whether the rows are printed; else they have been printed in another form.
    """
    found = [plain_products(device)]
    print(line(found[0]), flush=True)
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
