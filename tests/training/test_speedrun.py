"""The script of the races trains as `heedful train` does."""

import importlib.util
from pathlib import Path

import pytest

from heedful.training.run import train
from tiny_runs import tiny_recipe

SCRIPT = Path(__file__).parents[2] / "scripts" / "speedrun.py"


def test_a_race_ends_with_the_loss_and_scores_of_training_by_its_recipe(tmp_path):
    specification = importlib.util.spec_from_file_location("speedrun", SCRIPT)
    speedrun = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(speedrun)
    changes = {"model.options.dropout": 0.1, "optimization.optimizer": "muon", "checkpoints.publish": "last"}
    recipe = tiny_recipe(tmp_path, {**changes, "optimization.max_epochs": None, "optimization.max_updates": 7})
    trained = train(recipe)
    found = speedrun.race(recipe, tests=True)
    assert found["loss"] == pytest.approx(trained.metrics["validation"]["loss"], abs=6e-4)
    assert (found["updates"], found["target_tokens"]) == (7, trained.progress.target_tokens)
    assert found["operations"] > 0
    for name in recipe.data.test:
        assert found[name]["chrf"] == pytest.approx(trained.metrics[name]["chrf"], abs=0.01)
