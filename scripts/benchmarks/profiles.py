"""Profile a training step and a decoding step of Marian and Heed with equal weights.

    python scripts/benchmarks/profiles.py                          # small and base; prints markdown tables
    python scripts/benchmarks/profiles.py --sizes base --cases training --json out.json

`torch.profiler` times each operator on the CPU; it counts for the nearest name of `SHARES` among itself and its
callers. "Python" is the rest of the clock's time: interpreter, operator calls and profiler. A column sums to 100;
milliseconds are of an unprofiled step. Decoding is greedy `generate()` on an encoded source; `native` is Heed's
decoder, with one call of `kernels.cpp` a step.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any

import torch
import typer
from harness import Json, Rounds, Row, Sizes, Threads, Vocabulary, begin, median_seconds, report
from peers import endless_search, loss_of, make_heed, make_marian, make_pairs, make_sources, training_step
from torch.profiler import ProfilerActivity, profile, record_function
from transformers.modeling_outputs import BaseModelOutput

from heedful.decoding.native.compiled_network import CompiledNetwork
from heedful.decoding.native.engine import NativeDecoder
from heedful.host import keep_freed_memory

WHOLE = "what is profiled"
# Parts of names of operators and their callers. The first matching row counts.
SHARES = {
    "dropout": ("dropout", "bernoulli"),
    "attention": ("scaled_dot_product", "aten::bmm", "aten::baddbmm"),
    "matrix products": ("aten::mm", "aten::addmm", "aten::linear", "_linear", "onednn::qlinear"),
    "norms": ("layer_norm", "rms_norm"),
    "softmax and loss": ("softmax", "nll_loss", "cross_entropy", "outputloss", "aten::argmax"),
    "optimizer": ("optimizer.", "_fused_adamw"),
    "copies, casts": ("aten::copy_", "aten::_to_copy"),
    "kernels.cpp": ("kernels.cpp",),
}
OTHER, PYTHON = "other operators", "Python"


class RecordedLibrary:
    """The functions of `kernels.cpp` in the profiler."""

    def __init__(self, library: Any):
        self.library = library

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return the function of this name."""

        def call(*arguments: Any) -> Any:
            with record_function("kernels.cpp"):
                return getattr(self.library, name)(*arguments)

        return call


def share_of(event: Any) -> str:
    """Return the row for an operator's own time."""
    while event is not None and event.name != WHOLE:
        name = event.name.lower()
        for share, parts in SHARES.items():
            if any(part in name for part in parts):
                return share
        event = event.cpu_parent
    return OTHER


def profiled(call: Callable[[], Any]) -> dict[str, float]:
    """Return each row's percentage in one call."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function(WHOLE):
        call()
    times = dict.fromkeys([*SHARES, OTHER, PYTHON], 0.0)
    for event in profiler.events():
        row = PYTHON if event.name == WHOLE else share_of(event)
        times[row] += event.self_cpu_time_total
    total = sum(times.values())
    return {row: round(100 * spent / total, 1) for row, spent in times.items()}


def training_steps(size: str, options: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Return a training step for each model."""
    marian = make_marian(size, options["vocabulary"])
    models = {"marian": marian, "heed": make_heed(marian)}
    inputs = make_pairs(48, 28, options["vocabulary"], shortest=0.85)

    def loss(model: Any) -> torch.Tensor:
        precision = options["precision"]
        with torch.autocast("cpu", getattr(torch, precision), enabled=precision != "float32"):
            return loss_of(model, inputs)

    return {name: training_step(model, partial(loss, model)) for name, model in models.items()}


def decoding_calls(size: str, batch: int, options: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Return a call of each decoder that generates `new_tokens` tokens for encoded sources."""
    marian = make_marian(size, options["vocabulary"]).eval()
    heed = make_heed(marian).eval()
    decoder = NativeDecoder(heed)
    if isinstance(decoder.network, CompiledNetwork):
        decoder.network._library = RecordedLibrary(decoder.network._library)
    tokens, mask = make_sources(batch, 24, options["vocabulary"])
    settings = endless_search(1, options["new_tokens"])
    with torch.no_grad():
        native_source = decoder.encoded(tokens, mask)
        sources = {name: model.get_encoder()(tokens, mask) for name, model in (("marian", marian), ("heed", heed))}

    def generate(name: str, model: Any) -> Any:
        # A new one for each call, because it keeps state.
        encoded = BaseModelOutput(last_hidden_state=sources[name].last_hidden_state)
        return model.generate(encoder_outputs=encoded, attention_mask=mask, **settings)

    return {
        "marian": lambda: generate("marian", marian),
        "heed": lambda: generate("heed", heed),
        "native": lambda: heed.generate(**native_source, custom_generate=decoder, **settings),
    }


def table(title: str, calls: dict[str, Callable[[], Any]], steps: int, rounds: int) -> Iterator[Row]:
    """Print a case's table, and yield its columns."""
    seconds = median_seconds(calls, rounds)
    columns: list[Row] = [{"case": title, "model": name, **profiled(call)} for name, call in calls.items()]
    for column in columns:
        column["milliseconds"] = round(1000 * seconds[column["model"]].processor / steps, 2)
    print(f"\n| {title}, % of the time | {' | '.join(calls)} |\n|---|{'---:|' * len(calls)}")
    for row in [*SHARES, OTHER, PYTHON, "milliseconds"]:
        print(f"| {row} | {' | '.join(str(column[row]) for column in columns)} |")
    yield from columns


def measured(sizes: list[str], cases: list[str], options: dict[str, Any]) -> Iterator[Row]:
    """Yield the columns of all cases."""
    for size in sizes:
        for case in cases:
            if case == "training":
                yield from table(f"{size}, training step", training_steps(size, options), 1, options["rounds"])
            else:
                calls, steps = decoding_calls(size, int(case), options), options["new_tokens"]
                yield from table(f"{size}, decoding step, batch {case}", calls, steps, options["rounds"])


def main(
    sizes: Sizes = "small,base",
    cases: Annotated[str, typer.Option(help="training, and batch sizes for decoding.")] = "training,1,64",
    precision: Annotated[str, typer.Option(help="Precision of training: float32 or bfloat16.")] = "float32",
    vocabulary: Vocabulary = 10_000,
    new_tokens: Annotated[int, typer.Option(help="Tokens generated for each sentence.")] = 24,
    rounds: Rounds = 3,
    threads: Threads = 1,
    json: Json = None,
):
    """Print a table for each size and case."""
    begin(threads)
    keep_freed_memory()
    options = {"vocabulary": vocabulary, "new_tokens": new_tokens, "rounds": rounds, "precision": precision}
    report(measured(sizes.split(","), cases.split(","), options), json, is_printed=False)


if __name__ == "__main__":
    typer.run(main)
