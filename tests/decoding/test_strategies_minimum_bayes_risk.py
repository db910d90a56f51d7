"""Minimum Bayes risk decoding chooses the candidate that is most like all the others."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sacrebleu import sentence_chrf

from heedful import BeamSearch, MinimumBayesRisk
from heedful.decoding.strategies.minimum_bayes_risk import character_f_score, expected_utilities
from helpers import assert_error, assert_near, each_once, padded, sentences
from plain_strategies import KINDS, model_of, without_padding

COUNT = 8


class Letters:
    """A tokenizer of tiny models: each token is a letter or a blank."""

    def batch_decode(self, rows, skip_special_tokens):
        assert skip_special_tokens
        return ["".join(" abcde"[int(token) % 6] for token in row if token > 13) for row in rows]


def overlap(hypothesis, reference):
    return len(set(hypothesis) & set(reference)) / 7


def most_like_the_others(candidates, decode, utility):
    """Return the place of the first candidate with the largest sum of utilities."""
    texts = decode(candidates)
    sums = [sum(utility(text, other) for other in texts) for text in texts]
    return sums.index(max(sums)), max(sums) / len(texts)


SETTINGS = {
    "samples": {"do_sample": True, "top_k": 0},
    "beams": {"do_sample": False, "num_beams": COUNT},
    "beam_samples": {"do_sample": True, "num_beams": COUNT},
}


@pytest.mark.parametrize(("kind", "setting"), each_once(KINDS, SETTINGS, ["heed"]))
def test_the_choice_is_the_plainest_one_among_what_generate_returns(kind, setting):
    model, (ids, mask) = model_of(kind), padded(sentences(9, 2, 6))
    options = SETTINGS[setting] | {"attention_mask": mask, "num_return_sequences": COUNT, "max_new_tokens": 8}
    torch.manual_seed(3)
    candidates = model.generate(ids, **options)
    torch.manual_seed(3)
    chosen = model.generate(ids, custom_generate=MinimumBayesRisk(Letters()), **options)
    for number, row in enumerate(without_padding(chosen)):
        own = candidates[number * COUNT : (number + 1) * COUNT]
        decode = lambda rows: Letters().batch_decode(rows[:, 1:], skip_special_tokens=True)  # noqa: E731
        place, _ = most_like_the_others(own, decode, lambda one, other: sentence_chrf(one, [other]).score)
        assert row == without_padding(own)[place]


def test_a_tokenizer_pair_and_a_trained_model(model, tokenizers, pairs):
    ids, mask = padded([torch.tensor(row) for row in tokenizers.encode_source(list(pairs))])
    options = {"attention_mask": mask, "num_return_sequences": 6, "max_new_tokens": 40}
    options |= {"do_sample": True, "temperature": 0.5}
    chosen = model.generate(ids, custom_generate=MinimumBayesRisk(tokenizers), **options)
    assert tokenizers.decode_target(chosen) == list(pairs.values())


def test_scores_and_candidates_are_returned_which_may_come_from_another_strategy():
    model, (ids, mask) = model_of("heed"), padded(sentences(9, 2, 6))
    strategy = MinimumBayesRisk(Letters(), utility=overlap)
    options = {"attention_mask": mask, "num_return_sequences": COUNT, "max_new_tokens": 8, "do_sample": True}
    found = model.generate(ids, custom_generate=strategy, return_dict_in_generate=True, output_scores=True, **options)
    assert found.candidate_sequences.shape[0] == 3 * COUNT
    assert torch.equal(found.candidate_sequences, found.candidates.sequences)
    assert len(found.candidates.scores) > 3
    assert found.utilities.shape == (3, COUNT)
    assert found.sequences.shape[0] == 3
    assert_near(found.sequences_scores, found.utilities.amax(1))
    texts = Letters().batch_decode(found.candidate_sequences[:COUNT, 1:], skip_special_tokens=True)
    expected = [sum(overlap(text, other) for other in texts) / COUNT for text in texts]
    assert found.utilities[0].tolist() == pytest.approx(expected)
    models, (ids, mask) = [model_of("heed", seed) for seed in (0, 1)], padded(sentences(9, 2, 6))
    ensemble = BeamSearch(models=models[1:])
    options = {"attention_mask": mask, "num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 8}
    candidates = models[0].generate(ids, custom_generate=ensemble, **options)
    risk = MinimumBayesRisk(Letters(), candidates=ensemble)
    found = models[0].generate(ids, custom_generate=risk, return_dict_in_generate=True, **options)
    assert torch.equal(found.candidate_sequences, candidates)
    # The code of another one, such as the Hub's, reads settings that ours do not.
    diverse, risk = {**options, "diversity_penalty": 0.5}, MinimumBayesRisk(Letters())
    message = "`diversity_penalty` must not be set with MinimumB"
    assert_error(message, models[0].generate, ids, custom_generate=risk, **diverse)
    theirs = MinimumBayesRisk(Letters(), candidates=lambda *given, **settings: candidates)
    assert torch.equal(models[0].generate(ids, custom_generate=theirs, **diverse), found.sequences)
    rows = without_padding(candidates)
    assert all(row in rows[4 * number : 4 * number + 4] for number, row in enumerate(without_padding(found.sequences)))


@settings(deadline=None)
@given(st.lists(st.text("ab c", max_size=6), min_size=1, max_size=5))
def test_the_expected_utility_is_the_mean_of_sentence_chrf(texts):
    expected = [sum(sentence_chrf(text, [other]).score for other in texts) / len(texts) for text in texts]
    assert expected_utilities(texts, character_f_score()) == pytest.approx(expected)


def test_a_single_candidate_is_refused():
    model, source = model_of("heed"), torch.tensor([[20, 21]])
    message, risk = "`num_return_sequences` must be at least 2", MinimumBayesRisk(Letters())
    assert_error(message, model.generate, source, custom_generate=risk, do_sample=True)
