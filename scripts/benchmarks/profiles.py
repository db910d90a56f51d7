"""Where the time of a training step and of a decoding step goes, for Marian and for Heed with equal weights.

    python scripts/benchmarks/profiles.py                          # small and base; prints markdown tables
    python scripts/benchmarks/profiles.py --sizes base --cases training --json out.json

`torch.profiler` times every operator on the CPU; each counts for the nearest name of `SHARES` among its callers,
itself first. "Python" is what is left of the clock's time: the interpreter, calling operators, and the profiler. A
column adds up to 100; milliseconds stand below, of a step that is not profiled. Decoding is greedy `generate()` after
the source has been encoded, and `native` is Heed's own decoder.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from peers import interleaved_seconds, make_heed, make_marian, make_sources, write_rows
from torch.profiler import ProfilerActivity, profile, record_function
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import logging

from heedful import NativeDecoder
from heedful.inference.memory import keep_freed_memory

WHOLE = "what is profiled"
# Parts of the names of operators, and of what calls them. The first row that fits counts.
SHARES = {
    "dropout": ("dropout", "bernoulli"),
    "attention": ("scaled_dot_product", "aten::bmm", "aten::baddbmm"),
    "matrix products": (
        "aten::mm",
        "aten::addmm",
        "aten::linear",
        "_linear_pointwise",
        "onednn::qlinear",
        "mkldnn_linear",
    ),
    "norms": ("layer_norm", "rms_norm"),
    "softmax and loss": ("softmax", "nll_loss", "cross_entropy", "outputloss", "aten::argmax"),
    "optimizer": ("optimizer.", "_fused_adamw"),
}
OTHER, PYTHON = "other operators", "Python"


def share_of(event: Any) -> str:
    """Return the row that an operator's own time counts for."""
    while event is not None and event.name != WHOLE:
        name = event.name.lower()
        for share, parts in SHARES.items():
            if any(part in name for part in parts):
                return share
        event = event.cpu_parent
    return OTHER


def profiled(call: Callable[[], Any]) -> dict[str, float]:
    """Return the percentage of each row in a call."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function(WHOLE):
        call()
    times = dict.fromkeys([*SHARES, OTHER, PYTHON], 0.0)
    for event in profiler.events():
        row = PYTHON if event.name == WHOLE else share_of(event)
        times[row] += event.self_cpu_time_total
    total = sum(times.values())
    return {row: round(100 * spent / total, 1) for row, spent in times.items()}


def training_steps(size: str, options: dict[str, int]) -> dict[str, Callable[[], Any]]:
    """Return a training step of each model."""
    marian = make_marian(size, options["vocabulary"])
    models = {"marian": marian, "heed": make_heed(marian)}
    tokens, mask = make_sources(48, 28, options["vocabulary"], shortest=0.85)
    labels, label_mask = make_sources(48, 28, options["vocabulary"], shortest=0.85)
    inputs = {"input_ids": tokens, "attention_mask": mask, "labels": labels.masked_fill(label_mask == 0, -100)}

    def make_step(model: Any) -> Callable[[], None]:
        optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-5, fused=True)

        def step() -> None:
            model(**inputs).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return {name: make_step(model) for name, model in models.items()}


def decoding_calls(size: str, batch: int, options: dict[str, int]) -> dict[str, Callable[[], Any]]:
    """Return a call of each decoder that generates `new_tokens` tokens for encoded sources."""
    marian = make_marian(size, options["vocabulary"]).eval()
    heed = make_heed(marian).eval()
    decoder = NativeDecoder(heed)
    tokens, mask = make_sources(batch, 24, options["vocabulary"])
    ends = {"eos_token_id": None, "forced_eos_token_id": None, "bad_words_ids": None, "max_length": None}
    settings: dict[str, Any] = {"num_beams": 1, "do_sample": False, "max_new_tokens": options["new_tokens"], **ends}
    with torch.no_grad():
        native_source = decoder.encoded(tokens, mask)
        sources = {name: model.get_encoder()(tokens, mask) for name, model in (("marian", marian), ("heed", heed))}

    def generate(name: str, model: Any) -> Any:
        # Of its own for each call: what is kept in it would be read by the next.
        encoded = BaseModelOutput(last_hidden_state=sources[name].last_hidden_state)
        return model.generate(encoder_outputs=encoded, attention_mask=mask, **settings)

    return {
        "marian": lambda: generate("marian", marian),
        "heed": lambda: generate("heed", heed),
        "native": lambda: heed.generate(**native_source, custom_generate=decoder, **settings),
    }


def table(title: str, calls: dict[str, Callable[[], Any]], steps: int, rounds: int) -> list[dict[str, Any]]:
    """Print the table of one case, and return its columns."""
    seconds = interleaved_seconds(calls, rounds)
    columns = [{"case": title, "model": name, **profiled(call)} for name, call in calls.items()]
    for column in columns:
        column["milliseconds"] = round(1000 * seconds[column["model"]] / steps, 2)
    print(f"\n| {title}, % of the time | {' | '.join(calls)} |\n|---|{'---:|' * len(calls)}")
    for row in [*SHARES, OTHER, PYTHON, "milliseconds"]:
        print(f"| {row} | {' | '.join(str(column[row]) for column in columns)} |")
    return columns


def main(
    sizes: Annotated[str, typer.Option(help="Of tiny, small and base, with commas.")] = "small,base",
    cases: Annotated[str, typer.Option(help="training, and batch sizes of decoding, with commas.")] = "training,1,64",
    vocabulary: Annotated[int, typer.Option(help="Number of tokens.")] = 10_000,
    new_tokens: Annotated[int, typer.Option(help="Tokens generated for each sentence.")] = 24,
    rounds: Annotated[int, typer.Option(help="Timed calls of each.")] = 3,
    threads: Annotated[int, typer.Option(help="Of torch.")] = 1,
    json: Annotated[Path | None, typer.Option(help="File for the figures.")] = None,
):
    """Print one table per size and case."""
    torch.set_num_threads(threads)
    logging.set_verbosity_error()
    keep_freed_memory()
    options = {"vocabulary": vocabulary, "new_tokens": new_tokens}
    rows = []
    for size in sizes.split(","):
        for case in cases.split(","):
            if case == "training":
                rows += table(f"{size}, training step", training_steps(size, options), 1, rounds)
            else:
                calls = decoding_calls(size, int(case), options)
                rows += table(f"{size}, decoding step, batch {case}", calls, new_tokens, rounds)
    write_rows(rows, json)


if __name__ == "__main__":
    typer.run(main)
