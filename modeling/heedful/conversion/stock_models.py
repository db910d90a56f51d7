"""Heed models as transformers' own classes, which every engine supports.

A Heed model of the paper's shape is a Marian with reordered features: Marian has all sines before all cosines.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME

from heedful.configuration_heed import HeedConfig
from heedful.conversion.families import FAMILIES, T5Family, field_faults, stock_kind
from heedful.files import read_object, write_text
from heedful.modeling_heed import HeedForConditionalGeneration


def stock_config(config: HeedConfig) -> PreTrainedConfig:
    """Return the equivalent stock config; a `ValueError` names unsupported fields."""
    kind = stock_kind(config)
    family = FAMILIES[kind]
    if faults := list(field_faults(config, family.write_choices(config))):
        nearest = f"not even as {family.model_class}, the nearest class"
        raise ValueError(f"The model has no stock form, {nearest}: {' '.join(faults)}")
    options = family.stock_options(config)
    options |= {name: getattr(config, name) for name in ("bos_token_id", "vocab_size")}
    # Some classes would force an end token onto cut-off outputs.
    return AutoConfig.for_model(kind, **options, forced_eos_token_id=None, forced_bos_token_id=None)


def stock_model(ours: HeedForConditionalGeneration) -> PreTrainedModel:
    """Return the stock model with copied weights, in evaluation mode. It raises the errors of `stock_config`."""
    config = stock_config(ours.config)
    if ours.config.position_encoding == "sinusoidal":  # their table must be long enough
        config.max_position_embeddings = max(config.max_position_embeddings, ours.generation_config.max_length or 0)
    family = FAMILIES[config.model_type]
    theirs: Any = getattr(transformers, family.model_class)(config)
    theirs.load_state_dict(family.stock_weights(ours, theirs), strict=True)
    return theirs.to(ours.dtype).eval()


def save(stock: Any, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Save a stock model in a dtype; values that it would round stay in float32."""
    stock.save_pretrained(folder)
    config, weights = read_object(folder / CONFIG_NAME), load_file(folder / SAFE_WEIGHTS_NAME)
    if isinstance(FAMILIES[stock.config.model_type], T5Family):
        # transformers 5 treats each T5 as tied and checks the file; before, it used the config.
        config["tie_word_embeddings"] = stock.lm_head.weight is stock.shared.weight
    for name, weight in weights.items():
        if torch.equal(weight.to(dtype).float(), weight):
            weights[name] = weight.to(dtype)
    save_file(weights, folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
    config["dtype"] = str(dtype).removeprefix("torch.")
    write_text(folder / CONFIG_NAME, json.dumps(config, indent=2) + "\n")
