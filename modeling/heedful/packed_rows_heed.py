"""The rows of a batch in memory: padded to one length, without padding, or end to end.

On the CPU a training step computes padding only in attention. On a GPU a batch may be one long row of tokens,
`(1, N)`, in which a form of flash attention keeps sentences apart; N is a multiple of a large step, so that few shapes
occur. `laid_end_to_end` makes such a batch.

Letters in shape comments: B batch, N tokens of all rows and their filling, D = d_model, H heads.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .configuration_base_heed import IGNORED_LABEL, HeedBaseConfig
from .fast_paths_heed import has_observers

# The encodings that need no more than the positions of a packed row.
PACKED_ENCODINGS = ("sinusoidal", "rotary", "none")
WIDEST_HEAD = 256  # of flash attention, whose heads are multiples of 8 wide
# A window that restricts nothing: without one torch 2.14 takes cuDNN's attention on Hopper, which plans every new
# shape, even if cuDNN is disabled.
UNRESTRICTED = 2**20


class Layout:
    """The layout of a stack's `(B, length, D)` states within its layers: here unchanged, with padding."""

    def fits(self, states: torch.Tensor) -> bool:
        """Return whether `(B, length, D)` states have the layout's size."""
        return True

    def pack(self, states: torch.Tensor) -> torch.Tensor:
        """Lay out `(B, length, D)` states for the layers."""
        return states

    def unpack(self, states: torch.Tensor) -> torch.Tensor:
        """Lay them out as `(B, length, D)` again."""
        return states


PADDED = Layout()


class UniqueRows(torch.autograd.Function):
    """Takes rows of a matrix; the gradient of rows not taken exactly once must be zero."""

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
    """The tokens of a padded batch in one row, with one position of padding, whose gradient must be zero."""

    def __init__(self, tokens: torch.Tensor):
        flat = tokens.flatten()
        count = int(flat.sum())
        self.shape = tokens.shape
        self.numbers = torch.cat([flat.nonzero()[:, 0], flat.logical_not().nonzero()[:1, 0]])  # (N + 1)
        self.inverse = (flat.cumsum(0) - 1).masked_fill_(~flat, count)  # (batch · length)

    def fits(self, states: torch.Tensor) -> bool:
        """Return whether the states have as many rows and positions as the layout."""
        return self.shape == states.shape[:2]

    def pack(self, states: torch.Tensor) -> torch.Tensor:
        """Lay out `(B, length, D)` as `(1, N + 1, D)`."""
        return UniqueRows.apply(states.flatten(0, 1), self.numbers, self.inverse).unsqueeze(0)

    def unpack(self, states: torch.Tensor) -> torch.Tensor:
        """Lay out `(1, N + 1, D)` as `(B, length, D)`."""
        return UniqueRows.apply(states.flatten(0, 1), self.inverse, self.numbers).unflatten(0, self.shape)


LEAST_PADDING = 0.03  # share of positions; with less, packing costs more time than it saves


def packed_tokens(tokens: torch.Tensor | None) -> Layout:
    """Return the packing of `(B, length)` tokens, or `PADDED` if that is faster."""
    if tokens is None or tokens.dim() != 2:
        return PADDED
    tokens = tokens != 0
    has_tokens = tokens.any(1).all()  # a row without tokens attends to all of its padding
    return PackedTokens(tokens) if has_tokens and tokens.float().mean() < 1 - LEAST_PADDING else PADDED


@dataclass(frozen=True)
class EndToEnd(Layout):
    """Rows of a batch end to end, `(1, N, D)`."""

    bounds: torch.Tensor  # (rows + 1), int32: the first token of each row, and the end of the last
    positions: torch.Tensor  # (1, N)
    longest: int  # no row has more tokens

    def fits(self, states: torch.Tensor) -> bool:
        """Return whether the states have as many tokens as the layout."""
        return self.positions.shape == states.shape[:2]

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "EndToEnd":
        """Return the layout with its tensors moved."""
        return EndToEnd(move(self.bounds), move(self.positions), self.longest)


@dataclass(frozen=True)
class Packing:
    """The layouts of a batch, for a step that reads the loss alone and differentiates once."""

    states: Layout = PADDED  # of the target
    source: Layout = PADDED

    def of(self, side: str, states: torch.Tensor) -> Layout:
        """Return the layout of a side's `(B, length, D)` states."""
        layout = self.source if side == "encoder" else self.states
        return layout if layout.fits(states) else PADDED


ALL_PADDED = Packing()


def packing_of(model: Any, inputs: Mapping[str, Any], labels: torch.Tensor) -> Packing | None:
    """Return the packing of a Transformer's step on the CPU, or `None` if its states may be observed."""
    if model.lm_head.weight.device.type != "cpu" or has_observers(model, inputs):
        return None
    needed = needed_targets(labels, inputs.get("decoder_attention_mask"))
    return None if needed is None else Packing(packed_tokens(needed), packed_tokens(inputs.get("attention_mask")))


def needed_targets(labels: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return `(B, length)`, true at targets with a label and at the targets that these see; `None` if unknown."""
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

    `sides` are the layouts of the queries, and of keys and values.
    """
    # Here, since older versions of torch, which load models from the Hub, lack it.
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
        "flash attention takes one width of all heads, a multiple of 8 up to 256": is_uneven,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
