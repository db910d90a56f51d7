"""A story asks at its end for one of its words, and the tables say who still knows it, and who looks it up."""

from collections import Counter

import pytest
import torch

from heedful.studies.measures import Head
from heedful.studies.recurrent import clue

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
