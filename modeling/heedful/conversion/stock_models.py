"""Heed models as transformers' own classes, which every engine supports.

A Heed model of the paper's shape is a Marian with reordered features: Marian has all sines before all cosines.
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME

from heedful.configuration_heed import HeedConfig
from heedful.conversion.families import EMBEDDINGS, FAMILIES, T5Family, field_faults, stock_kind
from heedful.files import read_object, write_text
from heedful.messages_heed import wrong
from heedful.modeling_heed import HeedForConditionalGeneration

POSITIONS = "model.decoder.embed_positions.weight"


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


@torch.no_grad()
def start_from_zero(stock: PreTrainedModel) -> PreTrainedModel:
    """Return a Marian whose decoder starts with padding, its last token, a vector of zeros; else a `ValueError`.

    CTranslate2's converter for Marian needs it. The first row of the decoder's position table, which transformers
    loads from the file, gets the vector of Heed's start token. Computed positions would lack it.
    """
    config: Any = copy.deepcopy(stock.config)
    if config.model_type != "marian":
        raise wrong("zero_start", f"be False for a {type(stock).__name__}", True)
    tokens, start = config.vocab_size, config.decoder_start_token_id
    config.vocab_size = config.decoder_vocab_size = tokens + 1
    config.pad_token_id = config.decoder_start_token_id = tokens
    weights = stock.state_dict()
    positions = weights[POSITIONS].clone()
    positions[0] += weights["model.shared.weight"][start] * stock.model.decoder.embed_scale
    for name in ("model.shared.weight", *EMBEDDINGS):
        weights[name] = torch.nn.functional.pad(weights[name], (0, 0, 0, 1))
    # Padding is never the next token.
    weights["final_logits_bias"] = torch.nn.functional.pad(weights["final_logits_bias"], (0, 1), value=-1e4)
    marian: Any = type(stock)(config)
    marian.load_state_dict({**weights, POSITIONS: positions}, strict=True)
    marian.generation_config = copy.deepcopy(stock.generation_config)
    marian.generation_config.update(pad_token_id=tokens, decoder_start_token_id=tokens)
    return marian.to(stock.dtype).eval()


def save(stock: Any, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Save a stock model with weights that its class leaves out; values that the dtype would round stay in float32."""
    stock.save_pretrained(folder)
    config, weights = read_object(folder / CONFIG_NAME), load_file(folder / SAFE_WEIGHTS_NAME)
    if isinstance(FAMILIES[stock.config.model_type], T5Family):
        # transformers 5 treats each T5 as tied and checks the file; before, it used the config.
        config["tie_word_embeddings"] = stock.lm_head.weight is stock.shared.weight
    elif stock.config.decoder_start_token_id == stock.config.pad_token_id:
        weights[POSITIONS] = stock.state_dict()[POSITIONS]
    for name, weight in weights.items():
        if torch.equal(weight.to(dtype).float(), weight):
            weights[name] = weight.to(dtype)
    save_file(weights, folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
    config["dtype"] = str(dtype).removeprefix("torch.")
    write_text(folder / CONFIG_NAME, json.dumps(config, indent=2) + "\n")
