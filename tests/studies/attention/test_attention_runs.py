"""The studies of attention at their smallest."""

import pytest

from heedful.studies.attention import dilution, scaling
from heedful.studies.catalogue import ROOMS


@pytest.mark.parametrize("name", ROOMS["attention"])
def test_a_study_runs_at_its_smallest_and_keeps_its_promises(small, name):
    small(name)


def test_dilution_measures_every_head(small):
    *_, rows = small("dilution")
    assert len(rows["heads"]) == 3 * 2 * 4
    assert {row[0] for row in rows["entropy"]} == {"encoder", "decoder", "cross"}
    # Hardly trained, it looks everywhere alike; no row can have more entropy than that.
    assert all(0.5 < row[4] <= 1 + 1e-6 for row in rows["entropy"])
    assert rows["weights"][2][:2] == [10, dilution.kept_weight(3, 0, 10)]


def test_scaling_trains_every_scoring_at_every_width(small):
    lab, results, _ = small("scaling")
    assert [len(table["rows"]) for table in results["tables"]] == [len(scaling.WIDTHS), 9]
    keys = ("model.options.attention_scoring", "model.options.encoder_attention_heads")
    found = {tuple(training.changes[key] for key in keys) for training in lab.trainings}
    assert found == {(scoring, heads) for scoring in scaling.SCORINGS for heads in (16, 4, 1)}


def test_masking_trains_one_recipe_twice_and_measures_both(small):
    _, results, rows = small("masking")
    masked, unmasked = results["trainings"]
    assert masked["changes"] == unmasked["changes"]
    assert masked["metrics"]["validation"]["loss"] != unmasked["metrics"]["validation"]["loss"]
    for way, row, first, _, _, total, changed in rows["example"]:
        assert (total == pytest.approx(1)) == (way == "−∞ before" or row == 3), (way, row)
        assert (changed == pytest.approx(first)) == (way == "−∞ before" and row < 3), (way, row)
    assert [row[0] for row in rows["passes"]] == [3, 6]
    assert results["values"]["difference"] < 1e-4
    assert results["values"]["hidden_change"] < 1e-6 < results["values"]["zeroed_change"]
    assert all(row[3] <= row[2] < 1 for row in rows["sums"])
    assert rows["training"][1][2] != pytest.approx(rows["training"][1][3], rel=1e-3)
    assert len(rows["examples"]) == 3


def test_heads_are_compared_looked_at_and_left_out(small):
    *_, rows = small("heads")
    assert [row[0] for row in rows["quality"]] == [1, 4, 8]
    assert len({row[2] for row in rows["quality"]}) == 1  # parameters
    assert len(rows["looks"]) == 3 * 2 * 4
    assert [row[1] for row in rows["pruning"]] == [24, 12, 0, 48, 24, 0]
    full, half, none = (row[2:4] for row in rows["pruning"][:3])
    assert full[0] == full[1]  # nothing is left out, in any order
    assert half[0] != half[1]
    assert none[0] == pytest.approx(none[1])


def test_questions_leaves_out_each_head_of_the_encoder(small):
    _, results, tables = small("questions")
    (rows,) = tables.values()
    assert [row[0] for row in rows] == [f"encoder {n}.{h}" for n in (0, 1) for h in range(4)] + ["none left out"]
    best = max(rows[:-1], key=lambda row: row[1] - row[2])
    assert [results["values"][name] for name in ("head", "asked")] == best[:2]


def test_homonyms_have_one_vector_before_the_first_layer(small):
    lab, results, rows = small("homonyms")
    assert rows["words"][0][:3] == ["배를", "pear, ship, belly", pytest.approx(1 / 3)]
    assert [row[0] for row in rows["layers"]] == ["embedding", "layer 0", "layer 1", "layer 2"]
    chance = results["values"]["chance"]
    assert rows["layers"][0][1:] == pytest.approx([chance, chance, 1, 1, chance, chance], abs=1e-5)
    assert rows["layers"][-1][4] < 0.999
    assert rows["layers"][-1][3] != rows["layers"][-2][3]
    assert (lab.folder / "data").is_dir()
