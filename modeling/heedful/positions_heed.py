"""Positions (section 3.5 of *Attention Is All You Need*): the paper's sinusoids, and later relative positions.

The relative ones are `RotaryPositions`; `RelativeKeys` and `RelativeValues` (Shaw et al., "Self-Attention with
Relative Position Representations", 2018), which a layer's heads share; and `RelativeBias` (T5).

Letters in shape comments: B batch (1 for equal positions), Q and K lengths of queries and keys, H heads, D = d_model.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers.cache_utils import Cache

from .configuration_heed import RELATIVE_ENCODINGS, HeedConfig


def sinusoids(positions: torch.Tensor, width: int, layout: str) -> torch.Tensor:
    """Return sines and cosines of positions at geometric wavelengths (section 3.5), float32, `(*shape, width)`.

    The layout `interleaved` alternates sines and cosines. The others put all sines first, `tensor2tensor` with
    wavelengths up to 10000·2π, `concatenated` to just below it.
    """
    even = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32)  # 2i
    span = width - 2 if layout == "tensor2tensor" else width
    angles = positions.to(torch.float32)[..., None] * torch.exp(even * (-math.log(10000.0) / span))
    waves = angles.sin(), angles.cos()
    return torch.stack(waves, dim=-1).flatten(-2) if layout == "interleaved" else torch.cat(waves, dim=-1)


class SinusoidalPositions(nn.Module):
    """PE(pos, 2i) = sin(pos / 10000^(2i/d_model)) and PE(pos, 2i+1) = cos(...) (section 3.5)."""

    def __init__(self, config: HeedConfig):
        super().__init__()
        self.width = config.d_model
        self.layout = config.sinusoid_layout
        self.offset = config.position_offset

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """Encode `(B, length)` positions as `(B, length, D)`."""
        return sinusoids(positions + self.offset, self.width, self.layout)


class RotaryPositions(nn.Module):
    """Rotates pairs of query and key features by angles that grow with the position (Su et al., 2021)."""

    def forward(self, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate `(B, H, length, d_k)` queries or keys at `(B, length)` positions."""
        waves = sinusoids(positions, states.shape[-1], "interleaved").to(states.dtype)[:, None]  # (B, 1, length, d_k)
        sine, cosine = waves[..., 0::2], waves[..., 1::2]
        even, odd = states[..., 0::2], states[..., 1::2]
        rotated = even * cosine - odd * sine, even * sine + odd * cosine
        return torch.stack(rotated, dim=-1).flatten(-2)


def positions_of(
    length: int, past_length: int | torch.Tensor, attention_mask: torch.Tensor | None, device: torch.device | str
) -> torch.Tensor:
    """Return the `(B, length)` positions of the newest tokens, not counting padding; `(1, length)` without a mask."""
    if attention_mask is None or attention_mask.dim() != 2:
        return (torch.arange(length, device=device) + past_length)[None]
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:].to(device)


# Relative positions

SHAW_MAX_DISTANCE, T5_MAX_DISTANCE, T5_BUCKETS = 16, 128, 32  # the papers' defaults


