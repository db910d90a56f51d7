"""Path lengths by gradient: who sees whom after one layer, and after how many layers all have met."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from heedful.studies.complexity import reach
from heedful.studies.complexity.counts import path_length
from heedful.studies.complexity.reach import (
    KINDS,
    WIDTH,
    cells_between_ends,
    layer_at,
    layers_until_all_meet,
    measure_reach,
    reached,
)
from heedful.studies.complexity.settings import ComplexitySettings

LENGTH = 12
DISTANCE = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)  # from input to output


def asked(**changes):
    return ComplexitySettings(**{"d_model": 16, "heads": 2, "neighbourhood": 3, "kernel_width": 5, **changes})


def stacked(kind, depth):
    inputs = torch.randn(1, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    outputs = inputs
    for number in range(depth):
        outputs = layer_at(kind, number, asked())(outputs)
    return reached(outputs, inputs)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    ("kind", "backwards", "forwards"),
    [
        ("self_attention", 100, 100),
        ("restricted", 3, 3),
        ("recurrent", 100, 0),
        ("convolutional", 2, 2),
        ("causal", 4, 0),
    ],
)
def test_outputs_see_as_far_as_the_layers_reach(kind, backwards, forwards, depth):
    expected = (depth * backwards >= DISTANCE) & (-depth * forwards <= DISTANCE)
    assert torch.equal(stacked(kind, depth), expected)


def test_dilation_multiplies_what_a_stack_reaches():
    assert torch.equal(stacked("dilated", 1), (DISTANCE >= 0) & (DISTANCE <= 4))
    assert torch.equal(stacked("dilated", 2), DISTANCE >= 0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_formula_is_what_gradients_say(kind):
    find = (lambda kind, *where: cells_between_ends(*where)) if kind == "recurrent" else layers_until_all_meet
    for changes in ({}, {"neighbourhood": 2, "kernel_width": 3}):
        for length in (2, 5, 9, 10, 26):
            settings = asked(**changes)
            assert find(kind, length, settings) == path_length(kind, length, settings), (length, changes)


@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm"])
def test_one_recurrent_layer_reaches_everything_before_through_every_cell_between(cell):
    assert layers_until_all_meet("recurrent", 9, asked(cell=cell)) == 1
    assert cells_between_ends(9, asked(cell=cell)) == 9


class Faint(nn.Module):
    """Hands on a position and the one before it, so faintly that two layers in a row would leave nothing."""

    def forward(self, states):
        return 1e-200 * (states + F.pad(states, (0, 0, 1, 0))[:, :-1])


def test_gradients_too_small_for_float64_are_gradients_all_the_same(monkeypatch):
    monkeypatch.setattr(reach, "layer_at", lambda kind, depth, settings: Faint())
    assert layers_until_all_meet("causal", 6, asked()) == 5


class OnlyLast(nn.Module):
    """Lets the last position alone see all others."""

    def forward(self, states):
        return torch.cat([states[:, :-1], states.sum(1, keepdim=True)], dim=1)


def test_ends_that_meet_are_not_enough(monkeypatch):
    monkeypatch.setattr(reach, "layer_at", lambda kind, depth, settings: OnlyLast())
    with pytest.raises(RuntimeError, match="causal"):
        layers_until_all_meet("causal", 5, asked())


def test_layers_that_never_meet_are_an_error(monkeypatch):
    monkeypatch.setattr(reach, "layer_at", lambda kind, depth, settings: nn.Tanh())
    with pytest.raises(RuntimeError, match="5 layers of the kind causal leave inputs that do not reach all outputs"):
        layers_until_all_meet("causal", 5, asked())


def test_what_looks_ahead_is_not_taken_for_causal(monkeypatch):
    attention = layer_at("self_attention", 0, asked())
    monkeypatch.setattr(reach, "layer_at", lambda kind, depth, settings: attention)
    assert layers_until_all_meet("self_attention", 5, asked()) == 1
    with pytest.raises(RuntimeError, match="causal"):
        layers_until_all_meet("causal", 5, asked())


def test_rows_hold_layers_path_and_formula():
    rows = measure_reach(asked(reach_lengths=(4, 9)))
    assert [(row["kind"], row["length"]) for row in rows] == [(kind, n) for kind in KINDS for n in (4, 9)]
    (recurrent,) = (row for row in rows if row["kind"] == "recurrent" and row["length"] == 9)
    assert recurrent == {"kind": "recurrent", "length": 9, "layers": 1, "path": 9, "formula": 9}
    assert all(row["path"] == row["layers"] for row in rows if row["kind"] != "recurrent")
