"""Checks on a GPU, each a row of figures with limits; `gpu.py` runs them.

A case is a function of options that yields each row's name and a call for the row. Torchrun starts this file for the
two processes that compute one update on one card.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from harness import Row, seconds_of, waiting
from peers import SIZES, endless_search, make_heed, make_marian, make_pairs, make_sources
from safetensors.torch import load_file

from heedful.data.epochs.micro_batches import split_update
from heedful.training.model_of_recipe import make_engine
from heedful.training.processes.devices import make_accelerator
from heedful.training.recipe import OptimizationRecipe
from heedful.training.recipe_file import make_recipe
from heedful.training.run import train

Options = dict[str, Any]
Case = Iterator[tuple[str, Callable[[], Row]]]
Pair = tuple[torch.Tensor, torch.Tensor]

ROOT = Path(__file__).parents[2]
VOCABULARY = 1000
# Rows and lengths; the first two warm up.
SHAPES = [(44, 56), (43, 7), *((44 - 3 * number, 9 + 4 * number) for number in range(12))]
COST_OF_A_SHAPE = {"cuda": 20, "cpu": 1000}  # milliseconds; cuDNN's plans take hundreds
# Largest relative changes by splitting an update.
EXACT = {"loss": 1e-6, "gradient": 1e-5}
SPLITS = {"no": EXACT, "bf16": {"loss": 1e-4, "gradient": 2e-2}, "fp16": {"loss": 1e-4}}
STOP, END = 11, 24  # updates


def checked(**figures: tuple[float, float]) -> Row:
    """Return a row of figures with upper limits."""
    row: Row = {"result": "ok" if all(value <= limit for value, limit in figures.values()) else "FAILED"}
    for name, (value, limit) in figures.items():
        row |= {name: float(f"{value:.2g}"), f"{name} at most": float(f"{limit:.2g}")}
    return row


def distances(ours: Pair, theirs: Pair) -> list[float]:
    """Return each difference's norm relative to the second."""
    return [float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True)]


def compared(found: Sequence[Pair], expected: Pair, limits: dict[str, float]) -> Row:
    """Return the largest distance."""
    largest = [max(each) for each in zip(*(distances(pair, expected) for pair in found), strict=True)]
    return checked(**dict(zip(limits, zip(largest, limits.values(), strict=False), strict=False)))


def small_heed(options: Options) -> Any:
    """Return a Heed with random weights and without dropout."""
    heed = make_heed(make_marian(options["checked"], VOCABULARY, dropout=0.0))
    heed.config.label_smoothing = 0.1
    return heed


def kernels(options: Options) -> Case:
    """Compare each attention function with eager attention in float32, and an offloaded cache with a plain one."""
    on_gpu = options["device"] == "cuda"
    names = ["sdpa", *["flex_attention"] * on_gpu]  # its gradients need a GPU
    flash = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
    halves = [*names, *(name for name, package in flash.items() if on_gpu and importlib.util.find_spec(package))]
    for precision, of_precision in (("float32", names), ("bfloat16", halves)):
        for name in of_precision:
            yield f"{name} {precision}", partial(kernel_row, name, getattr(torch, precision), options)
    if on_gpu:
        yield "offloaded cache", partial(offloaded_row, options)


def computed(name: str, dtype: torch.dtype, options: Options) -> Pair:
    """Return an attention function's logits and gradient in one precision."""
    model = small_heed(options).to(options["device"], dtype).train()
    model.set_attn_implementation(name)
    batch = {key: value.to(options["device"]) for key, value in make_pairs(8, 40, VOCABULARY, 0.3).items()}
    output = model(**batch)
    output.loss.backward()
    gradient = torch.cat([parameter.grad.float().flatten() for parameter in model.parameters()])
    return output.logits[batch["labels"] != -100].detach().float(), gradient


def kernel_row(name: str, dtype: torch.dtype, options: Options) -> Row:
    """Compare with float32; the limit is three times eager attention's rounding difference."""
    exact = computed("eager", torch.float32, options)
    limits = [max(1e-4, 3 * each) for each in distances(computed("eager", dtype, options), exact)]
    return compared([computed(name, dtype, options)], exact, dict(zip(("logits", "gradient"), limits, strict=True)))


def offloaded_row(options: Options) -> Row:
    """Count tokens that an offloaded cache changes."""
    tokens, mask = (each.to(options["device"]) for each in make_sources(8, 30, VOCABULARY))
    model = small_heed(options).to(options["device"]).eval()
    call = partial(model.generate, tokens, attention_mask=mask, **endless_search(1, 12))
    return checked(differing=(int((call() != call(cache_implementation="offloaded")).sum()), 0))