class RelativeVectors(nn.Module):
    """A vector for each distance from -k to k."""

    def __init__(self, config: HeedConfig, width: int):
        super().__init__()
        self.max_distance = config.relative_attention_max_distance or SHAW_MAX_DISTANCE
        self.weight = nn.Parameter(torch.empty(2 * self.max_distance + 1, width))

    def rows(self, distances: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return the row in `weight` for `(B, Q, K)` distances and each of the states' heads: `(B, H, Q, K)`."""
        numbers = distances.clamp(-self.max_distance, self.max_distance) + self.max_distance
        return numbers[:, None].expand(*states.shape[:3], -1)


class RelativeKeys(RelativeVectors):
    """The vectors a^K in equation 4."""

    def forward(self, query: torch.Tensor, distances: torch.Tensor) -> torch.Tensor:
        """Return q·a^K for `(B, H, Q, d_k)` queries, to add to the scores `(B, H, Q, K)`."""
        scores = torch.matmul(query, self.weight.t())  # (B, H, Q, 2k + 1)
        return scores.gather(3, self.rows(distances, query))


class RelativeValues(RelativeVectors):
    """The vectors a^V in equation 3."""

    def forward(self, weights: torch.Tensor, distances: torch.Tensor) -> torch.Tensor:
        """Average a^V with `(B, H, Q, K)` weights, to add to the output `(B, H, Q, d_v)`."""
        # Not in 16 bits, to which a GPU would round after each of many small weights.
        precise = weights.to(torch.promote_types(weights.dtype, torch.float32))
        by_row = precise.new_zeros(*weights.shape[:3], len(self.weight))
        by_row = by_row.scatter_add(3, self.rows(distances, weights), precise)  # (B, H, Q, 2k + 1)
        return torch.matmul(by_row.to(weights.dtype), self.weight)


class RelativeBias(nn.Module):
    """The bias that T5 (Raffel et al., 2020) adds to scores, one for each head and bucket of distances.

    Small distances have a bucket each, larger ones share logarithmic buckets. In the encoder half of the buckets are
    for later keys, which the decoder does not see.
    """

    def __init__(self, config: HeedConfig, side: str):
        super().__init__()
        self.looks_ahead = side == "encoder"
        self.max_distance = config.relative_attention_max_distance or T5_MAX_DISTANCE
        heads, layers = (getattr(config, f"{side}_{part}") for part in ("attention_heads", "layers"))
        # One layer's heads after another's.
        columns = heads * layers if config.relative_bias_in_each_layer else heads
        self.weight = nn.Parameter(torch.empty(T5_BUCKETS, columns))

    def buckets(self, distances: torch.Tensor) -> torch.Tensor:
        """Return each distance's bucket, in the same shape."""
        count = len(self.weight) // (2 if self.looks_ahead else 1)
        exact = count // 2  # buckets with one distance each
        away = distances.abs() if self.looks_ahead else -distances.clamp(max=0)
        growth = torch.log(away.clamp(min=exact).float() / exact) / math.log(self.max_distance / exact)
        shared = exact + (growth * (count - exact)).long()
        bucket = torch.where(away < exact, away, shared.clamp(max=count - 1))
        return bucket + count * (distances > 0) if self.looks_ahead else bucket

    def forward(self, distances: torch.Tensor) -> torch.Tensor:
        """Return the bias `(B, H, Q, K)` for `(B, Q, K)` distances; H may be all layers' heads."""
        return F.embedding(self.buckets(distances), self.weight).permute(0, 3, 1, 2).contiguous()


class RelativePositions(nn.Module):
    """Relative positions, if any, for self-attention in all layers."""

    def __init__(self, config: HeedConfig, side: str):
        super().__init__()
        self.encoding = config.position_encoding
        self.heads_of_a_layer = (
            getattr(config, f"{side}_attention_heads") if config.relative_bias_in_each_layer else None
        )
        self.bias = RelativeBias(config, side) if self.encoding == "t5" else None

    def forward(
        self, positions: torch.Tensor, attention_mask: torch.Tensor | None, cache: Cache | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        """Return `shaw`'s distances, `(B, Q, K)`, `t5`'s bias, `(B, H, Q, K)`, or `None`: one for all layers, or each.

        A distance counts the tokens from a query, at `(B, Q)` positions, to a key; to earlier keys it is negative.
        """
        if self.encoding not in RELATIVE_ENCODINGS:
            return (None,)
        query_length = positions.shape[1]
        key_length = query_length if cache is None else cache.get_mask_sizes(query_length, 0)[0]
        keys = positions_of(key_length, 0, attention_mask, positions.device)
        keys = F.pad(keys, (0, key_length - keys.shape[1]))
        distances = keys[:, None] - positions[:, :, None]
        return (distances,) if self.bias is None else self.of_layers(self.bias(distances))

    def of_layers(self, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split a bias's heads by layers, unless all layers share it."""
        return (bias,) if self.heads_of_a_layer is None else bias.split(self.heads_of_a_layer, dim=1)
