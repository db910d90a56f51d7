"""Checks on the length of a run: each is given a recipe with exactly its defect, and one without."""

import pytest

from heedful.diagnosis.recipe_checks.run_length import RunPlan, check_run_length
from tiny_runs import tiny_recipe

# 1,000 updates of which 100 make an epoch, with validations and checkpoints on the way.
SOUND = {
    "optimization.schedule": "linear",
    "optimization.warmup_updates": 100,
    "optimization.max_updates": 1000,
    "validation.every_updates": 100,
    "checkpoints.every_updates": 100,
    "validation.patience": 5,
}
PLAN = RunPlan(updates_per_epoch=100, seconds_per_update=0.5)


@pytest.fixture
def findings(tmp_path):
    """Run the checks on the sound recipe with changes; return (level, key) of each finding, and the texts."""

    def check(plan=PLAN, **changes):
        recipe = tiny_recipe(tmp_path / "run", {**SOUND, **changes})
        found = list(check_run_length(recipe, plan, 32))
        return [(finding.level, finding.where) for finding in found], " ".join(finding.message for finding in found)

    return check


def test_a_sound_run_gives_no_finding(findings):
    assert findings() == ([], "")
    assert findings(plan=RunPlan()) == ([], "")


def test_a_warm_up_as_long_as_the_run_is_an_error(findings):
    found, told = findings(**{"optimization.warmup_updates": 2000})
    assert found == [("error", "optimization.warmup_updates")]
    assert "50 % of its peak" in told


def test_a_warm_up_that_the_data_end_first_is_an_error(findings):
    found, told = findings(**{"optimization.max_epochs": 3, "optimization.warmup_updates": 400})
    assert ("error", "optimization.warmup_updates") in found
    assert ("warning", "optimization.max_updates") not in found  # one cause, one finding
    assert "after 300 updates (`optimization.max_epochs`)" in told


def test_a_warm_up_of_more_than_half_the_run_is_a_warning(findings):
    assert findings(**{"optimization.warmup_updates": 600})[0] == [("warning", "optimization.warmup_updates")]


def test_the_papers_schedule_over_a_short_run_never_peaks(findings):
    changes = {
        "optimization.schedule": "paper",
        "optimization.learning_rate": 1.0,
        "optimization.warmup_updates": 4000,
    }
    found, told = findings(**changes)
    assert found == [("error", "optimization.warmup_updates")]
    assert "25 % of its peak" in told


@pytest.mark.parametrize(
    ("limit", "value"), [("optimization.max_epochs", 6), ("optimization.max_minutes", 5)], ids=["epochs", "minutes"]
)
def test_a_schedule_that_something_else_ends_first_is_a_warning(findings, limit, value):
    found, told = findings(**{limit: value})
    assert found == [("warning", "optimization.max_updates")]
    assert "after 600 updates" in told
    assert f"`{limit}`" in told
    assert "44 % of its peak" in told
    assert findings(**{limit: 10 * value})[0] == []


def test_what_the_speed_of_this_machine_decides_is_no_error(findings):
    found, told = findings(**{"optimization.max_minutes": 0.5, "validation.patience": None})
    assert {level for level, _ in found} == {"warning"}
    assert "by the speed measured here" in told


def test_a_constant_schedule_may_end_anywhere(findings):
    assert findings(**{"optimization.schedule": "constant", "optimization.max_epochs": 6})[0] == []


def test_an_update_larger_than_the_data_is_a_warning(findings):
    found, _ = findings(plan=RunPlan(updates_per_epoch=1))
    assert ("warning", "optimization.tokens_per_update") in found


def test_a_run_of_hundreds_of_epochs_is_a_warning(findings):
    found, told = findings(plan=RunPlan(updates_per_epoch=4))
    assert found == [("warning", "optimization.max_updates")]
    assert "250 times" in told
    assert findings(plan=RunPlan(updates_per_epoch=5))[0] == []


def test_a_run_that_is_never_validated_is_a_warning_and_an_error_where_it_counts(findings):
    never = {"validation.every_updates": 1001}
    assert findings(**never, **{"validation.patience": None})[0] == [("warning", "validation.every_updates")]
    assert findings(**never)[0] == [("error", "validation.every_updates")]
    best = {"validation.patience": None, "checkpoints.publish": "best"}
    assert findings(**never, **best)[0] == [("error", "validation.every_updates")]


def test_a_run_that_is_never_saved_is_a_warning(findings):
    found, told = findings(**{"checkpoints.every_updates": 2000})
    assert found == [("warning", "checkpoints.every_updates")]
    assert "nothing is averaged" in told


@pytest.mark.parametrize(("patience", "found"), [(9, []), (10, [("warning", "validation.patience")])])
def test_patience_longer_than_the_run_is_a_warning(findings, patience, found):
    assert findings(**{"validation.patience": patience})[0] == found
