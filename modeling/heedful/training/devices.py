"""The machine a run stands on: processes, devices and precision.

Processes are started by `accelerate launch --config_file configuration/accelerate/…` or by `torchrun`, which tell
them what they are by environment variables. What contradicts the recipe or the machine is refused here, before the
processes meet: an error afterwards leaves some of them waiting for the others.
"""

import os
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    get_int_from_env,
    is_deepspeed_available,
    parse_flag_from_env,
)

from heedful.inference.memory import keep_freed_memory
from heedful.training.recipe import OptimizationRecipe, Recipe

# How long a process waits for another. The main one may read, clean and tokenize a large corpus while the others
# wait; 10 minutes, NCCL's default, are too short for that. A process that dies does not make the others wait so
# long: the launcher ends them within seconds.
PATIENCE = timedelta(hours=3)


def make_accelerator(recipe: Recipe) -> Accelerator:
    """Set up devices, processes, precision and trackers.

    Raises:
        ValueError: If the recipe asks for a GPU or a precision that is not there, or the launcher's settings
            contradict the recipe, the machine or each other; see `check_launch`.
    """
    settings = recipe.optimization
    on_cpu = runs_on_cpu(settings.device)
    if on_cpu and settings.mixed_precision == "fp16":
        raise ValueError("`optimization.mixed_precision` must be no or bf16 on the CPU, but is fp16 instead.")
    check_launch(settings, on_cpu)
    if on_cpu:
        keep_freed_memory()
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision=settings.mixed_precision,
        log_with=recipe.logging.trackers or None,
        project_dir=str(recipe.folder / "trackers"),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
    )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        complete_deepspeed(accelerator.state.deepspeed_plugin.deepspeed_config, settings)
    if accelerator.distributed_type == DistributedType.FSDP:
        keep_exchange_exact(accelerator.state.fsdp_plugin)
    return accelerator


def join_processes(device: str | None) -> Accelerator:
    """Join the processes that a launcher has started, for work without a recipe, such as translating a test set.

    Args:
        device: cpu, cuda, or `None` for a GPU where there is one; each process takes its own.

    Raises:
        ValueError: If the device cannot be had by every process.
    """
    if device not in (None, "cpu", "cuda"):
        raise ValueError(
            f"`device` must be cpu or cuda where several processes run, each of which takes its own, "
            f"but is {device} instead."
        )
    on_cpu = runs_on_cpu(device or "auto", name="device")
    check_processes(on_cpu)
    return Accelerator(cpu=on_cpu, kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)])


def runs_on_cpu(device: str, name: str = "optimization.device") -> bool:
    """Return whether the CPU is meant: by a recipe or an option, by the accelerate file, or for want of a GPU.

    Args:
        device: auto, cpu or cuda.
        name: What the user calls this setting.

    Raises:
        ValueError: If a GPU is asked for that is not there, or that the accelerate file forbids.
    """
    forbidden = parse_flag_from_env("ACCELERATE_USE_CPU")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"`{name}` must be cpu or auto where there is no GPU, but is cuda instead.")
    if device == "cuda" and forbidden:
        raise ValueError(
            f"`{name}` must be cpu or auto where the accelerate file says `use_cpu`, but is cuda instead."
        )
    return device == "cpu" or forbidden or not torch.cuda.is_available()


def check_launch(settings: OptimizationRecipe, on_cpu: bool) -> None:
    """Check what the launcher says against the recipe and the machine.

    Args:
        settings: The recipe's section.
        on_cpu: Whether the run is to use the CPU.

    Raises:
        ValueError: If there are more processes than GPUs or fewer than asked for; if the accelerate file asks for
            GPUs, FSDP or DeepSpeed on the CPU, where Accelerate would silently do something else; if it asks for a
            precision, clipping or accumulation other than the recipe's; or for a variant that Heed does not support.
    """
    check_processes(on_cpu)
    kind = _asked_for()
    if on_cpu and settings.device == "cpu" and kind in ("FSDP", "DEEPSPEED"):
        raise ValueError(
            f"`optimization.device` must be auto or cuda where the accelerate file says `distributed_type: {kind}`, "
            "but is cpu instead."
        )
    if on_cpu and settings.device == "auto" and kind != "NO":
        raise ValueError(
            f"`distributed_type` of the accelerate file must be NO where there is no GPU, but is {kind} instead. "
            "Several processes on the CPU are started by torchrun."
        )
    if kind == "FSDP":
        _check_fsdp()
    if kind == "DEEPSPEED":
        _check_deepspeed(settings)
    _check_shared_settings(settings)


def check_processes(on_cpu: bool) -> None:
    """Check that as many processes were started as were asked for, and that each can have a GPU if it wants one.

    Args:
        on_cpu: Whether they are to use the CPU.

    Raises:
        ValueError: If not.
    """
    here, world = get_int_from_env(["LOCAL_WORLD_SIZE"], 1), _processes()
    gpus = 0 if on_cpu else torch.cuda.device_count()
    if not on_cpu and here > gpus:
        raise ValueError(
            f"The number of processes on this machine (`num_processes` of the accelerate file divided by "
            f"`num_machines`, `--nproc_per_node` of torchrun) must be at most {gpus}, the number of its GPUs, "
            f"but is {here} instead."
        )
    if not on_cpu and world > 1 and "LOCAL_RANK" not in os.environ:
        # Accelerate would make each of them a run of its own.
        raise ValueError(
            f"Processes on GPUs must be started by accelerate launch or torchrun, but `WORLD_SIZE` is {world} and "
            "`LOCAL_RANK` is missing."
        )
    # Accelerate's launcher for one process sets this, and an address where it was asked for more.
    if world == 1 and "ACCELERATE_USE_CPU" in os.environ and "MASTER_ADDR" in os.environ:
        raise ValueError(
            "`num_processes` and `num_machines` of accelerate launch must be 1 without `distributed_type: MULTI_GPU`, "
            "FSDP or DEEPSPEED: it was asked for more and has started one. Several processes on the CPU are started "
            "by torchrun. (If you have set MASTER_ADDR yourself, unset it.)"
        )


