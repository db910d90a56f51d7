"""Heed models as models of transformers' own classes, which every engine knows: the way back of `model_conversion.py`.

A Heed model of the paper's shape is a Marian whose features stand in another order: the paper puts the sine and the
cosine of a wavelength side by side, Marian all sines before all cosines. Residual connections, norms and products of
matrices compute the same whatever the order of the features, so the weights are put into Marian's.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_NAME

from heedful.configuration_heed import GATED_ACTIVATIONS, HeedConfig
from heedful.modeling_heed import HeedForConditionalGeneration
from heedful.publishing.conversion import model_conversion as conversion
from heedful.publishing.conversion.model_conversion import EMBEDDINGS, FAMILIES, FIRST_POSITION

# What all the classes have, and none of them can have otherwise.
COMMON = {
    "share_encoder_decoder_embeddings": True,
    "tie_output_embeddings": True,
    "tie_word_embeddings": True,
    "attention_scoring": "scaled_dot",
    "encoder_neighbourhood": None,
    "decoder_neighbourhood": None,
    "norm_type": "layernorm",
    "layer_norm_eps": 1e-5,
}
# Those of the kinds that differ from `HeedConfig`'s defaults stand in `FAMILIES`.
CHOSEN = {"position_encoding": "sinusoidal", "norm_placement": "post", "embedding_norm": False}

POSITIONS = "model.decoder.embed_positions.weight"


def stock_config(config: HeedConfig) -> PreTrainedConfig:
    """Return the config of the stock model that computes the same; a `ValueError` names what none of them can have."""
    kind = _kind_of(config)
    _check_expressible(config, kind)
    options = {theirs: getattr(config, ours) for ours, theirs in FAMILIES[kind].fields.items()}
    options |= {name: getattr(config, name) for name in ("bos_token_id", "vocab_size")}
    options |= {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}  # which some classes have by default
    if kind == "marian":
        options["decoder_vocab_size"] = config.vocab_size
    if config.position_encoding == "sinusoidal":
        options["sinusoid_layout"] = config.sinusoid_layout  # for the way back; transformers does not read it
    # Some classes would end each translation that is cut off with a token of their own.
    return AutoConfig.for_model(kind, **options, forced_eos_token_id=None, forced_bos_token_id=None)


def stock_model(ours: HeedForConditionalGeneration) -> PreTrainedModel:
    """Return the stock model with the weights of a Heed model, copied, in evaluation mode; it raises as above."""
    config = stock_config(ours.config)
    if ours.config.position_encoding == "sinusoidal":  # theirs are a table, which must be long enough
        config.max_position_embeddings = max(config.max_position_embeddings, ours.generation_config.max_length or 0)
    theirs: Any = getattr(transformers, FAMILIES[config.model_type].model_class)(config)
    weights = dict(theirs.state_dict())  # sinusoids are the class's own; biases that the model lacks are zero
    weights |= {name: torch.zeros_like(value) for name, value in weights.items() if "embed_positions" not in name}
    weights |= _stock_weights(ours, FAMILIES[config.model_type].renamings)
    weights["model.shared.weight"] = weights["model.encoder.embed_tokens.weight"]
    theirs.load_state_dict(weights, strict=True)
    return theirs.to(ours.dtype).eval()


@torch.no_grad()
def start_from_zero(stock: PreTrainedModel) -> PreTrainedModel:
    """Return a Marian whose decoder starts with padding, the last token, of which the vector is zero.

    Marian's own models do so, and CTranslate2's converter of them takes it for granted. What a Heed decoder starts
    with is added to the first row of the decoder's table of positions, which a stock Marian reads from the file if it
    is there. An engine that computes its positions cannot run such a model. For another class it is a `ValueError`.
    """
    config: Any = copy.deepcopy(stock.config)
    if config.model_type != "marian":
        raise ValueError(f"`zero_start` must be False for a {type(stock).__name__}, but is True instead.")
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


def save(stock: PreTrainedModel, folder: Path) -> None:
    """Save a stock model, with its table of positions if they are not the class's own."""
    stock.save_pretrained(folder)
    if stock.config.decoder_start_token_id == stock.config.pad_token_id:
        weights = load_file(folder / SAFE_WEIGHTS_NAME)
        positions = stock.state_dict()[POSITIONS]
        save_file({**weights, POSITIONS: positions}, folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})


def _kind_of(config: HeedConfig) -> str:
    is_pre = config.norm_placement == "pre"
    if config.position_encoding == "learned":
        return "mbart" if is_pre else "bart"
    if config.sinusoid_layout == "tensor2tensor":
        return "m2m_100"
    return "pegasus" if is_pre else "marian"


def _check_expressible(config: Any, kind: str) -> None:
    """Raise one error that names all fields which no stock class can have."""
    offset = config.pad_token_id + 1 if kind == "m2m_100" else 0
    wanted = COMMON | CHOSEN | {"position_offset": offset} | dict(FAMILIES[kind].options)
    # The kind follows from the layout.
    choices: dict[str, Any] = {name: (value,) for name, value in wanted.items() if name != "sinusoid_layout"}
    for side in ("encoder", "decoder"):
        heads = getattr(config, f"{side}_attention_heads")
        # Each of these is by default what it must be.
        own = {f"{side}_key_value_heads": heads, "d_k": config.d_model // heads, "d_v": config.d_model // heads}
        choices |= {name: (value,) for name, value in own.items() if getattr(config, name) not in (None, value)}
    faults = list(conversion.field_faults(config, choices))
    if config.activation_function in GATED_ACTIVATIONS:
        faults.append(f"`activation_function` must have no gate, but is {config.activation_function} instead.")
    if faults:
        nearest = FAMILIES[kind].model_class
        raise ValueError(f"The model has no stock form, of which {nearest} is the nearest: {' '.join(faults)}")


def _stock_weights(ours: HeedForConditionalGeneration, renamings: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Return the weights under their names, those of shared layers for each, with features in their order."""
    config: Any = ours.config
    weights = {}
    for name, value in ours.state_dict().items():
        if name == "lm_head.bias":
            name, value = "final_logits_bias", value[None]
        elif "embed_positions" in name:
            value = torch.cat([value.new_zeros(FIRST_POSITION, config.d_model), value])
        stack = ours.model.encoder if ".encoder." in name else ours.model.decoder
        for number in range(stack.rounds if ".layers." in name else 1):
            weights[name.replace(".layers.0.", f".layers.{number}.") if number else name] = value
    back = {name: theirs for theirs, name in renamings.items()}
    return conversion.renamed(weights, back, conversion.paper_order(config))
