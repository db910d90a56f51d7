"""Where in its sequence each token is, and how the model learns of it (section 3.5 of *Attention Is All You Need*).

Letters in shape comments: B batch.
"""

import math
from typing import Any

import torch
from torch import nn

from .configuration_heed import HeedConfig


def sinusoids(positions: torch.Tensor, width: int, layout: str) -> torch.Tensor:
    """Sine and cosine of each position at geometrically growing wavelengths (section 3.5), in float32.

    Nothing is stored, so the encoding extends to any length, whatever the dtype of the model. Positions of any shape
    become `(*shape, width)`; the width is even. The layout `interleaved` puts sine 2i beside cosine 2i+1; the others
    put all sines first, `tensor2tensor` with wavelengths that grow up to 10000·2π, `concatenated` to just below it.
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
        """Encode `(batch, length)` positions as `(batch, length, d_model)`."""
        return sinusoids(positions + self.offset, self.width, self.layout)


class RotaryPositions(nn.Module):
    """Rotates each pair of query and key features by an angle that grows with the position (Su et al., 2021)."""

    def forward(self, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate `(batch, heads, length, d_k)` queries or keys at `(batch, length)` positions."""
        waves = sinusoids(positions, states.shape[-1], "interleaved").to(states.dtype)[:, None]  # (B, 1, length, d_k)
        sine, cosine = waves[..., 0::2], waves[..., 1::2]
        even, odd = states[..., 0::2], states[..., 1::2]
        rotated = even * cosine - odd * sine, even * sine + odd * cosine
        return torch.stack(rotated, dim=-1).flatten(-2)


def positions_of(
    length: int,
    past_length: int | torch.Tensor,
    attention_mask: torch.Tensor | None,
    device: torch.device | str,
    tokens: Any = None,
) -> torch.Tensor:
    """Return the `(batch, length)` positions of the newest tokens, padding on either side not counted.

    The mask is `(batch, past_length + length)`, 0 at padding; where it is anything else every token is counted, and
    `(1, length)` numbers all sequences alike. Tokens of a packing may know them.
    """
    if tokens is not None and tokens.positions is not None:
        return tokens.positions
    if attention_mask is None or attention_mask.dim() != 2:
        return (torch.arange(length, device=device) + past_length)[None]
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:].to(device)
