"""All checks and timings that need a GPU: `make gpu`, in less than nine minutes.

    python scripts/benchmarks/gpu.py                               # prints "not measured" without a GPU
    python scripts/benchmarks/gpu.py --cases loop --pairs path/to/multi30k --languages de,en
    python scripts/benchmarks/gpu.py --device cpu --sizes tiny --loops tiny --vocabulary 90 --target-tokens 64

Each case is a process with a time limit, so a failure costs no other case. A check (`gpu_checks.py`) prints `ok` or
`FAILED` with its figures; one failure makes the exit code 1. Checks run at the same time, before the timings. The
first size is also compiled in `training`, and decodes.

`training` takes bare steps: 25,000 target and source tokens, AdamW and autocast; steps take turns, and medians are
compared. GiB is the peak of a model, its optimizer and step. MFU is the share of the card's peak for products with
weight matrices (`heedful.training.updates.model_size`), the same for all four models.

`loop` is `heedful train`: medians of the second half of its log, and a bare step on one of its updates.

`decoding` compares Marian's `generate()` with Heed's, and with Heed's compiled into CUDA graphs over a static cache
(`mode="reduce-overhead"`). `same` is the share of equal tokens, 1 in float32. A `Translator` then translates built-in
sentences with random weights, with and without graphs; the first round, which makes the graphs, does not count.
"""

import gc
import math
import os
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain, product
from json import loads
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import transformers
import typer
from gpu_checks import Case, exactness, kernels, plans, processes, recipe_tree
from harness import Json, Rounds, Row, Sizes, Vocabulary, begin, median_seconds, report, waiting
from peers import SIZES, endless_search, make_heed, make_marian, make_sources, training_step
from torch import nn
from transformers import CompileConfig, T5Config, T5ForConditionalGeneration

from heedful import HeedConfig, HeedForConditionalGeneration, Translator
from heedful.data.epochs.micro_batches import collate
from heedful.data.tokenizer_training import train_tokenizers
from heedful.decoding.loading import load_model
from heedful.decoding.strategies import graphs
from heedful.training.recipe_file import make_recipe
from heedful.training.run import train
from heedful.training.updates.model_size import operations_of_pairs, peak_operations
from heedful_lab.korean_english.pairs import korean_english_pairs

Loss = Callable[..., torch.Tensor]  # of model and batch
LENGTH = 32  # tokens of each source and target
SMOOTHING = 0.1
# Padded tokens per update, and updates, of the `loop` runs.
LOOPS = {"tiny": (800, 20), "small": (8_192, 300), "base": (50_000, 60), "big": (50_000, 40)}


class TorchTransformer(nn.Module):
    """`nn.Transformer` with embeddings, sinusoids, and tied output."""

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


