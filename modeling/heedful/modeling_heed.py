"""The Transformer encoder-decoder of *Attention Is All You Need* (Vaswani et al., 2017) for transformers.

It reads from top to bottom as the paper does: feed-forward networks (section 3.3), residual connections (3.1), layers,
embeddings with positions (3.4 and 3.5), stacks, the model of figure 1. Attention (3.2) is in `attention_heed.py`,
positions are in `positions_heed.py`; how the stacks work together, and the output, are in `encoder_decoder_heed.py`,
the training loss (5.4) is in `loss_heed.py`. What is not in the paper, but makes training faster on the CPU, is in
`fast_paths_heed.py`.

Who adds what to `HeedForConditionalGeneration`, in the order in which Python looks:

- `OutputLayer` (`encoder_decoder_heed.py`): the pre-softmax layer, and `forward` with the loss;
- `CachedGenerationMixin` (`generation_heed.py`): `generate()` with a cache, whose hypotheses share their source. It is
  a `HeedGenerationMixin` (two vocabularies, refused arguments), and that transformers' `GenerationMixin`;
- `HeedPreTrainedModel`, below: initial weights. It is a `KernelChoice` (`kernels_heed.py`), which chooses attention
  functions, and a `HeedBaseModel` (`pretrained_heed.py`), which loads, resizes and saves; both are `PreTrainedModel`s.

Letters in shape comments: B batch, S source length, T target length, D = d_model, V = number of target tokens.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attention_heed import AdditiveScore, HeedAttention
from .configuration_heed import GATED_ACTIVATIONS, HeedConfig
from .encoder_decoder_heed import EncoderDecoder, OutputLayer
from .fast_paths_heed import HeedDropout, LeanLayerNorm, Packing, can_use_lean_norm, has_observers, packing_of, project
from .generation_heed import CachedGenerationMixin
from .kernels_heed import KernelChoice
from .masks_heed import check_length, self_attention_mask, source_mask
from .positions_heed import RelativeBias, RelativePositions, RelativeVectors, SinusoidalPositions, positions_of
from .pretrained_heed import HeedBaseModel
from .versions_heed import by_name, given_cache

# Feed-forward networks and residual connections, sections 3.3 and 3.1


class HeedFeedForward(nn.Module):
    """FFN(x) = max(0, xW₁ + b₁)W₂ + b₂ (equation 2), or a gated variant max(0, xW_gate) ⊙ (xW₁)."""

    def __init__(self, config: HeedConfig, inner_size: int):
        super().__init__()
        gated = GATED_ACTIVATIONS.get(config.activation_function)
        self.activation = ACT2FN[gated or config.activation_function]
        self.dropout, self.is_t5 = HeedDropout(config.activation_dropout), config.position_encoding == "t5"
        self.fc1 = nn.Linear(config.d_model, inner_size, bias=config.feed_forward_bias)
        self.fc_gate = nn.Linear(config.d_model, inner_size, bias=config.feed_forward_bias) if gated else None
        self.fc2 = nn.Linear(inner_size, config.d_model, bias=config.feed_forward_bias)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Transform each position of `(batch, length, d_model)` by itself."""
        if self.fc_gate is None:
            inner = self.activation(project(hidden_states, self.fc1))
        else:
            inner = self.activation(project(hidden_states, self.fc_gate)) * project(hidden_states, self.fc1)
        if self.is_t5 and inner.dtype == torch.float16 and self.fc2.weight.dtype == torch.float32:
            inner = inner.float()  # see `widen_second_products`
        return project(self.dropout(inner) if self.training else inner, self.fc2)


def make_norm(config: HeedConfig) -> nn.Module:
    """Return the norm of the residual connections, over the last dimension of size d_model."""
    kind = nn.LayerNorm if config.norm_type == "layernorm" else nn.RMSNorm
    return kind(config.d_model, eps=config.layer_norm_eps)


