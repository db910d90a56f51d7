"""The formulas of Table 1 against what torch counts while the layers run."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heedful.studies.complexity.counts import (
    count,
    least_power,
    operations,
    path_length,
    sequential_steps,
    term_of_table_1,
)
from heedful.studies.complexity.layers import make_layer
from heedful.studies.complexity.measurement import KINDS
from heedful.studies.complexity.settings import ComplexitySettings

SMALL = {"d_model": 24, "heads": 3, "neighbourhood": 5, "kernel_width": 3}
OTHERS = [{}, {"neighbourhood": 20, "kernel_width": 7}, {"d_model": 40, "heads": 1, "cell": "gru"}, {"cell": "rnn"}]


def counted(kind, length, settings):
    with torch.device("meta"):
        layer = make_layer(kind, settings, kernel="eager")
    return count(layer, length, settings.d_model)


@pytest.mark.parametrize("others", OTHERS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_formula_is_what_torch_counts(kind, others):
    settings = ComplexitySettings(**{**SMALL, **others})
    for length in (2, 16, 33, 60):
        assert counted(kind, length, settings).operations == operations(kind, length, settings) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_products_in_a_row_grow_with_the_length_where_steps_wait_for_each_other(kind):
    settings = ComplexitySettings(**SMALL)
    short, long = (counted(kind, length, settings).products for length in (20, 40))
    steps = [sequential_steps(kind, length) for length in (20, 40)]
    assert steps == ([20, 40] if kind == "recurrent" else [1, 1])
    assert long == (2 * short if kind == "recurrent" else short)


@pytest.mark.parametrize(
    ("kind", "powers"),
    [
        ("self_attention", (2, 1, 0, 0)),
        ("restricted", (1, 1, 1, 0)),
        ("recurrent", (1, 2, 0, 0)),
        ("convolutional", (1, 2, 0, 1)),
    ],
)
def test_the_terms_have_the_powers_of_table_1(kind, powers):
    sizes = {"d_model": 16, "heads": 2, "neighbourhood": 4, "kernel_width": 3}
    once = term_of_table_1(kind, 10, ComplexitySettings(**sizes))
    assert term_of_table_1(kind, 30, ComplexitySettings(**sizes)) == once * 3 ** powers[0]
    for name, power in zip(("d_model", "neighbourhood", "kernel_width"), powers[1:], strict=True):
        more = ComplexitySettings(**{**sizes, name: 3 * sizes[name]})
        assert term_of_table_1(kind, 10, more) == once * 3**power


@pytest.mark.parametrize("kind", ["self_attention", "restricted", "recurrent", "convolutional"])
def test_a_layer_computes_a_bounded_multiple_of_the_term(kind):
    ratios = []
    for length, width, radius in itertools.product((2**14, 2**20), (64, 256), (16, 64)):
        settings = ComplexitySettings(d_model=width, heads=2, neighbourhood=radius)
        projections = 4 * length * width**2 if kind in ("self_attention", "restricted") else 0
        ratios.append((operations(kind, length, settings) - projections) / term_of_table_1(kind, length, settings))
    expected = {"self_attention": 2, "restricted": 6, "recurrent": 8, "convolutional": 2}[kind]
    assert ratios == pytest.approx([expected] * len(ratios))


BY_HAND = {
    "self_attention": {100: 1},
    "plain": {100: 1},
    "recurrent": {100: 100},
    "restricted": {6: 1, 7: 2, 11: 2, 12: 3},
    "masked": {12: 3},
    "convolutional": {2: 1, 12: 11},
    "causal": {3: 1, 4: 2},
    "dilated": {3: 1, 4: 2, 28: 4},
}


def test_path_lengths_by_hand():
    for kind, expected in BY_HAND.items():
        assert {n: path_length(kind, n, ComplexitySettings(**SMALL)) for n in expected} == expected, kind


@given(base=st.integers(2, 9), number=st.integers(1, 10**18))
def test_the_least_power_is_the_least(base, number):
    found = least_power(base, number)
    assert base**found >= number
    assert found == 1 or base ** (found - 1) < number
