"""A Heed model in CTranslate2's terms: a `TransformerSpec` with copies of the weights.

What CTranslate2 cannot express is refused by the name of the config's field; nothing is approximated.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from heedful.configuration_heed import GATED_ACTIVATIONS, HeedConfig
from heedful.data.tokenization import TokenizerPair
from heedful.inference.fingerprint import obstacle_to_copies
from heedful.modeling_heed import HeedForConditionalGeneration
from heedful.positions_heed import sinusoids

# Names of transformers' activations, and what CTranslate2 calls the same function.
ACTIVATIONS = {
    "relu": "RELU",
    **dict.fromkeys(("gelu", "gelu_python"), "GELU"),
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_accurate"), "GELUTanh"),
    **dict.fromkeys(("silu", "swish"), "SWISH"),
    "quick_gelu": "GELUSigmoid",
    "tanh": "Tanh",
    "sigmoid": "Sigmoid",
}
# Rows of the tables in which CTranslate2 looks up positions that Heed computes; learned positions have their own.
TABLE_ROWS = 2048


def import_ctranslate2() -> Any:
    """Import CTranslate2.

    Raises:
        ImportError: If it is not installed; the message names the extra.
    """
    try:
        import ctranslate2
    except ImportError as error:
        raise ImportError("The engine ctranslate2 must be installed: pip install 'heedful[ctranslate2]'") from error
    return ctranslate2


def obstacle(model: Any) -> str | None:
    """Return why CTranslate2 cannot compute what a model does, or `None` where it can."""
    reason = obstacle_to_copies(model, "CTranslate2")
    if reason is not None:
        return reason
    config = model.config
    for stack in ("encoder", "decoder"):
        radius = getattr(config, f"{stack}_neighbourhood")
        if radius is not None:
            return f"`{stack}_neighbourhood` must be None for CTranslate2, but is {radius} instead."
        heads = getattr(config, f"{stack}_attention_heads")
        d_k, d_v = config.d_k or config.d_model // heads, config.d_v or config.d_model // heads
        if d_k != d_v:
            return f"`d_v` must equal `d_k` for CTranslate2, but is {d_v} and not {d_k} in the {stack} instead."
    name = config.activation_function
    if name not in GATED_ACTIVATIONS and name not in ACTIVATIONS:
        known = ", ".join([*ACTIVATIONS, *GATED_ACTIVATIONS])
        return f"`activation_function` must be one of {known} for CTranslate2, but is {name} instead."
    return None


def positions_of_table(config: HeedConfig) -> int | None:
    """Return how many positions the written model has, or `None` where they are computed."""
    if config.position_encoding == "rotary":
        return None
    if config.position_encoding == "learned":
        return config.max_position_embeddings
    return max(TABLE_ROWS, config.max_position_embeddings)


def save_model(
    model: HeedForConditionalGeneration, tokenizers: TokenizerPair, folder: Path, quantization: str | None
) -> None:
    """Write CTranslate2's files: model.bin, config.json and the vocabularies.

    Args:
        model: A model without an `obstacle`, on any device; its weights are copied as float32.
        tokenizers: Those that it was trained with.
        folder: Where to write; it must exist.
        quantization: One of CTranslate2's types for weights; None keeps float32.

    Raises:
        ValueError: If the tokens do not make a vocabulary.
    """
    specification = make_specification(model)
    source, target = (vocabulary(tokenizer) for tokenizer in (tokenizers.source, tokenizers.target))
    specification.register_source_vocabulary(source)
    specification.register_target_vocabulary(target)
    config: Any = model.config
    special = {"bos_token": config.decoder_start_token_id, "eos_token": tokenizers.target.eos_token_id}
    unknown = tokenizers.target.unk_token_id
    special["unk_token"] = tokenizers.target.eos_token_id if unknown is None else unknown
    for name, token_id in special.items():
        token = target[token_id]
        if token not in source:
            raise ValueError(f"`{token}` must be in the source's vocabulary too for CTranslate2, but is not.")
        setattr(specification.config, name, token)
    specification.config.decoder_start_token = target[config.decoder_start_token_id]
    specification.config.layer_norm_epsilon = config.layer_norm_eps
    specification.validate()
    specification.optimize(quantization=quantization or "float32")
    specification.save(str(folder))


def vocabulary(tokenizer: Any) -> list[str]:
    """Return a tokenizer's tokens in the order of their ids.

    Raises:
        ValueError: If two ids have the same token, or one has none.
    """
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    if None in tokens:
        raise ValueError(f"Each id must have a token for CTranslate2, but {tokens.index(None)} has none.")
    if len(set(tokens)) < len(tokens):
        twice = next(token for number, token in enumerate(tokens) if token in tokens[:number])
        raise ValueError(f"Each token must have one id for CTranslate2, but {twice!r} has several.")
    return tokens


def make_specification(model: HeedForConditionalGeneration) -> Any:
    """Return CTranslate2's `TransformerSpec` of a model, with copies of its weights in float32."""
    import_ctranslate2()
    from ctranslate2.specs import TransformerSpec
    from ctranslate2.specs.transformer_spec import TransformerDecoderSpec, TransformerEncoderSpec

    config: Any = model.config
    encoder, decoder = model.model.encoder, model.model.decoder
    specification = TransformerSpec(
        TransformerEncoderSpec(**_options(config, "encoder")), TransformerDecoderSpec(**_options(config, "decoder"))
    )
    _set_stack(specification.encoder, specification.encoder.embeddings[0], encoder, config)
    _set_stack(specification.decoder, specification.decoder.embeddings, decoder, config)
    for theirs, ours in zip(specification.encoder.layer, encoder.layers, strict=True):
        _set_self_attention(theirs.self_attention, ours)
        _set_feed_forward(theirs.ffn, ours)
    for theirs, ours in zip(specification.decoder.layer, decoder.layers, strict=True):
        _set_self_attention(theirs.self_attention, ours)
        attention = ours.cross_attn
        query, output = theirs.attention.linear[0], theirs.attention.linear[2]
        _set_joined(query, attention.q_proj)
        _set_joined(theirs.attention.linear[1], attention.k_proj, attention.v_proj)
        _set_joined(output, attention.out_proj)
        _set_norm(theirs.attention.layer_norm, ours.cross_attn_residual.norm)
        theirs.attention.queries_scale = float(attention.scaling)
        _set_feed_forward(theirs.ffn, ours)
    _set_joined(specification.decoder.projection, model.lm_head)
    return specification


