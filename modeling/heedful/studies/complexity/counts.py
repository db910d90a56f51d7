"""What a layer of each kind computes, in how many steps, and how far apart two positions are: Table 1, exactly.

Operations are multiply-adds of matrix products and convolutions for one sequence; softmax, gates and sums, of lower
order, are not among them. n is the length, d the width d_model, k the width of a convolution, r how many positions
away restricted self-attention sees, to either side.
"""

import itertools
import math
from typing import NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from heedful.masks_heed import NARROWEST_BLOCK
from heedful.studies.complexity.settings import ComplexitySettings

PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.convolution}
GATES = {"rnn": 1, "gru": 3, "lstm": 4}


def operations(kind: str, length: int, settings: ComplexitySettings) -> int:
    """Return the multiply-adds of one layer: all that it computes, projections included.

    Self-attention projects each position four times (4·n·d²), and has n² scores and n² weights of d numbers (2·n²·d).
    In windows every block of b = max(r, 16) queries meets 3·b keys, the last one filled up: 6·b·d a query. A cell
    multiplies input and state by a matrix for each of its gates, four in an LSTM (8·n·d²). A gated convolution has
    twice as many outputs as inputs (2·k·n·d²).
    """
    n, d = length, settings.d_model
    if kind in ("self_attention", "plain", "masked", "additive"):
        return 4 * n * d**2 + 2 * n**2 * d
    if kind == "restricted":
        block = max(settings.neighbourhood, NARROWEST_BLOCK)
        return 4 * n * d**2 + 2 * math.ceil(n / block) * block * 3 * block * d
    if kind == "recurrent":
        return 2 * GATES[settings.cell] * n * d**2
    return 2 * settings.kernel_width * n * d**2


def term_of_table_1(kind: str, length: int, settings: ComplexitySettings) -> int:
    """Return the number under the O of Table 1, column "complexity per layer"."""
    n, d = length, settings.d_model
    terms = {
        "restricted": settings.neighbourhood * n * d,
        "recurrent": n * d**2,
        "convolutional": settings.kernel_width * n * d**2,
    }
    return terms.get(kind, n**2 * d)


def sequential_steps(kind: str, length: int) -> int:
    """Return how many steps of a layer wait for each other: those of Table 1, column "sequential operations"."""
    return length if kind == "recurrent" else 1


def path_length(kind: str, length: int, settings: ComplexitySettings) -> int:
    """Return the maximum path length: how many layers, or cells in a row, until every output has met every input.

    Table 1 has its order; this is the number. Self-attention takes 1, a neighbourhood ⌈(n−1)/r⌉, a recurrent layer n
    cells, and contiguous convolutions that look to both sides ⌈2(n−1)/(k−1)⌉. Causal layers, in which only earlier
    inputs are to be met, take ⌈(n−1)/(k−1)⌉ contiguous convolutions (`causal`), or ⌈log_k n⌉ whose dilation grows
    k-fold from layer to layer (`dilated`).
    """
    far, k = length - 1, settings.kernel_width
    lengths = {
        **dict.fromkeys(("restricted", "masked"), math.ceil(far / settings.neighbourhood)),
        "recurrent": length,
        "convolutional": math.ceil(2 * far / (k - 1)),
        "causal": math.ceil(far / (k - 1)),
        "dilated": least_power(k, length),
    }
    return lengths.get(kind, 1)


def least_power(base: int, number: int) -> int:
    """Return the least exponent, 1 or more, with base^exponent ≥ number; logarithms would round."""
    return next(exponent for exponent in itertools.count(1) if base**exponent >= number)


class Counted(NamedTuple):
    """What was counted while a layer ran."""

    operations: int  # multiply-adds
    products: int  # matrix products and convolutions, one after the other


class _Products(TorchDispatchMode):
    """Counts matrix products and convolutions."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func.overloadpacket in PRODUCTS
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def count(layer: nn.Module, length: int, d_model: int) -> Counted:
    """Run a layer that lies on the device `meta`, where nothing is computed, and count.

    There a layer takes the operators that `FlopCounterMode` knows, and not those that the CPU has in their place.
    """
    with FlopCounterMode(display=False) as operations, _Products() as products:
        layer.eval()(torch.empty(1, length, d_model, device="meta"))
    return Counted(operations.get_total_flops() // 2, products.number)