def normalise(states: torch.Tensor, norm: Any) -> torch.Tensor:
    """Apply a norm to `(…, d_model)` states; those in float32 of T5 in float16 are divided before they are rounded."""
    if isinstance(norm, nn.RMSNorm) and norm.weight.dtype == torch.float16 and states.dtype == torch.float32:
        return F.rms_norm(states, norm.normalized_shape, eps=norm.eps).to(norm.weight.dtype) * norm.weight
    return norm(states)


def clamped(states: torch.Tensor) -> torch.Tensor:
    """Keep states in float16 finite where transformers does: after each layer of an encoder, and everywhere in T5."""
    most = torch.finfo(torch.float16).max - 1000
    return states.clamp(-most, most) if states.dtype == torch.float16 else states


class HeedResidual(nn.Module):
    """LayerNorm(x + Dropout(Sublayer(x))) (sections 3.1 and 5.4), or x + Dropout(Sublayer(LayerNorm(x)))."""

    def __init__(self, config: HeedConfig):
        super().__init__()
        self.is_post_norm = config.norm_placement == "post"
        self.is_clamped = config.position_encoding == "t5"
        self.dropout = HeedDropout(config.dropout)
        self.norm = make_norm(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        sublayer: Callable[[torch.Tensor], torch.Tensor],
        packing: Packing | None = None,
    ) -> torch.Tensor:
        """Add what a function `sublayer` makes of `(batch, length, d_model)` to it.

        It is no module, which accelerate would move. With a packing the gradient cannot be differentiated again.
        """
        output = sublayer(hidden_states if self.is_post_norm else self._normalise(hidden_states, packing))
        if self.training:
            output = self.dropout(output)
        added = hidden_states + output
        added = clamped(added) if self.is_clamped else added
        return self._normalise(added, packing) if self.is_post_norm else added

    def _normalise(self, states: torch.Tensor, packing: Packing | None) -> torch.Tensor:
        if packing is not None and can_use_lean_norm(self.norm, states):
            return LeanLayerNorm.apply(states, self.norm.weight, self.norm.bias, self.norm.eps)
        return normalise(states, self.norm)


# Layers and stacks, section 3.1


