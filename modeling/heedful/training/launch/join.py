"""Processes that a launcher has started for work without a recipe, such as translating a test set."""

from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from heedful.training.launch.launch_checks import check_processes
from heedful.training.processes.devices import PATIENCE, runs_on_cpu


def join_processes(device: str | None) -> Accelerator:
    """Join the processes; each takes its own device: cpu, cuda, or with `None` a GPU where there is one."""
    if device not in (None, "cpu", "cuda"):
        must = "cpu or cuda where several processes run, each of which takes its own"
        raise ValueError(f"`device` must be {must}, but is {device} instead.")
    on_cpu = runs_on_cpu(device or "auto", name="device")
    check_processes(on_cpu)
    return Accelerator(cpu=on_cpu, kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)])
