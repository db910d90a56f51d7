"""Nouns are asked for their adjectives: measured on sentences that can be checked by hand, and the study's table."""

import json
from dataclasses import replace

import pytest
import torch

from heedful.studies.attention import questions
from heedful.studies.study import Lab, run_study


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    changes = {**questions.STUDY.changes, "tokenizer.vocab_size": 400, "data.test": {}}
    lab = Lab(replace(questions.STUDY, changes=changes), updates=3, folder=tmp_path_factory.mktemp("trainings"))
    return lab.train("tiny").translator()


def test_adjectives_are_known_by_the_form_that_stands_before_a_noun():
    assert questions.adjectives()["용감한"] == "brave"
    assert questions.adjectives()["맛있는"] == "delicious"
    pairs = questions.described_pairs()
    assert len(pairs) > 100
    for source, target in pairs:
        found = [questions.adjectives()[word] for word in source.split()[:-1] if word in questions.adjectives()]
        assert found
        assert all(f" {english} " in target for english in found), (source, target)


def test_a_head_that_looks_at_the_token_before_asks_of_all_words_alike(translator, monkeypatch):
    def before(_, row, kinds):
        length = len(row["input_ids"])
        shifted = torch.diag(torch.ones(length - 1), -1)
        return {"encoder": [shifted.expand(4, length, length)] * 2}

    monkeypatch.setattr(questions, "attention_along", before)
    monkeypatch.setattr(questions, "token_words", lambda _, ids: [*list(range(len(ids) - 1)), None])
    found = questions.questions_of_heads(translator, [("용감한 화가는 잔다.", "The brave painter sleeps.")])
    assert set(found.values()) == {(1.0, 1.0)}
    assert len(found) == 8


def test_translated_adjectives_are_counted_by_their_english(translator, monkeypatch):
    class Best:
        def __init__(self, text):
            self.text = text

    texts = ["The brave painter sleeps.", "The painter eats the big apple."]
    monkeypatch.setattr(translator, "translate", lambda sources: [[Best(text)] for text in texts])
    pairs = [("용감한 화가는 잔다.", ""), ("용감한 화가는 큰 사과를 먹는다.", "")]
    assert questions.translated_adjectives(translator, pairs) == pytest.approx(200 / 3)


def test_the_study_leaves_out_each_head_of_the_encoder(tmp_path, monkeypatch):
    monkeypatch.setattr(questions, "PAIRS", 6)
    changes = {**questions.STUDY.changes, "tokenizer.vocab_size": 400, "decoding.max_length": 6, "data.test": {}}
    lab = Lab(replace(questions.STUDY, changes=changes), updates=3, folder=tmp_path / "trainings")
    results = json.loads((run_study(lab, tmp_path / "out") / "results.json").read_text())
    rows = results["tables"][0]["rows"]
    assert [row[0] for row in rows] == [f"encoder {n}.{h}" for n in (0, 1) for h in range(4)] + ["none left out"]
    best = max(rows[:-1], key=lambda row: row[1] - row[2])
    assert results["values"]["head"] == best[0]
    assert results["values"]["asked"] == best[1]
