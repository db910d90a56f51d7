"""The transformers classes that convert to Heed models and back: their options, fields and weight names."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from heedful.configuration_heed import GATED_ACTIVATIONS, HeedConfig
from heedful.messages_heed import wrong
from heedful.positions_heed import T5_BUCKETS, T5_MAX_DISTANCE, sinusoids

ROUNDING = 2e-3  # a sine's error in half precision
COPIED_FIELDS = (
    "d_model", "encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads",
    "encoder_ffn_dim", "decoder_ffn_dim", "activation_function", "max_position_embeddings", "scale_embedding",
    "dropout", "attention_dropout", "activation_dropout", "use_cache", "pad_token_id", "eos_token_id",
    "decoder_start_token_id",
)  # fmt: skip
RENAMINGS = {
    "self_attn_layer_norm": "self_attn_residual.norm",
    "encoder_attn_layer_norm": "cross_attn_residual.norm",
    "final_layer_norm": "feed_forward_residual.norm",
    "encoder_attn": "cross_attn",
    ".fc1.": ".feed_forward.fc1.",
    ".fc2.": ".feed_forward.fc2.",
    "layernorm_embedding": "embedding_norm",
    "coder.layer_norm": "coder.norm",
}
EMBEDDINGS = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
SIDES = ("encoder", "decoder")
# Requirements for a stock form: always, and by default for each family.
COMMON: dict[str, Any] = {"share_encoder_decoder_embeddings": True, "position_offset": 0}
COMMON |= dict.fromkeys(("encoder_neighbourhood", "decoder_neighbourhood"))
ORIGINAL: dict[str, Any] = {"norm_type": "layernorm", "norm_placement": "post", "embedding_norm": False}
ORIGINAL |= {"position_encoding": "sinusoidal", "attention_scoring": "scaled_dot", "layer_norm_eps": 1e-5}
ORIGINAL |= {"tie_output_embeddings": True, "tie_word_embeddings": True}
FIRST_POSITION = 2  # first row of BART's and mBART's learned positions

Weights = dict[str, torch.Tensor]
Choices = dict[str, Sequence[Any]]  # config fields with their possible values


@dataclass(frozen=True)
class Family:
    """A transformers class, with the facts for converting and writing it."""

    model_class: str
    options: Mapping[str, Any]  # `HeedConfig` options
    fields: Mapping[str, str] = field(default_factory=lambda: {name: name for name in COPIED_FIELDS})  # ours, theirs

    def read_choices(self, config: Any) -> Choices:
        """Return the field values that a Heed model can reproduce."""
        return {}

    def heed_options(self, config: Any) -> dict[str, Any]:
        """Return the `HeedConfig` options for one of their configs."""
        options = {**self.options, **{ours: getattr(config, theirs) for ours, theirs in self.fields.items()}}
        if config.model_type == "m2m_100":
            options["position_offset"] = config.pad_token_id + 1
        if hasattr(config, "sinusoid_layout"):  # if converted from Heed
            options["sinusoid_layout"] = config.sinusoid_layout
        return options | {"attention_bias": True}

    def heed_weights(self, theirs: PreTrainedModel, config: HeedConfig) -> Weights:
        """Return their weights under our names; shared weights share memory."""
        weights = {}
        for name, value in theirs.state_dict().items():
            if name == "final_logits_bias":
                if value.any():
                    weights["lm_head.bias"] = value[0]
            elif "embed_positions" in name:
                if config.position_encoding == "sinusoidal":
                    exact_sinusoids(name, value, config)
                else:
                    weights[name] = value[FIRST_POSITION:]
            elif name != "model.shared.weight":  # another name of the embeddings
                weights[name] = value
        order = paper_order(config)
        return _renamed(weights, RENAMINGS, None if order is None else order.argsort())

    def write_choices(self, config: Any) -> Choices:
        """Return our field values that the class can reproduce."""
        choices = self.fixed_choices(config, ORIGINAL)
        choices.pop("sinusoid_layout", None)  # features can be reordered
        if self.model_class.startswith("M2M100"):
            choices["position_offset"] = (config.pad_token_id + 1,)
        widths = {config.d_model // getattr(config, f"{side}_attention_heads") for side in SIDES}
        choices["d_k"] = choices["d_v"] = (None, *widths) if len(widths) == 1 else (None,)
        if config.activation_function in GATED_ACTIVATIONS:
            choices["activation_function"] = ("one without a gate",)
        return choices

    def fixed_choices(self, config: Any, wanted: Mapping[str, Any]) -> Choices:
        """Return fields with one possible value, and the default numbers of key heads."""
        choices: Choices = {name: (value,) for name, value in {**COMMON, **wanted, **self.options}.items()}
        return choices | plain_heads(config)

    def stock_options(self, config: HeedConfig) -> dict[str, Any]:
        """Return their config's fields with the same meaning."""
        options = {theirs: getattr(config, ours) for ours, theirs in self.fields.items()}
        options |= {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}  # some classes have other defaults
        if self.model_class.startswith("Marian"):
            options["decoder_vocab_size"] = config.vocab_size
        if config.position_encoding == "sinusoidal":
            options["sinusoid_layout"] = config.sinusoid_layout  # only for the way back
        return options

    def stock_weights(self, ours: Any, stock: PreTrainedModel) -> Weights:
        """Return all their weights: ours under their names, with features in their order."""
        config, weights = ours.config, {}
        for name, value in written_out(ours).items():
            if name == "lm_head.bias":
                name, value = "final_logits_bias", value[None]
            elif "embed_positions" in name:
                value = torch.cat([value.new_zeros(FIRST_POSITION, config.d_model), value])
            weights[name] = value
        weights = _renamed(weights, {ours: theirs for theirs, ours in RENAMINGS.items()}, paper_order(config))
        weights["model.shared.weight"] = weights["model.encoder.embed_tokens.weight"]
        own = stock.state_dict()  # keep sinusoids; missing biases are zero
        zero = {name: torch.zeros_like(value) for name, value in own.items() if "embed_positions" not in name}
        return {**own, **zero, **weights}


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
T5_NAMES = {  # decoder layers, ours and theirs
    "self_attn_residual.norm": "layer.0.layer_norm",
    **{f"self_attn.{part}": f"layer.0.SelfAttention.{part[0]}" for part in PROJECTIONS},
    "cross_attn_residual.norm": "layer.1.layer_norm",
    **{f"cross_attn.{part}": f"layer.1.EncDecAttention.{part[0]}" for part in PROJECTIONS},
    "feed_forward_residual.norm": "layer.2.layer_norm",
    "feed_forward.fc_gate": "layer.2.DenseReluDense.wi_0",
    "feed_forward.fc1": "layer.2.DenseReluDense.wi_1",
    "feed_forward.fc2": "layer.2.DenseReluDense.wo",
}
T5_TABLE = "{}.block.{}.layer.0.SelfAttention.relative_attention_bias.weight"
# Their gated-gelu uses gelu_new.
T5_GATES = {inner: ours for ours, inner in GATED_ACTIVATIONS.items() if ours != "geglu"}


