"""Path lengths by gradient: who sees whom after one layer, and after how many layers all have met."""

import pytest
import torch
import torch.nn.functional as F

from heedful.studies.complexity import reach
from heedful.studies.complexity.counts import Sizes, path_length
from heedful.studies.complexity.reach import (
    KINDS,
    WIDTH,
    cells_between_ends,
    layer_at,
    layers_until_all_meet,
    path_by_gradient,
    reached,
)

LENGTH = 12
DISTANCE = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)  # from input to output


def asked(**changes):
    return Sizes(**{"d_model": 16, "heads": 2, "neighbourhood": 3, "kernel_width": 5, "cell": "lstm", **changes})


def stacked(kind, depth):
    inputs = torch.randn(1, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    outputs = inputs
    for number in range(depth):
        outputs = layer_at(kind, number, asked())(outputs)
    return reached(outputs, inputs)


def test_outputs_see_as_far_as_the_layers_reach_and_dilation_multiplies_it():
    for kind, backwards, forwards in (
        ("self_attention", 100, 100),
        ("restricted", 3, 3),
        ("recurrent", 100, 0),
        ("convolutional", 2, 2),
        ("causal", 4, 0),
    ):
        for depth in (1, 2, 3):
            expected = (depth * backwards >= DISTANCE) & (-depth * forwards <= DISTANCE)
            assert torch.equal(stacked(kind, depth), expected), (kind, depth)
    assert torch.equal(stacked("dilated", 1), (DISTANCE >= 0) & (DISTANCE <= 4))
    assert torch.equal(stacked("dilated", 2), DISTANCE >= 0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_formula_is_what_gradients_say(kind):
    for changes in ({}, {"neighbourhood": 2, "kernel_width": 3}):
        for length in (2, 5, 9, 10, 26):
            sizes = asked(**changes)
            assert path_by_gradient(kind, length, sizes, 0) == path_length(kind, length, sizes), (length, changes)


def test_one_recurrent_layer_reaches_everything_before_through_every_cell_between():
    for cell in ("rnn", "gru", "lstm"):
        assert layers_until_all_meet("recurrent", 9, asked(cell=cell), 0) == 1
        assert cells_between_ends(9, asked(cell=cell), 0) == 9


def faint(states):
    """Hand on a position and the one before it, so faintly that two layers in a row would leave nothing."""
    return 1e-200 * (states + F.pad(states, (0, 0, 1, 0))[:, :-1])


def test_gradients_too_small_for_float64_are_gradients_all_the_same(monkeypatch):
    monkeypatch.setattr(reach, "layer_at", lambda kind, depth, sizes: faint)
    assert layers_until_all_meet("causal", 6, asked(), 0) == 5


def only_last(states):
    """Let the last position alone see all others, so that the ends meet."""
    return torch.cat([states[:, :-1], states.sum(1, keepdim=True)], dim=1)


def test_layers_that_do_not_let_all_meet_or_look_ahead_are_an_error(monkeypatch):
    attention = layer_at("self_attention", 0, asked())
    for layer in (only_last, torch.tanh, attention):
        monkeypatch.setattr(reach, "layer_at", lambda kind, depth, sizes, layer=layer: layer)
        with pytest.raises(RuntimeError, match="5 layers of the kind causal leave inputs that do not reach all"):
            layers_until_all_meet("causal", 5, asked(), 0)
    assert layers_until_all_meet("self_attention", 5, asked(), 0) == 1
