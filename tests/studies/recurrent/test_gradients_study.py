"""The study of gradients: its measures against what is known of them, and a run of it."""

import math

import pytest
import torch

from heedful.studies.recurrent import gradients


def test_the_gradient_by_distance_is_autograds_through_the_equation():
    torch.manual_seed(4)
    encoder = gradients.fresh_encoder("tanh").double()
    cell = encoder.layers[0].first_cell
    tokens = encoder.embed_tokens(torch.randint(gradients.SYMBOLS, (gradients.BATCH, 101))).detach().requires_grad_()
    direction, hidden = torch.randn(gradients.WIDTH, dtype=torch.float64), torch.zeros(16, 64, dtype=torch.float64)
    for token in tokens.unbind(1):
        hidden = torch.tanh(token @ cell.weight_ih_l0.T + hidden @ cell.weight_hh_l0.T)
    (gradient,) = torch.autograd.grad((hidden * direction).sum(), tokens)
    norms = gradient.norm(dim=-1).mean(0)
    found = gradients.gradient_by_distance("tanh", gradients.ORTHOGONAL, 4)
    assert found == pytest.approx((norms.flip(0) / norms[-1]).tolist(), rel=1e-6)


def test_without_an_activation_an_orthogonal_matrix_keeps_gradients_and_a_larger_one_multiplies_them():
    kept = gradients.gradient_by_distance("linear", gradients.ORTHOGONAL, 1)
    larger = gradients.gradient_by_distance("linear", gradients.LARGER, 1)
    assert all(0.5 < norm < 2 for norm in kept)
    assert larger[100] / larger[60] == pytest.approx(1.5**40, rel=0.5)


def test_sigmoid_vanishes_by_a_quarter_or_more_and_relu_with_positive_weights_explodes():
    sigmoid = gradients.gradient_by_distance("sigmoid", gradients.ORTHOGONAL, 1)
    assert sigmoid[30] < 4.0**-29
    assert gradients.gradient_by_distance("relu", gradients.POSITIVE, 1)[30] > 1e20
    cells = "gru, open", "gru"
    opened, fresh = (gradients.gradient_by_distance(cell, gradients.ORTHOGONAL, 1)[100] for cell in cells)
    assert fresh < 1e-6 < 0.01 < opened


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_gate_that_keeps_the_state_begins_open(cell):
    encoder = gradients.fresh_encoder(f"{cell}, open")
    gate = {"lstm": "forget", "gru": "update"}[cell]
    layer = encoder.layers[0].first_cell
    gates = layer.gates(layer.read(torch.zeros(1, gradients.WIDTH)), torch.zeros(1, gradients.WIDTH))
    assert {name for name, values in gates.items() if values.mean() > 0.9} == {gate}


def test_the_gradient_through_linear_layers_is_the_product_of_their_matrices():
    torch.manual_seed(2)
    layers = torch.randn(gradients.DEPTHS[-1], 64, 64, dtype=torch.float64) / 8
    direction = torch.nn.functional.normalize(torch.randn(64, dtype=torch.float64), dim=0)
    product = layers[0] @ layers[1] @ layers[2]
    assert gradients.gradient_by_depth("linear", 1.0, 2)[2] == pytest.approx((product @ direction).norm().item())
    assert gradients.collapse_error(2) < 1e-12


def test_a_short_sequence_is_learned_and_clipping_saves_what_explodes():
    assert gradients.recall("lstm", 3, 150, seed=1).accuracy == 1
    lost = gradients.recall("linear", 20, 30, 1, gradients.LARGER, math.inf)
    held = gradients.recall("linear", 20, 30, 1, gradients.LARGER, 1.0)
    assert (lost.stopped > 0, held.stopped) == (True, 0)
    assert held.largest > 100
