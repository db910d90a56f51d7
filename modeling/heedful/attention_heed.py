"""Attention (section 3.2 of *Attention Is All You Need*): equation 1, the additive score, and heads side by side.

What a query sees is in `masks_heed.py`. In place of `eager_attention`, which is equation 1 as written, other functions
can compute the same: `kernels_heed.py`.

Letters in shape comments: B batch, Q and K lengths of queries and keys, H heads.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.cache_utils import EncoderDecoderCache
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs

from .configuration_heed import HeedConfig
from .fast_paths_heed import Packing, Tokens, project, project_together
from .kernels_heed import attention_function, check_flex_attention
from .masks_heed import WindowedMask, neighbourhood_attention
from .packed_rows_heed import EndToEnd, packed_attention
from .positions_heed import RelativeKeys, RelativeValues, RotaryPositions
from .versions_heed import given_cache

# Equation 1, and the additive score


def eager_attention(
    module: "HeedAttention",
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute Attention(Q, K, V) = softmax(QKᵀ/√d_k) V (equation 1) as written, or with the additive score.

    As every attention function of transformers it takes `(batch, heads, length, width)` queries, keys and values (of
    fewer heads where groups share them), a mask `(batch, 1, Q, K)` that is added to the scores, `dropout` and
    `scaling`; with relative positions also the `position_bias` or `distances` of `positions_heed.py`. It returns the
    output `(batch, Q, heads, d_v)` and the weights `(batch, heads, Q, K)`.
    """
    if module.num_key_value_groups > 1:
        key = key.repeat_interleave(module.num_key_value_groups, dim=1)
        value = value.repeat_interleave(module.num_key_value_groups, dim=1)
    if module.additive_score is not None:
        scores = module.additive_score(query, key)
    else:
        query = query * kwargs["scaling"]
        scores = torch.matmul(query, key.transpose(2, 3))
    if module.relative_keys is not None:
        scores = scores + module.relative_keys(query, kwargs["distances"])
    if kwargs.get("position_bias") is not None:
        scores = scores + kwargs["position_bias"]
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = F.softmax(scores, dim=-1)
    dropped = F.dropout(weights, p=kwargs["dropout"], training=module.training)
    output = torch.matmul(dropped, value)
    if module.relative_values is not None:
        output = output + module.relative_values(dropped, kwargs["distances"])
    return output.transpose(1, 2), weights


