"""The studies of recurrent models at their smallest."""

import pytest

from heedful.studies.catalogue import ROOMS
from heedful.studies.recurrent import cells, clue, gradients, robustness
from heedful.studies.recurrent.equal_models import recurrent_models


@pytest.mark.parametrize("name", ROOMS["recurrent"])
def test_a_study_runs_at_its_smallest_and_keeps_its_promises(small, name):
    small(name)


def test_each_cell_has_its_score_and_each_gate_its_shares(small):
    *_, rows = small("cells")
    assert [row[0] for row in rows["quality"]] == list(recurrent_models())
    gates = {"LSTM": ["forget", "input", "output"], "GRU": ["reset", "update"]}
    expected = [[name, gate] for name in cells.GATED for gate in gates[name.split()[0]]]
    assert [row[:2] for row in rows["gates"]] == expected
    assert [row[:2] for row in rows["few"]] == [["LSTM", 123], ["GRU", 141], ["GRU", 123]]
    large, as_large, as_wide = (row[2] for row in rows["few"])
    assert as_wide < 0.9 * large < as_large
    for row in rows["gates"]:
        assert 0.2 < row[2] < 0.9
        assert row[3] + row[4] < 1
    # A forget gate begins at a bias of 1, all others at 0.
    means = {(row[0], row[1]): row[2] for row in rows["gates"]}
    assert means["LSTM", "forget"] == pytest.approx(0.73, abs=0.08)
    assert means["GRU", "update"] == pytest.approx(0.5, abs=0.08)


def test_robustness_scores_every_model_on_every_change(small):
    _, results, _ = small("robustness")
    names = [*recurrent_models(), "Transformer"]
    for table in results["tables"]:
        assert [row[0] for row in table["rows"]] == names
        assert [f"{share:.0%}".replace("%", " %") for share in robustness.SHARES] == table["columns"][1:-1]
    assert [one["name"] for one in results["trainings"]] == names


def test_the_clue_scores_every_number_and_distance_and_says_which_head_looks(small):
    *_, rows = small("clue")
    assert [row[0] for row in rows["clues"]] == [row[0] for row in rows["distance"]] == list(clue.MODELS)
    looking = [row[-2].partition(" ")[0] in ("cross", "encoder") for row in rows["clues"]]
    assert looking == [False, False, True, True]
    shares = [share for row in rows["distance"] for share in row[1:]] + [s for row in rows["clues"] for s in row[2:6]]
    assert all(0 <= share <= 100 for share in shares)
    assert 0 < rows["clues"][-1][-1] < 1


def test_gradients_has_a_row_for_every_cell_and_matrix(small):
    _, results, _ = small("gradients")
    assert [len(table["rows"]) for table in results["tables"]] == [24, 6, 8, 6]
    distance, depth, _, clipping = results["tables"]
    assert distance["columns"][2:] == [str(distance) for distance in gradients.DISTANCES]
    assert depth["columns"][1:] == [str(depth) for depth in gradients.DEPTHS]
    assert [row[2] for row in clipping["rows"]] == ["no", "norm 1"] * 3
    assert "not finite at update" in clipping["rows"][2][-1]
