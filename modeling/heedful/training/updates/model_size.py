"""A model's size: its parameters and operations, and whether machine and card are large enough."""

import copy
import math
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedConfig

from heedful.protocols import Seq2SeqModel, TrainableModel

Kind = Callable[[Any], TrainableModel]  # makes a model from a config
# Dense bfloat16 operations per second, by part of the card's name.
PEAKS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}


def check_memory(kind: Kind, config: PreTrainedConfig, is_alone: bool) -> None:
    """Raise a `ValueError` if this machine cannot hold a model; a single process also holds gradients and moments."""
    memory, parameters = memory_of_machine(), parameters_of(kind, config)
    needed = parameters * (16 if is_alone else 4)
    if memory is not None and needed > memory:
        must = f"make a model that fits into {memory / 1e9:,.0f} GB, this machine's memory"
        found = f"make one with {parameters:.3g} parameters, which needs {needed / 1e9:.3g} GB"
        raise ValueError(f"`model.options` and `tokenizer.vocab_size` must {must}, but {found}.")


def parameters_of(kind: Kind, config: PreTrainedConfig) -> float:
    """Count a model's parameters without making it; its layers are alike."""
    depths = int(config.encoder_layers), int(config.decoder_layers)
    counts = {}
    for encoder, decoder in ((1, 1), (2, 1), (2, 2)):
        small = copy.deepcopy(config)
        small.encoder_layers, small.decoder_layers = encoder, decoder
        try:
            # The run's random numbers stay as they are.
            with torch.device("meta"), torch.random.fork_rng(devices=[]):
                counts[encoder, decoder] = kind(small).num_parameters()
        except (RuntimeError, OverflowError, TypeError):  # the product of sizes is too large
            return math.inf
    per_layer = counts[2, 1] - counts[1, 1], counts[2, 2] - counts[2, 1]
    return counts[1, 1] + sum((depth - 1) * count for depth, count in zip(depths, per_layer, strict=True))


def memory_of_machine() -> int | None:
    """Return this machine's memory in bytes; `None` if unknown."""
    with suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def operations_of_pairs(model: Seq2SeqModel, source_tokens: float, target_tokens: float) -> float:
    """Return a training step's floating-point operations on tokens without padding."""
    # A matrix takes two per number and token, and four backwards; attention scores, about 1 %, are left out.
    of_source = of_target = 0
    for name, parameter in model.named_parameters():
        reads_source = ".encoder." in name or ("cross_attn" in name and name.rsplit(".", 2)[1] in ("k_proj", "v_proj"))
        if parameter.dim() > 1 and not any(part in name for part in ("embed_tokens", "embed_positions", "lm_head")):
            of_source += parameter.numel() * reads_source
            of_target += parameter.numel() * (not reads_source)
    of_target += int(model.get_output_embeddings().weight.numel())
    return 6.0 * (of_source * source_tokens + of_target * target_tokens)


def peak_operations(device: torch.device) -> float | None:
    """Return a card's operations per second in bfloat16; `None` if unknown."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def device_values(model: Seq2SeqModel, window: dict[str, float], accelerator: Accelerator) -> dict[str, float]:
    """Return a GPU's peak memory in GiB and, if its peak speed is known, the share in use."""
    values = {"train/peak_memory_gib": torch.cuda.max_memory_allocated(accelerator.device) / 2**30}
    torch.cuda.reset_peak_memory_stats(accelerator.device)
    if (peak := peak_operations(accelerator.device)) is not None:
        tokens = window["tokens"] - window["target_tokens"], window["target_tokens"]
        able = peak * accelerator.num_processes * max(window["seconds"], 1e-9)
        values["train/model_flops_utilization"] = operations_of_pairs(model, *tokens) / able
    return values
