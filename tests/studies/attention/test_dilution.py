"""The study of dilution: its arithmetic, its measure, and a run of it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heedful.data.korean_english.pairs import korean_english_pairs
from heedful.studies.attention import dilution
from heedful.studies.catalogue import find_study
from heedful.studies.study import Lab


def test_one_score_of_three_keeps_the_known_weights():
    for others, count, percent in ((0, 10, "69.1"), (0, 100, "16.9"), (1, 10, "45.1"), (1, 100, "6.9")):
        assert f"{100 * dilution.kept_weight(3, others, count):.1f}" == percent


@given(st.floats(-20, 20), st.floats(-20, 20), st.integers(2, 300))
def test_the_kept_weight_is_torchs_softmax(score, others, count):
    scores = torch.full((count,), others, dtype=torch.float64)
    scores[0] = score
    assert dilution.kept_weight(score, others, count) == pytest.approx(scores.softmax(0)[0].item(), rel=1e-9)


def test_entropy_over_equal_scores_grows_by_one_and_of_a_sharp_head_not_at_all():
    spread = [(n, math.log(n)) for n in (3, 10, 40)]
    assert dilution.growth(spread) == pytest.approx(1)
    assert dilution.growth([(n, 0.7) for n, _ in spread]) == pytest.approx(0)
    assert dilution.growth([(n, 0.25 * value) for n, value in spread]) == pytest.approx(0.25)
    assert dilution.by_length([(10, 1.0), (10, 3.0), (80, 4.0)]) == [(10, 2.0), (80, 4.0)]


def test_joined_texts_are_sentences_one_after_the_other():
    singles = [pair["en"] for pair in korean_english_pairs("test", 6, 2)]
    texts = [target for _, target in dilution.texts("test", (1, 2), 4, 2)]
    assert texts == [singles[0], " ".join(singles[1:3]), singles[3], " ".join(singles[4:6])]


def test_entropies_are_those_of_the_weights_row_by_row(tmp_path, monkeypatch):
    """A model whose queries are zero looks at all it may alike, in decoder rows at one more each."""
    monkeypatch.setattr(dilution, "PAIRS", {"train": 300, "validation": 5, "test": 4})
    training = dilution.train_on_texts(Lab(find_study("dilution"), updates=1, folder=tmp_path / "trainings"))
    translator = training.translator()
    for name, weight in translator.model.named_parameters():
        if "q_proj" in name:
            torch.nn.init.zeros_(weight)
    training.translator = lambda: translator
    rows = dilution.attention_rows(training, dilution.texts("test", (2,), 2, 1))
    for points in rows.values():
        assert [value for _, value in points] == pytest.approx([math.log(n) for n, _ in points], abs=1e-5)
    assert {n for n, _ in rows["decoder", 0, 0]} >= set(range(1, 10))
