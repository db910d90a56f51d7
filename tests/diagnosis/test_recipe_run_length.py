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


PAPER = {"optimization.schedule": "paper", "optimization.learning_rate": 1.0}
NEVER = {"validation.every_updates": 1001}
CASES = [  # the plan, changes of the recipe, the findings, and what their texts say
    (PLAN, {}, [], []),
    (RunPlan(), {}, [], []),
    (PLAN, {"optimization.warmup_updates": 2000}, [("error", "optimization.warmup_updates")], ["50 % of its peak"]),
    (PLAN, {"optimization.warmup_updates": 600}, [("warning", "optimization.warmup_updates")], []),
    (
        *(PLAN, PAPER | {"optimization.warmup_updates": 4000}),
        *([("error", "optimization.warmup_updates")], ["25 % of its peak"]),
    ),
    *(
        (PLAN, {limit: value}, [("warning", "optimization.max_updates")], ["after 600 updates", f"`{limit}`", "44 %"])
        for limit, value in (("optimization.max_epochs", 6), ("optimization.max_minutes", 5))
    ),
    (PLAN, {"optimization.max_epochs": 60, "optimization.max_minutes": 50}, [], []),
    (PLAN, {"optimization.schedule": "constant", "optimization.max_epochs": 6}, [], []),
    (RunPlan(updates_per_epoch=4), {}, [("warning", "optimization.max_updates")], ["250 times"]),
    (RunPlan(updates_per_epoch=5), {}, [], []),
    (PLAN, NEVER | {"validation.patience": None}, [("warning", "validation.every_updates")], []),
    (PLAN, NEVER, [("error", "validation.every_updates")], []),
    (
        *(PLAN, NEVER | {"validation.patience": None, "checkpoints.publish": "best"}),
        *([("error", "validation.every_updates")], []),
    ),
    (
        *(PLAN, {"checkpoints.every_updates": 2000}),
        *([("warning", "checkpoints.every_updates")], ["nothing is averaged"]),
    ),
    (PLAN, {"validation.patience": 9}, [], []),
    (PLAN, {"validation.patience": 10}, [("warning", "validation.patience")], []),
]


def test_a_sound_run_gives_no_finding_and_what_is_wrong_is_named_by_its_key(findings):
    for plan, changes, expected, texts in CASES:
        found, told = findings(plan, **changes)
        assert found == expected, (plan, changes)
        assert all(text in told for text in texts), told


def test_a_warm_up_that_the_data_end_first_is_an_error(findings):
    found, told = findings(**{"optimization.max_epochs": 3, "optimization.warmup_updates": 400})
    assert ("error", "optimization.warmup_updates") in found
    assert ("warning", "optimization.max_updates") not in found  # one cause, one finding
    assert "after 300 updates (`optimization.max_epochs`)" in told


def test_what_the_speed_of_this_machine_decides_is_no_error_and_an_update_larger_than_the_data_a_warning(findings):
    found, told = findings(**{"optimization.max_minutes": 0.5, "validation.patience": None})
    assert {level for level, _ in found} == {"warning"}
    assert "by the speed measured here" in told
    found, _ = findings(plan=RunPlan(updates_per_epoch=1))
    assert ("warning", "optimization.tokens_per_update") in found