class AdditiveScore(nn.Module):
    """Score vᵀ tanh(q + k) of each query and key (Bahdanau et al., 2015); q and k are already projected."""

    def __init__(self, heads: int, d_k: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, d_k))

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Score `(batch, heads, Q, d_k)` queries against `(batch, heads, K, d_k)` keys: `(batch, heads, Q, K)`."""
        activations = torch.tanh(query[:, :, :, None] + key[:, :, None])  # (B, H, Q, K, d_k)
        return torch.einsum("bhqkd,hd->bhqk", activations, self.weight)


# Multi-head attention, section 3.2.2


class HeedAttention(nn.Module):
    """Multi-head attention: h heads side by side, concatenated and projected (section 3.2.2).

    The heads are those of `stack`, `encoder` or `decoder`. Where `is_causal`, a position sees only itself and earlier
    ones (section 3.2.3). Where `is_cross`, it is attention to the source, which has no relative positions.
    """

    def __init__(self, config: HeedConfig, stack: str, is_causal: bool = False, is_cross: bool = False):
        super().__init__()
        heads = getattr(config, f"{stack}_attention_heads")
        key_value_heads = getattr(config, f"{stack}_key_value_heads") or heads
        self.config = config
        self.is_causal = is_causal
        self.d_k = config.d_k or config.d_model // heads
        self.d_v = config.d_v or config.d_model // heads
        self.num_key_value_groups = heads // key_value_heads
        self.scaling = self.d_k**-0.5 if config.attention_scoring == "scaled_dot" else 1.0
        self.dropout = config.attention_dropout
        self.q_proj = nn.Linear(config.d_model, heads * self.d_k, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.d_model, key_value_heads * self.d_k, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.d_model, key_value_heads * self.d_v, bias=config.attention_bias)
        self.out_proj = nn.Linear(heads * self.d_v, config.d_model, bias=config.attention_bias)
        self.additive_score = AdditiveScore(heads, self.d_k) if config.attention_scoring == "additive" else None
        self.rotary = RotaryPositions() if config.position_encoding == "rotary" else None
        has_vectors = config.position_encoding == "shaw" and not is_cross
        self.relative_keys = RelativeKeys(config, self.d_k) if has_vectors else None
        self.relative_values = RelativeValues(config, self.d_v) if has_vectors else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        key_value_states: torch.Tensor | None = None,
        cache: EncoderDecoderCache | None = None,
        positions: torch.Tensor | None = None,
        attn_implementation: str = "eager",
        packing: Packing | None = None,
        relative: torch.Tensor | None = None,
        layer_idx: int = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from `(batch, query_length, d_model)` states to themselves, or to `key_value_states` where given.

        Those are the encoder's output, `(sources, source_length, d_model)`, see `HeedDecoder`. The mask is as the
        attention function of that name takes it, or a `WindowedMask`; `(batch, query_length)` positions are read where
        they are rotary; `packing` says which tokens the states are; `relative` is what `RelativePositions` returns;
        `layer_idx` is the layer's number in the cache. Weights are returned if the attention function returns them.
        """
        cache = given_cache(cache, kwargs)
        attend = attention_function(attn_implementation, eager_attention, hidden_states.device)
        tokens, source_tokens = (None, None) if packing is None else (packing.states, packing.source)
        if key_value_states is None:
            query, key, value = self.project_own(hidden_states, cache, positions, tokens, layer_idx)
        else:
            query = self.split_heads(project(hidden_states, self.q_proj), self.d_k, tokens)
            key, value = self.project_source(key_value_states, cache, source_tokens, layer_idx)
        if isinstance(tokens, EndToEnd):
            sides = tokens, tokens if key_value_states is None else source_tokens
            attend = functools.partial(packed_attention, sides=sides)
        if relative is not None:
            name = "position_bias" if self.relative_keys is None else "distances"
            attend = functools.partial(attend, **{name: relative.expand(query.shape[0], *relative.shape[1:])})
        if isinstance(attention_mask, WindowedMask):
            attend = functools.partial(neighbourhood_attention, attend)
        dropout = self.dropout if self.training else 0.0
        if attn_implementation == "flex_attention":
            check_flex_attention(query, dropout)
        sharing = 1  # targets of each source, which ask it together
        if query.shape[0] != key.shape[0]:
            sharing = query.shape[0] // key.shape[0]
            query = query.unflatten(0, (-1, sharing)).transpose(1, 2).flatten(2, 3)  # (sources, H, sharing · Q, d_k)
        output, weights = attend(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )  # (sources, sharing · Q, H, d_v)
        if sharing > 1 and weights is not None:
            weights = weights.unflatten(2, (sharing, -1)).transpose(1, 2).flatten(0, 1)  # (B, H, Q, K)
        if tokens is not None:
            output = tokens.pack(output.flatten(2))
        return project(output.reshape(*hidden_states.shape[:-1], -1), self.out_proj), weights

    def split_heads(self, states: torch.Tensor, width: int, tokens: Tokens | None = None) -> torch.Tensor:
        """Lay out `(batch, length, heads · width)` as `(batch, heads, length, width)`, with the padding back."""
        if tokens is not None:
            states = tokens.unpack(states)
        # -1 heads, not h: under tensor parallelism each process holds a share of them.
        return states.view(*states.shape[:-1], -1, width).transpose(1, 2)  # (B, H, length, width)

    def project_own(
        self,
        states: torch.Tensor,
        cache: EncoderDecoderCache | None,
        positions: torch.Tensor | None,
        tokens: Tokens | None,
        layer_idx: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project queries, keys and values of a stack's own states; keys and values of earlier steps are added."""
        query, key, value = project_together(states, self.q_proj, self.k_proj, self.v_proj)
        query, key = (self.split_heads(projected, self.d_k, tokens) for projected in (query, key))
        value = self.split_heads(value, self.d_v, tokens)
        if self.rotary is not None:
            query, key = self.rotary(query, positions), self.rotary(key, positions)
        if cache is not None:
            key, value = cache.self_attention_cache.update(key, value, layer_idx)
        return query, key, value

    def project_source(
        self, states: torch.Tensor, cache: EncoderDecoderCache | None, tokens: Tokens | None, layer_idx: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Project keys and values of the source, or take from the cache what an earlier step projected."""
        if cache is not None and cache.is_updated.get(layer_idx):
            layer: Any = cache.cross_attention_cache.layers[layer_idx]
            if layer.keys.device != states.device:  # an offloaded cache
                return layer.keys.to(states.device), layer.values.to(states.device)
            return layer.keys, layer.values
        key, value = project_together(states, self.k_proj, self.v_proj)
        key, value = self.split_heads(key, self.d_k, tokens), self.split_heads(value, self.d_v, tokens)
        if cache is None:
            return key, value
        cache.is_updated[layer_idx] = True
        return cache.cross_attention_cache.update(key, value, layer_idx)