@dataclass(frozen=True)
class T5Family(Family):
    """T5 and its variants have no biases, and scale a tied output by 1/√d_model, stored in Heed's last norm."""

    def read_choices(self, config: Any) -> Choices:
        """Return our number of distance buckets, and our gates."""
        gates = T5_GATES if config.is_gated_act else {config.dense_act_fn: config.dense_act_fn}
        return {"relative_attention_num_buckets": (T5_BUCKETS,), "dense_act_fn": tuple(gates)}

    def heed_options(self, config: Any) -> dict[str, Any]:
        """Return options with one dropout, and without query scaling."""
        options = {ours: getattr(config, theirs) for ours, theirs in self.fields.items()}
        options |= {f"decoder_{name}": options[f"encoder_{name}"] for name in ("attention_heads", "ffn_dim")}
        inner, dropout = config.dense_act_fn, config.dropout_rate
        options |= {"attention_dropout": dropout, "activation_dropout": dropout, "d_v": config.d_kv}
        options["activation_function"] = T5_GATES[inner] if config.is_gated_act else inner
        return {**self.options, **options, "attention_scoring": "dot", "scale_embedding": False}

    def heed_weights(self, theirs: Any, config: HeedConfig) -> Weights:
        """Return their weights: all layers' biases in one matrix, the output factor in the last norm."""
        held, names = theirs.state_dict(), self._names(config)
        weights = {names[name]: value for name, value in held.items() if name in names}
        for side in SIDES:
            layers = [T5_TABLE.format(side, number) for number in range(getattr(config, f"{side}_layers"))]
            tables = [held[name] for name in layers if name in held]
            weights[f"model.{side}.relative_positions.bias.weight"] = torch.cat(tables, dim=1)
            weights[f"model.{side}.embed_tokens.weight"] = weights[EMBEDDINGS[0]]
        if getattr(theirs.config, "scale_decoder_outputs", theirs.config.model_type == "umt5"):  # umT5 of 5.17 always
            norm = "model.decoder.norm.weight"
            weights[norm] = weights[norm] * config.d_model**-0.5
        return weights

    def write_choices(self, config: Any) -> Choices:
        """Return choices with any scaling, because queries can hold 1/√d_k, and embeddings √d_model."""
        heads = config.encoder_attention_heads
        fixed = {"attention_bias": False, "output_bias": False, "tie_word_embeddings": True}
        choices = self.fixed_choices(config, fixed)
        choices["attention_scoring"] = ("dot", "scaled_dot")
        choices |= {"decoder_attention_heads": (heads,), "decoder_ffn_dim": (config.encoder_ffn_dim,)}
        choices["d_v"] = (config.d_k,) if config.d_k is not None else (None, config.d_model // heads)
        if config.decoder_layers > config.encoder_layers:  # their cache has as many layers as the encoder
            choices["decoder_layers"] = range(1, config.encoder_layers + 1)
        gates = [ours for ours in GATED_ACTIVATIONS if ours not in T5_GATES.values()]
        if config.activation_function in gates or "-" in config.activation_function:
            choices["activation_function"] = tuple(T5_GATES.values())
        return choices

    def stock_options(self, config: Any) -> dict[str, Any]:
        """Return fields with the same meaning in all versions."""
        options = {theirs: getattr(config, ours) for ours, theirs in self.fields.items()}
        gate = GATED_ACTIVATIONS.get(config.activation_function)
        options["feed_forward_proj"] = f"gated-{gate}" if gate else config.activation_function
        if gate == "gelu_new":
            options["feed_forward_proj"] = "gated-gelu"  # means gelu_new in every version
        options["d_kv"] = config.d_k or config.d_model // config.encoder_attention_heads
        options["relative_attention_max_distance"] = config.relative_attention_max_distance or T5_MAX_DISTANCE
        return options | {"tie_word_embeddings": self._scales_output(config)}  # they infer scaling from it

    def stock_weights(self, ours: Any, stock: Any) -> Weights:
        """Return weights that include our factors, with a separate output matrix if ours has one."""
        config, held = ours.config, written_out(ours)
        weights = {name: held[own] for name, own in self._names(config).items() if own in held}
        for side in SIDES:
            table = held[f"model.{side}.relative_positions.bias.weight"]
            for number, own in enumerate(table.split(config.encoder_attention_heads, dim=1)):
                weights[T5_TABLE.format(side, number)] = own
        if config.attention_scoring == "scaled_dot":
            queries = [name for name in weights if name.endswith("Attention.q.weight")]
            weights |= {name: weights[name] * stock.config.d_kv**-0.5 for name in queries}
        source = held[EMBEDDINGS[0]] * (math.sqrt(config.d_model) if config.scale_embedding else 1)
        weights |= dict.fromkeys(("shared.weight", *(f"{side}.embed_tokens.weight" for side in SIDES)), source)
        norm = "decoder.final_layer_norm.weight"
        if self._scales_output(config):
            weights["lm_head.weight"] = source
            weights[norm] = weights[norm] * (1 if config.scale_embedding else math.sqrt(config.d_model))
        else:
            stock.lm_head.weight = torch.nn.Parameter(torch.empty_like(source))
        return weights

    def _scales_output(self, config: Any) -> bool:
        """Return whether input and output share a matrix; in older umT5 versions they never do."""
        has_two = self.options["relative_bias_in_each_layer"]
        return config.tie_word_embeddings and config.tie_output_embeddings and not has_two

    def _names(self, config: Any) -> dict[str, str]:
        """Return our name for each of their weights, except distances and duplicate embedding names."""
        is_gated = config.activation_function in GATED_ACTIVATIONS
        names = {"shared.weight": EMBEDDINGS[0], "lm_head.weight": EMBEDDINGS[2]}
        for side in SIDES:
            names[f"{side}.final_layer_norm.weight"] = f"model.{side}.norm.weight"
            for number in range(getattr(config, f"{side}_layers")):
                for ours, theirs in T5_NAMES.items():
                    theirs = theirs if is_gated else theirs.replace("wi_1", "wi")
                    theirs = theirs.replace("layer.2", "layer.1") if side == "encoder" else theirs
                    if side == "decoder" or "cross" not in ours:
                        names[f"{side}.block.{number}.{theirs}.weight"] = f"model.{side}.layers.{number}.{ours}.weight"
        return names


LEARNED, PRE = {"position_encoding": "learned", "embedding_norm": True}, {"norm_placement": "pre"}
T5_FIELDS = {
    "d_model": "d_model", "encoder_layers": "num_layers", "decoder_layers": "num_decoder_layers",
    "encoder_attention_heads": "num_heads", "encoder_ffn_dim": "d_ff", "d_k": "d_kv", "dropout": "dropout_rate",
    "layer_norm_eps": "layer_norm_epsilon", "relative_attention_max_distance": "relative_attention_max_distance",
    **{name: name for name in ("use_cache", "pad_token_id", "eos_token_id", "decoder_start_token_id")},
}  # fmt: skip
T5 = {"position_encoding": "t5", "norm_type": "rmsnorm", "feed_forward_bias": False, "embedding_norm": False} | PRE
SHARED, OWN = T5 | {"relative_bias_in_each_layer": False}, T5 | {"relative_bias_in_each_layer": True}
FAMILIES = {
    "bart": Family("BartForConditionalGeneration", LEARNED),
    "m2m_100": Family("M2M100ForConditionalGeneration", PRE | {"sinusoid_layout": "tensor2tensor"}),
    "marian": Family("MarianMTModel", {"sinusoid_layout": "concatenated"}),
    "mbart": Family("MBartForConditionalGeneration", LEARNED | PRE),
    "mt5": T5Family("MT5ForConditionalGeneration", SHARED, T5_FIELDS),
    "pegasus": Family("PegasusForConditionalGeneration", PRE | {"sinusoid_layout": "concatenated"}),
    "t5": T5Family("T5ForConditionalGeneration", SHARED, T5_FIELDS),
    "umt5": T5Family("UMT5ForConditionalGeneration", OWN, T5_FIELDS),
}
ENCODERS = ("bert", "roberta", "xlm-roberta")  # encoders that Heed can load


def stock_kind(config: HeedConfig) -> str:
    """Return the family nearest to a Heed model."""
    is_pre = config.norm_placement == "pre"
    if config.position_encoding == "t5":
        return "umt5" if config.relative_bias_in_each_layer else "t5"
    if config.position_encoding == "learned":
        return "mbart" if is_pre else "bart"
    if config.sinusoid_layout == "tensor2tensor":
        return "m2m_100"
    return "pegasus" if is_pre else "marian"


def plain_heads(config: Any) -> Choices:
    """Return the key head counts without grouped queries."""
    return {f"{side}_key_value_heads": (None, getattr(config, f"{side}_attention_heads")) for side in SIDES}


def field_faults(config: Any, choices: Mapping[str, Sequence[Any]]) -> Iterator[str]:
    """Yield an error for each field with another value than its choices; a missing field has the first."""
    for name, values in choices.items():
        if getattr(config, name, values[0]) not in values:
            shown = " or ".join(str(value) for value in values if value is not None or len(values) == 1)
            yield str(wrong(name, f"be {shown}", getattr(config, name)))


def written_out(ours: Any) -> Weights:
    """Return a Heed model's weights, repeated for each use of shared layers."""
    weights = {}
    for name, value in ours.state_dict().items():
        stack = ours.model.encoder if ".encoder." in name else ours.model.decoder
        for number in range(stack.rounds if ".layers." in name else 1):
            weights[name.replace(".layers.0.", f".layers.{number}.") if number else name] = value
    return weights


def paper_order(config: HeedConfig) -> torch.Tensor | None:
    """Return our feature index for each of theirs, `(d_model,)`, or None if the order is the same."""
    if config.position_encoding != "sinusoidal" or config.sinusoid_layout != "interleaved":
        return None
    features = torch.arange(config.d_model)
    return torch.cat([features[0::2], features[1::2]])


def exact_sinusoids(
    name: str, table: torch.Tensor, config: HeedConfig, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return a rounded table's exact sinusoids; a `ValueError` names any other table."""
    layout = "concatenated" if config.sinusoid_layout == "interleaved" else config.sinusoid_layout
    expected = sinusoids(torch.arange(len(table)), config.d_model, layout)
    if layout == "tensor2tensor" and not table[config.pad_token_id].any():
        expected[config.pad_token_id] = 0
    distance = (table.float().cpu() - expected).abs().max().item()
    if not distance <= max(ROUNDING, torch.finfo(dtype).eps):
        raise wrong(name, "hold the sinusoids that Heed computes", f"from them by {distance:.1e}", verb="differs")
    return expected


def _renamed(weights: Weights, renamings: Mapping[str, str], order: torch.Tensor | None) -> Weights:
    """Return renamed weights; `order`, if any, reorders the d_model features of inputs and outputs."""
    found = {}
    for name, value in weights.items():
        module, kind = f".{name}".split(".")[-2:]
        for part, replacement in renamings.items():
            name = name.replace(part, replacement)
        if order is not None:
            is_written = module in ("out_proj", "fc2") or module.endswith("norm")
            value = value[order] if is_written else value[:, order] if kind == "weight" else value
        found[name] = value
    return found
