"""The size of a config's model, and whether this machine can hold it."""

import copy
import math
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from transformers import PreTrainedConfig

from heedful.protocols import TrainableModel

Kind = Callable[[Any], TrainableModel]  # makes a model of a config


def check_memory(kind: Kind, config: PreTrainedConfig, is_alone: bool) -> None:
    """Raise a `ValueError` if this machine cannot hold a model; a single process holds gradients and moments too."""
    memory, parameters = memory_of_machine(), parameters_of(kind, config)
    needed = parameters * (16 if is_alone else 4)
    if memory is not None and needed > memory:
        must = f"make a model that fits into {memory / 1e9:,.0f} GB, the memory of this machine"
        found = f"make one of {parameters:.3g} parameters, which needs {needed / 1e9:.3g} GB"
        raise ValueError(f"`model.options` and `tokenizer.vocab_size` must {must}, but {found}.")


def parameters_of(kind: Kind, config: PreTrainedConfig) -> float:
    """Count the parameters of a model without making it; its layers are alike."""
    depths = int(config.encoder_layers), int(config.decoder_layers)
    counts = {}
    for encoder, decoder in ((1, 1), (2, 1), (2, 2)):
        small = copy.deepcopy(config)
        small.encoder_layers, small.decoder_layers = encoder, decoder
        try:
            # The random numbers of the run stay as they are.
            with torch.device("meta"), torch.random.fork_rng(devices=[]):
                counts[encoder, decoder] = kind(small).num_parameters()
        except (RuntimeError, OverflowError, TypeError):  # the product of sizes is too large
            return math.inf
    per_layer = counts[2, 1] - counts[1, 1], counts[2, 2] - counts[2, 1]
    return counts[1, 1] + sum((depth - 1) * count for depth, count in zip(depths, per_layer, strict=True))


def memory_of_machine() -> int | None:
    """Return the bytes of memory of this machine; `None` if unknown."""
    with suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None
