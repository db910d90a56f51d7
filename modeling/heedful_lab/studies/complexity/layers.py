"""The layers that Table 1 compares, each a module that transforms `(batch, length, d_model)`.

Self-attention is that of the model. The convolutional block is that of *Convolutional Sequence to Sequence
Learning* (Gehring et al., 2017), with which *Attention Is All You Need* compares.

Letters in shape comments: B batch, D = d_model.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import create_bidirectional_mask

from heedful.attending_heed import Call, attention_function, neighbourhood_mask, windowed_mask
from heedful.attention_heed import HeedAttention
from heedful.configuration_heed import HeedConfig
from heedful_lab.studies.complexity.counts import CellKind, Sizes

HALF_VARIANCE = math.sqrt(0.5)  # keeps the variance of a sum of two as large as that of each (section 3.5)


class SelfAttentionLayer(nn.Module):
    """Multi-head self-attention as in Heed's encoder (section 3.2), its mask included; no feed-forward network.

    A neighbourhood (restricted self-attention, section 4) is computed in blocks, as Heed does it, or by a mask of all
    pairs of positions. The kernel is `sdpa`, or `eager`, which is equation 1 as written, or with additive scores.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        neighbourhood: int | None = None,
        in_windows: bool = True,
        kernel: str = "sdpa",
        scoring: Literal["scaled_dot", "additive"] = "scaled_dot",
    ):
        super().__init__()
        self.config = HeedConfig(
            d_model=d_model,
            encoder_attention_heads=heads,
            decoder_attention_heads=heads,
            encoder_neighbourhood=neighbourhood,
            attention_scoring=scoring,
            position_encoding="none",
        )
        self.config._attn_implementation = kernel
        self.kernel = kernel
        self.in_windows = in_windows
        self.attention = HeedAttention(self.config, "encoder")

    def forward(self, states: Tensor) -> Tensor:
        """Transform `(batch, length, d_model)`."""
        radius = self.config.encoder_neighbourhood
        mask: Any = None
        if radius is not None and self.in_windows:
            tokens = torch.ones(states.shape[:2], device=states.device)
            mask = windowed_mask(tokens, radius, False, torch.bool if self.kernel == "sdpa" else states.dtype)
        elif radius is not None:
            seen = neighbourhood_mask(radius)
            mask = create_bidirectional_mask(self.config, states, attention_mask=None, and_mask_function=seen)
        function = attention_function(self.kernel, states.device)
        return self.attention(states, Call(function, mask))[0]


class RecurrentLayer(nn.Module):
    """A recurrent layer that reads from left to right, by torch's own cells."""

    def __init__(self, d_model: int, cell: CellKind = "lstm"):
        super().__init__()
        self.cells = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}[cell](d_model, d_model, batch_first=True)

    def forward(self, states: Tensor) -> Tensor:
        """Transform `(batch, length, d_model)`."""
        return self.cells(states)[0]


class ConvolutionalLayer(nn.Module):
    """A gated convolution in a residual connection: (x + A ⊙ σ(B))·√0.5, A and B the halves of what it computes.

    It looks at `kernel_width` positions, `dilation` apart: to both sides as in an encoder, or back alone if
    `is_causal`, as in a decoder (Gehring et al., sections 3.2, 3.3). Weights are drawn so that the variance stays
    (section 3.5); the paper's weight normalization is `torch.nn.utils.parametrizations.weight_norm` of `convolution`.
    """

    def __init__(self, d_model: int, kernel_width: int, dilation: int = 1, is_causal: bool = False):
        super().__init__()
        reach = dilation * (kernel_width - 1)
        self.padding = (reach, 0) if is_causal else (reach // 2, reach // 2)
        self.convolution = nn.Conv1d(d_model, 2 * d_model, kernel_width, dilation=dilation)
        nn.init.normal_(self.convolution.weight, std=math.sqrt(4 / (kernel_width * d_model)))
        nn.init.zeros_(self.convolution.get_parameter("bias"))

    def forward(self, states: Tensor) -> Tensor:
        """Transform `(batch, length, d_model)`."""
        channels = F.pad(states.transpose(1, 2), self.padding)  # (B, D, length + padding)
        return (states + F.glu(self.convolution(channels), dim=1).transpose(1, 2)) * HALF_VARIANCE


def make_layer(kind: str, sizes: Sizes, kernel: str = "sdpa", depth: int = 0) -> nn.Module:
    """Make a layer of a kind, in evaluation mode.

    Kinds are those of Table 1, `plain` and `masked`, which compute attention with every pair of positions in memory,
    `additive`, which is `plain` with Bahdanau's score, and `causal` and `dilated` convolutions, as a decoder has them.
    The kernel computes attention where the kind does not say; with the depth in the stack, from 0, dilation grows
    k-fold.
    """
    width, heads, radius, k = sizes.d_model, sizes.heads, sizes.neighbourhood, sizes.kernel_width
    makers: dict[str, Callable[[], nn.Module]] = {
        "self_attention": lambda: SelfAttentionLayer(width, heads, kernel=kernel),
        "restricted": lambda: SelfAttentionLayer(width, heads, radius, kernel=kernel),
        "recurrent": lambda: RecurrentLayer(width, sizes.cell),
        "convolutional": lambda: ConvolutionalLayer(width, k),
        "plain": lambda: SelfAttentionLayer(width, heads, kernel="eager"),
        "additive": lambda: SelfAttentionLayer(width, heads, kernel="eager", scoring="additive"),
        "masked": lambda: SelfAttentionLayer(width, heads, radius, in_windows=False, kernel=kernel),
        "causal": lambda: ConvolutionalLayer(width, k, is_causal=True),
        "dilated": lambda: ConvolutionalLayer(width, k, k**depth, is_causal=True),
    }
    return makers[kind]().eval()
