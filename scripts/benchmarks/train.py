"""Time a training step of Marian and of Heed, with the same weights, batch and optimizer, on the CPU.

    python scripts/benchmarks/train.py                             # small and base, float32 and bfloat16
    python scripts/benchmarks/train.py --sizes base --precisions float32 --batch 64

Each line is a ratio to Marian: how many steps Heed takes while Marian takes one. The steps take turns, and medians are
compared; the first losses, without dropout, must be equal.
"""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from peers import interleaved_seconds, make_heed, make_marian, make_sources, write_rows

from heedful.inference.memory import keep_freed_memory

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


def compare(size: str, precision: str, batch: int, length: int, options: dict[str, Any]) -> dict[str, Any]:
    """Time one case and return its figures.

    Raises:
        RuntimeError: If the losses differ.
    """
    vocabulary = options["vocabulary"]
    marian = make_marian(size, vocabulary)
    heed = make_heed(marian)
    tokens, mask = make_sources(batch, length, vocabulary, options["shortest"])
    labels, label_mask = make_sources(batch, length, vocabulary, options["shortest"])
    inputs = {"input_ids": tokens, "attention_mask": mask, "labels": labels.masked_fill(label_mask == 0, -100)}
    models = {"marian": marian, "heed": heed}
    optimizers = {name: torch.optim.AdamW(each.parameters(), lr=1e-5, fused=True) for name, each in models.items()}

    def loss(name: str) -> torch.Tensor:
        with torch.autocast("cpu", PRECISIONS[precision], enabled=precision != "float32"):
            return models[name](**inputs).loss

    for model in models.values():
        model.eval()
    with torch.no_grad():
        theirs, ours = float(loss("marian")), float(loss("heed"))
    if abs(ours - theirs) > TOLERANCE[precision] * theirs:
        raise RuntimeError(f"Heed's loss must be Marian's at {size} in {precision}, {theirs}, but is {ours}.")

    def step(name: str) -> None:
        loss(name).backward()
        optimizers[name].step()
        optimizers[name].zero_grad()

    for model in models.values():
        model.train()
    seconds = interleaved_seconds({name: lambda name=name: step(name) for name in models}, options["rounds"])
    milliseconds = {f"{name}_ms": round(1000 * value) for name, value in seconds.items()}
    ratio = round(seconds["marian"] / seconds["heed"], 2)
    padding = round(1 - (mask.float().mean() + label_mask.float().mean()).item() / 2, 2)
    case = {"size": size, "precision": precision, "batch": batch, "length": length, "padding": padding}
    return {**case, **milliseconds, "ratio": ratio}


def main(
    sizes: Annotated[str, typer.Option(help="Of tiny, small and base, with commas.")] = "small,base",
    precisions: Annotated[str, typer.Option(help="Of float32 and bfloat16, with commas.")] = "float32,bfloat16",
    batch: Annotated[int, typer.Option(help="Pairs.")] = 48,
    length: Annotated[int, typer.Option(help="Tokens of the longest source and target.")] = 28,
    shortest: Annotated[float, typer.Option(help="Length of the shortest, as a share of the longest.")] = 0.85,
    keep_memory: Annotated[bool, typer.Option(help="Let the C library keep freed memory, for both.")] = True,
    vocabulary: Annotated[int, typer.Option(help="Number of tokens.")] = 10_000,
    rounds: Annotated[int, typer.Option(help="Timed steps of each.")] = 7,
    threads: Annotated[int, typer.Option(help="Of torch.")] = 1,
    json: Annotated[Path | None, typer.Option(help="File for the figures.")] = None,
):
    """Print one line per size and precision."""
    torch.set_num_threads(threads)
    if keep_memory:
        keep_freed_memory()  # as Heed's training loop does
    options = {"vocabulary": vocabulary, "rounds": rounds, "shortest": shortest}
    rows = []
    for size in sizes.split(","):
        for precision in precisions.split(","):
            rows.append(compare(size, precision, batch, length, options))
            print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    write_rows(rows, json)


if __name__ == "__main__":
    typer.run(main)
