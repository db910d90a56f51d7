"""How a layer's time and memory grow with the input's length, on this machine's CPU."""

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

# Those of Table 1, then three with all pairs of positions in memory.
KINDS = ("self_attention", "restricted", "recurrent", "convolutional", "plain", "masked", "additive")
MOST_ADDITIVE_BYTES = 2**31  # of additive scores: d numbers for each pair of positions
SHORTEST_TIMING = 0.02  # seconds; shorter calls are repeated
FEWEST_LENGTHS = 3  # for a line through the upper half


class Cost(NamedTuple):
    """A forward pass's costs at one length."""

    milliseconds: float  # median of all rounds
    fastest: float  # round, in milliseconds
    slowest: float
    held_bytes: int  # at once, by tensors of the pass


@torch.no_grad()
def held_bytes(layer: nn.Module, states: torch.Tensor) -> int:
    """Return a forward pass's peak memory in bytes, without weights and input."""
    with HeldBytes() as memory:
        layer(states)
    return memory.peak


@torch.no_grad()
def seconds_of(layer: nn.Module, states: torch.Tensor) -> float:
    """Return a forward pass's mean CPU seconds, over enough calls to be timed."""
    calls, start = 0, time.process_time()
    while calls == 0 or time.process_time() - start < SHORTEST_TIMING:
        layer(states)
        calls += 1
    return (time.process_time() - start) / calls


def exponent(costs: Sequence[tuple[int, float]]) -> float | None:
    """Return the slope through the logarithms of (length, cost), upper half; `None` for fewer than three."""
    if len(costs) < FEWEST_LENGTHS:
        return None
    points = [(math.log(length), math.log(cost)) for length, cost in costs[len(costs) // 2 :]]
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def measure(sizes: Sizes, lengths: Sequence[int], rounds: int, seed: int) -> dict[str, dict[int, Cost]]:
    """Time each layer at each length, in turns, and measure its memory; too large additive scores have no cost.

    One float32 sequence, one thread, no gradients. Times are CPU seconds of this process.
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
    """Return the processor, its cores, and their load ("unknown" if the system does not report it)."""
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
