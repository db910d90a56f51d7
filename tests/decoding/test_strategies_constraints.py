"""Forced words occur in every output, and the search for them equals the plainest one."""

from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import plain_strategies as plain
from heedful import BeamSearch
from helpers import assert_error, each_once, sentences, tiny_model
from plain_strategies import KINDS, LENGTHS, LIMIT, assert_same, contains, decode, model_of, unmet

WORDS = {
    "one_token": [[40]],
    "two_phrases": [[20, 21], [33]],
    "overlapping": [[20, 21, 22], [21, 22, 23]],
    "alternatives": [[[20, 21], [22]], [[30, 31, 32], [33, 34]]],
    "many": [[20, 21], [22, 23], [24]],
}


@pytest.mark.parametrize(("kind", "name"), each_once(KINDS, WORDS, ["heed"]))
def test_constrained_search_equals_the_plainest(kind, name):
    words, model, rows = WORDS[name], model_of(kind), sentences(*LENGTHS)
    cached = kind != "t5"
    ours = decode(model, rows, BeamSearch(force_words_ids=words), num_beams=4, use_cache=cached)
    phrases = [[entry] if isinstance(entry[0], int) else entry for entry in words]
    asked = [partial(plain.ask, model, row) for row in rows]
    theirs = [plain.constrained_search(ask, phrases, beams=4, limit=LIMIT)[0] for ask in asked]
    assert_same(ours, theirs)
    assert not any(unmet(tokens, phrases) for _, tokens in ours)


def test_every_one_of_the_n_best_contains_the_words_which_may_fill_the_whole_output():
    model, rows = tiny_model(), sentences(*LENGTHS)
    found = decode(model, rows, BeamSearch(force_words_ids=[[20, 21]]), num_beams=6, num_return_sequences=6)
    assert len(found) == 18
    assert all(contains(tokens, [20, 21]) for _, tokens in found)
    assert len({tuple(tokens) for _, tokens in found[:6]}) == 6
    all_of_it = BeamSearch(force_words_ids=[[20, 21], [22], [23, 24, 25, 26, 27]])
    found = decode(tiny_model(), sentences(4), all_of_it, num_beams=2)
    assert sorted(found[0][1][1:]) == list(range(20, 28))


def test_each_sentence_may_have_words_of_its_own_or_none():
    model, rows, words = tiny_model(), sentences(*LENGTHS), [[[20, 21]], [], [[[30], [31]]]]

    def found(rows, words):
        return decode(model, rows, BeamSearch(sentence_force_words_ids=words), num_beams=4)

    together = found(rows, words)
    assert_same(together, [found([row], [own])[0] for row, own in zip(rows, words, strict=True)])
    assert contains(together[0][1], [20, 21])
    assert {30, 31} & set(together[2][1])
    assert_same(found(rows, [[], [], []]), decode(model, rows, BeamSearch(), num_beams=4))


PHRASES = st.lists(st.lists(st.integers(14, 24), min_size=1, max_size=3, unique=True), min_size=1, max_size=2)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
@given(st.lists(PHRASES, min_size=1, max_size=3, unique_by=str), st.integers(2, 5), st.integers(0, 3))
def test_whatever_the_words_they_occur_in_the_output(words, beams, seed):
    torch.manual_seed(seed)
    rows = sentences(5, 3)
    strategy, options = BeamSearch(force_words_ids=words), {"max_new_tokens": 10, "no_repeat_ngram_size": 0}
    found = decode(tiny_model(), rows, strategy, num_beams=beams, **options)
    assert not any(unmet(tokens[1:], words) for _, tokens in found)


REFUSED = {
    "must fit into the longest output, 8 tokens, but needs 9": {"force_words_ids": [list(range(20, 29))]},
    "must hold at least one constraint": {"force_words_ids": []},
    r"`force_words_ids\[0\]` must be a list of token ids": {"force_words_ids": [[]]},
    r"`force_words_ids\[1\]` must be a list of token ids": {"force_words_ids": [[20], 21]},
    "must be a list of constraints": {"force_words_ids": "word"},
    "must hold token ids from 0 to 98 that end no sentence, but holds 99": {"force_words_ids": [[99]]},
    "that end no sentence, but holds 2 instead": {"force_words_ids": [[20, 2]]},
    "must hold different constraints": {"force_words_ids": [[20], [21], [20]]},
    "must be None with `force_words_ids`": {"force_words_ids": [[20]], "sentence_force_words_ids": [[[20]]]},
    "must hold a list for each of the 1 sentences, but holds 2": {"sentence_force_words_ids": [[[20]], []]},
    r"`sentence_force_words_ids\[0\]` must fit": {"sentence_force_words_ids": [[list(range(20, 29))]]},
}


def test_words_that_make_no_sense_or_do_not_fit_are_refused_by_name():
    search = partial(decode, tiny_model(), num_beams=3)
    for message, words in REFUSED.items():
        assert_error(message, search, sentences(4), BeamSearch(**words))
    strategy = BeamSearch(force_words_ids=[[20, 21, 22, 23]], tokens_beyond_source=1)
    assert_error("longest output, 3 tokens", search, sentences(5, 2), strategy)
    message = r"`force_words_ids` of sentence 0 must be possible within 8"
    assert_error(message, search, sentences(4), BeamSearch(force_words_ids=[[20]]), bad_words_ids=[[20]])
