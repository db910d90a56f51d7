"""How the time and the memory of a layer grow with the length of what it reads, on this machine's CPU."""

import math
import os
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from heedful.checking.memory import HeldBytes
from heedful_lab.studies.complexity.counts import Sizes
from heedful_lab.studies.complexity.layers import make_layer

# Those of Table 1, then three that compute attention with every pair of positions in memory.
KINDS = ("self_attention", "restricted", "recurrent", "convolutional", "plain", "masked", "additive")
MOST_ADDITIVE_BYTES = 2**31  # of additive scores, which need d numbers for each pair of positions
SHORTEST_TIMING = 0.02  # so many seconds lasts what is timed: shorter calls are repeated
FEWEST_LENGTHS = 3  # fewer have no upper half through which a line could be drawn


class Cost(NamedTuple):
    """What a forward pass of a layer costs at one length."""

    milliseconds: float  # median of all rounds
    fastest: float  # round, in milliseconds
    slowest: float
    held_bytes: int  # by the tensors that it makes, at once


@torch.no_grad()
def held_bytes(layer: nn.Module, states: torch.Tensor) -> int:
    """Return the most bytes that a forward pass holds at once, in addition to weights and input."""
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


def exponent(costs: Sequence[tuple[int, float]]) -> float | None:
    """Return the power of the length by which costs (length, cost) grow; `None` of fewer than three.

    It is the slope of a line through the logarithms of the upper half (the middle one included), where constant costs
    matter least.
    """
    if len(costs) < FEWEST_LENGTHS:
        return None
    points = [(math.log(length), math.log(cost)) for length, cost in costs[len(costs) // 2 :]]
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def measure(sizes: Sizes, lengths: Sequence[int], rounds: int, seed: int) -> dict[str, dict[int, Cost]]:
    """Time every layer at every length, all in turns, and count the bytes it holds.

    Everything is computed in float32 by one thread, without gradients, for one sequence. Seconds are the process's own
    (CPU time), so that other processes disturb them through caches and clock rates alone. Additive scores that are too
    large have no cost.
    """
    torch.manual_seed(seed)
    layers = {kind: make_layer(kind, sizes) for kind in KINDS}
    inputs = {length: torch.randn(1, length, sizes.d_model) for length in lengths}
    places = [(kind, n) for n in lengths for kind in KINDS if _fits(kind, n, sizes.d_model)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        held = {(kind, n): held_bytes(layers[kind], inputs[n]) for kind, n in places}
        times = [[seconds_of(layers[kind], inputs[n]) for kind, n in places] for _ in range(rounds)]
    finally:
        torch.set_num_threads(threads)
    costs: dict[str, dict[int, Cost]] = {kind: {} for kind in KINDS}
    for (kind, n), *seconds in zip(places, *times, strict=True):
        costs[kind][n] = Cost(
            1000 * statistics.median(seconds), 1000 * min(seconds), 1000 * max(seconds), held[kind, n]
        )
    return costs


def _fits(kind: str, length: int, d_model: int) -> bool:
    return kind != "additive" or 4 * length**2 * d_model <= MOST_ADDITIVE_BYTES


def machine() -> dict[str, Any]:
    """Return the processor, its cores, and how busy they are ("unknown" where the system does not say)."""
    names = [line.partition(":")[2].strip() for line in _lines_of("/proc/cpuinfo") if line.startswith("model name")]
    load = _lines_of("/proc/loadavg")
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": load[0].split()[0] if load else "unknown",
    }


def _lines_of(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
