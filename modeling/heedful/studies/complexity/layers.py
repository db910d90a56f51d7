"""The layers that Table 1 compares, each a module that transforms `(batch, length, d_model)`.

Self-attention is that of the model. The convolutional blocks are those of *Convolutional Sequence to Sequence
Learning* (Gehring et al., 2017), with which *Attention Is All You Need* compares; they are layers and no model.

Letters in shape comments: B batch, S source length, T target length, D = d_model.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import create_bidirectional_mask

from heedful.attention_heed import HeedAttention
from heedful.configuration_heed import HeedConfig
from heedful.masks_heed import neighbourhood_mask, windowed_mask
from heedful.studies.complexity.counts import CellKind, Sizes

# Keeps the variance of a sum of two as large as that of each (Gehring et al., section 3.5).
HALF_VARIANCE = math.sqrt(0.5)


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
            mask = create_bidirectional_mask(
                config=self.config,
                inputs_embeds=states,
                attention_mask=None,
                and_mask_function=neighbourhood_mask(radius),
            )
        return self.attention(states, mask, positions=None, attn_implementation=self.kernel)[0]


class RecurrentLayer(nn.Module):
    """A recurrent layer that reads from left to right, by torch's own cells."""

    def __init__(self, d_model: int, cell: CellKind = "lstm"):
        super().__init__()
        self.cells = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}[cell](d_model, d_model, batch_first=True)

    def forward(self, states: Tensor) -> Tensor:
        """Transform `(batch, length, d_model)`."""
        return self.step(states, None)[0]

    def step(self, states: Tensor, memory):
        """Go on from the memory after the tokens before, `None` at the first; return the output and the memory."""
        return self.cells(states, memory)


def draw_weights(module: nn.Module, std: float) -> None:
    """Draw matrices from a normal distribution, and set biases to zero."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std) if parameter.dim() > 1 else nn.init.zeros_(parameter)


class GatedConvolution(nn.Module):
    """A convolution over time and a gated linear unit: A ⊙ σ(B) of the two halves of what it computes.

    It looks at `kernel_width` positions, `dilation` apart: to both sides, or back alone if `is_causal`. Weights are
    drawn so that the variance stays, as in section 3.5 of Gehring et al.; the paper's weight normalization is
    `torch.nn.utils.parametrizations.weight_norm` of `convolution`.
    """

    def __init__(self, d_model: int, kernel_width: int, dilation: int = 1, is_causal: bool = False):
        super().__init__()
        reach = dilation * (kernel_width - 1)
        self.padding = (reach, 0) if is_causal else (reach // 2, reach // 2)
        self.convolution = nn.Conv1d(d_model, 2 * d_model, kernel_width, dilation=dilation)
        draw_weights(self.convolution, math.sqrt(4 / (kernel_width * d_model)))

    def forward(self, states: Tensor) -> Tensor:
        """Transform `(batch, length, d_model)`."""
        channels = F.pad(states.transpose(1, 2), self.padding)  # (B, D, length + padding)
        return F.glu(self.convolution(channels), dim=1).transpose(1, 2)


class ConvolutionalEncoderLayer(nn.Module):
    """A gated convolution in a residual connection: (x + GLU(conv(x)))·√0.5 (Gehring et al., sections 3.2, 3.5)."""

    def __init__(self, d_model: int, kernel_width: int, dilation: int = 1):
        super().__init__()
        self.convolution = GatedConvolution(d_model, kernel_width, dilation)

    def forward(self, states: Tensor) -> Tensor:
        """Transform `(batch, source_length, d_model)`."""
        return (states + self.convolution(states)) * HALF_VARIANCE


class ConvolutionalDecoderLayer(nn.Module):
    """A causal gated convolution and attention to the source (Gehring et al., section 3.3), without heads.

    d = W h + b + g of the convolution's output h and the embedding g of the target token asks for d·z of the source
    states z, and adds up z + e, with the embeddings e of the source tokens. As in the authors' code sums of two are
    scaled by √0.5, and attention stands within the residual connection. With m source tokens its sum is scaled by √m
    (section 3.5).
    """

    def __init__(self, d_model: int, kernel_width: int, dilation: int = 1):
        super().__init__()
        self.convolution = GatedConvolution(d_model, kernel_width, dilation, is_causal=True)
        self.query = nn.Linear(d_model, d_model)
        self.output = nn.Linear(d_model, d_model)
        draw_weights(nn.ModuleList((self.query, self.output)), d_model**-0.5)

    def forward(
        self, states: Tensor, target_embeddings: Tensor, source_states: Tensor, source_embeddings: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Transform the target's states (B, T, D), and return them with the attention weights (B, T, S).

        The source's states (B, S, D) are those of the last encoder layer; embeddings are what the first layers of
        encoder and decoder were given.
        """
        hidden = self.convolution(states)
        query = (self.query(hidden) + target_embeddings) * HALF_VARIANCE
        weights = (query @ source_states.transpose(1, 2)).softmax(-1)  # (B, T, S)
        values = (source_states + source_embeddings) * HALF_VARIANCE
        context = weights @ values * math.sqrt(source_states.shape[1])
        hidden = (hidden + self.output(context)) * HALF_VARIANCE
        return (states + hidden) * HALF_VARIANCE, weights


class CausalConvolutionLayer(nn.Module):
    """A convolutional decoder layer that always reads the same source."""

    def __init__(self, d_model: int, kernel_width: int, dilation: int = 1):
        super().__init__()
        self.layer = ConvolutionalDecoderLayer(d_model, kernel_width, dilation)
        self.register_buffer("source", torch.randn(1, 2, d_model))

    def forward(self, states: Tensor) -> Tensor:
        """Transform `(1, length, d_model)`."""
        return self.layer(states, states, self.source, self.source)[0]


def make_layer(kind: str, sizes: Sizes, kernel: str = "sdpa", depth: int = 0) -> nn.Module:
    """Make a layer of a kind, in evaluation mode.

    Kinds are those of Table 1, `plain` and `masked`, which compute attention with every pair of positions in memory,
    `additive`, which is `plain` with Bahdanau's score (section 3.2.1 compares the two),
    and `causal` and `dilated` convolutions, as a decoder has them. The kernel computes attention where the kind does
    not say; with the depth in the stack, from 0, dilation grows k-fold.
    """
    width, heads, radius, k = sizes.d_model, sizes.heads, sizes.neighbourhood, sizes.kernel_width
    makers: dict[str, Callable[[], nn.Module]] = {
        "self_attention": lambda: SelfAttentionLayer(width, heads, kernel=kernel),
        "restricted": lambda: SelfAttentionLayer(width, heads, radius, kernel=kernel),
        "recurrent": lambda: RecurrentLayer(width, sizes.cell),
        "convolutional": lambda: ConvolutionalEncoderLayer(width, k),
        "plain": lambda: SelfAttentionLayer(width, heads, kernel="eager"),
        "additive": lambda: SelfAttentionLayer(width, heads, kernel="eager", scoring="additive"),
        "masked": lambda: SelfAttentionLayer(width, heads, radius, in_windows=False, kernel=kernel),
        "causal": lambda: CausalConvolutionLayer(width, k),
        "dilated": lambda: CausalConvolutionLayer(width, k, k**depth),
    }
    return makers[kind]().eval()
