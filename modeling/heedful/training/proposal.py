"""Settings that fit the data and the machine, for recipes that leave them open: one place chooses them all."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

LOOKED_AT = 100_000  # pairs whose lengths are measured
# Floating-point operations in a second that training reaches on one core, and on a GPU, with such small models.
CORE_SPEED, GPU_SPEED = 5e10, 2e13


@dataclass(frozen=True)
class DataFacts:
    """What the settings depend on in the training pairs."""

    pairs: int
    pair_bytes: float  # in UTF-8, of source and target together, on average
    longest_bytes: int  # of a side; one pair of a hundred has a longer one


@dataclass(frozen=True)
class Machine:
    """What the settings depend on in the machine."""

    cores: int
    has_gpu: bool


def look_at(pairs: Iterable[Mapping[str, str]], count: int | None = None) -> DataFacts:
    """Measure the first pairs of a corpus, of which there are `count` in all; `None` where these are all."""
    sides = [[len(pair[side].encode()) for side in ("source", "target")] for pair in islice(pairs, LOOKED_AT)]
    if not sides:
        raise ValueError("The training data must hold at least one pair, but hold none.")
    longest = sorted(map(max, sides))
    return DataFacts(count or len(sides), sum(map(sum, sides)) / len(sides), longest[len(sides) * 99 // 100])


def this_machine(device: str = "auto") -> Machine:
    """Return the machine that this process runs on, with no GPU where the recipe wants none."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(cores, device != "cpu" and torch.cuda.is_available())


@dataclass(frozen=True)
class Proposal:
    """Chosen settings, and how long they will take."""

    settings: dict[str, Any]  # by dotted key: {"optimization.max_updates": 1200, …}
    minutes: float  # of training, as estimated


def propose(data: DataFacts, machine: Machine) -> Proposal:
    """Choose settings by what was seen to work.

    The fewer pairs, the smaller vocabulary, model and updates, and the more dropout and passes over the pairs.
    """
    largest = 32_000 if machine.has_gpu else 8_000
    vocabulary = round(min(largest, max(500, 33 * data.pairs**0.5)), -2)
    tokens = max(4.0, data.pair_bytes / (2.4 + vocabulary / 8000))  # of a pair; larger vocabularies have longer tokens
    layers, width, updates_tokens = 2, 128, 2048
    if data.pairs >= 10_000:
        layers, width, updates_tokens = 3, 256, 6144
    if data.pairs >= 300_000 and machine.has_gpu:
        layers, width, updates_tokens = 6, 512, 25_000
    epoch = data.pairs * tokens / updates_tokens  # updates
    passes = 30 if data.pairs < 10_000 else 20 if data.pairs < 100_000 else 8
    updates = int(min(100_000 if machine.has_gpu else 6_000, max(600, passes * epoch)))
    # Two operations for each weight and token forwards, four backwards; attention and softmax add about as much again.
    weights = layers * 28 * width**2 + vocabulary * width
    speed = GPU_SPEED if machine.has_gpu else CORE_SPEED * machine.cores
    minutes = updates * updates_tokens * 6 * weights / speed / 60
    longest_tokens = max(40, 4 * int(data.longest_bytes / 10))
    sizes = {f"{side}_layers": layers for side in ("encoder", "decoder")}
    sizes |= {f"{side}_attention_heads": width // 32 for side in ("encoder", "decoder")}
    sizes |= {f"{side}_ffn_dim": 4 * width for side in ("encoder", "decoder")}
    dropout = 0.3 if data.pairs < 10_000 else 0.2 if data.pairs < 100_000 else 0.1
    every = max(1, updates // 10)
    settings = {
        "tokenizer.vocab_size": int(vocabulary),
        "model.options": {"d_model": width, **sizes, "norm_placement": "pre", "dropout": dropout},
        "optimization.schedule": "linear",
        "optimization.learning_rate": 0.003 if width == 128 else 0.0015 if width == 256 else 0.0007,
        "optimization.warmup_updates": max(1, updates // 10),
        "optimization.max_updates": updates,
        "optimization.max_minutes": float(max(10, round(3 * minutes))),
        "optimization.tokens_per_update": updates_tokens,
        "optimization.mixed_precision": "bf16" if machine.has_gpu else "no",
        "validation.every_updates": every,
        "validation.sentences": 100,
        "validation.max_new_tokens": longest_tokens,
        "checkpoints.every_updates": every,
        "checkpoints.keep_last": 1,
        "checkpoints.publish": "best",
        "decoding.num_beams": 4,
        "decoding.max_length": longest_tokens,
    }
    return Proposal(settings, minutes)
