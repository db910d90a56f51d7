"""The machine a run stands on: processes, devices, precision, and what the C library does with memory."""

import contextlib
import ctypes
import sys

import torch
from accelerate import Accelerator

from heed.training.recipe import Recipe


def make_accelerator(recipe: Recipe) -> Accelerator:
    """Set up devices, processes, precision and trackers.

    Raises:
        ValueError: If the recipe asks for a GPU or a precision that is not there.
    """
    settings = recipe.optimization
    has_gpu = torch.cuda.is_available()
    if settings.device == "cuda" and not has_gpu:
        raise ValueError("`optimization.device` must be cpu or auto where there is no GPU, but is cuda instead.")
    on_cpu = settings.device == "cpu" or (settings.device == "auto" and not has_gpu)
    if on_cpu and settings.mixed_precision == "fp16":
        raise ValueError("`optimization.mixed_precision` must be no or bf16 on the CPU, but is fp16 instead.")
    if on_cpu:
        keep_freed_memory()
    return Accelerator(
        cpu=on_cpu,
        mixed_precision=settings.mixed_precision,
        log_with=recipe.logging.trackers or None,
        project_dir=str(recipe.folder / "trackers"),
    )


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next step: giving it back costs a fifth to a third of a step on the CPU.

    By default glibc maps every large tensor anew, and the kernel fills it with zeros, page by page.
    """
    if not sys.platform.startswith("linux"):
        return
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
    with contextlib.suppress(OSError, AttributeError):  # another C library: it has its own ways
        library = ctypes.CDLL("libc.so.6")
        library.mallopt(mmap_threshold, 1 << 30)
        library.mallopt(trim_threshold, (1 << 31) - 1)


def hardware_in_words(accelerator: Accelerator) -> str:
    """Name what a run ran on, for its model card."""
    if accelerator.device.type == "cuda":
        return f"{accelerator.num_processes} × {torch.cuda.get_device_name(accelerator.device)}"
    return f"CPU, {torch.get_num_threads()} threads × {accelerator.num_processes} processes"
