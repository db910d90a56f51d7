"""Attention (section 3.2 of *Attention Is All You Need*): equation 1, the additive score, and multiple heads.

Masks, and kernels that compute the same as `eager_attention`, are in `attending_heed.py`.

Letters in shape comments: B batch, Q and K lengths of queries and keys, H heads, D = d_model.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from .attending_heed import AS_WRITTEN, Call
from .configuration_heed import HeedConfig
from .fast_paths_heed import project, project_together
from .packed_rows_heed import Layout
from .positions_heed import RelativeKeys, RelativeValues, RotaryPositions

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

    Like all attention functions in transformers, it takes `(B, H, length, width)` queries, keys and values (with fewer
    heads if groups share them), a mask `(B, 1, Q, K)` to add to the scores, `dropout` and `scaling`. Relative
    positions add a `position_bias` or `distances`. It returns output `(B, Q, H, d_v)` and weights `(B, H, Q, K)`.
    """
    if module.num_key_value_groups > 1:
        key = key.repeat_interleave(module.num_key_value_groups, dim=1)
        value = value.repeat_interleave(module.num_key_value_groups, dim=1)
    if module.additive_score is not None:
        scores = module.additive_score(query, key)
    else:
        query = query * kwargs["scaling"]
        scores = torch.matmul(query, key.transpose(2, 3))  # (B, H, Q, K)
    if module.relative_keys is not None:
        scores = scores + module.relative_keys(query, kwargs["distances"])
    if kwargs.get("position_bias") is not None:
        scores = scores + kwargs["position_bias"]
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = F.softmax(scores, dim=-1)
    dropped = F.dropout(weights, p=kwargs["dropout"], training=module.training)
    output = torch.matmul(dropped, value)  # (B, H, Q, d_v)
    if module.relative_values is not None:
        output = output + module.relative_values(dropped, kwargs["distances"])
    return output.transpose(1, 2), weights


class AdditiveScore(nn.Module):
    """Score vᵀ tanh(q + k) of projected queries and keys (Bahdanau et al., 2015)."""

    def __init__(self, heads: int, d_k: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, d_k))

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Score `(B, H, Q, d_k)` queries against `(B, H, K, d_k)` keys: `(B, H, Q, K)`."""
        activations = torch.tanh(query[:, :, :, None] + key[:, :, None])  # (B, H, Q, K, d_k)
        return torch.einsum("bhqkd,hd->bhqk", activations, self.weight)


# Multi-head attention, section 3.2.2


class HeedAttention(nn.Module):
    """Multi-head attention: h heads, concatenated and projected (section 3.2.2).

    If `is_causal`, a position sees only itself and earlier ones (section 3.2.3). If `is_cross`, it attends to the
    source, without relative positions.
    """

    as_written = staticmethod(eager_attention)

    def __init__(self, config: HeedConfig, stack: str, is_causal: bool = False, is_cross: bool = False):
        super().__init__()
        heads = getattr(config, f"{stack}_attention_heads")
        key_value_heads = getattr(config, f"{stack}_key_value_heads") or heads
        self.config = config
        self.is_causal, self.is_cross = is_causal, is_cross
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

    def forward(self, x: torch.Tensor, call: Call = AS_WRITTEN) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from `(B, Q, D)` states to themselves or the call's source; weights may be `(B, H, Q, K)`."""
        query, key, value = self.project_source(x, call) if self.is_cross else self.project_own(x, call)
        output, weights = call.attend(self, query, key, value)  # (B, Q, H, d_v)
        return project(call.layout.pack(output.flatten(2)), self.out_proj), weights

    def split_heads(self, states: torch.Tensor, width: int, layout: Layout) -> torch.Tensor:
        """Lay out `(B, length, H · width)` as `(B, H, length, width)`, with padding restored."""
        states = layout.unpack(states)
        # -1 heads, not h: under tensor parallelism each process holds some of them.
        return states.view(*states.shape[:-1], -1, width).transpose(1, 2)  # (B, H, length, width)

    def project_own(self, x: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project the stack's own states to queries, keys and values, and prepend keys and values of earlier steps."""
        query, key, value = project_together(x, self.q_proj, self.k_proj, self.v_proj)
        query, key = (self.split_heads(projected, self.d_k, call.layout) for projected in (query, key))
        value = self.split_heads(value, self.d_v, call.layout)
        if self.rotary is not None:
            query, key = self.rotary(query, call.positions), self.rotary(key, call.positions)
        if call.cache is not None:
            key, value = call.cache.self_attention_cache.update(key, value, call.number)
        return query, key, value

    def project_source(self, x: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project queries, and the source's keys and values unless the cache has them."""
        query = self.split_heads(project(x, self.q_proj), self.d_k, call.layout)
        cache, source = call.cache, cast(torch.Tensor, call.source)
        if cache is not None and cache.is_updated.get(call.number):
            layer: Any = cache.cross_attention_cache.layers[call.number]
            if layer.keys.device != x.device:  # an offloaded cache
                return query, layer.keys.to(x.device), layer.values.to(x.device)
            return query, layer.keys, layer.values
        key, value = project_together(source, self.k_proj, self.v_proj)
        key = self.split_heads(key, self.d_k, call.source_layout)
        value = self.split_heads(value, self.d_v, call.source_layout)
        if cache is not None:
            cache.is_updated[call.number] = True
            key, value = cache.cross_attention_cache.update(key, value, call.number)
        return query, key, value
