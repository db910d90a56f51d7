"""Layouts for a batch's rows: padded to one length, without padding, or end to end.

On the CPU a training step computes padding only in attention. On a GPU a batch may be one long row of tokens,
`(1, N)`, in which flash attention's varlen form keeps sentences apart. N is a multiple of some large number, so that
few shapes occur. `laid_end_to_end` makes such batches.

Letters in shape comments: B batch, N tokens in all rows, with filling, D = d_model, H heads.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .configuration_base_heed import IGNORED_LABEL, HeedBaseConfig
from .fast_paths_heed import filled, has_observers

# Encodings that need only the packed row's positions.
PACKED_ENCODINGS = ("sinusoidal", "rotary", "none")
WIDEST_HEAD = 256  # of flash attention, whose head widths are multiples of 8
# A window that restricts nothing: without one torch 2.14 takes cuDNN's attention on Hopper even if cuDNN is disabled,
# and cuDNN plans every new shape.
UNRESTRICTED = 2**20


class Layout:
    """The layout of `(B, length, D)` states within a stack's layers: here unchanged, with padding."""

    def fits(self, states: torch.Tensor) -> bool:
        """Return whether `(B, length, D)` states have the layout's size."""
        return True

    def pack(self, states: torch.Tensor) -> torch.Tensor:
        """Lay out `(B, length, D)` states for the layers."""
        return states

    def unpack(self, states: torch.Tensor) -> torch.Tensor:
        """Lay out the layers' states as `(B, length, D)` again."""
        return states


PADDED = Layout()


class UniqueRows(torch.autograd.Function):
    """Takes some of the states' rows; rows not taken exactly once must have gradient zero."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, taken: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        """Return the rows `taken` of `(rows, D)` states; `inverse` restores the states."""
        ctx.save_for_backward(taken, inverse)
        return states.index_select(0, taken)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return the gradient of the states, itself differentiable."""
        taken, inverse = ctx.saved_tensors
        return UniqueRows.apply(gradient, inverse, taken), None, None


class PackedTokens(Layout):
    """A padded batch's tokens in one row, filled up with padding positions, whose gradient must be zero."""

    def __init__(self, tokens: torch.Tensor):
        flat = tokens.flatten()
        count = int(flat.sum())
        self.shape = tokens.shape
        fillers = flat.logical_not().nonzero()[: filled(count + 1) - count, 0]
        self.numbers = torch.cat([flat.nonzero()[:, 0], fillers])  # (N)
        self.inverse = (flat.cumsum(0) - 1).masked_fill_(~flat, count)  # (batch · length)

    def fits(self, states: torch.Tensor) -> bool:
        """Return whether the states have the layout's numbers of rows and positions."""
        return self.shape == states.shape[:2]

    def pack(self, states: torch.Tensor) -> torch.Tensor:
        """Lay out `(B, length, D)` as `(1, N, D)`."""
        return UniqueRows.apply(states.flatten(0, 1), self.numbers, self.inverse).unsqueeze(0)

    def unpack(self, states: torch.Tensor) -> torch.Tensor:
        """Lay out `(1, N, D)` as `(B, length, D)`."""
        return UniqueRows.apply(states.flatten(0, 1), self.inverse, self.numbers).unflatten(0, self.shape)


LEAST_PADDING = 0.03  # share of positions; with less, packing costs more time than it saves


def packed_tokens(tokens: torch.Tensor | None) -> Layout:
    """Pack `(B, length)` tokens, or return `PADDED` if that is faster."""
    if tokens is None or tokens.dim() != 2:
        return PADDED
    tokens = tokens != 0
    has_tokens = tokens.any(1).all()  # a row without tokens attends to all its padding
    return PackedTokens(tokens) if has_tokens and tokens.float().mean() < 1 - LEAST_PADDING else PADDED


@dataclass(frozen=True)
class EndToEnd(Layout):
    """A batch's rows end to end, `(1, N, D)`."""

    bounds: torch.Tensor  # (rows + 1), int32: each row's first token, and the last row's end
    positions: torch.Tensor  # (1, N)
    longest: int  # the longest row's number of tokens, or more

    def fits(self, states: torch.Tensor) -> bool:
        """Return whether the states have the layout's number of tokens."""
        return self.positions.shape == states.shape[:2]

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "EndToEnd":
        """Return the layout with its tensors moved."""
        return EndToEnd(move(self.bounds), move(self.positions), self.longest)


@dataclass(frozen=True)
class Packing:
    """A batch's layouts, for a step that uses only the loss and differentiates it once."""

    states: Layout = PADDED  # of the target
    source: Layout = PADDED

    def of(self, side: str, states: torch.Tensor) -> Layout:
        """Return the layout for one side's `(B, length, D)` states."""
        layout = self.source if side == "encoder" else self.states
        return layout if layout.fits(states) else PADDED


ALL_PADDED = Packing()


def packing_of(model: Any, inputs: Mapping[str, Any], labels: torch.Tensor) -> Packing | None:
    """Return the packing for a Transformer's step on the CPU, or `None` if its states may be observed."""
    if model.lm_head.weight.device.type != "cpu" or has_observers(model, inputs):
        return None
    needed = needed_targets(labels, inputs.get("decoder_attention_mask"))
    return None if needed is None else Packing(packed_tokens(needed), packed_tokens(inputs.get("attention_mask")))


def needed_targets(labels: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return `(B, length)`, True for targets with a label and for targets that they see; `None` if unknown."""
    predicted = labels != IGNORED_LABEL
    needed = predicted.long().flip(1).cumsum(1).flip(1) > 0
    if attention_mask is None:
        return needed
    return needed & (predicted | (attention_mask != 0)) if attention_mask.shape == labels.shape else None


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
    """Attend (equation 1) within each row, with `(1, H, N, d_k)` queries, keys and values: `(1, N, H, d_v)`.

    `sides` are the layouts for queries, and for keys and values.
    """
    # Not at import: older torch versions, which also load models from the Hub, lack it.
    from torch.nn.attention.varlen import varlen_attn

    states = [each[0].transpose(0, 1) for each in (query, key, value)]  # (N, H, d_k)
    arguments: Any = *states, *(side.bounds for side in sides), *(side.longest for side in sides)
    window = (-1, 0) if module.is_causal else (UNRESTRICTED, UNRESTRICTED)
    output: Any = varlen_attn(*arguments, scale=scaling, window_size=window)
    return output[None], None


def why_padded(config: HeedBaseConfig, kernel: str) -> str | None:
    """Return why rows must be padded, or `None` if they may lie end to end."""
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
        "flash attention needs one width for all heads, a multiple of 8 up to 256": is_uneven,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
