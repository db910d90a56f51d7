"""A story asks at its end for one of its words, and the tables say who still knows it, and who looks it up."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch

from heedful.studies.recurrent import clue
from heedful.studies.study import Lab, run_study

KIND = {word: kind for kind, words in clue.CLUES.items() for word in words.split()}


def test_the_last_line_asks_for_the_only_word_of_its_kind():
    assert len(KIND) == sum(len(words.split()) for words in clue.CLUES.values())
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


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    changes = {**clue.STUDY.changes, "optimization.tokens_per_update": 256, "decoding.max_length": 4}
    folder = tmp_path_factory.mktemp("trainings")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clue, "PAIRS", {"train": 400, "validation": 8, "test": 64})
        patch.setattr(clue, "LOOKED_AT", 4)
        yield Lab(replace(clue.STUDY, changes=changes), updates=3, folder=folder)


def test_the_study_scores_every_number_and_distance_and_says_which_head_looks(lab, tmp_path):
    results = json.loads((run_study(lab, tmp_path / "out") / "results.json").read_text())
    numbers, distances = (table["rows"] for table in results["tables"])
    assert [row[0] for row in numbers] == [row[0] for row in distances] == list(clue.MODELS)
    assert [row[-2].partition(" ")[0] in ("cross", "encoder") for row in numbers] == [False, False, True, True]
    assert all(
        0 <= share <= 100 for row in [row[1:] for row in distances] + [row[2:6] for row in numbers] for share in row
    )
    assert 0 < results["values"]["transformer_weight"] < 1


def test_the_head_that_looks_most_is_found_where_the_word_is_asked_for(lab, monkeypatch):
    pairs = [("axe noon . the weapon was", "axe"), ("noon axe . the hour was", "noon")]
    files = lab.write_data(**{split: clue.stories(200, 1) for split in clue.PAIRS}) | {"tokenizer.vocab_size": None}
    translator = lab.train("tiny", files).translator()

    def looks_at_the_first_source_word(_, row, kinds):
        length = len(row["input_ids"])
        encoder, cross = torch.zeros(2, length, length), torch.zeros(2, 2, length)
        encoder[1, 4, 0], cross[0, 0, 0] = 0.9, 0.5  # `weapon` and `hour` are the fifth words
        return {"cross": [cross], "encoder": [encoder]}

    monkeypatch.setattr(clue, "attention_along", looks_at_the_first_source_word)
    assert clue.weight_on_the_clue(translator, pairs) == ("encoder 0.1", pytest.approx(0.9))
