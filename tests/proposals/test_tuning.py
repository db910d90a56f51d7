"""A search for settings: what it tries, that it can be stopped, and what it ends in."""

import itertools
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("optuna")
from heedful.proposals import tuning
from heedful.proposals.tuning import Tuning, knobs_of, tune
from heedful.training.recipe_file import read_recipe
from heedful.training.updates.engine import TrainingEngine
from helpers import assert_error, assert_refused
from tiny_runs import tiny_recipe


def knobs(recipe):
    return knobs_of(recipe.tokenizer, recipe.model, recipe.optimization)


FEW = {"dropout": [0.1, 0.4], "learning_rate": [0.003, 0.0001]}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return tiny_recipe(tmp_path_factory.mktemp("run") / "run", {"validation.every_updates": 2, "seed": 1})


@pytest.fixture(scope="module")
def found(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "search"
    return tune(recipe, folder, minutes=5, vary=FEW)


def test_a_search_ends_with_a_recipe_of_the_best_values_and_a_picture(found, recipe):
    assert (len(found.trials), found.has_unfinished) == (4, False)  # all there are
    best, first = found.trials[0], next(trial for trial in found.trials if trial.number == 1)
    assert best.loss == min(trial.loss for trial in found.trials)
    assert first.values == {"dropout": 0.1, "learning_rate": 0.003}
    assert read_recipe(found.recipe) == Tuning(recipe, Path(), {}).with_values(best.values)
    assert b"learning_rate" in (found.recipe.parent / tuning.PICTURE).read_bytes()
    assert not list(found.recipe.parent.glob("trial-*/checkpoints"))
    pruned = [trial for trial in found.trials if trial.is_pruned]  # before its end
    assert pruned
    assert all(trial.updates < 6 and trial.values["learning_rate"] == 0.0001 for trial in pruned)
    with pytest.raises(ValueError, match=r"must be a new folder or this search's folder, but .* holds another"):
        tune(recipe, found.recipe.parent, minutes=1, vary={"dropout": [0.1, 0.2]})


@pytest.fixture
def steps(monkeypatch):
    step, seen = TrainingEngine.step, []
    monkeypatch.setattr(TrainingEngine, "step", lambda *args: seen.append(1) or step(*args))
    return seen


def test_a_search_that_is_killed_goes_on_and_finds_the_same(found, recipe, tmp_path, monkeypatch, steps):
    report, seen = tuning._report, []

    def killed_in_the_third_trial(trial, corpus, update, loss):
        seen.append(trial.number)
        if len(set(seen)) == 3 and update == 4:
            raise RuntimeError("killed")
        report(trial, corpus, update, loss)

    with monkeypatch.context() as patch:
        patch.setattr(tuning, "_report", killed_in_the_third_trial)
        assert_error("killed", tune, recipe, tmp_path / "search", error=RuntimeError, minutes=5, vary=FEW)
    steps.clear()
    assert tune(recipe, tmp_path / "search", minutes=5, vary=FEW).trials == found.trials
    assert len(steps) < 12  # the first two trials were not trained again


def test_a_search_whose_time_is_over_leaves_its_trial_for_the_next(recipe, tmp_path, monkeypatch, steps):
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + 3600 * (len(steps) >= 3))
    monkeypatch.setattr("heedful.training.loop.loop.time", clock)
    search = tune(recipe, tmp_path / "search", minutes=5, vary=FEW)
    assert search.trials == []
    assert search.has_unfinished
    assert not search.recipe.exists()
    assert Tuning(recipe, tmp_path, {})._try(None, None, {}, end=0) is False  # none begins when the time is over


def test_a_trial_may_begin_just_before_the_end(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "time", SimpleNamespace(monotonic=itertools.count().__next__))
    tune(recipe, tmp_path / "search", minutes=2.5 / 60, vary=FEW)
    assert len([*tmp_path.glob("search/trial-*/recipe.yaml")]) == 1


def test_values_are_chosen_around_the_recipe_s_own_and_models_keep_their_proportions(tmp_path):
    tiny = tiny_recipe(tmp_path)
    choices = knobs(tiny)
    assert choices["vocabulary"] == (300, 400, 800)
    assert (choices["width"], choices["depth"]) == ((32, 64), (1, 2, 3, 4, 6))
    assert (0.1 in choices["dropout"], 0.003 in choices["learning_rate"]) == (True, True)
    assert "vocabulary" not in knobs(tiny_recipe(tmp_path, {"tokenizer.path": "somewhere"}))
    free, muon = ({"optimization.optimizer": name} for name in ("schedule_free", "muon"))
    assert knobs(tiny_recipe(tmp_path, free)).keys() - choices.keys() == {"beta1"}
    name = "embedding_learning_rate"
    found = knobs(tiny_recipe(tmp_path, {**muon, f"optimization.{name}": 0.02}))
    assert found.keys() - choices.keys() == {name}
    assert found[name] == (0.006, 0.01, 0.02, 0.034, 0.06)
    empty = tiny_recipe(tmp_path, muon)  # which means that of the rest, and is among what is tried
    assert Tuning(empty, tmp_path, found).own_values()[name] in knobs(empty)[name]
    options = Tuning(tiny, tmp_path, {}).with_values({"width": 64, "depth": 3}).model.options
    assert (options["d_model"], options["encoder_attention_heads"], options["decoder_ffn_dim"]) == (64, 4, 128)
    assert (options["encoder_layers"], options["decoder_layers"]) == (3, 3)
    deep = tiny_recipe(tmp_path, {"model.options.encoder_layers": 4, "model.options.decoder_layers": 2})
    assert Tuning(deep, tmp_path, {}).with_values({"depth": 4}) == deep
    options = Tuning(deep, tmp_path, {}).with_values({"depth": 6}).model.options
    assert (options["encoder_layers"], options["decoder_layers"]) == (6, 3)