def _options(config: HeedConfig, stack: str) -> dict[str, Any]:
    """Return the arguments of CTranslate2's specification of a stack."""
    from ctranslate2.specs.common_spec import Activation

    heads = getattr(config, f"{stack}_attention_heads")
    key_value_heads = getattr(config, f"{stack}_key_value_heads") or heads
    name = config.activation_function
    d_k = config.d_k or config.d_model // heads
    options: dict[str, Any] = {
        "num_layers": getattr(config, f"{stack}_layers"),
        "num_heads": heads,
        "pre_norm": config.norm_placement == "pre",
        "activation": Activation[ACTIVATIONS[GATED_ACTIVATIONS.get(name, name)]],
        "layernorm_embedding": config.embedding_norm,
        "ffn_glu": name in GATED_ACTIVATIONS,
        "rms_norm": config.norm_type == "rmsnorm",
    }
    if key_value_heads != heads:
        options["num_heads_kv"] = key_value_heads
    if d_k * heads != config.d_model:
        options["head_dim"] = d_k
    if config.position_encoding == "rotary":
        options |= {"rotary_dim": d_k, "rotary_interleave": True}
    return options


def _set_stack(theirs: Any, embeddings: Any, ours: Any, config: HeedConfig) -> None:
    """Set what stands before and behind the layers of a stack."""
    embeddings.weight = _copied(ours.embed_tokens.weight)
    theirs.scale_embeddings = config.scale_embedding
    if config.position_encoding != "rotary":
        theirs.position_encodings.encodings = _position_table(ours, config)
    if config.embedding_norm:
        _set_norm(theirs.layernorm_embedding, ours.embedding_norm)
    if config.norm_placement == "pre":
        _set_norm(theirs.layer_norm, ours.norm)


def _position_table(ours: Any, config: HeedConfig) -> Any:
    """Return `(positions, d_model)` encodings of the first positions."""
    if config.position_encoding == "learned":
        return _copied(ours.embed_positions.weight)
    rows: Any = positions_of_table(config)
    if config.position_encoding == "none":
        return torch.zeros(rows, config.d_model).numpy()
    return sinusoids(torch.arange(rows) + config.position_offset, config.d_model, config.sinusoid_layout).numpy()


def _set_self_attention(theirs: Any, layer: Any) -> None:
    attention = layer.self_attn
    _set_joined(theirs.linear[0], attention.q_proj, attention.k_proj, attention.v_proj)
    _set_joined(theirs.linear[1], attention.out_proj)
    _set_norm(theirs.layer_norm, layer.self_attn_residual.norm)
    theirs.queries_scale = float(attention.scaling)


def _set_feed_forward(theirs: Any, layer: Any) -> None:
    ours = layer.feed_forward
    if ours.fc_gate is None:
        _set_joined(theirs.linear_0, ours.fc1)
    else:
        _set_joined(theirs.linear_0, ours.fc_gate)  # the one with the activation
        _set_joined(theirs.linear_0_noact, ours.fc1)
    _set_joined(theirs.linear_1, ours.fc2)
    _set_norm(theirs.layer_norm, layer.feed_forward_residual.norm)


def _set_joined(theirs: Any, *ours: Any) -> None:
    """Set a linear layer to projections of the same input, one below the other."""
    theirs.weight = _copied(torch.cat([projection.weight.detach() for projection in ours]))
    biases = [projection.bias for projection in ours if projection.bias is not None]
    if biases:
        theirs.bias = _copied(torch.cat(biases))


def _set_norm(theirs: Any, ours: Any) -> None:
    theirs.gamma = _copied(ours.weight)
    if isinstance(ours, nn.LayerNorm):
        theirs.beta = _copied(ours.bias)


def _copied(tensor: torch.Tensor) -> Any:
    # `optimize` writes into what it is given, and a tensor's `numpy()` is the tensor's own memory.
    return tensor.detach().to("cpu", torch.float32, copy=True).numpy()
