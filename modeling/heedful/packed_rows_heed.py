"""Rows laid end to end, without padding: how a GPU trains where it can.

A batch is one long row of tokens then, `(1, tokens)`, and a form of flash attention keeps each sentence to itself.
Tokens are filled up to a multiple of a large step, so that few shapes recur. `laid_end_to_end` makes the batch.

Letters in shape comments: N tokens of all rows with what fills them up, H heads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .configuration_base_heed import HeedBaseConfig

# The encodings that need no more than the positions of a packed row.
PACKED_ENCODINGS = ("sinusoidal", "rotary", "none")
WIDEST_HEAD = 256  # of flash attention, whose heads are multiples of 8 wide
# As a window to either side it restricts nothing. Without a window torch 2.14 takes cuDNN's attention on Hopper, which
# makes a plan for every new shape, be it switched off or not.
UNRESTRICTED = 2**20


@dataclass(frozen=True)
class EndToEnd:
    """One side of a batch whose rows lie end to end: a `Packing` has it in place of `PackedTokens`."""

    bounds: torch.Tensor  # (rows + 1), int32: the first token of each row, and the end of the last
    positions: torch.Tensor  # (1, N)
    longest: int  # no row has more tokens

    @property
    def shape(self) -> torch.Size:
        """The shape of the states' first two dimensions, `(1, N)`."""
        return self.positions.shape

    def pack(self, states: torch.Tensor) -> torch.Tensor:
        """Return `(1, N, D)` states as they are."""
        return states

    unpack = pack

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "EndToEnd":
        """Return the same with its tensors moved elsewhere."""
        return EndToEnd(move(self.bounds), move(self.positions), self.longest)


def packed_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    sides: tuple[Any, Any],
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention (equation 1) within each row, of `(1, heads, N, d_k)` queries, keys and values.

    `sides` are those of the queries, and of keys and values. The output is `(1, N, heads, d_v)`.
    """
    # Here, because it is newer than the oldest torch by which a model of the Hub may be loaded.
    from torch.nn.attention.varlen import varlen_attn

    states = [each[0].transpose(0, 1) for each in (query, key, value)]  # (N, H, d_k)
    arguments: Any = *states, *(side.bounds for side in sides), *(side.longest for side in sides)
    window = (-1, 0) if module.is_causal else (UNRESTRICTED, UNRESTRICTED)
    output: Any = varlen_attn(*arguments, scale=scaling, window_size=window)
    return output[None], None


def why_padded(config: HeedBaseConfig, kernel: str) -> str | None:
    """Return why rows of a model must be padded to one length, or `None` where they may lie end to end."""
    reads: Any = config
    if config.model_type != "heed":
        return "the model is recurrent"
    stacks = reads.encoder_attention_heads, reads.decoder_attention_heads
    widths = {given or reads.d_model // heads for heads in stacks for given in (reads.d_k, reads.d_v)}
    is_uneven = len(widths) > 1 or max(widths) > WIDEST_HEAD or max(widths) % 8
    reasons = {
        f"`position_encoding` is {reads.position_encoding}": reads.position_encoding not in PACKED_ENCODINGS,
        "self-attention is restricted to a neighbourhood": reads.encoder_neighbourhood or reads.decoder_neighbourhood,
        "`attention_dropout` is not 0": reads.attention_dropout,
        f"`attn_implementation` is {kernel}": kernel != "sdpa" or reads.attention_scoring == "additive",
        "heads share keys and values": reads.encoder_key_value_heads or reads.decoder_key_value_heads,
        "flash attention takes one width of all heads, a multiple of 8 up to 256": is_uneven,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
