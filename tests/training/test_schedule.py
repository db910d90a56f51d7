import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heedful.training.loop.schedule import learning_rate, make_optimizer
from heedful.training.recipe import OptimizationRecipe


def settings(schedule, **changes):
    return OptimizationRecipe(**{"schedule": schedule, "max_updates": 1000, "warmup_updates": 100, **changes})


@given(
    update=st.integers(1, 10**6),
    d_model=st.integers(1, 4096),
    warmup=st.integers(1, 20_000),
    factor=st.floats(1e-3, 10),
)
def test_the_papers_schedule_is_equation_3(update, d_model, warmup, factor):
    paper = settings("paper", warmup_updates=warmup, learning_rate=factor)
    expected = factor * d_model**-0.5 * min(update**-0.5, update * warmup**-1.5)
    assert learning_rate(update, paper, d_model) == pytest.approx(expected, rel=1e-12)


def test_the_papers_base_model_peaks_at_update_4000_with_seven_ten_thousandths():
    paper = OptimizationRecipe(max_updates=100_000)
    rates = {update: learning_rate(update, paper, 512) for update in range(1, 12_001)}
    assert max(rates, key=rates.get) == 4000
    assert rates[4000] == pytest.approx(6.98771e-4, rel=1e-5)
    assert rates[1] == pytest.approx(rates[4000] / 4000)


SHAPES = {  # 300 updates after the warm-up, and at the end
    "inverse_sqrt": (0.5, math.sqrt(0.1)),
    "constant": (1.0, 1.0),
    "linear": (2 / 3, 0.0),
    "cosine": (0.75, 0.0),
}


def test_all_other_schedules_rise_linearly_and_have_their_own_shapes_after_the_warm_up():
    for schedule, (after, end) in SHAPES.items():
        rates = [learning_rate(update, settings(schedule, learning_rate=0.5), 512) for update in (1, 50, 99, 100)]
        assert rates == pytest.approx([0.005, 0.25, 0.495, 0.5])
        assert learning_rate(400, settings(schedule), 512) == pytest.approx(after)
        assert learning_rate(1000, settings(schedule), 512) == pytest.approx(end, abs=1e-12)
        assert learning_rate(5000, settings(schedule), 512) <= end + 1e-12


def test_without_warm_up_the_first_update_has_the_highest_rate():
    for schedule in ("paper", *SHAPES):
        rates = [learning_rate(update, settings(schedule, warmup_updates=0), 1) for update in range(1, 1000)]
        assert rates[0] == max(rates) == pytest.approx(1.0, abs=2e-3)
        assert min(rates) >= 0


def test_adam_has_the_papers_constants():
    optimizer = make_optimizer(torch.nn.Linear(3, 2), OptimizationRecipe(max_updates=1))
    assert type(optimizer) is torch.optim.Adam
    assert {group["betas"] for group in optimizer.param_groups} == {(0.9, 0.98)}
    assert {group["eps"] for group in optimizer.param_groups} == {1e-9}


def test_adamw_decays_matrices_and_no_vector():
    model = torch.nn.Linear(3, 2)
    optimizer = make_optimizer(model, OptimizationRecipe(optimizer="adamw", weight_decay=0.1, max_updates=1))
    assert type(optimizer) is torch.optim.AdamW
    decays = {parameter: group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]}
    assert decays == {model.weight: 0.1, model.bias: 0.0}


def test_frozen_weights_are_left_out():
    model = torch.nn.Linear(3, 2)
    model.weight.requires_grad_(False)
    optimizer = make_optimizer(model, OptimizationRecipe(max_updates=1))
    assert [group["params"] for group in optimizer.param_groups] == [[model.bias]]
