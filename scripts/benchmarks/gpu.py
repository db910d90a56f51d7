"""Tokens per second of training and decoding on one GPU, in bfloat16, beside Marian, nn.Transformer and T5.

    python scripts/benchmarks/gpu.py                               # base and big; prints "not measured" without a GPU
    python scripts/benchmarks/gpu.py --compile no,yes --cases training
    python scripts/benchmarks/gpu.py --device cpu --sizes tiny --vocabulary 90 --target-tokens 64 --batches 1,2

A training step has 25,000 target tokens, as many source tokens, AdamW and autocast; the steps take turns, and medians
are compared. MFU is the share of the card's peak that the model's own products take. With N + N layers, width d, inner
size f, V tokens, S source and T target tokens of a pair, a forward pass multiplies and adds

    N (4d² + 2df) S + N (6d² + 2df) T + 2N d² S + d V T + 2N d (S² + T² + S T)

numbers (encoder; decoder; the source's keys and values; output; scores and weighted sums). A step takes 2 · 3 times as
many operations: each is two, and the backward pass costs two forward passes. The formula counts padding and what a
causal mask hides, and is the same for all four.

Decoding compares Marian's `generate()` with Heed's, and with Heed's over a static cache whose step is compiled into
CUDA graphs (`mode="reduce-overhead"`). `same` is the share of Marian's tokens that are found, which is 1 in float32.
"""

import statistics
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from harness import Json, Rounds, Row, Sizes, Vocabulary, begin, median_seconds, report, waiting
from peers import SIZES, endless_search, make_heed, make_marian, make_sources, training_step
from torch import nn
from transformers import CompileConfig, T5Config, T5ForConditionalGeneration

LENGTH = 32  # tokens of each source and target
SMOOTHING = 0.1
# Dense bfloat16 operations per second, by a part of the card's name.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "RTX 4090": 165e12}


