"""The Transformer encoder-decoder of *Attention Is All You Need* (Vaswani et al., 2017) for transformers.

In this file: feed-forward networks (section 3.3), residual connections (3.1), layers, embeddings with positions (3.4
and 3.5), stacks, the model (figure 1). Attention (3.2) is in `attention_heed.py`, positions are in
`positions_heed.py`, the output is in `encoder_decoder_heed.py`, the training loss (5.4) in `loss_heed.py`.

`HeedForConditionalGeneration` inherits, in Python's order:

- `OutputLayer` (`encoder_decoder_heed.py`): the pre-softmax layer, and `forward` with the loss;
- `CachedGenerationMixin` (`generation_heed.py`): `generate()`, whose hypotheses share their source's cache;
- `HeedPreTrainedModel`, below: initial weights. It is a `KernelChoice` (`attending_heed.py`), which chooses attention
  functions, and a `HeedBaseModel` (`pretrained_heed.py`), which loads, resizes and saves.

Letters in shape comments: B batch, S source length, T target length, D = d_model.
"""

import math
from typing import Any, Literal

import torch
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

from .attending_heed import Call, KernelChoice, call_of
from .attention_heed import AdditiveScore, HeedAttention
from .configuration_heed import GATED_ACTIVATIONS, HeedConfig
from .encoder_decoder_heed import EncoderDecoder, OutputLayer
from .fast_paths_heed import HeedDropout, normalise, project
from .generation_heed import CachedGenerationMixin
from .positions_heed import RelativeBias, RelativePositions, RelativeVectors, SinusoidalPositions
from .pretrained_heed import HeedBaseModel
from .versions_heed import decoder_output, either_cache_name

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
        """Transform each position of `(B, length, D)` states independently."""
        if self.fc_gate is None:
            inner = self.activation(project(hidden_states, self.fc1))  # (B, length, inner_size)
        else:
            inner = self.activation(project(hidden_states, self.fc_gate)) * project(hidden_states, self.fc1)
        if self.is_t5 and inner.dtype == torch.float16 and self.fc2.weight.dtype == torch.float32:
            inner = inner.float()  # see `widen_second_products`
        return project(self.dropout(inner) if self.training else inner, self.fc2)


def make_norm(config: HeedConfig) -> nn.Module:
    """Return the config's norm over the last dimension, D."""
    kind = nn.LayerNorm if config.norm_type == "layernorm" else nn.RMSNorm
    return kind(config.d_model, eps=config.layer_norm_eps)


def clamped(states: torch.Tensor) -> torch.Tensor:
    """Keep float16 states finite, as transformers does."""
    most = torch.finfo(torch.float16).max - 1000
    return states.clamp(-most, most) if states.dtype == torch.float16 else states


class HeedResidual(nn.Module):
    """LayerNorm(x + Dropout(Sublayer(x))) (sections 3.1 and 5.4), or x + Dropout(Sublayer(LayerNorm(x)))."""

    def __init__(self, config: HeedConfig, stack: str):
        super().__init__()
        self.is_post_norm = config.norm_placement == "post"
        self.is_clamped = stack == "encoder" or config.position_encoding == "t5"
        self.dropout = HeedDropout(config.dropout)
        self.norm = make_norm(config)

    def before(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        """Return the sub-layer's input from `(B, length, D)` states x: normed in a pre-norm model."""
        return x if self.is_post_norm else normalise(x, self.norm, call)

    def after(self, x: torch.Tensor, output: torch.Tensor, call: Call) -> torch.Tensor:
        """Add the sub-layer's output to `(B, length, D)` states x, and norm the sum in a post-norm model."""
        added = x + (self.dropout(output) if self.training else output)
        added = clamped(added) if self.is_clamped else added
        return normalise(added, self.norm, call) if self.is_post_norm else added


# Layers and stacks, section 3.1


class HeedEncoderLayer(GradientCheckpointingLayer):
    """Self-attention, then a feed-forward network, each in a residual connection (section 3.1)."""

    def __init__(self, config: HeedConfig):
        super().__init__()
        self.self_attn = HeedAttention(config, "encoder")
        self.self_attn_residual = HeedResidual(config, "encoder")
        self.feed_forward = HeedFeedForward(config, config.encoder_ffn_dim)
        self.feed_forward_residual = HeedResidual(config, "encoder")

    def forward(self, x: torch.Tensor, *parts: Any) -> torch.Tensor:
        """Transform `(B, S, D)` states; `parts` are a `Call`."""
        call = Call(*parts)
        attended, _ = self.self_attn(self.self_attn_residual.before(x, call), call)
        x = self.self_attn_residual.after(x, attended, call)
        output = self.feed_forward(self.feed_forward_residual.before(x, call))
        return self.feed_forward_residual.after(x, output, call)


class HeedDecoderLayer(GradientCheckpointingLayer):
    """Masked self-attention, attention to the source, then a feed-forward network (section 3.1)."""

    def __init__(self, config: HeedConfig):
        super().__init__()
        self.self_attn = HeedAttention(config, "decoder", is_causal=True)
        self.self_attn_residual = HeedResidual(config, "decoder")
        self.cross_attn = HeedAttention(config, "decoder", is_cross=True)
        self.cross_attn_residual = HeedResidual(config, "decoder")
        self.feed_forward = HeedFeedForward(config, config.decoder_ffn_dim)
        self.feed_forward_residual = HeedResidual(config, "decoder")

    def forward(self, x: torch.Tensor, *parts: Any) -> torch.Tensor:
        """Transform `(B, T, D)` states; `parts` are a `Call`."""
        call = Call(*parts)
        attended, _ = self.self_attn(self.self_attn_residual.before(x, call), call)
        x = self.self_attn_residual.after(x, attended, call)
        if call.source is not None:
            attended, _ = self.cross_attn(self.cross_attn_residual.before(x, call), call)
            x = self.cross_attn_residual.after(x, attended, call)
        output = self.feed_forward(self.feed_forward_residual.before(x, call))
        return self.feed_forward_residual.after(x, output, call)


class HeedPreTrainedModel(KernelChoice, HeedBaseModel):
    """Base class of Heed's Transformers and their stacks: initial weights, and settings for transformers."""

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
        """Draw matrices from Glorot's uniform distribution, and embeddings with variance 1 after scaling."""
        super()._init_weights(module)
        if isinstance(module, (nn.Embedding, RelativeBias)) or module is self.get_output_embeddings():
            init.normal_(module.weight, std=self.config.d_model**-0.5)
        elif isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight)
        elif isinstance(module, (AdditiveScore, RelativeVectors)):
            init.normal_(module.weight, std=module.weight.shape[-1] ** -0.5)