def test_any_key_may_be_varied_and_empty_is_a_value(recipe, tmp_path):
    search = tune(recipe, tmp_path / "search", minutes=5, vary={"optimization.r_drop": [None, 2, 0.5]})
    assert {trial.values["optimization.r_drop"] for trial in search.trials} == {None, 2, 0.5}
    ticks = (search.recipe.parent / tuning.PICTURE).read_text()
    assert ticks.index(">0.5<") < ticks.index(">2<") < ticks.index(">None<")


def test_knobs_that_turn_nothing_are_refused(recipe, tmp_path):
    twice = {"dropout": [0.1, 0.3], "model.options.dropout": [0.2, 0.4]}
    cases = [
        ({}, "`--vary` must name a setting .* but names none"),
        ({"dropout": [0.1]}, "`--vary dropout` must have at least two values, but has only 0.1"),
        ({"vocabulary": []}, r"must have at least two values, but has none here: pass vocabulary=VALUE,VALUE"),
        ({"widht": [32, 64]}, "must name one of vocabulary, .*, or a key of the recipe, but names widht instead"),
        ({"optimization.rate": [1, 2]}, "a key of the recipe, but names optimization.rate instead"),
        ({"dropout": [0.1, "much"]}, "dropout"),
        ({"width": ["small", 32]}, "`--vary width` must have whole numbers, but has 'small'"),
        ({"data.train": [["a"], ["b"]]}, r"`--vary data.train` must have numbers, texts, .* but has \['a'\]"),
        ({"vocabulary": [400, 100]}, r"`tokenizer.vocab_size` must be at least 260 for bpe \(.*\), but is 100"),
        (twice, "must name each setting once, but names dropout and model.options.dropout, which are the same"),
        (
            {"embedding_learning_rate": [0.1, -0.2]},
            "`optimization.embedding_learning_rate` must be above 0, but is -0.2",
        ),
        ({"learning_rate": [0.1, -1]}, "`optimization.learning_rate` must be above 0, but is -1"),
    ]
    assert_refused(cases, lambda vary: tune(recipe, tmp_path / "search", minutes=1, vary=vary))
    assert not (tmp_path / "search").exists()


def test_all_sets_of_values_are_tried_in_the_end(recipe, tmp_path, monkeypatch):
    def rated(tuned, study, trial, values, end):
        tried = tuned.with_values(values)
        trial.report(tried.model.options["dropout"] + 100 * tried.optimization.learning_rate, 1)
        study.tell(trial.number, 1.0)
        return True

    monkeypatch.setattr(Tuning, "_try", rated)
    vary = {"dropout": [0.1, 0.2, 0.3], "learning_rate": [0.001, 0.002], "optimization.beta1": [0.8, 0.9]}
    search = tune(recipe, tmp_path / "search", minutes=5, vary=vary)
    assert len({tuple(trial.values.values()) for trial in search.trials}) == len(search.trials) == 12
    assert search.trials[0].values.items() >= {"dropout": 0.1, "learning_rate": 0.001}.items()


def test_a_trial_that_diverges_is_left_out_and_the_search_goes_on(recipe, tmp_path):
    vary = {"learning_rate": [1e30, 0.002]}
    search = tune(recipe, tmp_path / "search", minutes=5, vary=vary)
    assert [trial.values for trial in search.trials] == [{"learning_rate": 0.002}]
    assert "where the original recipe gave" not in search.recipe.read_text()  # 0.003 was not among the values
    assert tune(recipe, tmp_path / "search", minutes=5, vary=vary) == search
    with pytest.raises(ValueError, match="`--vary` must allow a model that can be trained, but none of its values"):
        tune(recipe, tmp_path / "other", minutes=5, vary={"learning_rate": [1e30, 1e31]})
    assert not (tmp_path / "other").exists()


def test_a_mistake_in_the_recipe_leaves_no_search_behind(tmp_path):
    for changes, message in (
        ({"data.validation": str(tmp_path / "nowhere.tsv")}, r"nowhere\.tsv"),
        ({"overwrite": True}, "`overwrite` must be false for a search"),
    ):
        with pytest.raises((FileNotFoundError, ValueError), match=message):
            tune(tiny_recipe(tmp_path / "run", changes), tmp_path / "search", minutes=5, vary=FEW)
        assert not (tmp_path / "search").exists()


def test_trials_are_compared_by_the_same_pairs(found, recipe):
    study = Tuning(recipe, found.recipe.parent, FEW).study()
    with pytest.raises(ValueError, match=r"`data\.validation` must be the same pairs as in earlier trials"):
        tuning._check_same_validation(study, [{"source": "둘", "target": "two"}])


def test_a_lock_that_a_killed_search_in_a_relative_folder_left_is_waited_for_no_more(recipe, tmp_path, monkeypatch):
    from optuna.storages import journal

    def backend(path, made=journal.JournalFileBackend):
        assert Path(path) == lock.with_suffix("")
        assert not lock.is_symlink()
        return made(path)

    monkeypatch.chdir(tmp_path)
    lock = tmp_path / "found" / "trials.log.lock"
    lock.parent.mkdir()
    lock.symlink_to("found/trials.log")
    monkeypatch.setattr(journal, "JournalFileBackend", backend)
    Tuning(recipe, Path("found"), FEW).study()
    assert [path.name for path in lock.parent.iterdir()] == ["trials.log"]