class TorchTransformer(nn.Module):
    """`nn.Transformer` with embeddings, sinusoids, and an output that shares the embeddings' matrix."""

    def __init__(self, size: str, vocabulary: int):
        super().__init__()
        layers, width, inner, heads = SIZES[size].values()
        self.embed = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embed.weight, std=width**-0.5)
        self.transformer = nn.Transformer(width, heads, layers, layers, inner, dropout=0.1, batch_first=True)
        places = torch.arange(LENGTH)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
        self.register_buffer("positions", torch.cat([places.sin(), places.cos()], dim=-1))
        self.scale = width**0.5

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of `(batch, length)` sources and targets."""
        shifted = F.pad(labels[:, :-1], (1, 0))
        source, target = (
            F.dropout(self.embed(tokens) * self.scale + self.positions[: tokens.shape[1]], 0.1, self.training)
            for tokens in (input_ids, shifted)
        )
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        states = self.transformer(source, target, tgt_mask=mask, tgt_is_causal=True)
        logits = F.linear(states, self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), label_smoothing=SMOOTHING)


def make_t5(size: str, vocabulary: int) -> T5ForConditionalGeneration:
    """Return a T5 of equal sizes with random weights."""
    layers, width, inner, heads = SIZES[size].values()
    ids = {"pad_token_id": vocabulary - 1, "decoder_start_token_id": vocabulary - 1, "eos_token_id": 0}
    sizes = {"d_model": width, "d_kv": width // heads, "d_ff": inner, "num_layers": layers, "num_heads": heads}
    return T5ForConditionalGeneration(T5Config(vocab_size=vocabulary, **sizes, **ids, feed_forward_proj="relu"))


def losses(size: str, vocabulary: int, device: str) -> dict[str, tuple[nn.Module, Callable[..., torch.Tensor]]]:
    """Return each model in training, with a function of it and a batch that gives the smoothed loss."""
    marian = make_marian(size, vocabulary)
    heed = make_heed(marian)
    heed.config.label_smoothing = SMOOTHING

    def smoothed(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        shifted = model.prepare_decoder_input_ids_from_labels(batch["labels"])
        logits = model(input_ids=batch["input_ids"], decoder_input_ids=shifted, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(), label_smoothing=SMOOTHING)

    found: dict[str, tuple[nn.Module, Callable[..., torch.Tensor]]] = {
        "marian": (marian, smoothed),
        "t5": (make_t5(size, vocabulary), smoothed),
        "nn.Transformer": (TorchTransformer(size, vocabulary), lambda model, batch: model(**batch)),
        "heed": (heed, lambda model, batch: model(**batch).loss),
    }
    for model, _ in found.values():
        model.to(device).train()
    return found


def step_operations(size: str, vocabulary: int, pairs: int) -> float:
    """Return the floating-point operations of a training step (see above)."""
    layers, width, inner, _ = SIZES[size].values()
    source = target = LENGTH
    products = layers * (4 * width**2 + 2 * width * inner) * source
    products += layers * (6 * width**2 + 2 * width * inner) * target + 2 * layers * width**2 * source
    products += width * vocabulary * target + 2 * layers * width * (source**2 + target**2 + source * target)
    return 6.0 * products * pairs


def training_row(size: str, is_compiled: bool, options: dict[str, Any]) -> Row:
    """Time a training step of every model."""
    device, vocabulary = options["device"], options["vocabulary"]
    pairs = max(1, options["target_tokens"] // LENGTH)
    tokens, _ = make_sources(pairs, LENGTH, vocabulary, shortest=1.0)
    batch = {"input_ids": tokens.to(device), "labels": tokens.flip(1).to(device)}

    def make_step(model: Any, loss_of: Callable[..., torch.Tensor]) -> Callable[[], None]:
        compute = torch.compile(loss_of) if is_compiled else loss_of

        def loss() -> torch.Tensor:
            with torch.autocast(device, options["dtype"], enabled=options["dtype"] != torch.float32):
                return compute(model, batch)

        return waiting(training_step(model, loss), device)

    steps = {name: make_step(*each) for name, each in losses(size, vocabulary, device).items()}
    seconds = median_seconds(steps, options["rounds"])
    speeds = {name: pairs * LENGTH / each for name, each in seconds.items()}
    row = {"size": size, "case": "training", "compiled": is_compiled, "target_tokens": pairs * LENGTH}
    row |= {f"{name} tokens/s": round(speed) for name, speed in speeds.items()}
    if options["peak"]:
        operations = step_operations(size, vocabulary, pairs)
        row |= {f"{name} MFU": round(operations / each / options["peak"], 3) for name, each in seconds.items()}
    best = max(speed for name, speed in speeds.items() if name != "heed")
    return {**row, "heed to the best": round(speeds["heed"] / best, 2)}


def decoding_row(size: str, batch: int, beams: int, options: dict[str, Any]) -> Row:
    """Time `generate()` of Marian and of Heed.

    Raises:
        RuntimeError: If in float32 the tokens differ.
    """
    device, vocabulary, new_tokens = options["device"], options["vocabulary"], options["new_tokens"]
    marian = make_marian(size, vocabulary).eval()
    heed = make_heed(marian).eval().to(device, options["dtype"])
    marian = marian.to(device, options["dtype"])
    tokens, mask = (each.to(device) for each in make_sources(batch, LENGTH, vocabulary))
    settings = {"input_ids": tokens, "attention_mask": mask, **endless_search(beams, new_tokens)}
    compiled = CompileConfig(mode="reduce-overhead", fullgraph=True)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "marian": lambda: marian.generate(**settings),
        "heed": lambda: heed.generate(**settings),
        "heed with graphs": lambda: heed.generate(**settings, cache_implementation="static", compile_config=compiled),
    }
    expected = calls["marian"]()
    same = statistics.mean(float((calls[name]() == expected).float().mean()) for name in calls if name != "marian")
    if options["dtype"] == torch.float32 and same < 1:
        raise RuntimeError(f"Heed must give Marian's tokens at {size}, {batch} x {beams}, but does not.")
    seconds = median_seconds({name: waiting(call, device) for name, call in calls.items()}, options["rounds"])
    row = {"size": size, "case": "decoding", "batch": batch, "beams": beams, "same": round(same, 3)}
    row |= {f"{name} tokens/s": round(batch * new_tokens / each) for name, each in seconds.items()}
    return row | {name: round(seconds["marian"] / each, 2) for name, each in seconds.items() if name != "marian"}


def peak_of(device: str) -> float | None:
    """Return the operations per second that the card can do, or `None` where that is not known."""
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def measured(sizes: list[str], cases: list[str], options: dict[str, Any]) -> Iterator[Row]:
    """Yield one row per size and case."""
    for size in sizes:
        for is_compiled in options["compile"] if "training" in cases else ():
            yield training_row(size, is_compiled == "yes", options)
        for width in options["beams"] if "decoding" in cases else ():
            for batch in options["batches"]:
                yield decoding_row(size, int(batch), int(width), options)


def main(
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    sizes: Sizes = "base,big",
    cases: Annotated[str, typer.Option(help="Of training and decoding, with commas.")] = "training,decoding",
    compile: Annotated[str, typer.Option(help="Of no and yes, with commas: torch.compile in training.")] = "no",
    batches: Annotated[str, typer.Option(help="Sentences of a batch of decoding, with commas.")] = "1,64,256",
    beams: Annotated[str, typer.Option(help="Beam widths, with commas; 1 is greedy.")] = "1,4",
    target_tokens: Annotated[int, typer.Option(help="Of a training step.")] = 25_000,
    new_tokens: Annotated[int, typer.Option(help="Tokens generated for each sentence.")] = 32,
    vocabulary: Vocabulary = 37_000,
    precision: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    peak_teraflops: Annotated[float | None, typer.Option(help="Of a card whose peak is not known.")] = None,
    rounds: Rounds = 5,
    json: Json = None,
):
    """Print one line per size and case."""
    if device == "cuda" and not torch.cuda.is_available():
        print("not measured: there is no GPU")
        return
    begin(torch.get_num_threads())
    options = {"device": device, "vocabulary": vocabulary, "target_tokens": target_tokens, "rounds": rounds}
    options |= {"new_tokens": new_tokens, "dtype": getattr(torch, precision), "compile": compile.split(",")}
    options |= {"batches": batches.split(","), "beams": beams.split(",")}
    options["peak"] = peak_teraflops * 1e12 if peak_teraflops else peak_of(device)
    report(measured(sizes.split(","), cases.split(","), options), json, device)


if __name__ == "__main__":
    typer.run(main)