def _processes() -> int:
    """Return the number of processes, as torchrun or MPI tells it."""
    return get_int_from_env(["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"], 1)


def _asked_for() -> str:
    """Return the `distributed_type` of the accelerate file, as far as processes are told of it."""
    if _is_true("ACCELERATE_USE_DEEPSPEED"):
        return "DEEPSPEED"
    if _is_true("ACCELERATE_USE_FSDP"):
        return "FSDP"
    # Accelerate's launcher of several processes says nothing of the CPU, its launcher of one always does.
    by_accelerate = "ACCELERATE_DYNAMO_BACKEND" in os.environ and "ACCELERATE_USE_CPU" not in os.environ
    return "MULTI_GPU" if by_accelerate and "LOCAL_RANK" in os.environ else "NO"


def _is_true(name: str) -> bool:
    return os.environ.get(name, "false").lower() == "true"


def _check_fsdp() -> None:
    version = os.environ.get("FSDP_VERSION", "1")
    if version != "2":
        raise ValueError(f"`fsdp_version` of the accelerate file must be 2, but is {version} instead.")
    if _is_true("FSDP_CPU_RAM_EFFICIENT_LOADING"):
        raise ValueError(
            "`fsdp_cpu_ram_efficient_loading` of the accelerate file must be false, because every process makes or "
            "loads the same weights, but is true instead."
        )


def _check_deepspeed(settings: OptimizationRecipe) -> None:
    if not is_deepspeed_available():
        raise ValueError(
            "`distributed_type` of the accelerate file must be one whose library is installed, but is DEEPSPEED "
            "instead: pip install deepspeed, or use FSDP, which needs nothing else."
        )
    if "ACCELERATE_DEEPSPEED_CONFIG_FILE" in os.environ:
        raise ValueError(
            "`deepspeed_config_file` of the accelerate file must be absent, because the recipe decides precision, "
            f"clipping and batches, but is {os.environ['ACCELERATE_DEEPSPEED_CONFIG_FILE']} instead."
        )
    stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    if stage != "2":
        raise ValueError(f"`zero_stage` of the accelerate file must be 2, but is {stage} instead; for 3, use FSDP.")
    for name in ("offload_optimizer_device", "offload_param_device"):
        where = os.environ.get(f"ACCELERATE_DEEPSPEED_{name.upper()}", "none")
        if where != "none":  # Accelerate would put in another Adam, without the recipe's betas and epsilon
            raise ValueError(f"`{name}` of the accelerate file must be none, but is {where} instead.")
    clipping, norm = os.environ.get("ACCELERATE_GRADIENT_CLIPPING", "auto"), settings.max_grad_norm or 0.0
    if clipping not in ("auto", "none") and float(clipping) != norm:
        raise ValueError(
            f"`gradient_clipping` of the accelerate file must be absent or {norm}, as `optimization.max_grad_norm`, "
            f"but is {clipping} instead."
        )


def _check_shared_settings(settings: OptimizationRecipe) -> None:
    if _is_true("ACCELERATE_USE_PARALLELISM_CONFIG"):
        raise ValueError(
            "`parallelism_config` of the accelerate file must be absent: Heedful divides data, not layers."
        )
    steps = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if steps != "1":  # Accelerate would divide every loss by it
        raise ValueError(
            "`gradient_accumulation_steps` of the accelerate file must be absent or 1, because accumulation follows "
            f"from `optimization.tokens_per_update` and `optimization.token_budget`, but is {steps} instead."
        )
    by_accelerate = "ACCELERATE_DYNAMO_BACKEND" in os.environ or _is_true("ACCELERATE_USE_DEEPSPEED")
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    allowed = list(dict.fromkeys(["no", settings.mixed_precision]))
    # The recipe's wins over the file's in Accelerate, so that the file's would be ignored.
    if by_accelerate and precision not in allowed:
        raise ValueError(
            f"`mixed_precision` of the accelerate file must be {' or '.join(allowed)}, because "
            f"`optimization.mixed_precision` of the recipe decides, but is {precision} instead."
        )


def complete_deepspeed(config: dict[str, Any], settings: OptimizationRecipe) -> None:
    """Write into DeepSpeed's configuration what it wants to know, and what Accelerate would guess.

    Args:
        config: The configuration of Accelerate's plugin; it is changed.
        settings: The recipe's section.
    """
    # Only its own statistics use it: the loop brings batches of its own, without a DataLoader.
    config["train_micro_batch_size_per_gpu"] = 1
    # Accelerate would clip at 1; DeepSpeed's 0 is no clipping.
    config["gradient_clipping"] = settings.max_grad_norm or 0.0


def keep_exchange_exact(plugin: FullyShardedDataParallelPlugin) -> None:
    """Let FSDP2 sum gradients and return losses in float32 under mixed precision, as DDP does.

    Accelerate would do both in the precision of the matrix products, of which bf16 keeps 8 bits.
    """
    policy = plugin.mixed_precision_policy
    if policy is not None:
        plugin.mixed_precision_policy = replace(policy, reduce_dtype=torch.float32, output_dtype=None)


def hardware_in_words(accelerator: Accelerator) -> str:
    """Name what a run ran on, for its model card."""
    if accelerator.device.type == "cuda":
        return f"{accelerator.num_processes} × {torch.cuda.get_device_name(accelerator.device)}"
    return f"CPU, {torch.get_num_threads()} threads × {accelerator.num_processes} processes"
