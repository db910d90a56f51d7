"""Which inputs reach which outputs, and after how many layers: maximum path lengths, found by gradient.

An input reaches an output where the gradient of the output by it is not zero. Weights are random, so that none is zero
by chance. Nor is one because a product of many small numbers is too small for float64: between two layers what comes
back at each position is brought to length 1, which leaves zeros as they are.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from heedful_lab.studies.complexity.counts import Sizes
from heedful_lab.studies.complexity.layers import RecurrentLayer, make_layer

WIDTH, HEADS = 8, 2  # wide enough that no gradient is zero by chance; reach does not depend on the width
# In these an output looks at earlier inputs alone. Dilated convolutions are among them because a stack of padded ones
# that look to both sides would go 27 - 9 - 3 positions to reach 15, by way of padding, and so needs further layers.
CAUSAL_KINDS = ("recurrent", "causal", "dilated")
KINDS = ("self_attention", "restricted", "recurrent", "convolutional", "causal", "dilated")
LONGEST_REACH = 256  # on longer ways through a recurrent layer gradients become zero, in float64 too


def layer_at(kind: str, depth: int, sizes: Sizes) -> nn.Module:
    """Make the layer at a depth, from 0, of a stack of a kind, in float64."""
    return make_layer(kind, replace(sizes, d_model=WIDTH, heads=HEADS), "eager", depth).double()


def reached(outputs: torch.Tensor, inputs: torch.Tensor, positions: range | None = None) -> torch.Tensor:
    """Tell which inputs `(1, length, d_model)` reach which outputs, or those at positions: `(outputs, inputs)`."""
    direction = torch.randn_like(outputs[0, 0])
    rows = []
    for position in range(outputs.shape[1]) if positions is None else positions:
        (gradient,) = torch.autograd.grad(outputs[0, position] @ direction, inputs, retain_graph=True)
        rows.append((gradient[0] != 0).any(-1))
    return torch.stack(rows)


def layers_until_all_meet(kind: str, length: int, sizes: Sizes, seed: int) -> int:
    """Return how many layers it takes until every output depends on every input, in a causal kind on all before it."""
    torch.manual_seed(seed)
    inputs = torch.randn(1, length, WIDTH, dtype=torch.float64, requires_grad=True)
    wanted = torch.ones(length, length, dtype=torch.bool)
    if kind in CAUSAL_KINDS:
        wanted = wanted.tril()
    ends = range(0, length, length - 1)  # those farthest apart; all are looked at when these have met
    outputs = inputs
    for depth in range(length):
        outputs = layer_at(kind, depth, sizes)(outputs)
        outputs.register_hook(_to_length_1)
        if all(torch.equal(reached(outputs, inputs, some), wanted[list(some)]) for some in (ends, range(length))):
            return depth + 1
    raise RuntimeError(f"{length} layers of the kind {kind} leave inputs that do not reach all outputs.")


def _to_length_1(gradient: torch.Tensor) -> torch.Tensor:
    largest = gradient.abs().amax(-1, keepdim=True)  # whose square does not vanish
    gradient = gradient / largest.where(largest > 0, 1)
    return F.normalize(gradient, dim=-1)


def cells_between_ends(length: int, sizes: Sizes, seed: int) -> int:
    """Return how many cells of a recurrent layer lie between the first input and the last output.

    The memory is cut before each cell in turn: where then nothing of the first input arrives, there is no way around.
    """
    torch.manual_seed(seed)
    layer = RecurrentLayer(WIDTH, sizes.cell).double()
    inputs = torch.randn(1, length, WIDTH, dtype=torch.float64, requires_grad=True)
    last = range(-1, 0)
    if not reached(layer(inputs), inputs, last)[0, 0]:
        raise RuntimeError("The first input of a recurrent layer must reach its last output, but does not.")
    cells = 1
    for cut in range(1, length):
        with torch.no_grad():
            _, memory = layer.cells(inputs[:, :cut])
        outputs, _ = layer.cells(inputs[:, cut:], memory)
        cells += not reached(outputs, inputs, last)[0, 0]
    return cells


def path_by_gradient(kind: str, length: int, sizes: Sizes, seed: int) -> int:
    """Return the maximum path length: of a recurrent layer the cells that it leads through, and else the layers."""
    if kind == "recurrent":
        return cells_between_ends(length, sizes, seed)
    return layers_until_all_meet(kind, length, sizes, seed)
