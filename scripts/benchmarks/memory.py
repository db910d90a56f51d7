"""Peak CPU memory in training and beam search, for Marian and Heed with equal weights.

    python scripts/benchmarks/memory.py                            # base: a training step, and beam 5 at batch 64
    python scripts/benchmarks/memory.py --cases training --target-tokens 2720

Each figure has its own process. The model first runs at a small size, so that the optimizer has its state, and freed
memory is given back (`malloc_trim`). The figure is the highest resident memory (VmHWM, reset by
`/proc/self/clear_refs`) above the previous one. Gradients count. Label smoothing is 0.1, with transformers'
`LabelSmoother` for Marian.
"""

import ctypes
import gc
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from harness import Json, Row, Sizes, Threads, Vocabulary, begin, report
from peers import check_losses, endless_search, make_heed, make_marian, make_sources, native, training_step
from transformers.trainer_pt_utils import LabelSmoother

from heedful.decoding.native.engine import NativeDecoder

SMOOTHING = 0.1
LENGTH = 32  # tokens of each pair's source and target, in training
BEAMS = 5
MEBIBYTE = 2**20


def resident_bytes(field: str) -> int:
    """Return VmRSS (resident now) or VmHWM (the maximum) in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024


def begin_anew() -> int:
    """Give back freed memory, reset the maximum, and return the resident memory in bytes."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident_bytes("VmRSS")


def make_model(name: str, options: dict[str, Any], dropout: float = 0.1) -> Any:
    """Return `marian` or `heed`, with the same weights."""
    marian = make_marian(options["size"], options["vocabulary"], dropout)
    if name == "marian":
        return marian
    heed = make_heed(marian)
    heed.config.label_smoothing = SMOOTHING
    return heed


def smoothed_loss(name: str, model: Any, sentences: int, vocabulary: int) -> torch.Tensor:
    """Return the training loss of pairs of equal lengths."""
    tokens, mask = make_sources(sentences, LENGTH, vocabulary, shortest=1.0)
    labels = tokens.flip(1)
    inputs = {"input_ids": tokens, "attention_mask": mask}
    if name == "heed":
        return model.loss_of(inputs | {"labels": labels})
    outputs = model(**inputs, decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels))
    return LabelSmoother(epsilon=SMOOTHING)(outputs, labels)


def training(name: str, options: dict[str, Any]) -> Callable[..., None]:
    """Return a training step on some sentences."""
    model = make_model(name, options)
    return training_step(model, lambda sentences, _: smoothed_loss(name, model, sentences, options["vocabulary"]))


def decoding(name: str, options: dict[str, Any]) -> Callable[..., list[list[int]]]:
    """Return a beam search over some sentences with a fixed number of new tokens each."""
    model = make_model("heed" if name == "native" else name, options).eval()
    decoder = NativeDecoder(model) if name == "native" else None

    def translate(sentences: int, new_tokens: int) -> list[list[int]]:
        tokens, mask = make_sources(sentences, options["source_length"], options["vocabulary"])
        inputs, settings = {"input_ids": tokens, "attention_mask": mask}, endless_search(BEAMS, new_tokens)
        tokens = native(model, decoder, inputs, settings) if decoder else model.generate(**inputs, **settings)
        return tokens.tolist()

    return translate


def peak(case: str, name: str, options: dict[str, Any]) -> tuple[int, Any]:
    """Return a call's peak above the previously resident bytes, and its result."""
    begin(options["threads"])
    sentences = options["target_tokens"] // LENGTH if case == "training" else options["batch"]
    call = (training if case == "training" else decoding)(name, options)
    call(2, 3)
    before = begin_anew()
    result = call(sentences, options["new_tokens"])
    return resident_bytes("VmHWM") - before, result


def measure(case: str, options: dict[str, Any]) -> Row:
    """Return a case's figures in MiB, and ratios to Marian's.

    Raises:
        RuntimeError: If losses or tokens differ.
    """
    names = ["marian", "heed"]
    if case == "training":
        models = {name: make_model(name, options, dropout=0.0).train() for name in names}
        with torch.no_grad():
            check_losses(*(float(smoothed_loss(*each, 2, options["vocabulary"])) for each in models.items()))
    else:
        names.append("native")
    peaks, results = {}, {}
    for name in names:
        # A fresh process each, without kept memory.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            peaks[name], results[name] = pool.submit(peak, case, name, options).result()
        if results[name] != results["marian"]:
            raise RuntimeError(f"{name} must give Marian's tokens, but does not.")
    shown = {f"{name}_mib": round(value / MEBIBYTE) for name, value in peaks.items()}
    ratios = {name: round(value / peaks["marian"], 2) for name, value in peaks.items() if name != "marian"}
    return {"size": options["size"], "case": case, **shown, **ratios}


def main(
    sizes: Sizes = "base",
    cases: Annotated[str, typer.Option(help="Comma-separated cases: training, beam.")] = "training,beam",
    vocabulary: Vocabulary = 37_000,
    target_tokens: Annotated[int, typer.Option(help="Target tokens in training, in targets of 32.")] = 4096,
    batch: Annotated[int, typer.Option(help="Sentences per beam search.")] = 64,
    source_length: Annotated[int, typer.Option(help="Tokens of the longest source of beam search.")] = 50,
    new_tokens: Annotated[int, typer.Option(help="Tokens generated for each sentence.")] = 50,
    threads: Threads = 1,
    json: Json = None,
):
    """Print a line for each size and case."""
    if not sys.platform.startswith("linux"):
        raise typer.BadParameter("the peak is read from /proc, which only Linux has")
    begin(threads)
    options = {"vocabulary": vocabulary, "target_tokens": target_tokens, "batch": batch, "threads": threads}
    options |= {"source_length": source_length, "new_tokens": new_tokens}
    report((measure(case, {**options, "size": size}) for size in sizes.split(",") for case in cases.split(",")), json)


if __name__ == "__main__":
    typer.run(main)
