"""A Heed model as CTranslate2's `TransformerSpec`, with copies of the weights; nothing is approximated."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from heedful.configuration_heed import GATED_ACTIVATIONS, RELATIVE_ENCODINGS, HeedConfig
from heedful.data.tokenization import TokenizerPair
from heedful.files import import_extra
from heedful.modeling_heed import HeedForConditionalGeneration
from heedful.positions_heed import sinusoids

ACTIVATIONS = {
    "relu": "RELU",
    **dict.fromkeys(("gelu", "gelu_python"), "GELU"),
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_accurate"), "GELUTanh"),
    **dict.fromkeys(("silu", "swish"), "SWISH"),
    "quick_gelu": "GELUSigmoid",
    "tanh": "Tanh",
    "sigmoid": "Sigmoid",
}
ACTIVATIONS |= {gate: ACTIVATIONS[inner] for gate, inner in GATED_ACTIVATIONS.items() if inner in ACTIVATIONS}
CHOICES: dict[str, Sequence[Any]] = {
    "attention_scoring": ("scaled_dot", "dot"),
    "activation_function": tuple(ACTIVATIONS),
    **dict.fromkeys(("encoder_neighbourhood", "decoder_neighbourhood"), (None,)),
}
TABLE_ROWS = 2048  # positions that Heed computes and CTranslate2 looks up
WITHOUT_TABLE = ("rotary", *RELATIVE_ENCODINGS)
import_ctranslate2 = partial(import_extra, "ctranslate2", "ctranslate2")


def positions_of_table(config: HeedConfig) -> int | None:
    """Return the number of positions in the written model, `None` for computed positions."""
    if config.position_encoding in WITHOUT_TABLE:
        return None
    limit = config.max_position_embeddings
    # A limit below the default suggests short texts, perhaps on a small device.
    is_said = config.position_encoding == "learned" or limit < HeedConfig.max_position_embeddings
    return limit if is_said else max(TABLE_ROWS, limit)


def save_model(
    model: HeedForConditionalGeneration, tokenizers: TokenizerPair, folder: Path, quantization: str
) -> None:
    """Write a model into a folder, with weights in a CTranslate2 type."""
    specification = make_specification(model)
    source, target = vocabulary(tokenizers.source), vocabulary(tokenizers.target)
    specification.register_source_vocabulary(source)
    specification.register_target_vocabulary(target)
    config: Any = model.config
    end, unknown = tokenizers.target.eos_token_id, tokenizers.target.unk_token_id
    special = {"bos_token": config.decoder_start_token_id, "eos_token": end}
    special["unk_token"] = end if unknown is None else unknown
    for name, token_id in special.items():
        token = target[token_id]
        if token not in source:
            raise ValueError(f"`{token}` must also be in the source vocabulary for CTranslate2, but is not.")
        setattr(specification.config, name, token)
    specification.config.decoder_start_token = target[config.decoder_start_token_id]
    specification.config.layer_norm_epsilon = config.layer_norm_eps
    specification.validate()
    specification.optimize(quantization=quantization)
    specification.save(str(folder))


def vocabulary(tokenizer: Any) -> list[str]:
    """Return a tokenizer's tokens ordered by id; a `ValueError` unless each id has exactly one."""
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    if None in tokens:
        raise ValueError(f"Each id must have a token for CTranslate2, but {tokens.index(None)} has none.")
    if len(set(tokens)) < len(tokens):
        twice = next(token for number, token in enumerate(tokens) if token in tokens[:number])
        raise ValueError(f"Each token must have one id for CTranslate2, but {twice!r} has several.")
    return tokens


def make_specification(model: HeedForConditionalGeneration) -> Any:
    """Return a model's `TransformerSpec` for CTranslate2, with float32 copies of its weights."""
    import_ctranslate2()
    from ctranslate2.specs import TransformerSpec
    from ctranslate2.specs.transformer_spec import TransformerDecoderSpec, TransformerEncoderSpec

    config: Any = model.config
    encoder = TransformerEncoderSpec(**_options(config, "encoder"))
    decoder = TransformerDecoderSpec(**_options(config, "decoder"))
    _set_stack(encoder, encoder.embeddings[0], model.model.encoder, config)
    _set_stack(decoder, decoder.embeddings, model.model.decoder, config)
    for theirs, ours in zip(decoder.layer, _layers_of(model.model.decoder), strict=True):
        across = ours.cross_attn
        inputs = (across.q_proj,), (across.k_proj, across.v_proj)
        _set_attention(theirs.attention, across, ours.cross_attn_residual, inputs)
    _set_joined(decoder.projection, model.lm_head)
    return TransformerSpec(encoder, decoder)


