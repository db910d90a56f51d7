"""A search for settings: what it tries, that it can be stopped, and what it ends in."""

import pytest

from heedful.diagnosis import tuning
from heedful.diagnosis.tuning import knobs_of, tune, with_values
from heedful.training.loop.loop import TrainingLoop
from heedful.training.recipe_file import read_recipe
from tiny_runs import tiny_recipe

FEW = {"dropout": [0.1, 0.4], "learning_rate": [0.003, 0.0001]}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return tiny_recipe(tmp_path_factory.mktemp("run") / "run", {"validation.every_updates": 2, "seed": 2})


@pytest.fixture(scope="module")
def found(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "search"
    return tune(recipe, folder, minutes=5, vary=FEW)


def test_a_search_ends_with_a_recipe_of_the_best_values_and_a_picture(found, recipe):
    assert len(found.trials) == 4  # all there are
    assert not found.has_unfinished
    best = found.trials[0]
    assert best.loss == min(trial.loss for trial in found.trials)
    assert next(trial for trial in found.trials if trial.number == 1).values == {
        "dropout": 0.1,
        "learning_rate": 0.003,
    }
    written = read_recipe(found.recipe)
    assert written == with_values(recipe, best.values)
    assert b"learning_rate" in (found.recipe.parent / tuning.PICTURE).read_bytes()
    assert not list(found.recipe.parent.glob("trial-*/checkpoints"))


def test_a_bad_trial_is_given_up_before_its_end(found):
    pruned = [trial for trial in found.trials if trial.is_pruned]
    assert pruned
    assert all(trial.updates < 6 and trial.values["learning_rate"] == 0.0001 for trial in pruned)


def test_a_search_that_is_killed_goes_on_and_finds_the_same(found, recipe, tmp_path, monkeypatch):
    train_on, trained = TrainingLoop._train_on, []

    def killed_in_the_third_trial(loop, update):
        trained.append(loop.recipe.output)
        if len(set(trained)) == 3 and trained.count(trained[-1]) == 4:
            raise RuntimeError("killed")
        train_on(loop, update)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "_train_on", killed_in_the_third_trial)
        with pytest.raises(RuntimeError, match="killed"):
            tune(recipe, tmp_path / "search", minutes=5, vary=FEW)
    monkeypatch.setattr(TrainingLoop, "_train_on", lambda loop, update: trained.append(0) or train_on(loop, update))
    again = tune(recipe, tmp_path / "search", minutes=5, vary=FEW)
    assert again.trials == found.trials
    assert trained.count(0) < 12  # the first two trials were not trained again


def test_a_search_whose_time_is_over_leaves_its_trial_for_the_next(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingLoop, "_is_late", lambda loop: loop.progress.update == 3)
    search = tune(recipe, tmp_path / "search", minutes=5, vary=FEW)
    assert search.trials == []
    assert search.has_unfinished
    assert not search.recipe.exists()


def test_values_are_chosen_around_the_recipe_s_own(tmp_path):
    choices = knobs_of(tiny_recipe(tmp_path))
    assert choices["vocabulary"] == (300, 400, 800)
    assert choices["width"] == (32, 64)
    assert choices["depth"] == (1, 2, 3, 4, 6)
    assert 0.1 in choices["dropout"]
    assert 0.003 in choices["learning_rate"]
    assert "vocabulary" not in knobs_of(tiny_recipe(tmp_path, {"tokenizer.path": "somewhere"}))


def test_any_key_may_be_varied_and_empty_is_a_value(recipe, tmp_path):
    search = tune(recipe, tmp_path / "search", minutes=5, vary={"optimization.r_drop": [None, 2, 0.5]})
    assert {trial.values["optimization.r_drop"] for trial in search.trials} == {None, 2, 0.5}
    ticks = (search.recipe.parent / tuning.PICTURE).read_text()
    assert ticks.index(">0.5<") < ticks.index(">2<") < ticks.index(">None<")


def test_a_wider_model_has_more_heads_of_the_same_width(tmp_path):
    options = with_values(tiny_recipe(tmp_path), {"width": 64, "depth": 3}).model.options
    assert (options["d_model"], options["encoder_attention_heads"], options["decoder_ffn_dim"]) == (64, 4, 128)
    assert (options["encoder_layers"], options["decoder_layers"]) == (3, 3)


@pytest.mark.parametrize(
    ("vary", "message"),
    [
        ({}, "`--vary` must name a knob or more .* but names none"),
        ({"dropout": [0.1]}, "`--vary dropout` must have two values or more, but has 0.1 alone"),
        ({"vocabulary": []}, r"must have two values or more, but has none here: give it vocabulary=VALUE,VALUE"),
        ({"widht": [32, 64]}, "must name one of vocabulary, .*, or a key of the recipe, but names widht instead"),
        ({"optimization.rate": [1, 2]}, "a key of the recipe, but names optimization.rate instead"),
        ({"dropout": [0.1, "much"]}, "dropout"),
        ({"learning_rate": [0.1, -1]}, "`optimization.learning_rate` must be above 0 and finite, but is -1"),
    ],
)
def test_knobs_that_turn_nothing_are_refused(recipe, tmp_path, vary, message):
    with pytest.raises(ValueError, match=message):
        tune(recipe, tmp_path / "search", minutes=1, vary=vary)
    assert not (tmp_path / "search").exists()


def test_a_folder_is_of_one_search(found, recipe):
    with pytest.raises(ValueError, match=r"must be a new folder or that of this search, but .* holds another"):
        tune(recipe, found.recipe.parent, minutes=1, vary={"dropout": [0.1, 0.2]})
