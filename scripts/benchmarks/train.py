"""Time a training step of Marian and Heed on the CPU, with the same weights, batch and optimizer.

    python scripts/benchmarks/train.py                             # small and base, float32 and bfloat16
    python scripts/benchmarks/train.py --sizes base --precisions float32 --batch 64

Each line has Heed's speed relative to Marian. Steps take turns, and medians are compared. The first losses, without
dropout, must be equal.
"""

from functools import partial
from typing import Annotated, Any

import torch
import typer
from harness import Json, Rounds, Row, Sizes, Threads, Vocabulary, begin, median_seconds, ratios, report
from peers import check_losses, loss_of, make_heed, make_marian, make_pairs, training_step

from heedful.host import keep_freed_memory

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


def compare(size: str, precision: str, options: dict[str, Any]) -> Row:
    """Time a case and return its figures.

    Raises:
        RuntimeError: If losses differ.
    """
    shape = {name: options[name] for name in ("batch", "length")}
    marian = make_marian(size, options["vocabulary"])
    models = {"marian": marian, "heed": make_heed(marian)}
    inputs = make_pairs(**shape, vocabulary=options["vocabulary"], shortest=options["shortest"])

    def loss(model: Any) -> torch.Tensor:
        with torch.autocast("cpu", getattr(torch, precision), enabled=precision != "float32"):
            return loss_of(model, inputs)

    with torch.no_grad():
        check_losses(*(float(loss(model.eval())) for model in models.values()), TOLERANCE[precision])
    steps = {name: training_step(model, partial(loss, model)) for name, model in models.items()}
    seconds = median_seconds(steps, options["rounds"])
    milliseconds = {f"{name}_ms": round(1000 * each.processor) for name, each in seconds.items()}
    tokens = (inputs["attention_mask"].float().mean() + (inputs["labels"] >= 0).float().mean()).item() / 2
    return {
        "size": size,
        "precision": precision,
        **shape,
        "padding": round(1 - tokens, 2),
        **milliseconds,
        **ratios(seconds, "marian"),
    }


def main(
    sizes: Sizes = "small,base",
    precisions: Annotated[str, typer.Option(help="Comma-separated: float32, bfloat16.")] = "float32,bfloat16",
    batch: Annotated[int, typer.Option(help="Pairs.")] = 48,
    length: Annotated[int, typer.Option(help="Tokens of the longest source and target.")] = 28,
    shortest: Annotated[float, typer.Option(help="Shortest length, as a share of the longest.")] = 0.85,
    keep_memory: Annotated[bool, typer.Option(help="Let the C library keep freed memory for both models.")] = True,
    vocabulary: Vocabulary = 10_000,
    rounds: Rounds = 7,
    threads: Threads = 1,
    json: Json = None,
):
    """Print a line for each size and precision."""
    begin(threads)
    if keep_memory:
        keep_freed_memory()  # as in Heed's loop
    options = {"batch": batch, "length": length, "shortest": shortest, "vocabulary": vocabulary, "rounds": rounds}
    report((compare(size, name, options) for size in sizes.split(",") for name in precisions.split(",")), json)


if __name__ == "__main__":
    typer.run(main)
