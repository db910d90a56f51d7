"""The formulas of Table 1 against what torch counts while the layers run, and path lengths against gradients."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from heedful.studies.complexity import reach
from heedful.studies.complexity.counts import Sizes, operations, path_length, sequential_steps, term_of_table_1
from heedful.studies.complexity.layers import make_layer
from heedful.studies.complexity.measurement import KINDS

PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.convolution}
SMALL = {"d_model": 24, "heads": 3, "neighbourhood": 5, "kernel_width": 3, "cell": "lstm"}
OTHERS = [{}, {"neighbourhood": 20, "kernel_width": 7}, {"d_model": 40, "heads": 1, "cell": "gru"}, {"cell": "rnn"}]


class CountedProducts(TorchDispatchMode):
    """Counts matrix products and convolutions."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func.overloadpacket in PRODUCTS
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def counted(kind, length, sizes):
    """Run a layer on the device `meta`, and return its multiply-adds and its products, one after the other.

    There it takes the operators that `FlopCounterMode` knows, and not those that the CPU has in their place.
    """
    with torch.device("meta"):
        layer = make_layer(kind, sizes, kernel="eager")
    with FlopCounterMode(display=False) as operations, CountedProducts() as products:
        layer(torch.empty(1, length, sizes.d_model, device="meta"))
    return operations.get_total_flops() // 2, products.number


@pytest.mark.parametrize("others", OTHERS, ids=str)
def test_the_formula_is_what_torch_counts(others):
    sizes = Sizes(**{**SMALL, **others})
    for kind, length in itertools.product(KINDS, (2, 16, 33, 60)):
        assert counted(kind, length, sizes)[0] == operations(kind, length, sizes) > 0, (kind, length)


def test_products_in_a_row_grow_with_the_length_where_steps_wait_for_each_other():
    for kind in KINDS:
        short, long = (counted(kind, length, Sizes(**SMALL))[1] for length in (20, 40))
        steps = [sequential_steps(kind, length) for length in (20, 40)]
        assert steps == ([20, 40] if kind == "recurrent" else [1, 1])
        assert long == (2 * short if kind == "recurrent" else short), kind


def test_the_terms_have_the_powers_of_table_1():
    for kind, length, *powers in (
        ("self_attention", 2, 1, 0, 0),
        ("restricted", 1, 1, 1, 0),
        ("recurrent", 1, 2, 0, 0),
        ("convolutional", 1, 2, 0, 1),
    ):
        once = term_of_table_1(kind, 10, Sizes(**SMALL))
        assert term_of_table_1(kind, 30, Sizes(**SMALL)) == once * 3**length
        for name, power in zip(("d_model", "neighbourhood", "kernel_width"), powers, strict=True):
            more = Sizes(**{**SMALL, name: 3 * SMALL[name]})
            assert term_of_table_1(kind, 10, more) == once * 3**power, (kind, name)


def test_a_layer_computes_a_bounded_multiple_of_the_term():
    for kind, expected in {"self_attention": 2, "restricted": 6, "recurrent": 8, "convolutional": 2}.items():
        ratios = []
        for length, width, radius in itertools.product((2**14, 2**20), (64, 256), (16, 64)):
            sizes = Sizes(width, 2, radius, 3, "lstm")
            projections = 4 * length * width**2 if kind in ("self_attention", "restricted") else 0
            ratios.append((operations(kind, length, sizes) - projections) / term_of_table_1(kind, length, sizes))
        assert ratios == pytest.approx([expected] * len(ratios)), kind


def test_path_lengths_by_hand():
    for kind, expected in (
        ("self_attention", {100: 1}),
        ("plain", {100: 1}),
        ("recurrent", {100: 100}),
        ("restricted", {6: 1, 7: 2, 11: 2, 12: 3}),
        ("masked", {12: 3}),
        ("convolutional", {2: 1, 12: 11}),
        ("causal", {3: 1, 4: 2}),
        ("dilated", {3: 1, 4: 2, 28: 4}),
    ):
        assert {n: path_length(kind, n, Sizes(**SMALL)) for n in expected} == expected, kind


@given(base=st.sampled_from([3, 5, 7, 9]), number=st.integers(2, 10**18))
def test_dilated_convolutions_take_the_least_power(base, number):
    found = path_length("dilated", number, Sizes(**{**SMALL, "kernel_width": base}))
    assert base**found >= number
    assert found == 1 or base ** (found - 1) < number


LENGTH = 12
DISTANCE = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)  # from input to output


def asked(**changes):
    return Sizes(**{"d_model": 16, "heads": 2, "neighbourhood": 3, "kernel_width": 5, "cell": "lstm", **changes})


def stacked(kind, depth):
    inputs = torch.randn(1, LENGTH, reach.WIDTH, dtype=torch.float64, requires_grad=True)
    outputs = inputs
    for number in range(depth):
        outputs = reach.layer_at(kind, number, asked())(outputs)
    return reach.reached(outputs, inputs)


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


@pytest.mark.parametrize("kind", reach.KINDS)
def test_the_formula_is_what_gradients_say(kind):
    for sizes in (asked(), asked(neighbourhood=2, kernel_width=3)):
        for length in (2, 5, 9, 10, 26):
            path = reach.path_by_gradient(kind, length, sizes, 0)
            assert path == path_length(kind, length, sizes), (length, sizes)


def test_one_recurrent_layer_reaches_everything_before_through_every_cell_between():
    for cell in ("rnn", "gru", "lstm"):
        assert reach.layers_until_all_meet("recurrent", 9, asked(cell=cell), 0) == 1
        assert reach.cells_between_ends(9, asked(cell=cell), 0) == 9


def faint(states):
    """Hand on a position and the one before it, so faintly that two layers in a row would leave nothing."""
    return 1e-200 * (states + F.pad(states, (0, 0, 1, 0))[:, :-1])


def test_gradients_too_small_for_float64_are_gradients_all_the_same(monkeypatch):
    monkeypatch.setattr(reach, "layer_at", lambda kind, depth, sizes: faint)
    assert reach.layers_until_all_meet("causal", 6, asked(), 0) == 5


def only_last(states):
    """Let the last position alone see all others, so that the ends meet."""
    return torch.cat([states[:, :-1], states.sum(1, keepdim=True)], dim=1)


def test_layers_that_do_not_let_all_meet_or_look_ahead_are_an_error(monkeypatch):
    attention = reach.layer_at("self_attention", 0, asked())
    for layer in (only_last, torch.tanh, attention):
        monkeypatch.setattr(reach, "layer_at", lambda kind, depth, sizes, layer=layer: layer)
        with pytest.raises(RuntimeError, match="5 layers of the kind causal leave inputs that do not reach all"):
            reach.layers_until_all_meet("causal", 5, asked(), 0)
    assert reach.layers_until_all_meet("self_attention", 5, asked(), 0) == 1