class HeedEncoderLayer(GradientCheckpointingLayer):
    """Self-attention, then a feed-forward network, each in a residual connection (section 3.1)."""

    def __init__(self, config: HeedConfig):
        super().__init__()
        self.self_attn = HeedAttention(config, "encoder")
        self.self_attn_residual = HeedResidual(config)
        self.feed_forward = HeedFeedForward(config, config.encoder_ffn_dim)
        self.feed_forward_residual = HeedResidual(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        relative: torch.Tensor | None = None,
        packing: Packing | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """Transform `(batch, source_length, d_model)`."""
        hidden_states = self.self_attn_residual(
            hidden_states,
            lambda states: self.self_attn(states, attention_mask, packing=packing, relative=relative, **kwargs)[0],
            packing,
        )
        return clamped(self.feed_forward_residual(hidden_states, lambda states: self.feed_forward(states), packing))


class HeedDecoderLayer(GradientCheckpointingLayer):
    """Masked self-attention, attention to the source, then a feed-forward network (section 3.1)."""

    def __init__(self, config: HeedConfig):
        super().__init__()
        self.self_attn = HeedAttention(config, "decoder", is_causal=True)
        self.self_attn_residual = HeedResidual(config)
        self.cross_attn = HeedAttention(config, "decoder", is_cross=True)
        self.cross_attn_residual = HeedResidual(config)
        self.feed_forward = HeedFeedForward(config, config.decoder_ffn_dim)
        self.feed_forward_residual = HeedResidual(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        encoder_hidden_states: torch.Tensor | None = None,
        relative: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        cache: EncoderDecoderCache | None = None,
        packing: Packing | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """Transform `(batch, target_length, d_model)`, reading `(batch, source_length, d_model)` encoder states."""
        shared: Any = {"cache": given_cache(cache, kwargs), "packing": packing, **kwargs}
        hidden_states = self.self_attn_residual(
            hidden_states,
            lambda states: self.self_attn(states, attention_mask, None, relative=relative, **shared)[0],
            packing,
        )
        if encoder_hidden_states is not None:
            hidden_states = self.cross_attn_residual(
                hidden_states,
                lambda states: self.cross_attn(states, encoder_attention_mask, encoder_hidden_states, **shared)[0],
                packing,
            )
        return self.feed_forward_residual(hidden_states, lambda states: self.feed_forward(states), packing)


class HeedPreTrainedModel(KernelChoice, HeedBaseModel):
    """What every Heed Transformer shares: initial weights, and what transformers may do with it."""

    config: HeedConfig
    config_class = HeedConfig
    auto_map = {
        "AutoConfig": "configuration_heed.HeedConfig",
        "AutoModel": "modeling_heed.HeedModel",
        "AutoModelForSeq2SeqLM": "modeling_heed.HeedForConditionalGeneration",
    }
    supports_gradient_checkpointing = True
    _no_split_modules = ["HeedEncoderLayer", "HeedDecoderLayer"]
    _can_compile_fullgraph = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw matrices from Glorot's uniform distribution, and embeddings so that, scaled, they have variance 1."""
        super()._init_weights(module)
        if isinstance(module, (nn.Embedding, RelativeBias)) or module is self.get_output_embeddings():
            init.normal_(module.weight, std=self.config.d_model**-0.5)
        elif isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight)
        elif isinstance(module, (AdditiveScore, RelativeVectors)):
            init.normal_(module.weight, std=module.weight.shape[-1] ** -0.5)


class HeedStack(HeedPreTrainedModel):
    """What encoder and decoder share: token embeddings, positions, and the checks on what they are given."""

    side: Literal["encoder", "decoder"]
    layer_class: type[nn.Module]

    def __init__(self, config: HeedConfig):
        super().__init__(config)
        vocab_size = config.vocab_size if self.side == "encoder" else config.target_vocab_size
        self.embed_tokens = nn.Embedding(vocab_size, config.d_model)
        self.embedding_scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.embed_positions: nn.Module | None = None
        self.longest_sequence: int | None = None
        if config.position_encoding == "sinusoidal":
            self.embed_positions = SinusoidalPositions(config)
        elif config.position_encoding == "learned":
            self.longest_sequence = config.max_position_embeddings
            self.embed_positions = nn.Embedding(self.longest_sequence, config.d_model)
        self.relative_positions = RelativePositions(config, self.side)
        self.embedding_norm = make_norm(config) if config.embedding_norm else nn.Identity()
        self.dropout = HeedDropout(config.dropout)
        self.norm = make_norm(config) if config.norm_placement == "pre" else None
        self.gradient_checkpointing = False
        depth = getattr(config, f"{self.side}_layers")
        self.layers = nn.ModuleList([self.layer_class(config) for _ in range(1 if config.share_layers else depth)])
        self.rounds = depth if config.share_layers else 1  # how often the states go through all of them
        self.post_init()
        self._leave_out_of_tensor_parallelism()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw as every Heed model does; with `depth_scaled_init` the matrices of layer l are smaller by √l."""
        super()._init_weights(module)
        if self.config.depth_scaled_init and isinstance(module, nn.Linear):
            numbered = enumerate(self.layers, start=1)
            depth = next(number for number, layer in numbered if any(part is module for part in layer.modules()))
            init.xavier_uniform_(module.weight, gain=depth**-0.5)

    def embed(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        """Look up and scale `(batch, length)` ids (section 3.4), or scale `(batch, length, d_model)` embeddings."""
        return self.look_up(input_ids, inputs_embeds) * self.embedding_scale

    def add_positions(self, embeddings: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Add the encoding of `(batch, length)` positions to `(batch, length, d_model)` states, norm and drop out."""
        if self.embed_positions is not None:
            embeddings = embeddings + self.embed_positions(positions).to(embeddings.dtype)
        return self.dropout(self.embedding_norm(embeddings))


class HeedEncoder(HeedStack):
    """A stack of N layers that read the whole source at once (section 3.1)."""

    side = "encoder"
    layer_class = HeedEncoderLayer
    _can_record_outputs = {
        "hidden_states": HeedEncoderLayer,
        "attentions": OutputRecorder(HeedAttention, index=1, layer_name="self_attn"),
    }
    _tp_plan = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.out_proj": "rowwise",
        "layers.*.feed_forward.fc1": "colwise",
        "layers.*.feed_forward.fc_gate": "colwise",
        "layers.*.feed_forward.fc2": "rowwise",
    }

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        packing: Packing | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """Encode the source.

        Args:
            input_ids: `(batch, source_length)`.
            attention_mask: `(batch, source_length)`, 1 at tokens and 0 at padding, on either side.
            inputs_embeds: `(batch, source_length, d_model)` in place of `input_ids`.
            packing: The padding that a training step leaves out.
            kwargs: `output_attentions`, `output_hidden_states`, `return_dict`.

        Returns:
            `last_hidden_state` `(batch, source_length, d_model)` and what was asked to be recorded.
        """
        embeddings = self.embed(input_ids, inputs_embeds)
        check_length(embeddings.shape[1], attention_mask, self.longest_sequence)
        records, tokens = kwargs.get("output_attentions"), packing and packing.source
        settings = self.attention_settings(records)
        kernel = settings._attn_implementation
        positions = positions_of(embeddings.shape[1], 0, attention_mask, embeddings.device, tokens)
        relative = self.relative_positions(positions, attention_mask)
        mask = self_attention_mask(settings, embeddings, attention_mask, "encoder", records, tokens=tokens)
        hidden_states = self.add_positions(embeddings, positions)  # (B, S, D)
        if packing is not None:
            packing = packing.of_encoder(hidden_states)
            hidden_states = packing.pack(hidden_states)
        given = {"positions": positions, "attn_implementation": kernel, "packing": packing, **kwargs}
        for number, layer in enumerate([*self.layers] * self.rounds):
            own = self.relative_positions.of_layer(relative, number)
            hidden_states = layer(hidden_states, mask, own, **given)
        hidden_states = hidden_states if self.norm is None else normalise(hidden_states, self.norm)
        return BaseModelOutput(last_hidden_state=hidden_states if packing is None else packing.unpack(hidden_states))


