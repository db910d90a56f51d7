"""A run's Accelerator: devices, precision, trackers, and a launch check before processes wait for each other."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    parse_flag_from_env,
)

from heedful import processor_heed
from heedful.host import keep_freed_memory, share_cores
from heedful.messages_heed import wrong
from heedful.training.processes.launcher import local_world_size, world_size
from heedful.training.recipe import OptimizationRecipe

logger = logging.getLogger(__name__)

# Processes wait for the main one to prepare a large corpus; NCCL's default is 10 minutes.
PATIENCE = timedelta(hours=3)


def precision_here(asked: str, on_cpu: bool) -> str:
    """Return Accelerate's name for the recipe's precision, or for its substitute if bf16 is missing."""
    if asked == "tf32":
        return "no"  # Accelerate has no name for it: `float32_products` sets it
    if asked != "bf16":
        return asked
    if processor_heed.has_bfloat16() if on_cpu else torch.cuda.is_bf16_supported(including_emulation=False):
        return asked
    machine, name = ("processor", "float32") if on_cpu else ("GPU", "fp16")
    logger.warning("`optimization.mixed_precision` is bf16, which this %s lacks: the run uses %s", machine, name)
    return "no" if on_cpu else "fp16"


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """Within the context, round factors of float32 products to 10 bits, if the precision is tf32."""
    if precision != "tf32":
        yield
        return
    with ExitStack() as afterwards:
        afterwards.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("high")
        yield


def make_accelerator(
    settings: OptimizationRecipe, trackers: Sequence[str] = (), folder: Path | None = None
) -> Accelerator:
    """Set up devices, processes, precision, and trackers that write into the folder."""
    on_cpu = runs_on_cpu(settings.device)
    is_met = not on_cpu or settings.mixed_precision in ("no", "bf16")
    settings.require(is_met, "mixed_precision", "be no or bf16 on the CPU")
    check_launch(settings, on_cpu)
    if on_cpu:
        keep_freed_memory()
        share_cores()
    if world_size() == 1:  # several recipes in a notebook may differ in device and precision
        AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision=precision_here(settings.mixed_precision, on_cpu),
        log_with=list(trackers) or None,
        project_dir=None if folder is None else str(folder),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
    )
    if accelerator.distributed_type == DistributedType.FSDP:
        keep_exchange_exact(accelerator.state.fsdp_plugin)
    return accelerator


def runs_on_cpu(device: str, name: str = "optimization.device") -> bool:
    """Return whether the device setting `auto`, `cpu` or `cuda` means the CPU here."""
    obstacles = ["there is no GPU"] if not torch.cuda.is_available() else []
    obstacles += ["the accelerate file sets `use_cpu`"] if parse_flag_from_env("ACCELERATE_USE_CPU") else []
    if device == "cuda" and obstacles:
        raise wrong(name, f"be cpu or auto if {obstacles[0]}", "cuda")
    return device == "cpu" or bool(obstacles)


def check_launch(settings: OptimizationRecipe, on_cpu: bool) -> None:
    """Refuse a launcher that contradicts recipe or machine, or is not supported."""
    kind = _distributed_type()
    kinds = "NO, MULTI_GPU or FSDP (version 2)" if kind == "DEEPSPEED" else "NO without a GPU"
    hint = "fsdp2.yaml shards weights and optimizer; torchrun starts several processes on the CPU."
    if kind == "DEEPSPEED" or (on_cpu and settings.device == "auto" and kind != "NO"):
        raise ValueError(f"`distributed_type` of the accelerate file must be {kinds}, but is {kind} instead: {hint}")
    check_processes(on_cpu)
    if kind == "FSDP":
        if on_cpu:
            where = "if the accelerate file has `distributed_type: FSDP`"
            raise wrong("optimization.device", f"be auto or cuda {where}", "cpu")
        _check_field("fsdp_version", "FSDP_VERSION", "2", unset="1")
        reason = "every process makes or loads the same weights"
        _check_field("fsdp_cpu_ram_efficient_loading", "FSDP_CPU_RAM_EFFICIENT_LOADING", "false", reason)
    reason = "Heedful divides data, not layers"
    _check_field("parallelism_config", "ACCELERATE_USE_PARALLELISM_CONFIG", "absent or false", reason)
    # Accelerate would divide every loss by this number.
    reason = "accumulation follows from `optimization.tokens_per_update` and `optimization.token_budget`"
    _check_field("gradient_accumulation_steps", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1", reason)
    # Accelerate would use the recipe's precision instead of the file's, and has no tf32.
    if "ACCELERATE_DYNAMO_BACKEND" in os.environ:
        allowed = " or ".join(dict.fromkeys(["no", settings.mixed_precision.replace("tf32", "no")]))
        reason = "the recipe's `optimization.mixed_precision` decides"
        _check_field("mixed_precision", "ACCELERATE_MIXED_PRECISION", allowed, reason)


def check_processes(on_cpu: bool) -> None:
    """Check that all processes were started, and that each has a GPU unless they run on the CPU."""
    here, world, gpus = local_world_size(), world_size(), torch.cuda.device_count()
    if not on_cpu and here > gpus:
        where = "the accelerate file's `num_processes` / `num_machines`, or torchrun's `--nproc_per_node`"
        must = f"must be at most {gpus}, the number of its GPUs"
        raise ValueError(f"The number of processes on this machine ({where}) {must}, but is {here} instead.")
    if not on_cpu and world > 1 and "LOCAL_RANK" not in os.environ:  # each would become a separate run
        must = "Processes on GPUs must be started by accelerate launch or torchrun"
        raise ValueError(f"{must}, but `WORLD_SIZE` is {world} and `LOCAL_RANK` is missing.")
    # Accelerate's launcher for one process sets these, the address only if several were requested.
    if world == 1 and {"ACCELERATE_USE_CPU", "MASTER_ADDR"} <= os.environ.keys():
        raise ValueError(
            "accelerate launch started one process instead of several (`num_processes`, `num_machines`), because "
            "`distributed_type` is neither MULTI_GPU nor FSDP: on the CPU use `torchrun --nproc_per_node 2`. "
            "(If you set MASTER_ADDR yourself, unset it.)"
        )


def _distributed_type() -> str:
    for kind in ("DEEPSPEED", "FSDP"):
        if parse_flag_from_env(f"ACCELERATE_USE_{kind}"):
            return kind
    # Accelerate's launcher sets the CPU's variable for one process only.
    by_accelerate = "ACCELERATE_DYNAMO_BACKEND" in os.environ and "ACCELERATE_USE_CPU" not in os.environ
    return "MULTI_GPU" if by_accelerate and "LOCAL_RANK" in os.environ else "NO"


def _check_field(field: str, variable: str, allowed: str, reason: str = "", unset: str | None = None) -> None:
    """Check a field in the accelerate file; processes get it in an environment variable."""
    values = allowed.split(" or ")
    value = os.environ.get(variable, unset or values[0])
    if value.lower() not in values:
        must = f"{allowed}, because {reason}" if reason else allowed
        raise ValueError(f"`{field}` of the accelerate file must be {must}, but is {value} instead.")


def keep_exchange_exact(plugin: FullyShardedDataParallelPlugin) -> None:
    """Let FSDP2 sum gradients and return losses in float32 under mixed precision, like DDP; Accelerate does not."""
    policy = plugin.mixed_precision_policy
    if policy is not None:
        plugin.mixed_precision_policy = replace(policy, reduce_dtype=torch.float32, output_dtype=None)


def kind_of_machine(accelerator: Accelerator) -> str:
    """Name the processor or GPU and the precision: they decide how a run rounds."""
    on_cuda = accelerator.device.type == "cuda"
    kind = torch.cuda.get_device_name(accelerator.device) if on_cuda else processor_heed.kind()
    return f"{kind}, {accelerator.mixed_precision.replace('no', 'float32')}"


def hardware_in_words(accelerator: Accelerator) -> str:
    """Name a run's hardware for its model card."""
    return f"{accelerator.num_processes} × {kind_of_machine(accelerator)}"


def join_processes(device: str | None) -> Accelerator:
    """Join the processes; each takes its own device. `None` means a GPU, if there is one."""
    if device not in (None, "cpu", "cuda"):
        raise wrong("device", "be cpu or cuda if several processes run, because each takes its own", device)
    on_cpu = runs_on_cpu(device or "auto", name="device")
    check_processes(on_cpu)
    return Accelerator(cpu=on_cpu, kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)])
