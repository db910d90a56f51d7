"""The study of positions: sinusoids turn, letters are reversed, and a run of it."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.positions_heed import sinusoids
from heedful.studies.models import positions


@settings(deadline=None)
@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(1, 40))
def test_one_matrix_turns_every_position_into_the_one_k_further(position, offset, half):
    width = 2 * half
    here = positions.encodings(torch.tensor([position]), width)[0]
    there = positions.encodings(torch.tensor([position + offset]), width)[0]
    assert torch.allclose(positions.shift_matrix(offset, width) @ here, there, atol=1e-9)


def test_the_formula_is_the_models_and_the_error_is_rounding():
    numbers = torch.arange(300)
    ours, theirs = positions.encodings(numbers, 64), sinusoids(numbers, 64, "interleaved")
    assert torch.allclose(ours.float(), theirs, atol=1e-4)
    exact, own = positions.shift_errors(100)
    assert exact < 1e-12
    assert 1e-9 < own < 1e-3


def test_the_matrix_is_a_rotation_and_two_shifts_are_one():
    matrix = positions.shift_matrix(7, 16)
    assert torch.allclose(matrix @ matrix.T, torch.eye(16, dtype=torch.float64))
    assert torch.allclose(matrix @ positions.shift_matrix(5, 16), positions.shift_matrix(12, 16))
    outside = matrix.masked_fill(torch.block_diag(*[torch.ones(2, 2, dtype=torch.bool)] * 8), 0)
    assert not outside.any()


def test_reversal_is_reversed_never_twice_the_same_and_as_long_as_asked():
    pairs = positions.reversed_letters((2, 4), 200, 1)
    assert len(set(pairs)) == 200
    assert all(source.split()[::-1] == target.split() for source, target in pairs)
    assert {len(source.split()) for source, _ in pairs} == {2, 3, 4}
    assert positions.reversed_letters((2, 4), 50, 1) == pairs[:50]
    assert positions.reversed_letters((2, 4), 50, 2) != pairs[:50]
