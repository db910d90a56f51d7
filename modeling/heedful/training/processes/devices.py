"""The Accelerator of a run: processes, devices, precision and trackers."""

import logging
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
from heedful.training.processes.collectives import Watch
from heedful.training.processes.heartbeat import Heartbeat
from heedful.training.processes.launch_checks import check_launch, check_processes
from heedful.training.processes.launcher import world_size
from heedful.training.recipe import OptimizationRecipe

logger = logging.getLogger(__name__)

# Processes wait for the main one to prepare a large corpus; NCCL's default is 10 minutes.
PATIENCE = timedelta(hours=3)


def precision_here(asked: str, on_cpu: bool) -> str:
    """Return Accelerate's name for a recipe's precision; where bf16 is missing, the one that takes its place."""
    if asked == "tf32":
        return "no"  # Accelerate has no name for it: `float32_products` sets it
    if asked != "bf16":
        return asked
    if processor_heed.has_bfloat16() if on_cpu else torch.cuda.is_bf16_supported(including_emulation=False):
        return asked
    machine, name = ("processor", "float32") if on_cpu else ("GPU", "fp16")
    logger.warning("`optimization.mixed_precision` is bf16, which this %s lacks: %s takes its place", machine, name)
    return "no" if on_cpu else "fp16"


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """Multiply float32 numbers with 10 bits each within the context, if the precision is tf32."""
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
    if on_cpu and settings.mixed_precision in ("tf32", "fp16"):
        raise wrong("optimization.mixed_precision", "be no or bf16 on the CPU", settings.mixed_precision)
    check_launch(settings, on_cpu)
    if on_cpu:
        keep_freed_memory()
        share_cores()
    if world_size() == 1:  # one recipe after another, as in a notebook, may each have its device and precision
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


def make_watch(accelerator: Accelerator, **settings: float) -> Watch:
    """Return a `Heartbeat` with these settings; for a single process, a `Watch`."""
    return Watch() if accelerator.num_processes == 1 else Heartbeat(accelerator, **settings)


def runs_on_cpu(device: str, name: str = "optimization.device") -> bool:
    """Return whether the CPU is used where `auto`, `cpu` or `cuda` is asked for."""
    obstacles = ["there is no GPU"] if not torch.cuda.is_available() else []
    obstacles += ["the accelerate file says `use_cpu`"] if parse_flag_from_env("ACCELERATE_USE_CPU") else []
    if device == "cuda" and obstacles:
        raise wrong(name, f"be cpu or auto where {obstacles[0]}", "cuda")
    return device == "cpu" or bool(obstacles)


def keep_exchange_exact(plugin: FullyShardedDataParallelPlugin) -> None:
    """Let FSDP2 sum gradients and return losses in float32 under mixed precision, as DDP does; Accelerate does not."""
    policy = plugin.mixed_precision_policy
    if policy is not None:
        plugin.mixed_precision_policy = replace(policy, reduce_dtype=torch.float32, output_dtype=None)


def kind_of_machine(accelerator: Accelerator) -> str:
    """Name the processor or GPU and the precision in use, which decide how a run rounds."""
    on_cuda = accelerator.device.type == "cuda"
    kind = torch.cuda.get_device_name(accelerator.device) if on_cuda else processor_heed.kind()
    return f"{kind}, {accelerator.mixed_precision.replace('no', 'float32')}"


def hardware_in_words(accelerator: Accelerator) -> str:
    """Name the hardware of a run for its model card."""
    return f"{accelerator.num_processes} × {kind_of_machine(accelerator)}"


def join_processes(device: str | None) -> Accelerator:
    """Join the processes; each takes its own device. `None` is a GPU where there is one."""
    if device not in (None, "cpu", "cuda"):
        raise wrong("device", "be cpu or cuda where several processes run, each of which takes its own", device)
    on_cpu = runs_on_cpu(device or "auto", name="device")
    check_processes(on_cpu)
    return Accelerator(cpu=on_cpu, kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)])
