"""Checks of the launcher against recipe and machine, before processes would wait for one that fails."""

import os

import torch
from accelerate.utils import parse_flag_from_env

from heedful.messages_heed import wrong
from heedful.training.processes.launcher import local_world_size, world_size
from heedful.training.recipe import OptimizationRecipe


def check_launch(settings: OptimizationRecipe, on_cpu: bool) -> None:
    """Refuse a launcher that contradicts recipe or machine, or is not supported."""
    kind = _distributed_type()
    kinds = "NO, MULTI_GPU or FSDP (version 2)" if kind == "DEEPSPEED" else "NO where there is no GPU"
    hint = "fsdp2.yaml shards weights and optimizer; several processes on the CPU are started by torchrun."
    if kind == "DEEPSPEED" or (on_cpu and settings.device == "auto" and kind != "NO"):
        raise ValueError(f"`distributed_type` of the accelerate file must be {kinds}, but is {kind} instead: {hint}")
    check_processes(on_cpu)
    if kind == "FSDP":
        if on_cpu:
            where = "where the accelerate file says `distributed_type: FSDP`"
            raise wrong("optimization.device", f"be auto or cuda {where}", "cpu")
        _check_field("fsdp_version", "FSDP_VERSION", "2", unset="1")
        reason = "every process makes or loads the same weights"
        _check_field("fsdp_cpu_ram_efficient_loading", "FSDP_CPU_RAM_EFFICIENT_LOADING", "false", reason)
    reason = "Heedful divides data, not layers"
    _check_field("parallelism_config", "ACCELERATE_USE_PARALLELISM_CONFIG", "absent or false", reason)
    # Accelerate would divide every loss by it.
    reason = "accumulation follows from `optimization.tokens_per_update` and `optimization.token_budget`"
    _check_field("gradient_accumulation_steps", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1", reason)
    # Accelerate would ignore the file's precision for the recipe's, and does not know tf32.
    if "ACCELERATE_DYNAMO_BACKEND" in os.environ:
        allowed = " or ".join(dict.fromkeys(["no", settings.mixed_precision.replace("tf32", "no")]))
        reason = "`optimization.mixed_precision` of the recipe decides"
        _check_field("mixed_precision", "ACCELERATE_MIXED_PRECISION", allowed, reason)


def check_processes(on_cpu: bool) -> None:
    """Check that all processes were started, and that each has a GPU if not on the CPU."""
    here, world, gpus = local_world_size(), world_size(), torch.cuda.device_count()
    if not on_cpu and here > gpus:
        where = "`num_processes` of the accelerate file divided by `num_machines`, `--nproc_per_node` of torchrun"
        must = f"must be at most {gpus}, the number of its GPUs"
        raise ValueError(f"The number of processes on this machine ({where}) {must}, but is {here} instead.")
    if not on_cpu and world > 1 and "LOCAL_RANK" not in os.environ:  # Accelerate would make each its own run
        must = "Processes on GPUs must be started by accelerate launch or torchrun"
        raise ValueError(f"{must}, but `WORLD_SIZE` is {world} and `LOCAL_RANK` is missing.")
    # Accelerate's launcher for one process sets this, and an address where it was asked for more.
    if world == 1 and {"ACCELERATE_USE_CPU", "MASTER_ADDR"} <= os.environ.keys():
        raise ValueError(
            "accelerate launch started one process instead of several (`num_processes`, `num_machines`), as it does "
            "without `distributed_type: MULTI_GPU` or FSDP: on the CPU use `torchrun --nproc_per_node 2`. "
            "(If you have set MASTER_ADDR yourself, unset it.)"
        )


def _distributed_type() -> str:
    for kind in ("DEEPSPEED", "FSDP"):
        if parse_flag_from_env(f"ACCELERATE_USE_{kind}"):
            return kind
    # Accelerate's launcher sets the CPU's variable for one process only.
    by_accelerate = "ACCELERATE_DYNAMO_BACKEND" in os.environ and "ACCELERATE_USE_CPU" not in os.environ
    return "MULTI_GPU" if by_accelerate and "LOCAL_RANK" in os.environ else "NO"


def _check_field(field: str, variable: str, allowed: str, reason: str = "", unset: str | None = None) -> None:
    """Check a field of the accelerate file, which reaches processes in an environment variable."""
    values = allowed.split(" or ")
    value = os.environ.get(variable, unset or values[0])
    if value.lower() not in values:
        must = f"{allowed}, because {reason}" if reason else allowed
        raise ValueError(f"`{field}` of the accelerate file must be {must}, but is {value} instead.")
