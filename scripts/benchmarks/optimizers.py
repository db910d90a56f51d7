"""Time an update with each optimizer and with fused Adam, on the CPU.

    python scripts/benchmarks/optimizers.py --sizes small,base

An update is the forward and backward passes of its micro-batches, and an optimizer step. Passes and steps take turns,
and medians are compared. Ratios to Adam depend on the update's padded tokens.
"""

from typing import Annotated, Any

import typer
from harness import Json, Rounds, Row, Sizes, Threads, Vocabulary, begin, median_seconds, report
from peers import make_heed, make_marian, make_pairs

from heedful.training.recipe import OptimizationRecipe
from heedful.training.updates.optimizers import make_optimizer, set_learning_rate

SETTINGS: dict[str, dict[str, Any]] = {
    "adam": {},
    "adamw": {},
    "schedule_free": {"schedule": "constant"},
    "muon": {},
}


def compare(size: str, updates: list[int], options: dict[str, Any]) -> Row:
    """Time a micro-batch's passes and each optimizer's step, and return the ratios of whole updates."""
    marian = make_marian(size, options["vocabulary"])
    inputs = make_pairs(options["batch"], options["length"], options["vocabulary"], shortest=0.85)
    padded = inputs["attention_mask"].numel() + inputs["labels"].numel()
    models = {name: make_heed(marian).train() for name in SETTINGS}
    calls: dict[str, Any] = {}
    for name, model in models.items():
        model.loss_of(inputs).backward()
        settings = OptimizationRecipe(optimizer=name, learning_rate=1e-4, max_updates=1, **SETTINGS[name])  # type: ignore[arg-type]
        optimizer = make_optimizer(model, settings)
        set_learning_rate(optimizer, 1e-4)
        calls[name] = optimizer.step
    gradients = models["adam"]
    seconds = median_seconds({"passes": lambda: gradients.loss_of(inputs).backward(), **calls}, options["rounds"])
    row: Row = {"size": size, "padded tokens of a micro-batch": padded}
    row |= {f"{name}_ms": round(1000 * each.processor, 1) for name, each in seconds.items()}
    for tokens in updates:
        passes = seconds["passes"].processor * tokens / padded
        whole = {name: passes + seconds[name].processor for name in SETTINGS}
        row |= {
            f"{name} of {tokens}": round(each / whole["adam"], 3) for name, each in whole.items() if name != "adam"
        }
    return row


def main(
    sizes: Sizes = "small,base",
    updates: Annotated[str, typer.Option(help="Comma-separated padded tokens per update.")] = "4096,25000",
    batch: Annotated[int, typer.Option(help="Pairs per micro-batch.")] = 48,
    length: Annotated[int, typer.Option(help="Tokens of the longest source and target.")] = 28,
    vocabulary: Vocabulary = 10_000,
    rounds: Rounds = 5,
    threads: Threads = 1,
    json: Json = None,
):
    """Print a line for each size."""
    begin(threads)
    options = {"batch": batch, "length": length, "vocabulary": vocabulary, "rounds": rounds}
    report((compare(size, [*map(int, updates.split(","))], options) for size in sizes.split(",")), json)


if __name__ == "__main__":
    typer.run(main)
