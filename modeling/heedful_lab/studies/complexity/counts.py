"""Table 1 exactly: each kind of layer's operations, sequential steps, and path lengths.

Operations are multiply-adds of matrix products and convolutions for one sequence. n is the length, d the width
d_model, k a convolution's width, r the positions that restricted self-attention sees to either side.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Literal

from heedful.attending_heed import NARROWEST_BLOCK
from heedful.files import check_at_least

CellKind = Literal["rnn", "gru", "lstm"]
GATES: dict[CellKind, int] = {"rnn": 1, "gru": 3, "lstm": 4}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the layers; a number out of range or an unknown cell is a `ValueError`."""

    d_model: int  # width d of the layers
    heads: int  # of self-attention
    neighbourhood: int  # r, of restricted self-attention
    kernel_width: int  # k, of convolutions
    cell: CellKind  # of the recurrent layer

    def __post_init__(self) -> None:
        check_at_least(1, d_model=self.d_model, heads=self.heads, neighbourhood=self.neighbourhood)
        if self.d_model % self.heads:
            raise ValueError(f"`heads` must divide `d_model`, but they are {self.heads} and {self.d_model} instead.")
        if self.kernel_width < 3 or self.kernel_width % 2 == 0:
            raise ValueError(f"`kernel_width` must be odd and at least 3, but is {self.kernel_width} instead.")
        if self.cell not in GATES:
            raise ValueError(f"`cell` must be rnn, gru or lstm, but is {self.cell!r} instead.")


def operations(kind: str, length: int, sizes: Sizes) -> int:
    """Return the multiply-adds of one layer, with its projections.

    Self-attention: four projections of each position (4·n·d²), n² scores and n² weights of d numbers (2·n²·d). In
    windows, each block of b = max(r, 16) queries meets 3·b padded keys: 6·b·d a query. A cell has a matrix for each
    gate, for input and state; an LSTM has four gates (8·n·d²). A gated convolution has 2·d outputs (2·k·n·d²).
    """
    n, d = length, sizes.d_model
    if kind in ("self_attention", "plain", "masked", "additive"):
        return 4 * n * d**2 + 2 * n**2 * d
    if kind == "restricted":
        block = max(sizes.neighbourhood, NARROWEST_BLOCK)
        return 4 * n * d**2 + 2 * math.ceil(n / block) * block * 3 * block * d
    if kind == "recurrent":
        return 2 * GATES[sizes.cell] * n * d**2
    return 2 * sizes.kernel_width * n * d**2


def term_of_table_1(kind: str, length: int, sizes: Sizes) -> int:
    """Return the number in the O of Table 1, column "complexity per layer"."""
    n, d = length, sizes.d_model
    terms = {
        "restricted": sizes.neighbourhood * n * d,
        "recurrent": n * d**2,
        "convolutional": sizes.kernel_width * n * d**2,
    }
    return terms.get(kind, n**2 * d)


def sequential_steps(kind: str, length: int) -> int:
    """Return the number of sequential steps (Table 1, column "sequential operations")."""
    return length if kind == "recurrent" else 1


def path_length(kind: str, length: int, sizes: Sizes) -> int:
    """Return the maximum path length: layers, or cells in a row, until each output has met each input.

    Table 1 has its order. Convolutions need ⌈2(n−1)/(k−1)⌉ to both sides; if causal, ⌈(n−1)/(k−1)⌉, or ⌈log_k n⌉ with
    k-fold dilation from layer to layer (`dilated`). A neighbourhood needs ⌈(n−1)/r⌉, a recurrent layer n cells.
    """
    far, k = length - 1, sizes.kernel_width
    lengths = {
        **dict.fromkeys(("restricted", "masked"), math.ceil(far / sizes.neighbourhood)),
        "recurrent": length,
        "convolutional": math.ceil(2 * far / (k - 1)),
        "causal": math.ceil(far / (k - 1)),
        "dilated": next(layers for layers in itertools.count(1) if k**layers >= length),  # logarithms would round
    }
    return lengths.get(kind, 1)
