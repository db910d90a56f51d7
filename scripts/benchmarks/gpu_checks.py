"""What must hold on a card, each check a row with its figures beside their limits; `gpu.py` runs them.

A section is a function of options that yields the name of each row and a call that makes it. Started by torchrun on
two processes, this file is the part of `processes` that computes one update on one card together.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
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

from heedful.data.micro_batches import micro_batches_of_rank, split_update
from heedful.training.loop.engine import Engine
from heedful.training.processes.devices import make_accelerator
from heedful.training.recipe import OptimizationRecipe
from heedful.training.recipe_file import make_recipe
from heedful.training.run import train

Options = dict[str, Any]
Section = Iterator[tuple[str, Callable[[], Row]]]

ROOT = Path(__file__).parents[2]
VOCABULARY = 1000
NEW_SHAPES = [(44 - 3 * number, 9 + 4 * number) for number in range(12)]  # rows, length
COST_OF_A_SHAPE = {"cuda": 20, "cpu": 1000}  # milliseconds; a plan of cuDNN's takes hundreds
# Relative differences of an update's loss and gradient between its splits.
SPLITS = {"no": (1e-6, 1e-5), "bf16": (1e-4, 2e-2), "fp16": (1e-4, None)}
STOP, END = 11, 24  # updates
IS_COMPILED = "compile" in OptimizationRecipe.__dataclass_fields__  # whether `heedful train` can compile the step


def checked(**figures: tuple[float, float]) -> Row:
    """Return a row of figures that each must not be above its limit."""
    row: Row = {"result": "ok" if all(value <= limit for value, limit in figures.values()) else "FAILED"}
    for name, (value, limit) in figures.items():
        row |= {name: float(f"{value:.2g}"), f"{name} at most": limit}
    return row


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the norm of a difference as a share of the second's."""
    return float((ours - theirs).norm() / theirs.norm())


def small_heed(options: Options) -> Any:
    """Return a Heed with random weights that draws no random numbers."""
    heed = make_heed(make_marian(options["checked"], VOCABULARY, dropout=0.0))
    heed.config.label_smoothing = 0.1
    return heed


# Kernels


def kernels(options: Options) -> Section:
    """Compare every attention function with eager attention in float32, and an offloaded cache with a plain one."""
    on_gpu, is_there = options["device"] == "cuda", importlib.util.find_spec
    names = ["sdpa", *["flex_attention"] * on_gpu]  # whose gradients need a GPU
    flash = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
    halves = [*names, *(name for name, package in flash.items() if on_gpu and is_there(package))]
    for precision, of_precision in (("float32", names), ("bfloat16", halves)):
        for name in of_precision:
            yield f"{name} {precision}", partial(kernel_row, name, getattr(torch, precision), options)
    if on_gpu:
        yield "offloaded cache", partial(offloaded_row, options)