def _options(config: HeedConfig, stack: str) -> dict[str, Any]:
    from ctranslate2.specs.common_spec import Activation

    heads, key_value_heads = (getattr(config, f"{stack}_{part}_heads") for part in ("attention", "key_value"))
    name = config.activation_function
    d_k = config.d_k or config.d_model // heads
    return {
        "num_layers": getattr(config, f"{stack}_layers"),
        "num_heads": heads,
        "pre_norm": config.norm_placement == "pre",
        "activation": Activation[ACTIVATIONS[name]],
        "layernorm_embedding": config.embedding_norm,
        "ffn_glu": name in GATED_ACTIVATIONS,
        "rms_norm": config.norm_type == "rmsnorm",
        "num_heads_kv": None if key_value_heads == heads else key_value_heads,
        "head_dim": None if d_k * heads == config.d_model else d_k,
        "rotary_dim": d_k if config.position_encoding == "rotary" else None,
        "rotary_interleave": True,
        "relative_position": config.position_encoding == "shaw",
        "relative_attention_bias": config.position_encoding == "t5",
    }


def _set_stack(theirs: Any, embeddings: Any, ours: Any, config: HeedConfig) -> None:
    embeddings.weight = _copied(ours.embed_tokens.weight)
    theirs.scale_embeddings = config.scale_embedding
    if config.position_encoding not in WITHOUT_TABLE:
        theirs.position_encodings.encodings = _position_table(ours, config)
    if config.embedding_norm:
        _set_norm(theirs.layernorm_embedding, ours.embedding_norm)
    if config.norm_placement == "pre":
        _set_norm(theirs.layer_norm, ours.norm)
    for number, (their_layer, layer) in enumerate(zip(theirs.layer, _layers_of(ours), strict=True)):
        own = layer.self_attn
        inputs = ((own.q_proj, own.k_proj, own.v_proj),)
        _set_attention(their_layer.self_attention, own, layer.self_attn_residual, inputs)
        if own.relative_keys is not None:  # Shaw's vectors
            their_layer.self_attention.relative_position_keys = _copied(own.relative_keys.weight)
            their_layer.self_attention.relative_position_values = _copied(own.relative_values.weight)
        if (bias := ours.relative_positions.bias) is not None:  # T5's, or umT5's
            biases = ours.relative_positions.of_layers(bias.weight)
            their_layer.self_attention.relative_attention_bias = _copied(biases[number % len(biases)])
            distance = numpy.dtype("int32").type(bias.max_distance)
            their_layer.self_attention.relative_attention_max_distance = distance
        inner = layer.feed_forward
        _set_joined(their_layer.ffn.linear_0, inner.fc_gate or inner.fc1)  # with the activation
        if inner.fc_gate is not None:
            _set_joined(their_layer.ffn.linear_0_noact, inner.fc1)
        _set_joined(their_layer.ffn.linear_1, inner.fc2)
        _set_norm(their_layer.ffn.layer_norm, layer.feed_forward_residual.norm)


def _layers_of(stack: Any) -> list[Any]:
    return [*stack.layers] * stack.rounds


def _position_table(ours: Any, config: HeedConfig) -> Any:
    """Return the `(positions, d_model)` encodings."""
    if config.position_encoding == "learned":
        return _copied(ours.embed_positions.weight)
    rows: Any = positions_of_table(config)
    if config.position_encoding == "none":
        return torch.zeros(rows, config.d_model).numpy()
    return sinusoids(torch.arange(rows) + config.position_offset, config.d_model, config.sinusoid_layout).numpy()


def _set_attention(theirs: Any, attention: Any, residual: Any, inputs: tuple[tuple[Any, ...], ...]) -> None:
    """Set an attention layer; projections with the same input become one linear layer."""
    for linear, projections in zip(theirs.linear, (*inputs, (attention.out_proj,)), strict=True):
        _set_joined(linear, *projections)
    _set_norm(theirs.layer_norm, residual.norm)
    theirs.queries_scale = float(attention.scaling)


def _set_joined(theirs: Any, *ours: Any) -> None:
    """Set a linear layer to stacked projections with the same input."""
    theirs.weight = _copied(torch.cat([projection.weight.detach() for projection in ours]))
    biases = [projection.bias for projection in ours if projection.bias is not None]
    if biases:
        theirs.bias = _copied(torch.cat(biases))


def _set_norm(theirs: Any, ours: Any) -> None:
    theirs.gamma = _copied(ours.weight)
    if isinstance(ours, nn.LayerNorm):
        theirs.beta = _copied(ours.bias)


def _copied(tensor: torch.Tensor) -> Any:
    # `optimize` changes its arrays, and `numpy()` shares a tensor's memory.
    return tensor.detach().to("cpu", torch.float32, copy=True).numpy()