def plans(options: Options) -> Case:
    """Compare batches of new and repeated shapes."""
    for name in ("training", "generate()"):
        yield name, partial(plan_row, name, options)


def plan_row(name: str, options: Options) -> Row:
    """Time new shapes, then the same again; `extra` is the median difference in milliseconds."""
    device, dtype = options["device"], options["dtype"]
    model = small_heed(options).to(device)
    model = model.train() if name == "training" else model.eval().to(dtype)

    def call(input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> None:
        given = {"input_ids": input_ids, "attention_mask": attention_mask}
        if name != "training":
            return model.generate(**given, **endless_search(1, 8))
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            loss = model(**given, labels=labels).loss
        return loss.backward()

    made = [make_pairs(*shape, VOCABULARY, 0.5) for shape in SHAPES]
    calls = [partial(call, **{key: value.to(device) for key, value in batch.items()}) for batch in made]
    first, later = ([1000 * seconds_of(waiting(each, device))[0] for each in calls][2:] for _ in range(2))
    extra = median(new - old for new, old in zip(first, later, strict=True))
    row = {"new shapes, ms": round(median(first), 1), "repeated, ms": round(median(later), 1)}
    return row | checked(extra=(extra, COST_OF_A_SHAPE[device]))


def exactness(options: Options) -> Case:
    """Check split updates, single and batched sentences, equal runs, and a resumed run."""
    precisions = ["no", "bf16", *["fp16"] * (options["device"] == "cuda")]
    for precision in precisions:
        yield f"an update split, {precision}", partial(split_row, precision, options)
    for name in ("float32", "bfloat16", "float16"):
        yield f"generate() alone and in a batch, {name}", partial(alone_row, getattr(torch, name), options)
    for precision in precisions:
        yield f"runs of {END} updates, {precision}", partial(runs_row, options, mixed_precision=precision)
    if options["device"] == "cuda":
        yield f"compiled runs of {END} updates", partial(runs_row, options, mixed_precision="bf16", compile=True)


def update(token_budget: int, options: Options, accelerator: Accelerator, precision: Any = "no") -> Pair:
    """Return an update's loss and gradient over all processes, in micro-batches."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 40, (32, 2), generator=generator).tolist()
    made = [[torch.randint(1, VOCABULARY - 1, (n,), generator=generator).tolist() for n in both] for both in lengths]
    rows, tokens = [{"input_ids": source, "labels": target} for source, target in made], sum(n for _, n in lengths)
    model = small_heed(options).train()
    settings = OptimizationRecipe(max_updates=1, mixed_precision=precision, compile=False)
    engine = make_engine(accelerator, model, settings)
    parts = split_update([rows], token_budget, accelerator.num_processes)
    sums = accelerator.reduce(engine.accumulate(engine.feed.micro_batches(parts), tokens), "sum")
    accelerator.unscale_gradients()
    return sums[:1].cpu() / tokens, torch.cat([weight.grad.flatten() for weight in engine.parameters]).cpu()


def update_alone(token_budget: int, options: Options, precision: Any = "no") -> Pair:
    """Return an update's loss and gradient on one process."""
    settings = OptimizationRecipe(max_updates=1, device=options["device"], mixed_precision=precision)
    return update(token_budget, options, make_accelerator(settings), precision)


def split_row(precision: str, options: Options) -> Row:
    """Compare an update in one piece with two pieces, some, and single rows."""
    whole, *parts = (update_alone(budget, options, precision) for budget in (10**6, 1200, 300, 1))
    return compared(parts, whole, SPLITS[precision])


def alone_row(dtype: torch.dtype, options: Options) -> Row:
    """Count sentences whose tokens differ; a few may in half precision, because shapes change rounding."""
    tokens, mask = (each.to(options["device"]) for each in make_sources(32, 40, VOCABULARY))
    model, differing = small_heed(options).to(options["device"], dtype).eval(), 0
    for settings in (endless_search(1, 20), endless_search(4, 20)):
        together = model.generate(tokens, attention_mask=mask, **settings)
        for row in range(0, 32, 4):
            real = slice(row, row + 1), slice(int(mask[row].sum()))
            alone = model.generate(tokens[real], attention_mask=mask[real], **settings)
            differing += not torch.equal(alone[0], together[row])
    return {"of": 16} | checked(differing=(differing, 0 if dtype == torch.float32 else 2))


def recipe_tree(output: Path, size: str, options: Options, **optimization: Any) -> dict[str, Any]:
    """Return a recipe on the built-in corpus with its last weights published and hardly any translation."""
    layers, width, inner, heads = SIZES[size].values()
    sizes = {"d_model": width, "dropout": 0.1}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": layers, f"{side}_ffn_dim": inner, f"{side}_attention_heads": heads}
    never = {"every_updates": 10**6}
    settings = {"learning_rate": 5e-4, "schedule": "constant", "warmup_updates": 4, "device": options["device"]}
    where = {"train": "builtin:train:3000", "validation": "builtin:validation:100", "source": "ko", "target": "en"}
    tree = {"name": "gpu", "output": str(output), "resume": output.exists(), "data": where}
    tree |= {"tokenizer": {"vocab_size": 400}, "model": {"options": sizes}, "optimization": settings | optimization}
    tree |= {"validation": never | {"sentences": 1}, "checkpoints": never | {"publish": "last"}}
    return tree | {"decoding": {"num_beams": 1, "max_length": 9}, "logging": {"every_updates": 1}}


def runs_row(options: Options, **optimization: Any) -> Row:
    """Count weight matrices in which a second run and a resumed one differ from the first in any bit."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    settings = {"tokens_per_update": 4096, "token_budget": 2048, **optimization}
    with TemporaryDirectory() as folder:
        for name, end in (("first", END), ("second", END), ("resumed", STOP), ("resumed", END)):
            tree = recipe_tree(Path(folder, name), options["checked"], options, max_updates=end, **settings)
            found[name] = load_file(train(make_recipe(tree)).folder / "model.safetensors")
    first = found.pop("first")
    differing = {name: sum(not torch.equal(run[key], first[key]) for key in first) for name, run in found.items()}
    return checked(**{name: (count, 0) for name, count in differing.items()})


def processes(options: Options) -> Case:
    """Compare one process of each launcher, and two on one card, with a plain process."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc_per_node"]
    launchers = {"torchrun": [*torchrun, "1"]}
    if options["device"] == "cuda":
        for name, file in (("DDP", "multi_gpu"), ("FSDP2", "fsdp2")):
            config = f"{ROOT}/configuration/accelerate/{file}.yaml"
            one = ["--num_processes", "1", "--main_process_port", "0"]
            launchers[name] = ["accelerate.commands.launch", "--config_file", config, *one]
    with TemporaryDirectory() as folder:
        for name, command in launchers.items():
            yield f"one process, {name}", partial(launched_row, Path(folder), name, command, options)
        yield "two processes, gloo", partial(two_processes_row, Path(folder), [*torchrun, "2"], options)


