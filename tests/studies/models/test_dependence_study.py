"""The study of long-range dependence: its data, its measures, and the whole at a small size."""

from itertools import pairwise
from types import SimpleNamespace

from heedful.studies.measures import score
from heedful.studies.models import dependence
from heedful.studies.pairs import corpus_pairs


def test_sources_are_one_to_three_neighbouring_sentences_and_none_is_lost():
    pairs = corpus_pairs("builtin:train:50")
    joined = dependence.joined_sentences("train", 50, seed=1)
    assert " ".join(source for source, _ in joined) == " ".join(source for source, _ in pairs)
    assert " ".join(target for _, target in joined) == " ".join(target for _, target in pairs)
    assert {sum(mark in "?." for mark in target) for _, target in joined} == {1, 2, 3}


def test_reversal_pairs_are_reversed_as_long_as_asked_for_and_repeatable():
    pairs = dependence.reversed_sequences(7, 300, seed=3)
    lengths = {len(source.split()) for source, _ in pairs}
    assert lengths == set(range(1, 8))
    assert all(target.split() == source.split()[::-1] for source, target in pairs)
    assert pairs == dependence.reversed_sequences(7, 300, seed=3) != dependence.reversed_sequences(7, 300, seed=4)


def test_sequences_are_grouped_by_their_number_of_symbols():
    pairs = dependence.reversed_sequences(dependence.LONGEST, 500, seed=1)
    groups = dependence._grouped(dependence.SEQUENCE_GROUPS, pairs, dependence._symbols(None, pairs))
    assert sorted(pair for group in groups for pair in group) == sorted(pairs)
    for group, (low, high) in zip(groups, pairwise((0, *dependence.SEQUENCE_GROUPS)), strict=True):
        assert {len(source.split()) for source, _ in group} == set(range(low + 1, high + 1))


def test_an_exact_match_has_every_symbol_in_its_place():
    def translate(sources):
        return [[SimpleNamespace(text=" ".join(reversed(source.split())))] for source in sources]

    pairs = [("a b", "b a"), ("a b", "a b"), ("a b", "b"), ("a", "a")]
    assert score(SimpleNamespace(translate=translate), pairs, "exact_match") == 50
