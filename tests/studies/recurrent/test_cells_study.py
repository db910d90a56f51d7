"""The studies of cells and of robustness: models as large as each other, and both at a small size."""

from itertools import pairwise
from random import Random

import pytest
import torch

from heedful import HeedConfig, HeedForConditionalGeneration, HeedRNNConfig, HeedRNNForConditionalGeneration
from heedful.studies.catalogue import find_study
from heedful.studies.recurrent import robustness
from heedful.studies.recurrent.equal_models import recurrent_models
from heedful.studies.training import study_recipe


def test_all_models_have_about_the_parameters_of_the_transformer():
    options = study_recipe(dict(find_study("cells").changes)).model.options
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
