"""Gradients on their way back through activations and gates, over time steps and layers.

Fresh cells show how steps multiply them (Hochreiter, 1991; Bengio et al., 1994; Pascanu et al., 2013). Small trainings
to name a sequence's first symbol show the effect, with and without clipping.
"""

import math
from collections.abc import Mapping
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from heedful.cells_heed import ACTIVATIONS
from heedful.configuration_heed_rnn import HeedRNNConfig
from heedful.figures import Panel, Points, lines
from heedful.modeling_heed_rnn import HeedRNNEncoder
from heedful_lab.studies.report import Cell, Outcome
from heedful_lab.studies.study import Lab, description_of

DESCRIPTION = description_of(__file__)
CELLS, STACKS = DESCRIPTION["cells"], DESCRIPTION["stacks"]
KEEPING_GATE = 1  # its index: an LSTM's forget gate, a GRU's update gate
OPEN = 4.0  # a bias with sigmoid 0.98
WIDTH = 64
BATCH = 16
DISTANCES = (1, 5, 10, 25, 50, 100)
# Initial recurrent matrices: orthogonal, 1.5 times as large, or with absolute values.
ORTHOGONAL, LARGER, POSITIVE = MATRICES = ("orthogonal", "orthogonal × 1.5", "positive")
DEPTHS = (1, 5, 10, 25, 50)
SYMBOLS = 8
LENGTHS = (5, 20, 50)  # of sequences in the task
UPDATES = 400
RATE = 0.003  # of Adam
TESTED = 512  # sequences
LARGEST_NORM = 1.0
UNCLIPPED = (("tanh", ORTHOGONAL), ("linear", LARGER), ("lstm", ORTHOGONAL))
DESCENT_RATE = 0.1  # of plain gradient descent, to show clipping without Adam
DESCENT_LENGTH = 20


class Recall(NamedTuple):
    """A training on the task."""

    accuracy: float  # on new sequences
    largest: float  # gradient norm before clipping
    stopped: int  # first update with a loss that is not finite, or 0


def fresh_encoder(cell: str, matrix: str = ORTHOGONAL) -> HeedRNNEncoder:
    """Return a forward encoder of one layer with an initial recurrent matrix of `MATRICES`."""
    sizes: dict[str, Any] = {"vocab_size": SYMBOLS + 3, "embedding_size": WIDTH, "hidden_size": WIDTH}
    encoder = HeedRNNEncoder(HeedRNNConfig(**sizes, bidirectional=False, dropout=0.0, **CELLS[cell]))
    weights = dict(encoder.layers[0].named_parameters())
    recurrent = weights["first_cell.weight_hh_l0"].data
    if matrix == LARGER:
        recurrent.mul_(1.5)
    elif matrix == POSITIVE:
        recurrent.abs_()
    if cell.endswith("open"):
        weights["first_cell.bias_ih_l0"].data.view(-1, WIDTH)[KEEPING_GATE] = OPEN
    return encoder


def gradient_by_distance(cell: str, matrix: str, seed: int) -> list[float]:
    """Return the last state's gradient norm at 0, 1, 2 … steps before, relative to 0; float64 mean of sequences."""
    torch.manual_seed(seed)
    encoder = fresh_encoder(cell, matrix).double()
    inputs = encoder.embed_tokens(torch.randint(SYMBOLS, (BATCH, DISTANCES[-1] + 1))).detach().requires_grad_()
    last = encoder(inputs_embeds=inputs).last_hidden_state[:, -1]
    (gradient,) = torch.autograd.grad((last * torch.randn(WIDTH, dtype=torch.float64)).sum(), inputs)
    norms = gradient.norm(dim=-1).mean(0).flip(0)  # (distance)
    return (norms / norms[0]).tolist()


def gradient_by_depth(activation: str, gain: float, seed: int) -> list[float]:
    """Return the gradient norm at a feed-forward stack's input by depth; weights have variance gain² / width."""
    torch.manual_seed(seed)
    layers = torch.randn(DEPTHS[-1], WIDTH, WIDTH, dtype=torch.float64) * gain * WIDTH**-0.5
    direction = F.normalize(torch.randn(WIDTH, dtype=torch.float64), dim=0)
    inputs = torch.randn(BATCH, WIDTH, dtype=torch.float64, requires_grad=True)
    states, norms = inputs, []
    for layer in layers:
        states = ACTIVATIONS[activation](states @ layer)
        (gradient,) = torch.autograd.grad((states @ direction).sum(), inputs, retain_graph=True)
        norms.append(gradient.norm(dim=-1).mean().item())
    return norms