class HeedDecoder(HeedStack):
    """A stack of N layers that predict each target token from those before it and the source (section 3.1)."""

    side = "decoder"
    layer_class = HeedDecoderLayer
    _can_record_outputs = {
        "hidden_states": HeedDecoderLayer,
        "attentions": OutputRecorder(HeedAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(HeedAttention, index=1, layer_name="cross_attn"),
    }
    _tp_plan = HeedEncoder._tp_plan | {
        name.replace("self_attn", "cross_attn"): style for name, style in HeedEncoder._tp_plan.items()
    }

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        cache: EncoderDecoderCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        packing: Packing | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Decode the target's newest tokens.

        Args:
            input_ids: `(batch, target_length)`, without the tokens that are already in the cache.
            attention_mask: `(batch, past_length + target_length)`, 0 at padding, on either side.
            encoder_hidden_states: `(sources, source_length, d_model)`, each for as many consecutive targets.
            encoder_attention_mask: `(sources, source_length)`.
            cache: Cache of earlier calls, extended in place; `past_key_values` is its other name.
            inputs_embeds: `(batch, target_length, d_model)` in place of `input_ids`.
            use_cache: Whether to return a cache; the config's `use_cache` by default.
            packing: The padding that a training step leaves out.
            kwargs: `output_attentions`, `output_hidden_states`, `return_dict`.

        Returns:
            `last_hidden_state` `(batch, target_length, d_model)`, the cache, and what was asked to be recorded.
        """
        cache = given_cache(cache, kwargs)
        embeddings = self.embed(input_ids, inputs_embeds)
        if use_cache and cache is None:
            cache = EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))
        past_length = 0 if cache is None else cache.get_seq_length()
        check_length(past_length + embeddings.shape[1], attention_mask, self.longest_sequence)
        records, tokens = kwargs.get("output_attentions"), packing and packing.states
        settings = self.attention_settings(records)
        kernel = settings._attn_implementation  # once: to read a config takes microseconds
        if kernel == "flex_attention" and cache is not None and cache.is_compileable:
            # Its mask is read after the cache has moved the position that the mask counts from.
            must = "`attn_implementation` must be eager or sdpa beside a static cache"
            raise ValueError(f"{must}, but is flex_attention instead.")
        positions = positions_of(embeddings.shape[1], past_length, attention_mask, embeddings.device, tokens)
        own_cache = None if cache is None else cache.self_attention_cache
        relative = self.relative_positions(positions, attention_mask, own_cache)
        causal_mask = self_attention_mask(settings, embeddings, attention_mask, "decoder", records, own_cache, tokens)
        cross_mask = source_mask(settings, embeddings, encoder_attention_mask, encoder_hidden_states)
        hidden_states = self.add_positions(embeddings, positions)  # (B, T, D)
        if packing is not None:
            packing = packing.of_decoder(hidden_states, encoder_hidden_states if cache is None else None)
            hidden_states = packing.pack(hidden_states)
            if packing.source is not None and encoder_hidden_states is not None:
                encoder_hidden_states = packing.source.pack(encoder_hidden_states)
        given = {"positions": positions, "attn_implementation": kernel, "packing": packing, **by_name(cache), **kwargs}
        for number, layer in enumerate([*self.layers] * self.rounds):
            own = self.relative_positions.of_layer(relative, number)
            hidden_states = layer(
                hidden_states, causal_mask, encoder_hidden_states, own, cross_mask, layer_idx=number, **given
            )
        hidden_states = hidden_states if self.norm is None else normalise(hidden_states, self.norm)
        hidden_states = hidden_states if packing is None else packing.unpack(hidden_states)
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden_states, **by_name(cache))


# The model, figure 1


class HeedModel(EncoderDecoder, HeedPreTrainedModel):
    """Encoder and decoder of figure 1 without the final linear layer; `forward` is that of `EncoderDecoder`."""

    def __init__(self, config: HeedConfig):
        super().__init__(config)
        self._hold_both_stacks(HeedEncoder(config), HeedDecoder(config))
        self.post_init()
        (self._tp_plan or {}).pop("embed_tokens", None)  # transformers 5.17 adds it; the stacks have their own


class HeedForConditionalGeneration(OutputLayer, CachedGenerationMixin, HeedPreTrainedModel):
    """The whole of figure 1, with the final linear layer and the training loss; `forward` is that of `OutputLayer`."""

    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: HeedConfig):
        super().__init__(config)
        model = HeedModel(config)
        self._hold_head(model, nn.Linear(config.d_model, config.target_vocab_size, bias=config.output_bias))
        # Without a length, `generate()` would stop after 20 tokens and say so only in a log.
        self.generation_config.max_length = config.max_position_embeddings
        self.post_init()

    def _score(self, states: torch.Tensor) -> torch.Tensor:
        return project(states, self.lm_head)

    def _shortcuts(self, inputs: Mapping[str, Any], labels: torch.Tensor) -> dict[str, Any]:
        """Return the padding that a step on the CPU may leave out, as `packing`, where nothing observes its states."""
        layers = HeedEncoderLayer, HeedDecoderLayer
        if self.lm_head.weight.device.type != "cpu" or has_observers(self, inputs, layers):
            return {}
        masks = inputs.get("attention_mask"), inputs.get("decoder_attention_mask")
        return {"packing": packing_of(labels, *masks)}
