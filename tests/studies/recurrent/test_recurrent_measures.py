"""What the studies of recurrent models measure and compare: cells, changed sources, stories, gradients."""

import math
from collections import Counter
from itertools import pairwise
from random import Random

import pytest
import torch

from heedful import HeedConfig, HeedForConditionalGeneration, HeedRNNConfig, HeedRNNForConditionalGeneration
from heedful.studies.catalogue import find_study
from heedful.studies.measures import Head
from heedful.studies.recurrent import clue, gradients, robustness
from heedful.studies.recurrent.equal_models import recurrent_models
from heedful.studies.training import study_recipe


def test_models_have_about_the_parameters_of_the_transformer_and_differ_in_cell_attention_and_width_alone():
    options = study_recipe(dict(find_study("cells").changes)).model.options
    with torch.device("meta"):
        transformer = HeedForConditionalGeneration(HeedConfig(**options, vocab_size=2000)).num_parameters()
        for name, changes in recurrent_models().items():
            fields = {key: value for key, value in changes["model.options"].items() if key != "model_type"}
            model = HeedRNNForConditionalGeneration(HeedRNNConfig(**fields, vocab_size=2000))
            assert model.num_parameters() == pytest.approx(transformer, rel=0.01), name
    recipes = [one.pop("model.options") | one for one in recurrent_models().values()]
    assert {key for one in recipes for key in one if one[key] != recipes[0][key]} == {
        "cell",
        "attention",
        "hidden_size",
    }


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


KIND = {word: kind for kind, words in clue.CLUES.items() for word in words}


def test_the_last_line_asks_for_the_only_word_of_its_kind():
    assert len(KIND) == sum(len(words) for words in clue.CLUES.values())
    for pair in clue.stories(200, seed=3):
        kinds = [KIND[word] for word in clue.clues_of(pair)]
        assert len(set(kinds)) == len(kinds) in clue.NUMBERS
        assert pair[0].endswith(f" . the {KIND[pair[1]]} was")
        assert pair[1] in clue.clues_of(pair)


def test_the_decisive_word_stands_anywhere_and_is_no_word_more_often_than_another():
    pairs = [pair for pair in clue.stories(8_000, seed=3) if len(clue.clues_of(pair)) == 4]
    assert clue.distance(("axe noon hall fog . the weapon was", "axe")) == 3
    places = Counter(clue.distance(pair) for pair in pairs)
    assert [places[place] / len(pairs) for place in range(4)] == [pytest.approx(0.25, abs=0.03)] * 4
    assert max(Counter(pair[1] for pair in pairs).values()) / len(pairs) < 0.03  # one of 96


def test_the_head_that_looks_most_is_found_where_the_word_is_asked_for(monkeypatch):
    pairs = [("axe noon . the weapon was", "axe"), ("noon axe . the hour was", "noon")]

    def look_at_the_first_source_word(translator, pairs, kinds):
        encoder, cross = torch.zeros(2, 7, 7), torch.zeros(2, 2, 7)
        encoder[1, 4, 0], cross[0, 0, 0] = 0.9, 0.5  # `weapon` and `hour` are the fifth words
        by_kind = {"cross": cross, "encoder": encoder}
        yield from [{Head(kind, 0, head): by_kind[kind][head] for kind in by_kind for head in (0, 1)}] * len(pairs)

    monkeypatch.setattr(clue, "attention_by_head", look_at_the_first_source_word)
    assert clue.weight_on_the_clue(None, pairs) == ("encoder 0.1", pytest.approx(0.9))


def test_the_gradient_by_distance_is_autograds_through_the_equation():
    torch.manual_seed(4)
    encoder = gradients.fresh_encoder("tanh").double()
    cell = encoder.layers[0].first_cell
    tokens = encoder.embed_tokens(torch.randint(gradients.SYMBOLS, (gradients.BATCH, 101))).detach().requires_grad_()
    direction, hidden = torch.randn(gradients.WIDTH, dtype=torch.float64), torch.zeros(16, 64, dtype=torch.float64)
    for token in tokens.unbind(1):
        hidden = torch.tanh(token @ cell.weight_ih_l0.T + hidden @ cell.weight_hh_l0.T)
    (gradient,) = torch.autograd.grad((hidden * direction).sum(), tokens)
    norms = gradient.norm(dim=-1).mean(0)
    found = gradients.gradient_by_distance("tanh", gradients.ORTHOGONAL, 4)
    assert found == pytest.approx((norms.flip(0) / norms[-1]).tolist(), rel=1e-6)


def test_without_an_activation_an_orthogonal_matrix_keeps_gradients_and_a_larger_one_multiplies_them():
    kept = gradients.gradient_by_distance("linear", gradients.ORTHOGONAL, 1)
    larger = gradients.gradient_by_distance("linear", gradients.LARGER, 1)
    assert all(0.5 < norm < 2 for norm in kept)
    assert larger[100] / larger[60] == pytest.approx(1.5**40, rel=0.5)


def test_sigmoid_vanishes_by_a_quarter_or_more_and_relu_with_positive_weights_explodes():
    sigmoid = gradients.gradient_by_distance("sigmoid", gradients.ORTHOGONAL, 1)
    assert sigmoid[30] < 4.0**-29
    assert gradients.gradient_by_distance("relu", gradients.POSITIVE, 1)[30] > 1e20
    cells = "gru, open", "gru"
    opened, fresh = (gradients.gradient_by_distance(cell, gradients.ORTHOGONAL, 1)[100] for cell in cells)
    assert fresh < 1e-6 < 0.01 < opened


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_gate_that_keeps_the_state_begins_open(cell):
    encoder = gradients.fresh_encoder(f"{cell}, open")
    gate = {"lstm": "forget", "gru": "update"}[cell]
    layer = encoder.layers[0].first_cell
    gates = layer.gates(layer.read(torch.zeros(1, gradients.WIDTH)), torch.zeros(1, gradients.WIDTH))
    assert {name for name, values in gates.items() if values.mean() > 0.9} == {gate}


def test_the_gradient_through_linear_layers_is_the_product_of_their_matrices():
    torch.manual_seed(2)
    layers = torch.randn(gradients.DEPTHS[-1], 64, 64, dtype=torch.float64) / 8
    direction = torch.nn.functional.normalize(torch.randn(64, dtype=torch.float64), dim=0)
    product = layers[0] @ layers[1] @ layers[2]
    assert gradients.gradient_by_depth("linear", 1.0, 2)[2] == pytest.approx((product @ direction).norm().item())
    assert gradients.collapse_error(2) < 1e-12


def test_a_short_sequence_is_learned_and_clipping_saves_what_explodes():
    assert gradients.recall("lstm", 3, 150, seed=1).accuracy == 1
    lost = gradients.recall("linear", 20, 30, 1, gradients.LARGER, math.inf)
    held = gradients.recall("linear", 20, 30, 1, gradients.LARGER, 1.0)
    assert (lost.stopped > 0, held.stopped) == (True, 0)
    assert held.largest > 100