def collapse_error(seed: int) -> float:
    """Return the relative difference between a stack of linear layers and the product of its matrices."""
    torch.manual_seed(seed)
    layers = torch.randn(DEPTHS[-1], WIDTH, WIDTH, dtype=torch.float64) * WIDTH**-0.5
    states = inputs = torch.randn(BATCH, WIDTH, dtype=torch.float64)
    for layer in layers:
        states = ACTIVATIONS["linear"](states @ layer)
    return ((states - inputs @ torch.linalg.multi_dot(list(layers))).norm() / states.norm()).item()


def recall(
    cell: str, length: int, updates: int, seed: int, matrix: str = ORTHOGONAL, descent_norm: float | None = None
) -> Recall:
    """Train a cell to name the first of `length` random symbols, with Adam or clipped plain descent, and test it."""
    torch.manual_seed(seed)
    encoder, output = fresh_encoder(cell, matrix), nn.Linear(WIDTH, SYMBOLS)
    weights = [*encoder.parameters(), *output.parameters()]
    optimizer: Any = torch.optim.Adam(weights, RATE)
    if descent_norm is not None:
        optimizer = torch.optim.SGD(weights, DESCENT_RATE)
    largest = 0.0
    for update in range(1, updates + 1):
        symbols = torch.randint(SYMBOLS, (64, length))
        loss = F.cross_entropy(output(encoder(symbols).last_hidden_state[:, -1]), symbols[:, 0])
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(weights, LARGEST_NORM if descent_norm is None else descent_norm).item()
        if not math.isfinite(loss.item() + norm):
            return Recall(0.0, largest, update)
        largest = max(largest, norm)
        optimizer.step()
    symbols = torch.randint(SYMBOLS, (TESTED, length))
    with torch.no_grad():
        named = output(encoder(symbols).last_hidden_state[:, -1]).argmax(-1)
    return Recall((named == symbols[:, 0]).double().mean().item(), largest, 0)


def run(lab: Lab) -> Outcome:
    """Measure fresh cells and stacks, and train cells at several lengths, with and without clipping."""
    updates = lab.updates or UPDATES
    by_distance = {(m, c): gradient_by_distance(c, m, lab.seed) for m in MATRICES for c in CELLS}
    by_depth = {name: gradient_by_depth(kind, gain, lab.seed) for name, (kind, gain) in STACKS.items()}
    clipping: list[tuple[Cell, ...]] = []
    for (cell, matrix), norm in product(UNCLIPPED, (math.inf, LARGEST_NORM)):
        found = recall(cell, DESCENT_LENGTH, updates, lab.seed, matrix, norm)
        named = f"loss not finite at update {found.stopped}" if found.stopped else f"{found.accuracy:.0%}"
        clipping.append((cell, matrix, "no" if norm == math.inf else f"norm {norm:g}", found.largest, named))
    rows: dict[str, list[tuple[Cell, ...]]] = {
        "distance": [(*key, *(norms[d] for d in DISTANCES)) for key, norms in by_distance.items()],
        "depth": [(name, *(norms[d - 1] for d in DEPTHS)) for name, norms in by_depth.items()],
        "recall": [(c, *(recall(c, length, updates, lab.seed).accuracy for length in LENGTHS)) for c in CELLS],
        "clipping": clipping,
    }
    settings = {"updates": updates, "length": DESCENT_LENGTH, "symbols": SYMBOLS, "norm": LARGEST_NORM}

    def panel(norms_by_name: Mapping[str, list[float]], first: int, label: str, top: float, title: str = "") -> Panel:
        curves: dict[str, Points] = {name: list(enumerate(norms, first)) for name, norms in norms_by_name.items()}
        return lines(curves, label, "norm of the gradient", title, log="y", ylim=(1e-20, top))

    panels = {
        "distance": [panel({c: by_distance[m, c] for c in CELLS}, 0, "steps back", 1e20, m) for m in MATRICES],
        "depth": [panel(by_depth, 1, "layers", 10)],
    }
    return Outcome(rows, panels, {"collapse": collapse_error(lab.seed)}, settings)