class HeedStack(HeedPreTrainedModel):
    """Base class of encoder and decoder: token embeddings, positions, and the loop over the layers."""

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
        self.rounds = depth if config.share_layers else 1  # number of passes through all layers
        self.post_init()
        self._leave_out_of_tensor_parallelism()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw the weights; `depth_scaled_init` divides the matrices of layer l by √l."""
        super()._init_weights(module)
        if self.config.depth_scaled_init and isinstance(module, nn.Linear):
            numbered = enumerate(self.layers, start=1)
            depth = next(number for number, layer in numbered if any(part is module for part in layer.modules()))
            init.xavier_uniform_(module.weight, gain=depth**-0.5)

    def embed(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        """Look up `(B, length)` ids, or take `(B, length, D)` embeddings, and scale them (section 3.4)."""
        return self.look_up(input_ids, inputs_embeds) * self.embedding_scale

    def add_positions(self, embeddings: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """Encode `(B, length)` positions, add them to `(B, length, D)` embeddings, norm and drop out."""
        if self.embed_positions is not None:
            embeddings = embeddings + self.embed_positions(positions).to(embeddings.dtype)
        return self.dropout(self.embedding_norm(embeddings))

    def transform(self, embeddings: torch.Tensor, call: Call) -> torch.Tensor:
        """Apply all layers (section 3.1) to `(B, length, D)` embeddings."""
        x = call.layout.pack(self.add_positions(embeddings, call.positions))
        for number, layer in enumerate([*self.layers] * self.rounds):
            x = layer(x, *call.of_layer(number))
        return call.layout.unpack(x if self.norm is None else normalise(x, self.norm))


class HeedEncoder(HeedStack):
    """A stack of N layers that encode the whole source at once (section 3.1)."""

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
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """Encode the source.

        Args:
            input_ids: `(batch, source_length)`.
            attention_mask: `(batch, source_length)`, 0 at padding, on either side.
            inputs_embeds: `(batch, source_length, d_model)` in place of `input_ids`.
            kwargs: `output_attentions`, `output_hidden_states`, `return_dict`.

        Returns:
            `last_hidden_state` `(batch, source_length, d_model)`, and recorded outputs.
        """
        embeddings = self.embed(input_ids, inputs_embeds)
        call = call_of(self, embeddings, attention_mask, kwargs)
        hidden_states = self.transform(embeddings, call)
        return BaseModelOutput(last_hidden_state=hidden_states)


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

    @either_cache_name
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
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Decode the target's newest tokens.

        Args:
            input_ids: `(batch, target_length)`, without the tokens in the cache.
            attention_mask: `(batch, past_length + target_length)`, 0 at padding, on either side.
            encoder_hidden_states: `(sources, source_length, d_model)`, each for batch / sources consecutive targets.
            encoder_attention_mask: `(sources, source_length)`.
            cache: Cache of earlier calls, extended in place; `past_key_values` is its other name.
            inputs_embeds: `(batch, target_length, d_model)` in place of `input_ids`.
            use_cache: Whether to return a cache; the default is the config's.
            kwargs: `output_attentions`, `output_hidden_states`, `return_dict`.

        Returns:
            `last_hidden_state` `(batch, target_length, d_model)`, the cache, and recorded outputs.
        """
        embeddings = self.embed(input_ids, inputs_embeds)
        if use_cache and cache is None:
            cache = EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))
        source = encoder_hidden_states, encoder_attention_mask
        call = call_of(self, embeddings, attention_mask, kwargs, cache, *source)
        return decoder_output(self.transform(embeddings, call), cache)


# The model, figure 1


class HeedModel(EncoderDecoder, HeedPreTrainedModel):
    """Encoder and decoder of figure 1 without the final linear layer; `forward` is `EncoderDecoder`'s."""

    def __init__(self, config: HeedConfig):
        super().__init__(config)
        self._hold_both_stacks(HeedEncoder(config), HeedDecoder(config))
        self.post_init()
        (self._tp_plan or {}).pop("embed_tokens", None)  # transformers 5.17 adds it; the stacks have theirs


class HeedForConditionalGeneration(OutputLayer, CachedGenerationMixin, HeedPreTrainedModel):
    """The whole of figure 1, with the final linear layer and the training loss; `forward` is `OutputLayer`'s."""

    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: HeedConfig):
        super().__init__(config)
        model = HeedModel(config)
        self._hold_head(model, nn.Linear(config.d_model, config.target_vocab_size, bias=config.output_bias))
        # Without a length, `generate()` would stop after 20 tokens, with only a log message.
        self.generation_config.max_length = config.max_position_embeddings
        self.post_init()

    def _score(self, states: torch.Tensor) -> torch.Tensor:
        return project(states, self.lm_head)
