"""The studies of cells and of robustness: models as large as each other, and both at a small size."""

import json
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
import torch

from heedful import HeedConfig, HeedForConditionalGeneration, HeedRNNConfig, HeedRNNForConditionalGeneration
from heedful.studies.recurrent import cells, robustness
from heedful.studies.recurrent.equal_models import recurrent_models
from heedful.studies.study import Lab, run_study
from heedful.studies.training import LEARNING, study_recipe

SMALL = {
    "data.test": {"test": "builtin:test:8"},
    "tokenizer.vocab_size": 400,
    "optimization.tokens_per_update": 256,
    "decoding.max_length": 8,
    "logging.every_updates": 1,
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Run both studies with three updates a training; return their results."""
    folder, results = tmp_path_factory.mktemp("recurrent"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cells, "MEASURED", 3)
        patch.setattr(cells, "FEW", 300)
        patch.setattr(cells, "SEEDS", 1)
        patch.setattr(robustness, "PAIRS", 3)
        for module in (cells, robustness):
            study = replace(module.STUDY, changes={**module.STUDY.changes, **SMALL})
            lab = Lab(study, updates=3, data="builtin:train:400", folder=folder / "trainings")
            written = run_study(lab, folder / study.name)
            results[study.name] = json.loads((written / "results.json").read_text(encoding="utf-8"))
    return results


def test_all_models_have_about_the_parameters_of_the_transformer():
    options = study_recipe(dict(LEARNING)).model.options
    with torch.device("meta"):
        transformer = HeedForConditionalGeneration(HeedConfig(**options, vocab_size=2000)).num_parameters()
        for name, changes in recurrent_models().items():
            fields = {key: value for key, value in changes["model.options"].items() if key != "model_type"}
            model = HeedRNNForConditionalGeneration(HeedRNNConfig(**fields, vocab_size=2000))
            assert model.num_parameters() == pytest.approx(transformer, rel=0.01), name


def test_nothing_but_cell_attention_and_width_differs():
    models = list(recurrent_models().values())
    recipes = [one.pop("model.options") | one for one in models]
    differing = {key for recipe in recipes for key in recipe if recipe[key] != recipes[0][key]}
    assert differing == {"cell", "attention", "hidden_size"}


def test_each_cell_has_its_score_and_each_gate_its_shares(found):
    quality, few, gates = found["cells"]["tables"]
    assert [row[0] for row in quality["rows"]] == list(recurrent_models())
    assert [tuple(row[:2]) for row in gates["rows"]] == [
        (name, gate)
        for name in cells.GATED
        for gate in (("forget", "input", "output") if "LSTM" in name else ("reset", "update"))
    ]
    assert [row[:2] for row in few["rows"]] == [["LSTM", 123], ["GRU", 141], ["GRU", 123]]
    large, as_large, as_wide = (row[2] for row in few["rows"])
    assert as_wide < 0.9 * large < as_large
    for row in gates["rows"]:
        assert 0.2 < row[2] < 0.9
        assert row[3] + row[4] < 1
    # A forget gate begins at a bias of 1, all others at 0.
    means = {(row[0], row[1]): row[2] for row in gates["rows"]}
    assert means["LSTM", "forget"] == pytest.approx(0.73, abs=0.08)
    assert means["GRU", "update"] == pytest.approx(0.5, abs=0.08)


def test_every_model_is_scored_on_every_change(found):
    names = [*recurrent_models(), "Transformer"]
    for table in found["robustness"]["tables"]:
        assert [row[0] for row in table["rows"]] == names
        assert [f"{share:.0%}".replace("%", " %") for share in robustness.SHARES] == table["columns"][1:-1]
    assert [one["name"] for one in found["robustness"]["trainings"]] == names
    assert found["robustness"]["trainings"][:6] == found["cells"]["trainings"][:6]


WORDS = [f"w{number}" for number in range(200)]


@pytest.mark.parametrize("kind", robustness.KINDS)
def test_about_the_share_of_words_is_changed(kind):
    source = " ".join(WORDS)
    assert robustness.changed_source(source, kind, 0.0, Random(1), ["x"]) == source
    words = robustness.changed_source(source, kind, 0.2, Random(1), ["x"]).split()
    if kind == "swapped":
        assert sorted(words) == sorted(WORDS)
        early = [word for word, after in pairwise(words) if int(word[1:]) - int(after[1:]) == 1]
        assert 20 <= len(early) <= 50
        assert all(abs(place - int(word[1:])) <= 1 for place, word in enumerate(words))
    elif kind == "left_out":
        assert 20 <= 200 - len(words) <= 60
        assert words == sorted(words, key=lambda word: int(word[1:]))
    else:
        assert [word for word in words if word != "x"] == WORDS
        assert 20 <= words.count("x") <= 60


def test_one_word_stays_and_the_same_seed_gives_the_same():
    pairs = [("하나 둘 셋", "one two three"), ("넷", "four")]
    assert all(source for source, _ in robustness.changed_pairs(pairs, "left_out", 1.0, 1))
    first, again, other = (robustness.changed_pairs(pairs * 20, "inserted", 0.5, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert [target for _, target in first] == [target for _, target in pairs * 20]
