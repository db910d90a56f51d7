"""What studies measure: dependence, cells between words, positions, n-grams, changed sources, stories, gradients."""

import math
import random
from collections import Counter
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful import HeedConfig, HeedForConditionalGeneration, HeedRNNConfig, HeedRNNForConditionalGeneration
from heedful.positions_heed import sinusoids
from heedful_lab.studies.catalogue import find_study
from heedful_lab.studies.models import dependence, positions
from heedful_lab.studies.models.ngrams import NgramModel
from heedful_lab.studies.models.paths import MODELS, cells_between, make_model
from heedful_lab.studies.recurrent import clue, gradients, robustness
from heedful_lab.studies.recurrent.equal_models import recurrent_models
from heedful_lab.studies.training import study_recipe

LETTERS = partial(positions.reversed_letters, (2, 4), 200)


@pytest.mark.parametrize(
    ("make", "lengths"), [(LETTERS, {2, 3, 4}), (partial(dependence.reversed_sequences, 7, 300), {*range(1, 8)})]
)
def test_reversal_is_reversed_as_long_as_asked_for_and_repeatable(make, lengths):
    pairs = make(seed=3)
    assert {len(source.split()) for source, _ in pairs} == lengths
    assert all(target.split() == source.split()[::-1] for source, target in pairs)
    assert pairs == make(seed=3) != make(seed=4)
    assert make is not LETTERS or len(set(pairs)) == 200  # never twice the same


@pytest.mark.parametrize("length", [2, 5])
def test_without_attention_all_cells_of_both_sides_lie_between_the_first_word_and_the_last(length):
    torch.manual_seed(0)
    chain, backwards, told = (make_model(name) for name in list(MODELS)[:3])
    assert [cells_between(chain, length, place) for place in (0, length - 1)] == [length + 1, 2 * length]
    assert [cells_between(backwards, length, place) for place in (0, length - 1)] == [2, length + 1]
    assert [cells_between(told, length, place) for place in (0, length - 1)] == [length, length]


@pytest.mark.parametrize("name", list(MODELS)[3:])
def test_attention_leads_around_all_cells_but_the_one_that_reads_the_word(name):
    torch.manual_seed(0)
    assert cells_between(make_model(name), 6, 5) == 1


@settings(deadline=None)
@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(1, 40))
def test_one_matrix_turns_every_position_into_the_one_k_further(position, offset, half):
    width = 2 * half
    here = positions.encodings(torch.tensor([position]), width)[0]
    there = positions.encodings(torch.tensor([position + offset]), width)[0]
    assert torch.allclose(positions.shift_matrix(offset, width) @ here, there, atol=1e-9)


def test_the_formula_is_the_models_and_the_error_is_rounding():
    numbers = torch.arange(300)
    ours, theirs = positions.encodings(numbers, 64), sinusoids(numbers, 64, "interleaved")
    assert torch.allclose(ours.float(), theirs, atol=1e-4)
    exact, own = positions.shift_errors(100)
    assert exact < 1e-12
    assert 1e-9 < own < 1e-3
    matrix = positions.shift_matrix(7, 16)  # a rotation; and two shifts are one
    assert torch.allclose(matrix @ matrix.T, torch.eye(16, dtype=torch.float64))
    assert torch.allclose(matrix @ positions.shift_matrix(5, 16), positions.shift_matrix(12, 16))


START, END, VOCABULARY = 1, 2, 12
TOKENS = st.integers(0, VOCABULARY - 1)
ROWS = st.lists(st.lists(TOKENS, max_size=6).map(lambda row: [*row, END]), min_size=1, max_size=12)
PREFIXES = st.lists(TOKENS, min_size=1, max_size=7)  # with one of them the beginning is outside of the window


def probabilities(model: NgramModel, history: list[int]) -> list[float]:
    return [model.probability(history, token) for token in range(VOCABULARY)]