def computed(name: str, dtype: torch.dtype, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and gradient of an attention function in a precision."""
    model = small_heed(options).to(options["device"], dtype).train()
    model.set_attn_implementation(name)
    batch = {key: value.to(options["device"]) for key, value in make_pairs(8, 40, VOCABULARY, 0.3).items()}
    output = model(**batch, skip_logits=False)
    output.loss.backward()
    gradient = torch.cat([parameter.grad.float().flatten() for parameter in model.parameters()])
    return output.logits[batch["labels"] != -100].detach().float(), gradient


def kernel_row(name: str, dtype: torch.dtype, options: Options) -> Row:
    """Compare with float32; rounding may make three times the difference that it makes of eager attention."""
    exact, plain = computed("eager", torch.float32, options), computed("eager", dtype, options)
    figures = {}
    for place, ours in enumerate(computed(name, dtype, options)):
        allowed = round(max(1e-4, 3 * distance(plain[place], exact[place])), 4)
        figures[("logits", "gradient")[place]] = distance(ours, exact[place]), allowed
    return checked(**figures)


def offloaded_row(options: Options) -> Row:
    """Count tokens that an offloaded cache changes."""
    model = small_heed(options).to(options["device"]).eval()
    tokens, mask = (each.to(options["device"]) for each in make_sources(8, 30, VOCABULARY))
    call = partial(model.generate, tokens, attention_mask=mask, **endless_search(1, 12))
    return checked(differing=(int((call() != call(cache_implementation="offloaded")).sum()), 0))


# Plans


def plans(options: Options) -> Section:
    """Compare batches of new shapes with batches whose shapes were there before."""
    for name in ("training", "generate()"):
        yield name, partial(plan_row, name, options)


def plan_row(name: str, options: Options) -> Row:
    """Time new shapes, then the same ones again; `extra` is the median of the differences, in milliseconds."""
    device, dtype = options["device"], options["dtype"]
    model = small_heed(options).to(device)

    def step(batch: dict[str, torch.Tensor]) -> None:
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            loss = model(**batch).loss
        loss.backward()
        model.zero_grad()

    def generate(batch: dict[str, torch.Tensor]) -> None:
        model.generate(**{key: batch[key] for key in ("input_ids", "attention_mask")}, **endless_search(1, 8))

    call = step if name == "training" else generate
    model = model.train() if name == "training" else model.eval().to(dtype)
    shapes = [(44, 56), (43, 7), *NEW_SHAPES]  # the first two bring memory and libraries
    made = [make_pairs(*shape, VOCABULARY, 0.5) for shape in shapes]
    calls = [partial(call, {key: value.to(device) for key, value in batch.items()}) for batch in made]
    first, later = ([1000 * seconds_of(waiting(each, device))[0] for each in calls][2:] for _ in range(2))
    extra = [new - old for new, old in zip(first, later, strict=True)]
    times = {"new shapes, ms": round(median(first), 1), "repeated, ms": round(median(later), 1)}
    return checked(extra=(median(extra), COST_OF_A_SHAPE[device])) | times


# Exactness


def exactness(options: Options) -> Section:
    """Check splits of an update, sentences alone and in a batch, runs that are alike, and one that was stopped."""
    precisions = ["no", "bf16", *["fp16"] * (options["device"] == "cuda")]
    for precision in precisions:
        yield f"an update split, {precision}", partial(split_row, precision, options)
    for name in ("float32", "bfloat16", "float16"):
        yield f"generate() alone and in a batch, {name}", partial(alone_row, getattr(torch, name), options)
    for precision in precisions:
        yield f"runs of {END} updates, {precision}", partial(runs_row, options, mixed_precision=precision)
    if IS_COMPILED and options["device"] == "cuda":
        yield f"compiled runs of {END} updates", partial(runs_row, options, mixed_precision="bf16", compile=True)


def update(accelerator: Accelerator, token_budget: int, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of an update on all processes, divided into micro-batches, and its gradient."""
    generator = torch.Generator().manual_seed(0)

    def sentence() -> list[int]:
        length = int(torch.randint(2, 40, (1,), generator=generator))
        return torch.randint(1, VOCABULARY - 1, (length,), generator=generator).tolist()

    rows = [{"input_ids": sentence(), "labels": sentence()} for _ in range(32)]
    model = small_heed(options).train()
    engine = Engine(accelerator, model, torch.optim.AdamW(model.parameters()))
    parts = split_update([rows], token_budget, accelerator.num_processes)
    micro_batches = micro_batches_of_rank(parts, accelerator.process_index, VOCABULARY - 1)
    tokens = sum(len(row["labels"]) for row in rows)
    sums = accelerator.reduce(engine.accumulate(micro_batches, tokens), "sum")
    accelerator.unscale_gradients()
    gradient = torch.cat([parameter.grad.float().flatten() for parameter in engine.parameters])
    return sums[:1].cpu() / tokens, gradient.cpu()


def update_alone(token_budget: int, options: Options, precision: str = "no") -> tuple[torch.Tensor, torch.Tensor]:
    """Return loss and gradient of an update on one process."""
    settings = OptimizationRecipe(max_updates=1, device=options["device"], mixed_precision=precision)  # type: ignore[arg-type]
    return update(make_accelerator(settings), token_budget, options)


def split_row(precision: str, options: Options) -> Row:
    """Compare an update in one piece with the same in two, some, and single rows."""
    whole, *parts = (update_alone(budget, options, precision) for budget in (10**6, 1200, 300, 1))
    loss, gradient = (max(distance(part[place], whole[place]) for part in parts) for place in (0, 1))
    of_loss, of_gradient = SPLITS[precision]
    limits = {"loss": (loss, of_loss), "gradient": (gradient, of_gradient)}
    return checked(**{name: each for name, each in limits.items() if each[1] is not None})


def alone_row(dtype: torch.dtype, options: Options) -> Row:
    """Count sentences whose tokens differ; half precision rounds products of other shapes otherwise, so a few may."""
    model = small_heed(options).to(options["device"], dtype).eval()
    tokens, mask = (each.to(options["device"]) for each in make_sources(32, 40, VOCABULARY))
    differing = 0
    for beams in (1, 4):
        settings = endless_search(beams, 20)
        together = model.generate(tokens, attention_mask=mask, **settings)
        for row in range(0, 32, 4):
            real = slice(row, row + 1), slice(int(mask[row].sum()))
            alone = model.generate(tokens[real], attention_mask=mask[real], **settings)
            differing += not torch.equal(alone[0], together[row])
    return {"of": 16} | checked(differing=(differing, 0 if dtype == torch.float32 else 2))


def recipe_tree(output: Path, size: str, options: Options, **optimization: Any) -> dict[str, Any]:
    """Return a recipe of the built-in corpus, which publishes its last weights and translates next to nothing."""
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
    """Count weight matrices in which a second run, and one that was stopped, differ from the first in any bit."""
    found = {}
    with TemporaryDirectory() as folder:
        for name, ends in (("first", [END]), ("second", [END]), ("resumed", [STOP, END])):
            for end in ends:
                settings = {"max_updates": end, "tokens_per_update": 4096, "token_budget": 2048, **optimization}
                tree = recipe_tree(Path(folder, name), options["checked"], options, **settings)
                found[name] = load_file(train(make_recipe(tree)).folder / "model.safetensors")
    differing = {
        name: sum(not torch.equal(weight, found["first"][key]) for key, weight in found[name].items())
        for name in ("second", "resumed")
    }
    return checked(**{name: (count, 0) for name, count in differing.items()})


# Processes


def processes(options: Options) -> Section:
    """Compare one process of each launcher, and two on one card, with one that none has launched."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc_per_node"]
    launchers = {"torchrun": [*torchrun, "1"]}
    if options["device"] == "cuda":
        for name, file in (("DDP", "multi_gpu"), ("FSDP2", "fsdp2")):
            config = str(ROOT / "configuration" / "accelerate" / f"{file}.yaml")
            one = ["--num_processes", "1", "--main_process_port", "0"]
            launchers[name] = ["accelerate.commands.launch", "--config_file", config, *one]
    with TemporaryDirectory() as name:
        folder = Path(name)
        for launcher, command in launchers.items():
            yield f"one process, {launcher}", partial(launched_row, folder, launcher, command, options)
        yield "two processes, gloo", partial(two_processes_row, folder, [*torchrun, "2"], options)


def start(command: list[str]) -> None:
    """Run a Python module in a process; a failure is a `RuntimeError` with the end of what it said."""
    finished = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
    if finished.returncode:
        raise RuntimeError(finished.stderr[-2000:])


def losses_of(run: Path) -> torch.Tensor:
    """Return what a run has logged."""
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return torch.tensor([line["train/loss"] for line in lines if "train/loss" in line], dtype=torch.float64)


def launched_row(folder: Path, launcher: str, command: list[str], options: Options) -> Row:
    """Compare the losses of `heedful train` with those of the same without a launcher."""
    plain = folder / "plain"
    if not plain.exists():
        settings = {"max_updates": 8, "tokens_per_update": 2048, "token_budget": 1024}
        train(make_recipe(recipe_tree(plain, options["checked"], options, **settings)))
    overrides = [f"output={folder / launcher}", f"tokenizer.path={plain / 'tokenizer'}"]
    start([*command, str(ROOT / "scripts" / "train.py"), str(plain / "recipe.yaml"), *overrides])
    losses, expected = losses_of(folder / launcher), losses_of(plain)
    return {"updates": len(losses)} | checked(losses=(float((losses / expected - 1).abs().max()), 1e-5))


def two_processes_row(folder: Path, torchrun: list[str], options: Options) -> Row:
    """Compare loss and summed gradient of an update with one process's."""
    start([*torchrun, __file__, str(folder), json.dumps({key: options[key] for key in ("device", "checked")})])
    expected, found = update_alone(600, options), [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]
    loss, gradient = (max(distance(rank[place], expected[place]) for rank in found) for place in (0, 1))
    return checked(loss=(loss, 1e-6), gradient=(gradient, 1e-5))


def one_of_two(folder: Path, options: Options) -> None:
    """Compute this process's part of an update on the first card, where no more than one process is usual."""
    os.environ |= {"LOCAL_RANK": "0", "NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
    gloo = InitProcessGroupKwargs(backend="gloo")
    accelerator = Accelerator(cpu=options["device"] == "cpu", kwargs_handlers=[gloo])
    torch.save(update(accelerator, 600, options), folder / f"{accelerator.process_index}.pt")


if __name__ == "__main__":
    one_of_two(Path(sys.argv[1]), json.loads(sys.argv[2]))
