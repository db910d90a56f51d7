"""Confidence is what translations with such a score were worth on average."""

import json
from dataclasses import dataclass

import numpy as np
import pytest

from heedful.inference.confidence import Confidence
from helpers import assert_error


@dataclass
class Scored:
    text: str
    score: float


def drawn(count, seed=1):
    """Translations whose probability of being right is exp(score)."""
    draws = np.random.default_rng(seed)
    scores = draws.uniform(-3, 0, count)
    return [
        Scored("yes" if draw < np.exp(score) else "no", float(score))
        for draw, score in zip(draws.random(count), scores, strict=True)
    ]


def test_confidence_is_the_probability_of_being_right_where_scores_tell_it():
    translations = drawn(20_000)
    found = Confidence.of_pairs(translations, [["yes"]] * 20_000, exact=True, num_beams=1)
    assert found.values == sorted(found.values)
    for score in (-2.5, -1.5, -0.7, -0.2):
        assert found.of(score) == pytest.approx(100 * np.exp(score), abs=4)
    assert found.of(-99) == found.values[0]
    assert found.of(0) == found.values[-1]
    assert sum(count for *_, count in found.reliability) == 20_000
    for said, was, _ in found.reliability:
        assert said == pytest.approx(was, abs=3)


def test_scores_that_tell_nothing_or_the_contrary_give_one_value():
    translations = [Scored("ab" if number % 2 else "xy", 0.0) for number in range(200)]
    found = Confidence.of_pairs(translations, [["ab", "other"]] * 200, exact=False, num_beams=4)
    assert {round(found.of(score), 6) for score in (-5, 0, 5)} == {50.0}
    upside_down = [Scored("ab" if number < 100 else "xy", float(number)) for number in range(200)]
    assert Confidence.of_pairs(upside_down, [["ab"]] * 200, exact=True, num_beams=4).values == [50.0]


def test_confidence_is_kept_in_a_folder_and_few_pairs_give_none(tmp_path):
    found = Confidence.of_pairs(drawn(100), [["yes"]] * 100, exact=True, num_beams=5)
    found.save(tmp_path)
    assert json.loads((tmp_path / "confidence.json").read_text())["num_beams"] == 5
    again = Confidence.from_pretrained(tmp_path)
    assert (again.scores, again.values) == (found.scores, found.values)
    assert Confidence.of_pairs(drawn(99), [["yes"]] * 99, exact=True, num_beams=5) is None
    (tmp_path / "confidence.json").write_text('{"measure": "chrf"}')
    assert_error("confidence.json must be as", Confidence.from_pretrained, tmp_path)
    (tmp_path / "confidence.json").unlink()
    assert_error("confidence.json does not exist", Confidence.from_pretrained, tmp_path)


def test_each_half_is_rated_by_the_curve_of_the_other_half():
    halves = [Scored("no" if number % 2 else "yes", float(number)) for number in range(200)]
    found = Confidence.of_pairs(halves, [["yes"]] * 200, exact=True, num_beams=1).reliability
    assert found[0][:2] == (0, 100)  # the right half, by the wrong one's curve
    assert found[-1][:2] == (100, 0)
