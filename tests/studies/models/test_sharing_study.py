import json
from dataclasses import replace

import pytest

from heedful.studies.measures import train_with_seeds
from heedful.studies.models import sharing
from heedful.studies.study import Lab, run_study


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the results of the study with ten updates a training."""
    folder = tmp_path_factory.mktemp("sharing")
    small = {
        "data.test": {"test": "builtin:test:8"},
        "tokenizer.vocab_size": 400,
        "optimization.tokens_per_update": 256,
        "decoding.max_length": 8,
    }
    study = replace(sharing.STUDY, changes={**sharing.STUDY.changes, **small})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "SEEDS", 1)
        lab = Lab(study, updates=10, data="builtin:train:400", folder=folder / "trainings")
        written = run_study(lab, folder / "out")
    return json.loads((written / "results.json").read_text())


def test_every_further_matrix_adds_vocabulary_times_width(results):
    rows = {row[0]: row for row in results["tables"][0]["rows"]}
    matrix = 400 * 64
    fewest = rows[sharing.ONE][2]
    assert rows[sharing.OWN_OUTPUT][2] == rows[sharing.OWN_SOURCE][2] == fewest + matrix
    assert rows[sharing.EACH][2] == fewest + 2 * matrix
    assert [(row[2] - fewest) // matrix + 1 for row in rows.values()] == [row[1] for row in rows.values()]


def test_each_way_to_share_is_another_training(results):
    trainings = results["trainings"]
    assert [one["name"] for one in trainings] == list(sharing.SHARINGS)
    assert len({one["metrics"]["validation"]["loss"] for one in trainings}) == 4
    assert {one["changes"]["seed"] for one in trainings} == {1}


def test_what_is_saved_is_the_share_of_the_parameters(results):
    values = results["values"]
    assert values["saved"] == pytest.approx((values["each"] - values["one"]) / values["each"])
    assert results["command"] == "heedful study sharing --seed 1 --updates 10 --data builtin:train:400"


def test_several_seeds_are_several_trainings(monkeypatch):
    asked = []
    monkeypatch.setattr(Lab, "train", lambda lab, name, changes=None: asked.append((name, lab.seed, changes)))
    train_with_seeds(Lab(sharing.STUDY, seed=5), "one", {"a": 1}, 2)
    assert asked == [("one, seed 5", 5, {"a": 1}), ("one, seed 6", 6, {"a": 1})]
