import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.studies.models.ngrams import NgramModel

START, END, VOCABULARY = 1, 2, 12
TOKENS = st.integers(0, VOCABULARY - 1)
ROWS = st.lists(st.lists(TOKENS, max_size=6).map(lambda row: [*row, END]), min_size=1, max_size=12)
PREFIXES = st.lists(TOKENS, min_size=1, max_size=7)  # with one of them the beginning is outside of the window


def probabilities(model: NgramModel, history: list[int]) -> list[float]:
    return [model.probability(history, token) for token in range(VOCABULARY)]


@settings(max_examples=100, deadline=None)
@given(rows=ROWS, window=st.integers(0, 4), history=PREFIXES, other=PREFIXES)
def test_probabilities_sum_to_one_after_any_history_and_nothing_before_the_window_matters(
    rows, window, history, other
):
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


def test_a_unigram_model_is_discounted_counts_and_the_uniform_rest():
    model = NgramModel([[3, 3, 4, END]], 0, vocab_size=10, start_id=START)
    # 3 twice, 4 and </s> once: n1 = 2, n2 = 1, so D = 2 / (2 + 2 * 1) = 1/2, and 3 * D / 4 is left for all.
    rest = 3 * 0.5 / 4
    assert model.probability([], 3) == pytest.approx((2 - 0.5) / 4 + rest / 10)
    assert model.probability([], 4) == pytest.approx((1 - 0.5) / 4 + rest / 10)
    assert model.probability([], 7) == pytest.approx(rest / 10)


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


def test_sentence_beginnings_keep_their_counts():
    # Nothing stands to the left of <s>, so what follows it at the beginning is counted as often as it comes.
    rows = [[4, 5, 6, END], [4, 5, 6, END], [4, 5, 6, END], [7, 5, 6, END]]
    model = NgramModel(rows, 3, vocab_size=10, start_id=START)
    assert model.levels[1].counts[START,] == {4: 3, 7: 1}
    assert model.levels[2].counts[5, 6] == {END: 2}
    assert model.probability([], 4) > 2 * model.probability([], 7)


def test_a_wider_window_pays_where_the_language_looks_further_back():
    draw = random.Random(0)
    rows = []
    for _ in range(400):
        row = [draw.randint(4, 7), draw.randint(4, 7)]
        for _ in range(8):
            row.append(row[-2])  # only the token before the last one tells the next
        rows.append([*row, END])
    train, test = rows[:300], rows[300:]
    unigram, markov, window = (NgramModel(train, width, VOCABULARY, START).perplexity(test) for width in (0, 1, 2))
    assert min(unigram, markov) > 2 * window
    assert NgramModel(train, 2, VOCABULARY, START).probability([4, 5], 4) > 0.9
