"""The layers of Table 1 on `(batch, length, d_model)`; the convolutional block is Gehring et al.'s (2017)."""

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

HALF_VARIANCE = math.sqrt(0.5)  # keeps a sum's variance (section 3.5)


class SelfAttentionLayer(nn.Module):
    """Multi-head self-attention of Heed's encoder (section 3.2) with its mask, without the feed-forward network.

    Restricted self-attention (section 4) runs in blocks, or with a mask of all pairs. The kernel is `sdpa` or `eager`.
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
    """A recurrent layer from left to right, with torch's cells."""

    def __init__(self, d_model: int, cell: CellKind = "lstm"):
        super().__init__()
        self.cells = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}[cell](d_model, d_model, batch_first=True)

    def forward(self, states: Tensor) -> Tensor:
        """Transform `(batch, length, d_model)`."""
        return self.cells(states)[0]


class ConvolutionalLayer(nn.Module):
    """A gated convolution in a residual connection: (x + A ⊙ σ(B))·√0.5; A and B are halves of the output.

    It sees `kernel_width` positions, `dilation` apart, to both sides, or only back if `is_causal` (Gehring et al.,
    sections 3.2, 3.3). Initial weights keep the variance (section 3.5).
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
    """Make a layer of one kind, in evaluation mode; dilation grows k-fold with `depth` in the stack, from 0.

    `plain` and `masked` attention keep all pairs of positions in memory; `additive` is `plain` with Bahdanau's score;
    `causal` and `dilated` convolutions are a decoder's.
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