@settings(max_examples=100, deadline=None)
@given(rows=ROWS, window=st.integers(0, 4), history=PREFIXES, other=PREFIXES)
def test_probabilities_sum_to_one_after_any_history_and_none_before_the_window_matters(rows, window, history, other):
    model = NgramModel(rows, window, VOCABULARY, START)
    inside = [3] * window  # as long as the window, so that only it may be read
    distribution = probabilities(model, [*history, *inside])
    assert probabilities(model, [*other, *inside]) == distribution
    for found in (distribution, probabilities(model, history[1:])):
        assert min(found) > 0
        assert sum(found) == pytest.approx(1, abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(rows=ROWS, window=st.integers(0, 4), tests=ROWS)
def test_perplexity_is_the_mean_over_all_tokens_of_all_sentences(rows, window, tests):
    model = NgramModel(rows, window, VOCABULARY, START)
    losses = [-math.log(model.probability(row[:place], row[place])) for row in tests for place in range(len(row))]
    assert model.perplexity(tests) == pytest.approx(math.exp(sum(losses) / len(losses)))


def test_the_shorter_history_counts_contexts_not_tokens():
    # 5 comes four times but only after 4; 6 comes after 4 and after 7: as often after different tokens.
    rows = [[4, 5, END], [4, 5, END], [4, 5, END], [4, 5, END], [4, 6, END], [7, 6, END]]
    model = NgramModel(rows, 1, vocab_size=10, start_id=START)
    unseen = 9
    assert model.probability([unseen], 6) > model.probability([unseen], 5)
    assert model.probability([4], 5) > model.probability([4], 6)
    # By hand: left contexts 4:1 5:1 6:2 7:1 </s>:2 (of 7), D = 3 / (3 + 2 * 2); an unseen history adds nothing to it.
    discount = 3 / 7
    assert model.probability([unseen], 6) == pytest.approx((2 - discount) / 7 + 5 * discount / 7 / 10)


def test_models_have_about_the_parameters_of_the_transformer_and_differ_in_cell_attention_and_width_alone():
    options = study_recipe(dict(find_study("cells").changes)).model.options
    with torch.device("meta"):
        transformer = HeedForConditionalGeneration(HeedConfig(**options, vocab_size=2000)).num_parameters()
        for name, changes in recurrent_models().items():
            fields = {key: value for key, value in changes["model.options"].items() if key != "model_type"}
            model = HeedRNNForConditionalGeneration(HeedRNNConfig(**fields, vocab_size=2000))
            assert model.num_parameters() == pytest.approx(transformer, rel=0.01), name
    recipes = [one.pop("model.options") | one for one in recurrent_models().values()]
    differing = {key for one in recipes for key in one if one[key] != recipes[0][key]}
    assert differing == {"cell", "attention", "hidden_size"}


WORDS = [f"w{number}" for number in range(200)]


@pytest.mark.parametrize("kind", robustness.KINDS)
def test_about_the_share_of_words_is_changed(kind):
    source = " ".join(WORDS)
    assert robustness.changed_source(source, kind, 0.0, random.Random(1), ["x"]) == source
    assert robustness.changed_source("넷", "left_out", 1.0, random.Random(1), ["x"]) == "넷"
    words = robustness.changed_source(source, kind, 0.2, random.Random(1), ["x"]).split()
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


KIND = {word: kind for kind, words in clue.CLUES.items() for word in words}


def test_the_last_line_asks_for_the_only_word_of_its_kind_which_is_anywhere_and_none_more_often_than_another():
    assert clue.distance(("axe noon hall fog . the weapon was", "axe")) == 3
    places, words = Counter(), Counter()
    for pair in clue.stories(8_000, seed=3):
        kinds = [KIND[word] for word in clue.clues_of(pair)]
        assert len(set(kinds)) == len(kinds) in clue.NUMBERS
        assert pair[0].endswith(f" . the {KIND[pair[1]]} was")
        if len(kinds) == 4:
            places[clue.distance(pair)] += 1
            words[pair[1]] += 1
    assert [places[place] / places.total() for place in range(4)] == [pytest.approx(0.25, abs=0.03)] * 4
    assert max(words.values()) / words.total() < 0.03  # one of 96


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
