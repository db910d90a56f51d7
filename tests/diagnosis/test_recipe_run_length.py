"""Checks on the length of a run: each is given a recipe with exactly its defect, and one without."""

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
    (  # a warm-up that the data end first
        *(PLAN, {"optimization.max_epochs": 3, "optimization.warmup_updates": 400}),
        [("error", "optimization.warmup_updates"), ("warning", "validation.patience")],
        ["after 300 updates (`optimization.max_epochs`)"],
    ),
    (  # what the speed of this machine decides is no error
        *(PLAN, {"optimization.max_minutes": 0.5, "validation.patience": None}),
        [("warning", f"{key}_updates") for key in ("optimization.warmup", "validation.every", "checkpoints.every")],
        ["by the speed measured here"],
    ),
    (
        *(RunPlan(updates_per_epoch=1), {}),  # an update larger than the data
        [("warning", f"optimization.{key}") for key in ("tokens_per_update", "max_updates")],
        ["always sees the same pairs"],
    ),
    (PLAN, {"validation.patience": 9}, [], []),
    (PLAN, {"validation.patience": 10}, [("warning", "validation.patience")], []),
]


def test_a_sound_run_gives_no_finding_and_what_is_wrong_is_named_by_its_key(tmp_path):
    for plan, changes, expected, texts in CASES:
        found = list(check_run_length(tiny_recipe(tmp_path / "run", {**SOUND, **changes}), plan, 32))
        assert [(finding.level, finding.where) for finding in found] == expected, (plan, changes)
        assert all(text in " ".join(finding.message for finding in found) for text in texts), found
