"""What many tests rest on: pairs of options, and new processes."""

import itertools

import pytest

from helpers import WITHOUT_HEEDFUL, fresh_process, pairwise


@pytest.mark.parametrize("sizes", [(3,), (2, 3), (4, 2, 2), (13, 3, 2), (5, 4, 3, 2), (2, 2, 2, 2, 2)], ids=str)
def test_every_pair_of_values_is_in_few_combinations(sizes):
    axes = [[f"{name}{value}" for value in range(size)] for name, size in zip("abcde", sizes, strict=False)]
    found = pairwise(*axes)
    assert set(found) <= set(itertools.product(*axes))
    for one, other in itertools.combinations(range(len(axes)), 2):
        pairs = {(values[one], values[other]) for values in found}
        assert pairs == set(itertools.product(axes[one], axes[other]))
    largest = sorted(sizes)[-2:]
    assert len(found) == len(set(found)) <= largest[0] * largest[-1] * (1.5 if len(sizes) > 2 else 1)


def test_a_new_process_tells_which_piece_raised_and_has_no_heedful_where_it_is_not_to_be(tmp_path):
    pieces = {"right": "assert number == 3", "wrong": "assert number == 4", "import": "import heedful"}
    raised = fresh_process(pieces, {"number": 3}, tmp_path / "one", WITHOUT_HEEDFUL)
    assert raised.keys() == {"wrong", "import"}
    assert raised["wrong"].endswith("AssertionError\n")
    assert "ModuleNotFoundError" in raised["import"]
