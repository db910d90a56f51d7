"""How the time and the memory of a layer grow with the length of what it reads, on this machine's CPU."""

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from heedful.diagnosis.memory import HeldBytes
from heedful.studies.complexity.layers import make_layer
from heedful.studies.complexity.settings import FEWEST_LENGTHS, ComplexitySettings

# Those of Table 1, then three that compute attention with every pair of positions in memory.
KINDS = ("self_attention", "restricted", "recurrent", "convolutional", "plain", "masked", "additive")
# Additive scores need d numbers for each pair of positions. They are measured up to so many bytes of them.
MOST_ADDITIVE_BYTES = 2**31
# Shorter calls are repeated, so that what is timed lasts so many seconds.
SHORTEST_TIMING = 0.02


@torch.no_grad()
def held_bytes(layer: nn.Module, states: torch.Tensor) -> int:
    """Return the most bytes that a forward pass holds at once, beside weights and input."""
    with HeldBytes() as memory:
        layer(states)
    return memory.peak


@torch.no_grad()
def seconds_of(layer: nn.Module, states: torch.Tensor) -> float:
    """Return the CPU's seconds for one forward pass, the mean over as many as last long enough to be timed."""
    calls, start = 0, time.process_time()
    while calls == 0 or time.process_time() - start < SHORTEST_TIMING:
        layer(states)
        calls += 1
    return (time.process_time() - start) / calls


def exponent(lengths: Sequence[int], costs: Sequence[float | None]) -> float:
    """Return the power of the length by which costs grow: the slope of a line through the logarithms.

    Only the upper half of the lengths with a cost counts (the middle one included), where constant costs matter least.
    """
    points = [(math.log(n), math.log(cost)) for n, cost in zip(lengths, costs, strict=True) if cost is not None]
    points = points[len(points) // 2 :]
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def fits(kind: str, length: int, d_model: int) -> bool:
    """Return whether a layer is measured at a length."""
    return kind != "additive" or 4 * length**2 * d_model <= MOST_ADDITIVE_BYTES


def kinds_of(settings: ComplexitySettings) -> list[str]:
    """Return the kinds that are measured at three lengths or more, so that a growth can be told."""
    measured = {kind: sum(fits(kind, length, settings.d_model) for length in settings.lengths) for kind in KINDS}
    return [kind for kind, lengths in measured.items() if lengths >= FEWEST_LENGTHS]


def measure(settings: ComplexitySettings) -> dict[str, dict[str, list[float | None]]]:
    """Time every layer at every length, all in turns, and count the bytes it holds.

    Everything is computed in float32 by one thread, without gradients, for one sequence. Seconds are the process's own
    (CPU time), so that other processes disturb them through caches and clock rates alone.

    Returns:
        For each of `kinds_of` `milliseconds` (medians), `fastest` and `slowest` in milliseconds, and `bytes`, by
        length; None at a length for which additive scores are too large.
    """
    torch.manual_seed(settings.seed)
    layers = {kind: make_layer(kind, settings) for kind in kinds_of(settings)}
    inputs = [torch.randn(1, length, settings.d_model) for length in settings.lengths]
    seconds: dict[str, list[list[float]]] = {kind: [[] for _ in inputs] for kind in layers}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        held = {
            kind: [float(held_bytes(layer, states)) if fits(kind, *states.shape[1:]) else None for states in inputs]
            for kind, layer in layers.items()
        }
        for _ in range(settings.rounds):
            for number, states in enumerate(inputs):
                for kind, layer in layers.items():
                    if fits(kind, *states.shape[1:]):
                        seconds[kind][number].append(seconds_of(layer, states))
    finally:
        torch.set_num_threads(threads)
    return {kind: {**_summaries(seconds[kind]), "bytes": held[kind]} for kind in layers}


def _summaries(rounds: list[list[float]]) -> dict[str, list[float | None]]:
    summaries: dict[str, Callable[[list[float]], float]]
    summaries = {"milliseconds": statistics.median, "fastest": min, "slowest": max}
    return {name: [1000 * of(each) if each else None for each in rounds] for name, of in summaries.items()}


def machine() -> dict[str, Any]:
    """Tell what figures were measured on: processor, cores, how busy they are (where the system tells), torch."""
    names = [line.partition(":")[2].strip() for line in _lines_of("/proc/cpuinfo") if line.startswith("model name")]
    load = _lines_of("/proc/loadavg")
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_average": float(load[0].split()[0]) if load else None,
        "torch": torch.__version__,
    }


def _lines_of(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
