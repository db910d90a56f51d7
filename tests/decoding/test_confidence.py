"""Confidence is what translations with such a score were worth on average."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import GenerationConfig

from heedful.decoding.confidence import Confidence, settings_of
from heedful.decoding.engines import Translation
from helpers import assert_error


def drawn(count, seed=1):
    """Translations whose probability of being right is exp(score)."""
    draws = np.random.default_rng(seed)
    scores, lots = draws.uniform(-3, 0, count), draws.random(count)
    return [scored("yes" if lot < np.exp(score) else "no", score) for lot, score in zip(lots, scores, strict=True)]


def scored(text, score):
    return SimpleNamespace(text=text, score=float(score))


def test_confidence_is_the_probability_of_being_right_where_scores_tell_it():
    translations = drawn(20_000)
    found = Confidence.of_pairs(translations, [["yes"]] * 20_000, exact=True, num_beams=1)
    assert found.values == sorted(found.values)
    for score in (-2.5, -1.5, -0.7, -0.2):
        assert found.of(score) == pytest.approx(100 * np.exp(score), abs=4)
    below = [found.of(factor * found.scores[0]) for factor in (1, 1.1, 2, 5, 50)]
    assert below[0] == found.values[0]
    assert below == sorted(below, reverse=True)
    assert below[-1] < 1e-9
    assert found.of(0) == found.values[-1]
    assert sum(count for *_, count in found.reliability) == 20_000
    for said, was, _ in found.reliability:
        assert said == pytest.approx(was, abs=3)


def test_scores_that_tell_nothing_give_one_value_and_halves_are_rated_by_each_other():
    found = Confidence.of_pairs([scored("ab", 0), scored("xy", 0)] * 100, [["ab", "other"]] * 200, False, 4)
    assert [round(found.of(score), 6) for score in (-5, 0, 5)] == [0, 50, 50]
    upside_down = [scored("ab" if number < 100 else "xy", number) for number in range(200)]
    assert Confidence.of_pairs(upside_down, [["ab"]] * 200, exact=True, num_beams=4).values == [50.0]
    halves = [scored("no" if number % 2 else "yes", number) for number in range(200)]
    found = Confidence.of_pairs(halves, [["yes"]] * 200, exact=True, num_beams=1).reliability
    assert found[0][:2] == (0, 100)  # the right half, by the wrong one's curve
    assert found[-1][:2] == (100, 0)


def test_confidence_is_kept_in_a_folder_and_few_pairs_give_none(tmp_path):
    found = Confidence.of_pairs(drawn(100), [["yes"]] * 100, exact=True, num_beams=5)
    found.save(tmp_path)
    assert json.loads((tmp_path / "confidence.json").read_text())["num_beams"] == 5
    again = Confidence.from_pretrained(tmp_path)
    assert (again.scores, again.values) == (found.scores, found.values)
    assert Confidence.of_pairs(drawn(99), [["yes"]] * 99, exact=True, num_beams=5) is None
    for changed in ({"values": None}, {"tokens": 3}, {"settings": []}, {"familiarity": "x"}, {"beams": 1}):
        (tmp_path / "confidence.json").write_text(json.dumps(asdict(found) | changed))
        assert_error("confidence.json must have the fields", Confidence.from_pretrained, tmp_path)
    (tmp_path / "confidence.json").unlink()
    assert_error("confidence.json does not exist", Confidence.from_pretrained, tmp_path)


def test_a_text_of_another_kind_a_cut_off_output_and_another_search_are_not_calibrated():
    rng = np.random.default_rng(1)
    rows = [[int(token) for token in rng.zipf(1.5, 12) % 200] for _ in range(1_000)]
    found = Confidence.of_pairs(drawn(100), [["yes"]] * 100, exact=True, num_beams=4)
    search = GenerationConfig(num_beams=4, length_penalty=0.6, max_new_tokens=99, eos_token_id=2)
    found = found.for_kind(settings_of(search, "en"), np.concatenate(rows[:800]), rows[800:])
    answered = [found.of_translation(Translation((1,), -0.5), ids) is not None for ids in rows[800:]]
    assert 0.98 < sum(answered) / 200 < 1
    for ids in ([*range(300, 310)], [*range(150, 190)], [999]):
        assert found.of_translation(Translation((1,), -0.5), ids) is None
    assert found.of_translation(Translation((1,), -0.5, finished=False), rows[800]) is None
    found.check(search, "en", num_beams=4)
    found.check(GenerationConfig(num_beams=4, length_penalty=0.6, max_length=7, top_k=5), "en")
    for given, message in (
        ({"num_beams": 2}, "`num_beams` must be 4 with `--confidence`, which is not calibrated for"),
        ({"early_stopping": True}, "`early_stopping` must be left out"),
        ({"length_penalty": 0.0}, "`length_penalty` must be 0.6"),
        ({"do_sample": True}, "`do_sample`"),
        ({"repetition_penalty": 1.2}, "`repetition_penalty`"),
        ({"length_penalty_form": "gnmt"}, "`length_penalty_form`"),
    ):
        other = GenerationConfig.from_dict(search.to_dict() | given)
        assert_error(message, found.check, other, "en")
    assert_error("`target_language` must be en", found.check, search, "de")
