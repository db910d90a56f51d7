"""The processor: maker, instructions, and the cores that this process may use.

On them depend the training precision, the library for matrix products and the flags for `kernels.cpp`.
"""

import os
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # the container's: microseconds of processor time, per microseconds
# Processors on which oneDNN multiplies float32 faster than torch's own library (MKL on x86), see docs/benchmarks.md.
FASTER_BY_ONEDNN = {("AMD", "AVX512")}


def vendor() -> str:
    """Return the maker: "AMD", "Intel" or "other"."""
    name = str(torch.cpu.get_capabilities().get("cpu_name", ""))
    return next((maker for maker in ("AMD", "Intel") if maker in name), "other")


def registers() -> str:
    """Return torch's name for the vector instructions that it uses here, such as AVX512 or AVX2."""
    name = torch.backends.cpu.get_cpu_capability()
    return "AVX512" if name.startswith("AVX512") else name


def has(*instructions: str) -> bool:
    """Return whether the processor has one of these instructions (torch's names), and torch may use it."""
    found = torch.cpu.get_capabilities()
    widest = next((name for fact, name in (("avx512_f", "AVX512"), ("avx2", "AVX2")) if found.get(fact)), registers())
    return registers() == widest and any(found.get(name) for name in instructions)


def has_bfloat16() -> bool:
    """Return whether there are bfloat16 instructions; without them each number is converted separately."""
    return has("avx512_bf16", "amx_bf16", "bf16")


def multiplies_bytes_exactly() -> bool:
    """Return whether torch's 8-bit integer products are exact: on x86 without VNNI sums have only 16 bits."""
    is_x86 = torch.cpu.get_capabilities().get("architecture") == "x86_64"
    return not is_x86 or has("avx512_vnni", "avx_vnni")


@cache
def multiplies_by_onednn() -> bool:
    """Return whether oneDNN multiplies float32 faster than torch's own library; the result is cached."""
    return torch.backends.mkldnn.is_available() and (vendor(), registers()) in FASTER_BY_ONEDNN


def usable_cores() -> int:
    """Return the number of cores that this process may use, by affinity and container quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no file, or "max": no quota
        quota, period = map(int, QUOTA.read_text().split())
        cores = min(cores, max(1, round(quota / period)))
    return cores


def kind() -> str:
    """Describe the processor, threads and library, on which rounding depends."""
    library = "oneDNN" if multiplies_by_onednn() else "torch"
    return f"{vendor()} CPU with {registers()}, {torch.get_num_threads()} threads, products by {library}"
