"""How the costs of forward passes and training steps grow with source length and batch.

    python scripts/benchmarks/scale.py                             # 64 to 4,096 tokens; batches of 1 to 64
    python scripts/benchmarks/scale.py --axes length --lengths 256,512,1024,2048

`full` is Heed with attention to all positions, `neighbourhood` the same weights with `encoder_neighbourhood` 32.
Targets have 16 tokens. Seconds are the CPU's, medians of calls that take turns. Memory is the peak of all tensors in a
call, the same on each machine. A line for each kind and step then gives the powers of length or batch by which seconds
and memory grow: the slope through the logarithms of the upper half.
"""

import math
import statistics
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any

import torch
import typer
from harness import Json, Rounds, Row, Sizes, Threads, Vocabulary, begin, median_seconds, report
from peers import make_heed, make_marian, make_sources

from heedful.checking.memory import HeldBytes

RADIUS = 32
TARGET_LENGTH = 16
MEBIBYTE = 2**20


def make_models(size: str, vocabulary: int) -> dict[str, Any]:
    """Return a model of each kind with the same weights."""
    marian = make_marian(size, vocabulary)
    models = {kind: make_heed(marian) for kind in ("full", "neighbourhood")}
    models["neighbourhood"].config.encoder_neighbourhood = RADIUS
    return models


def run(model: Any, step: str, sentences: int, length: int, vocabulary: int) -> None:
    """Run a forward pass or a training step."""
    tokens, mask = make_sources(sentences, length, vocabulary, shortest=0.9)
    labels, _ = make_sources(sentences, TARGET_LENGTH, vocabulary, shortest=1.0)
    with torch.set_grad_enabled(step == "training"):
        loss = model.train(step == "training")(input_ids=tokens, attention_mask=mask, labels=labels).loss
    if step == "training":
        loss.backward()
        model.zero_grad()


def measure(models: dict[str, Any], step: str, sentences: int, length: int, options: dict[str, int]):
    """Return each model's milliseconds and MiB."""
    runs = {
        kind: partial(run, model, step, sentences, length, options["vocabulary"]) for kind, model in models.items()
    }
    mebibytes = {}
    for kind, once in runs.items():
        with HeldBytes() as memory:
            once()
        mebibytes[kind] = memory.peak / MEBIBYTE
    seconds = median_seconds(runs, options["rounds"])
    return {kind: (1000 * seconds[kind].processor, mebibytes[kind]) for kind in models}


def exponent(sizes: list[int], costs: list[float]) -> float:
    """Return the power of the size by which costs grow, by least squares on the upper half's logarithms."""
    points = [(math.log(size), math.log(cost)) for size, cost in zip(sizes, costs, strict=True)][len(sizes) // 2 :]
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def scale(size: str, axis: str, numbers: list[int], options: dict[str, int]) -> Iterator[Row]:
    """Measure an axis: yield a row for each size, kind and step, and exponents for each kind and step."""
    models = make_models(size, options["vocabulary"])
    if axis == "batch":
        models = {"full": models["full"]}
    for step in ("forward", "training"):
        found = []
        for number in numbers:
            sentences, length = (1, number) if axis == "length" else (number, options["length"])
            found.append(measure(models, step, sentences, length, options))
        for kind in models:
            row = {"size": size, "axis": axis, "kind": kind, "step": step}
            costs = [each[kind] for each in found]
            for number, (milliseconds, mebibytes) in zip(numbers, costs, strict=True):
                yield {**row, axis: number, "ms": round(milliseconds, 1), "mib": round(mebibytes, 2)}
            powers = [round(exponent(numbers, list(each)), 2) for each in zip(*costs, strict=True)]
            yield {**row, "exponent_of_time": powers[0], "exponent_of_memory": powers[1]}


def main(
    sizes: Sizes = "base",
    axes: Annotated[str, typer.Option(help="Comma-separated axes: length, batch.")] = "length,batch",
    lengths: Annotated[str, typer.Option(help="Comma-separated source lengths.")] = "64,128,256,512,1024,2048,4096",
    batches: Annotated[str, typer.Option(help="Sentences, with commas.")] = "1,2,4,8,16,32,64",
    length: Annotated[int, typer.Option(help="Longest source in tokens, for the batch axis.")] = 32,
    vocabulary: Vocabulary = 1_000,
    rounds: Rounds = 3,
    threads: Threads = 1,
    json: Json = None,
):
    """Print a line for each figure."""
    begin(threads)
    texts = {"length": lengths, "batch": batches}
    numbers = {axis: [int(number) for number in text.split(",")] for axis, text in texts.items()}
    options = {"length": length, "vocabulary": vocabulary, "rounds": rounds}
    chosen = [(size, axis) for size in sizes.split(",") for axis in axes.split(",")]
    report((row for size, axis in chosen for row in scale(size, axis, numbers[axis], options)), json)


if __name__ == "__main__":
    typer.run(main)