def start(*command: str) -> None:
    """Run a Python module in a process; a failure is a `RuntimeError` with the end of its output."""
    finished = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
    if finished.returncode:
        raise RuntimeError(finished.stderr[-280:])


def launched_row(folder: Path, launcher: str, command: list[str], options: Options) -> Row:
    """Compare the losses of `heedful train` with and without a launcher."""
    plain, run = folder / "plain", folder / launcher
    if not plain.exists():
        settings = {"max_updates": 8, "tokens_per_update": 2048, "token_budget": 1024}
        train(make_recipe(recipe_tree(plain, options["checked"], options, **settings)))
    start(*command, f"{ROOT}/scripts/train.py", f"{plain}/recipe.yaml", f"output={run}")
    ours, theirs = (
        [loss for line in (each / "log.jsonl").open() if (loss := json.loads(line).get("train/loss"))]
        for each in (run, plain)
    )
    return checked(losses=(max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)), 1e-5))


def two_processes_row(folder: Path, torchrun: list[str], options: Options) -> Row:
    """Compare loss and summed gradient with one process's."""
    start(*torchrun, __file__, str(folder), options["device"], options["checked"])
    return compared([torch.load(folder / f"{rank}.pt") for rank in (0, 1)], update_alone(600, options), EXACT)


def one_of_two(folder: str, device: str, size: str) -> None:
    """Compute this process's part on the first card, which only one process usually uses."""
    os.environ |= {"LOCAL_RANK": "0", "NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
    accelerator = Accelerator(cpu=device == "cpu", kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    found = update(600, {"checked": size}, accelerator)
    torch.save(found, f"{folder}/{accelerator.process_index}.pt")


if __name__ == "__main__":
    one_of_two(*sys.argv[1:])