def losses(size: str, vocabulary: int, device: str, has_t5: bool) -> dict[str, tuple[nn.Module, Loss]]:
    """Return each model in training, with a function of model and batch for the smoothed loss."""
    marian = make_marian(size, vocabulary)
    heed = make_heed(marian)
    heed.config.label_smoothing = SMOOTHING

    def smoothed(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        shifted = model.prepare_decoder_input_ids_from_labels(batch["labels"])
        logits = model(input_ids=batch["input_ids"], decoder_input_ids=shifted, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(), label_smoothing=SMOOTHING)

    found: dict[str, tuple[nn.Module, Loss]] = {
        "marian": (marian, smoothed),
        "nn.Transformer": (TorchTransformer(size, vocabulary), lambda model, batch: model(**batch)),
        "heed": (heed, lambda model, batch: model.loss_of(batch)),
    }
    if has_t5:
        found["t5"] = make_t5(size, vocabulary), smoothed
    for model, _ in found.values():
        model.to(device).train()
    return found


def bare_step(model: Any, loss_of: Loss, batch: Any, is_compiled: bool, options: dict[str, Any]) -> Callable[[], None]:
    """Return a training step on a batch on the device."""
    compute = torch.compile(loss_of) if is_compiled else loss_of

    def loss() -> torch.Tensor:
        with torch.autocast(options["device"], options["dtype"], enabled=options["dtype"] != torch.float32):
            return compute(model, batch)

    return waiting(training_step(model, loss), options["device"])


def peak_memory(model: nn.Module, step: Callable[[], None]) -> float:
    """Return GiB of weights, their two moments, and a step's peak in addition."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    kept = 12 * sum(parameter.numel() for parameter in model.parameters())
    return round((torch.cuda.max_memory_allocated() - before + kept) / 2**30, 2)


def training_row(size: str, is_compiled: bool, options: dict[str, Any]) -> Row:
    """Time a training step for each model."""
    device, vocabulary = options["device"], options["vocabulary"]
    pairs = max(1, options["target_tokens"] // LENGTH)
    tokens, _ = make_sources(pairs, LENGTH, vocabulary, shortest=1.0)
    batch = {"input_ids": tokens.to(device), "labels": tokens.flip(1).to(device)}

    models = losses(size, vocabulary, device, has_t5=not is_compiled)
    steps = {name: bare_step(*each, batch, is_compiled, options) for name, each in models.items()}
    seconds = {name: each.clock for name, each in median_seconds(steps, options["rounds"]).items()}
    speeds = {name: pairs * LENGTH / each for name, each in seconds.items()}
    row: Row = {"compiled": is_compiled, "target_tokens": pairs * LENGTH}
    row |= {f"{name} tokens/s": round(speed) for name, speed in speeds.items()}
    if options["peak"]:
        operations = operations_of_pairs(models["heed"][0], pairs * LENGTH, pairs * LENGTH)
        row |= {f"{name} MFU": round(operations / each / options["peak"], 3) for name, each in seconds.items()}
    if device == "cuda":
        row |= {f"{name} GiB": peak_memory(models[name][0], step) for name, step in steps.items()}
    best = max(speed for name, speed in speeds.items() if name != "heed")
    return {**row, "heed to the best": round(speeds["heed"] / best, 2)}


def decoding_row(size: str, batch: int, beams: int, options: dict[str, Any]) -> Row:
    """Time Marian's and Heed's `generate()`.

    Raises:
        RuntimeError: If float32 tokens differ.
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
    timed = median_seconds({name: waiting(call, device) for name, call in calls.items()}, options["rounds"])
    seconds = {name: each.clock for name, each in timed.items()}
    row = {"same": round(same, 3)}
    row |= {f"{name} tokens/s": round(batch * new_tokens / each) for name, each in seconds.items()}
    return row | {name: round(seconds["marian"] / each, 2) for name, each in seconds.items() if name != "marian"}


def training(options: dict[str, Any]) -> Case:
    """Take bare steps of each size; the first is compiled too."""
    for size in options["sizes"]:
        for is_compiled in options["compile"] if size == options["sizes"][0] else [False]:
            yield f"{size}{' compiled' * is_compiled}", partial(training_row, size, is_compiled, options)


def loop(options: dict[str, Any]) -> Case:
    """Run `heedful train` with each size, plain and compiled."""
    with TemporaryDirectory() as folder:
        for size in options["loops"]:
            for is_compiled in options["compile"]:
                name = f"{size}{' compiled' * is_compiled}"
                yield name, partial(loop_row, size, is_compiled, Path(folder, name), options)


def loop_row(size: str, is_compiled: bool, run: Path, options: dict[str, Any]) -> Row:
    """Train from a recipe, then take bare steps on the corpus's first update."""
    tokens, updates = LOOPS[size]
    precision = "no" if options["dtype"] == torch.float32 else "bf16"
    settings: dict[str, Any] = {"compile": is_compiled, "mixed_precision": precision}
    tree = recipe_tree(run, size, options, tokens_per_update=tokens, max_updates=updates, **settings)
    tree["logging"] = {"every_updates": 5}
    tree["data"]["train"] = f"builtin:train:{tokens}"
    if options["pairs"]:
        tree["data"] = dict(zip(("source", "target"), options["languages"].split(","), strict=True))
        tree["data"] |= {split: f"{options['pairs']}/{split}.jsonl.gz" for split in ("train", "validation")}
        tree["tokenizer"] = {"vocab_size": 8000}
    for tokenizer in run.parent.glob("*/tokenizer"):
        tree["tokenizer"] = {"path": str(tokenizer)}  # of an earlier run
    result = train(make_recipe(tree))
    lines = [loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    row: Row = {"padded tokens": tokens, "updates": lines[-1]["update"], "pairs": options["pairs"] or "built-in"}
    for name in ("target_tokens_per_s", "waiting_share", "model_flops_utilization", "peak_memory_gib"):
        values = [line[f"train/{name}"] for line in lines if f"train/{name}" in line]
        row |= {name: round(statistics.median(values[len(values) // 2 :]), 3)} if values else {}
    model: Any = load_model(result.folder).to(options["device"]).train()
    rows = list(chain.from_iterable(next(iter(result.corpus.training.updates(0)))))
    batch = {key: each.to(options["device"]) for key, each in collate(rows, model.config.pad_token_id).items()}
    step = bare_step(model, lambda model, batch: model.loss_of(batch), batch, is_compiled, options)
    bare = sum(len(pair["labels"]) for pair in rows) / median_seconds({"step": step}, options["rounds"])["step"].clock
    return row | {"bare tokens/s": round(bare), "loop to bare": round(row["target_tokens_per_s"] / bare, 3)}


def decoding(options: dict[str, Any]) -> Case:
    """Search with the first size: each beam width and batch, and a `Translator`."""
    size = options["sizes"][0]
    for beams, batch in product(options["beams"], options["batches"]):
        yield f"{size}, {batch} x {beams}", partial(decoding_row, size, batch, beams, options)
    yield f"{size}, Translator", partial(translation_row, size, options)


def translation_row(size: str, options: dict[str, Any]) -> Row:
    """Time a `Translator` on sentences of different lengths."""
    pairs = list(korean_english_pairs("train", 2000 if options["device"] == "cuda" else 20))
    sources, targets = ([pair[side] for pair in pairs] for side in ("ko", "en"))
    tokenizers = train_tokenizers(sources, targets, vocab_size=400)
    sizes = recipe_tree(Path(), size, options)["model"]["options"]
    model = HeedForConditionalGeneration(HeedConfig(**sizes, vocab_size=len(tokenizers.target)))
    translator = Translator(model.to(options["device"], options["dtype"]), tokenizers, engine="generate")
    call = partial(translator.translate, sources, num_beams=1, max_new_tokens=options["new_tokens"])
    row: Row = {"sentences": len(sources)}
    for name, steps in (("plain", math.inf), ("with graphs", 0)):
        graphs.STEPS_THAT_PAY = steps
        seconds = median_seconds({name: waiting(call, options["device"])}, rounds=1)[name].clock
        row[f"{name}, sentences/s"] = round(len(sources) / seconds, 1)
    return row


# Seconds for each. Checks run at the same time, the rest in turn.
CHECKS = {"kernels": (kernels, 100), "exactness": (exactness, 130), "processes": (processes, 130)}
TIMED = {"plans": (plans, 30), "training": (training, 135), "loop": (loop, 150), "decoding": (decoding, 80)}
CASES = CHECKS | TIMED


def work(case: str, options: dict[str, Any], results: Connection) -> None:
    """Send a case's rows and then `None`; the process leads a group of its own child processes."""
    os.setsid()
    begin(torch.get_num_threads())
    for name, make in CASES[case][0](options):
        row: Row = {"case": case, "name": name}
        try:
            row |= make()
        except Exception as error:
            traceback.print_exc()
            row |= {"result": "FAILED", "error": f"{type(error).__name__}: {error}"[:300]}
        results.send(row)
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
    results.send(None)


def rows_of(cases: list[str], options: dict[str, Any]) -> Iterator[Row]:
    """Run each case in a process, all at once, and yield their rows."""
    spawn, begun, running = get_context("spawn"), time.monotonic(), {}
    for case in cases:
        results, sender = spawn.Pipe(duplex=False)
        running[case] = results, spawn.Process(target=work, args=(case, options, sender))
        running[case][1].start()
        sender.close()
    try:
        for case, (results, _) in running.items():
            yield from received(case, results, begun + options["patience"] * CASES[case][1])
    finally:
        for _, process in running.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()


def received(case: str, results: Connection, end: float) -> Iterator[Row]:
    """Yield a process's rows; if it fails or exceeds its time, the last row reports it."""
    missing = {"case": case, "result": "FAILED" if case in CHECKS else "not measured", "error": "its time is up"}
    try:
        while results.poll(max(0.0, end - time.monotonic())):
            if (row := results.recv()) is None:
                return
            yield row
    except EOFError:
        missing |= {"result": "FAILED", "error": "its process has ended"}
    yield missing


def main(
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    sizes: Sizes = "base,big",
    loops: Annotated[str, typer.Option(help="Comma-separated model sizes of the case loop.")] = "small,base,big",
    cases: Annotated[str, typer.Option(help="With commas.")] = ",".join(CASES),
    compile: Annotated[str, typer.Option(help="torch.compile in training: no, yes, or both with a comma.")] = "no,yes",
    batches: Annotated[str, typer.Option(help="Comma-separated batch sizes of decoding.")] = "1,64",
    beams: Annotated[str, typer.Option(help="Comma-separated beam widths; 1 is greedy.")] = "1,4",
    target_tokens: Annotated[int, typer.Option(help="Target tokens per training step.")] = 25_000,
    new_tokens: Annotated[int, typer.Option(help="Tokens generated for each sentence.")] = 32,
    vocabulary: Vocabulary = 37_000,
    precision: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    peak_teraflops: Annotated[float | None, typer.Option(help="Peak of an unknown GPU.")] = None,
    pairs: Annotated[str | None, typer.Option(help="Folder of train.jsonl.gz and validation.jsonl.gz.")] = None,
    languages: Annotated[str, typer.Option(help="Source and target language of these pairs.")] = "de,en",
    patience: Annotated[float, typer.Option(help="Factor for each case's time limit.")] = 1.0,
    rounds: Rounds = 5,
    json: Json = None,
):
    """Print a line for each check, size and case."""
    if device == "cuda" and not torch.cuda.is_available():
        print("not measured: there is no GPU")
        return
    begin(torch.get_num_threads())
    options = {"device": device, "vocabulary": vocabulary, "target_tokens": target_tokens, "rounds": rounds}
    options |= {"new_tokens": new_tokens, "dtype": getattr(torch, precision), "sizes": sizes.split(",")}
    options |= {"compile": [each == "yes" for each in compile.split(",")], "loops": loops.split(",")}
    options |= {"batches": list(map(int, batches.split(","))), "beams": list(map(int, beams.split(",")))}
    options |= {"pairs": pairs, "languages": languages, "patience": patience}
    options["checked"] = "small" if device == "cuda" else "tiny"
    options["peak"] = peak_teraflops * 1e12 if peak_teraflops else peak_operations(torch.device(device))
    asked = cases.split(",")
    groups = [[case for case in asked if case in CHECKS], *([case] for case in asked if case not in CHECKS)]
    name = torch.cuda.get_device_name() if device == "cuda" else "none"
    first = {"card": name, "torch": torch.__version__, "transformers": transformers.__version__}
    rows = report(chain([first], *(rows_of(group, options) for group in groups)), json, device)
    sys.exit(any(row.get("result") == "FAILED" for row in rows))


if __name__ == "__main__":
    typer.run(main)
