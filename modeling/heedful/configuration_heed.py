"""Sizes and options of Heed's Transformer; the defaults are the base model of *Attention Is All You Need*."""

from difflib import get_close_matches
from typing import Any, Literal

from transformers.configuration_utils import strict

from .configuration_base_heed import HeedBaseConfig
from .messages_heed import wrong

GATED_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu", "geglu_new": "gelu_new", "reglu": "relu"}
RELATIVE_ENCODINGS = ("shaw", "t5")


def check_one_kernel(attn_implementation: str | dict[str, str] | None) -> None:
    """Raise a `ValueError` if a model's parts get separate attention functions, which would be ignored."""
    if isinstance(attn_implementation, dict) and set(attn_implementation) - {""}:
        raise wrong("attn_implementation", "be one name for encoder and decoder", attn_implementation)


@strict
class HeedConfig(HeedBaseConfig):
    r"""Configuration of [`HeedModel`] and [`HeedForConditionalGeneration`].

    `HeedConfig()` is the paper's base model (Vaswani et al., 2017, Table 3). Every argument is keyword-only.

    Args:
        vocab_size (`int`): Number of source tokens. The paper shares about 37,000 byte-pair tokens (section 5.1).
        decoder_vocab_size (`int`, *optional*): Number of target tokens; `None` becomes `vocab_size`. Assigning
            `vocab_size` sets both if they are equal and `share_encoder_decoder_embeddings` is True.
        d_model (`int`): Width of every layer's input and output (section 3.1).
        encoder_layers, decoder_layers (`int`): Depth N of each stack. A deep encoder with a shallow
            decoder translates about as well, and faster.
        share_layers (`bool`): A stack has one layer and applies it N times (Dehghani et al., 2019, "Universal
            Transformers", without its halting; Lan et al., 2020, "ALBERT").
        encoder_attention_heads, decoder_attention_heads (`int`): Number of heads h of each stack (section 3.2.2).
        encoder_key_value_heads, decoder_key_value_heads (`int`, *optional*): Number of key and value heads. Fewer make
            the cache smaller: a group of query heads shares each; `None` gives each query head its own.
        d_k, d_v (`int`, *optional*): Width of one head's queries and keys, and of its values; `None` is d_model / h.
        encoder_ffn_dim, decoder_ffn_dim (`int`): Inner width d_ff of the feed-forward networks (section 3.3).
        activation_function (`str`): A `transformers` activation, or with a gate, a third matrix that multiplies the
            inner layer (Shazeer, 2020): `swiglu`, `geglu`, `geglu_new` (with `gelu_new`, as in T5 v1.1), `reglu`.
        attention_bias, feed_forward_bias (`bool`): Whether the projections in attention (section 3.2.2: no) and in
            feed-forward networks (equation 2: yes) have biases.
        attention_scoring (`str`): `scaled_dot` (equation 1), `dot` (without 1/√d_k), or `additive` (Bahdanau et al.,
            2015; compared in section 3.2.1; only with the `eager` kernel).
        encoder_neighbourhood, decoder_neighbourhood (`int`, *optional*): Self-attention reaches at most r positions
            away (restricted self-attention, section 4); `None` sets no limit.
        position_encoding (`str`): `sinusoidal` (section 3.5), `learned` (Table 3, row E; no longer than
            `max_position_embeddings`), or `none`. Relative positions, to any length, are `rotary` (Su et al., 2021),
            `shaw` (Shaw et al., 2018; only with the `eager` kernel) and `t5` (Raffel et al., 2020).
        relative_attention_max_distance (`int`, *optional*): The largest distance that `shaw` and `t5` distinguish;
            `None` is 16 for `shaw` and 128 for `t5`, as in the papers.
        relative_bias_in_each_layer (`bool`): Whether each layer has its `t5` bias, as in umT5 (Chung et al., 2023).
        sinusoid_layout (`str`): `interleaved` sine and cosine as in the paper, `concatenated` halves as in Marian, or
            `tensor2tensor`: halves whose last wavelength is exactly 10000·2π, as in Tensor2Tensor and M2M100.
        position_offset (`int`): The first token's position for sinusoids: 0 in the paper, 2 in M2M100.
        max_position_embeddings (`int`): Longest sequence with `learned` positions, and the default length limit of
            `generate()`. Other positions have no limit, except in CTranslate2's tables.
        scale_embedding (`bool`): Multiplies embeddings by √d_model (section 3.4).
        norm_placement (`str`): `post` is LayerNorm(x + Sublayer(x)) (section 3.1); `pre` is x + Sublayer(LayerNorm(x))
            with a norm at the end of each stack; training deep models is then more stable.
        embedding_norm (`bool`): Whether both stacks norm embeddings plus positions, before dropout, as in BART.
        norm_type (`str`): `layernorm`, or `rmsnorm`, which leaves out the mean and the bias.
        layer_norm_eps (`float`): Added to the variance in a norm.
        depth_scaled_init (`bool`): Divides the initial matrices of layer l by √l (Zhang et al., 2019, "Depth-Scaled
            Initialization"). Without it, post-norm stacks of 12 layers learn slowly or not at all.
        dropout (`float`): P_drop on each sub-layer's output and on embeddings plus positions (section 5.4).
        attention_dropout, activation_dropout (`float`): Dropout on attention weights and inside the feed-forward
            networks; not in the paper.
        source_word_dropout, target_word_dropout (`float`): Share of embeddings dropped in training, see `drop_words`.
        label_smoothing (`float`): ε_ls in the training loss (section 5.4); evaluation uses the plain cross-entropy.
        tie_word_embeddings (`bool`): `False` gives source, target and output embeddings a matrix each. `True` shares
            them by the next two fields; if both are `True`, there is one matrix (section 3.4).
        share_encoder_decoder_embeddings (`bool`): Source and target have one vocabulary and, unless
            `tie_word_embeddings` is False, one embedding matrix.
        tie_output_embeddings (`bool`): Target embeddings and the pre-softmax layer have one matrix.
        output_bias (`bool`): Adds a bias to the pre-softmax layer, as in Marian; not in the paper.
        use_cache (`bool`): Whether `generate()` keeps keys and values of earlier steps.
        pad_token_id, bos_token_id, eos_token_id, decoder_start_token_id (`int`): The last starts the decoder's input.
        format_version (`int`): Version of the saved format; an older Heedful refuses a higher number.

    Raises:
        ValueError: If a field is out of range, does not fit another, or looks misspelt; the message names it.
    """

    model_type = "heed"
    attribute_map = {
        "hidden_size": "d_model",
        "num_hidden_layers": "encoder_layers",
        "num_attention_heads": "encoder_attention_heads",
        "layer_norm_epsilon": "layer_norm_eps",
    }
    # Empty, not None: the stacks and the head have plans (`HeedEncoder._tp_plan`).
    base_model_tp_plan = {}

    d_model: int = 512
    encoder_layers: int = 6
    decoder_layers: int = 6
    share_layers: bool = False
    encoder_attention_heads: int = 8
    decoder_attention_heads: int = 8
    encoder_key_value_heads: int | None = None
    decoder_key_value_heads: int | None = None
    d_k: int | None = None
    d_v: int | None = None
    encoder_ffn_dim: int = 2048
    decoder_ffn_dim: int = 2048
    activation_function: str = "relu"
    attention_bias: bool = False
    feed_forward_bias: bool = True
    attention_scoring: Literal["scaled_dot", "dot", "additive"] = "scaled_dot"
    encoder_neighbourhood: int | None = None
    decoder_neighbourhood: int | None = None
    position_encoding: Literal["sinusoidal", "learned", "rotary", "shaw", "t5", "none"] = "sinusoidal"
    relative_attention_max_distance: int | None = None
    relative_bias_in_each_layer: bool = False
    sinusoid_layout: Literal["interleaved", "concatenated", "tensor2tensor"] = "interleaved"
    position_offset: int = 0
    max_position_embeddings: int = 512
    scale_embedding: bool = True
    norm_placement: Literal["post", "pre"] = "post"
    embedding_norm: bool = False
    norm_type: Literal["layernorm", "rmsnorm"] = "layernorm"
    layer_norm_eps: float = 1e-5
    depth_scaled_init: bool = False
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    output_bias: bool = False

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_attn_implementation":
            check_one_kernel(value)
        super().__setattr__(name, value)

    def _check_own_fields(self) -> None:
        super()._check_own_fields()
        self._check_sizes()
        self._check_heads("encoder")
        self._check_heads("decoder")

    def _check_sizes(self) -> None:
        sizes = ("vocab_size", "decoder_vocab_size", "d_model", "d_k", "d_v", "max_position_embeddings")
        in_stack = ("layers", "attention_heads", "key_value_heads", "ffn_dim", "neighbourhood")
        self._check_at_least_one(*sizes, *(f"{stack}_{size}" for stack in ("encoder", "decoder") for size in in_stack))
        is_scaled = self.depth_scaled_init and self.share_layers
        self._require(not is_scaled, "depth_scaled_init", "False if `share_layers` is True")
        self._check_shares("dropout", "attention_dropout", "activation_dropout")
        self._require(self.layer_norm_eps > 0, "layer_norm_eps", "above 0")
        self._check_positions()
        from transformers.activations import ACT2FN

        if self.activation_function not in [*GATED_ACTIVATIONS, *ACT2FN]:
            nearest = get_close_matches(self.activation_function, [*GATED_ACTIVATIONS, *ACT2FN], n=3)
            hint = f" (near it: {', '.join(nearest)})" if nearest else ""
            rule = f"a transformers activation or one of {', '.join(GATED_ACTIVATIONS)}"
            self._require(False, "activation_function", rule, f"is {self.activation_function!r}{hint}")

    def _check_positions(self) -> None:
        encoding, offset = self.position_encoding, self.position_offset
        if encoding == "sinusoidal":
            self._require(self.d_model % 2 == 0, "d_model", "even for sinusoidal positions")
            is_wide = self.sinusoid_layout != "tensor2tensor" or self.d_model >= 4
            self._require(is_wide, "d_model", "at least 4 for `tensor2tensor` sines")
        rule, found = "at least 0, and 0 unless `position_encoding` is sinusoidal", f"is {offset} with {encoding}"
        self._require(offset == 0 or (offset > 0 and encoding == "sinusoidal"), "position_offset", rule, found)
        # In T5's decoder 16 buckets have one distance each; the others need at least one more.
        farthest, least = self.relative_attention_max_distance, {"shaw": 1, "t5": 17}.get(encoding)
        rule, found = "None, or at least 1 with shaw and 17 with t5 positions", f"is {farthest} with {encoding}"
        is_met = farthest is None or (least is not None and farthest >= least)
        self._require(is_met, "relative_attention_max_distance", rule, found)
        is_met = not self.relative_bias_in_each_layer or (encoding == "t5" and not self.share_layers)
        rule = "False unless `position_encoding` is t5 and `share_layers` False"
        self._require(is_met, "relative_bias_in_each_layer", rule)
        is_met = encoding != "shaw" or self.attention_scoring != "additive"
        self._require(is_met, "attention_scoring", "scaled_dot or dot with shaw")

    def _check_heads(self, stack: str) -> None:
        """Check that one stack's sizes can be divided by its heads."""
        heads = getattr(self, f"{stack}_attention_heads")
        key_value_heads = getattr(self, f"{stack}_key_value_heads") or heads
        for name in ("d_k", "d_v"):
            rule = f"divisible by `{stack}_attention_heads` unless `{name}` is given"
            is_met = getattr(self, name) is not None or self.d_model % heads == 0
            self._require(is_met, "d_model", rule, f"they are {self.d_model} and {heads}")
        rule, found = f"divisible by `{stack}_key_value_heads`", f"they are {heads} and {key_value_heads}"
        self._require(heads % key_value_heads == 0, f"{stack}_attention_heads", rule, found)
        d_k = self.d_k or self.d_model // heads
        is_met = self.position_encoding != "rotary" or d_k % 2 == 0
        self._require(is_met, "d_k", "even for rotary positions", f"is {d_k}")
