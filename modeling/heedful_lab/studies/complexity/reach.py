"""Maximum path lengths: an input reaches an output if the output's gradient is not zero there.

Between layers the gradient at each position is scaled to length 1, to prevent underflow in float64.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from heedful_lab.studies.complexity.counts import Sizes
from heedful_lab.studies.complexity.layers import RecurrentLayer, make_layer

WIDTH, HEADS = 8, 2  # wide enough to avoid zeros by chance; reach does not depend on it
# Outputs see only earlier inputs. Dilated convolutions to both sides would need more layers: they reach 15 as
# 27 - 9 - 3, through padding.
CAUSAL_KINDS = ("recurrent", "causal", "dilated")
KINDS = ("self_attention", "restricted", "recurrent", "convolutional", "causal", "dilated")
LONGEST_REACH = 256  # beyond it a recurrent layer's gradients underflow, in float64 too


def layer_at(kind: str, depth: int, sizes: Sizes) -> nn.Module:
    """Make the layer at `depth` (from 0) in a stack, in float64."""
    return make_layer(kind, replace(sizes, d_model=WIDTH, heads=HEADS), "eager", depth).double()


def reached(outputs: torch.Tensor, inputs: torch.Tensor, positions: range | None = None) -> torch.Tensor:
    """Return which inputs `(1, length, d_model)` reach which outputs, or those at positions: `(outputs, inputs)`."""
    direction = torch.randn_like(outputs[0, 0])
    rows = []
    for position in range(outputs.shape[1]) if positions is None else positions:
        (gradient,) = torch.autograd.grad(outputs[0, position] @ direction, inputs, retain_graph=True)
        rows.append((gradient[0] != 0).any(-1))
    return torch.stack(rows)


def layers_until_all_meet(kind: str, length: int, sizes: Sizes, seed: int) -> int:
    """Return the number of layers until each output depends on each input (in a causal kind, each earlier one)."""
    torch.manual_seed(seed)
    inputs = torch.randn(1, length, WIDTH, dtype=torch.float64, requires_grad=True)
    wanted = torch.ones(length, length, dtype=torch.bool)
    if kind in CAUSAL_KINDS:
        wanted = wanted.tril()
    ends = range(0, length, length - 1)  # farthest apart; all are checked when these have met
    outputs = inputs
    for depth in range(length):
        outputs = layer_at(kind, depth, sizes)(outputs)
        outputs.register_hook(_to_length_1)
        if all(torch.equal(reached(outputs, inputs, some), wanted[list(some)]) for some in (ends, range(length))):
            return depth + 1
    raise RuntimeError(f"{length} layers of the kind {kind} leave inputs that do not reach all outputs.")


def _to_length_1(gradient: torch.Tensor) -> torch.Tensor:
    largest = gradient.abs().amax(-1, keepdim=True)  # its square does not vanish
    gradient = gradient / largest.where(largest > 0, 1)
    return F.normalize(gradient, dim=-1)


def cells_between_ends(length: int, sizes: Sizes, seed: int) -> int:
    """Count a recurrent layer's cells between first input and last output: a cut before each stops the gradient."""
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
    """Return the maximum path length: in cells for a recurrent layer, otherwise in layers."""
    if kind == "recurrent":
        return cells_between_ends(length, sizes, seed)
    return layers_until_all_meet(kind, length, sizes, seed)
