"""The study of Table 1: its settings, the earlier command, and what its page says."""

import json
from pathlib import Path

import pytest

from heedful.studies.catalogue import find_study
from heedful.studies.complexity import complexity
from heedful.studies.complexity.complexity import NAMES, PAPER, Measurements, outcome_of
from heedful.studies.complexity.counts import Sizes, operations
from heedful.studies.complexity.measurement import KINDS, Cost, machine
from heedful.studies.complexity.reach import KINDS as REACHING
from heedful.studies.study import Lab
from small_studies import SMALLEST, rows_of

PAGE = Path(__file__).parents[3] / "docs" / "studies" / "complexity"
STUDY = find_study("complexity")
TINY = SMALLEST["complexity"].settings
OUT_OF_RANGE = {
    "d_model": ["0"],
    "heads": ["0", "3", "", "1.5"],
    "neighbourhood": ["0"],
    "rounds": ["0", "a"],
    "kernel_width": ["1", "4", "-3"],
    "lengths": ["8,16", "8,8,16", "16,8,32", "1,2,3", "", "a", "1,,2", "1 2"],
    "reach_lengths": ["1", "9,5", "9,257"],
    "cell": ["transformer"],
}


def test_the_settings_are_those_of_the_command():
    assert Lab(STUDY, changed=["lengths=64, 128,256"]).settings()["lengths"] == [64, 128, 256]
    assert Lab(STUDY).settings() == STUDY.settings
    assert machine()["processor"]


def test_a_setting_out_of_range_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setattr(complexity, "measure", lambda *arguments: pytest.fail("must not be reached"))
    for name, values in OUT_OF_RANGE.items():
        for value in values:
            with pytest.raises(ValueError, match=rf"`{name}` must .* instead\."):
                STUDY.run(Lab(STUDY, changed=[*TINY, f"{name}={value}"]))
    with pytest.raises(ValueError, match=r"must be those of the study complexity \(d_model, .*\), but one is width"):
        Lab(STUDY, changed=["width=3"])


def test_the_earlier_command_runs_the_study_and_says_so(heedful_command, printed, refused, tmp_path):
    options = [f"--{setting.replace('_', '-')}" for setting in TINY]
    code, output, errors = heedful_command("complexity", "--cell", "gru", *options, "--json")
    assert code == 0, errors
    assert f"heedful study complexity --seed 0 cell=gru {' '.join(TINY)}\n" in errors
    results = json.loads(output)
    assert (results["study"], results["seed"]) == ("complexity", 0)
    output = printed("complexity", *options, "--output", tmp_path / "out")
    assert output.rstrip() == (tmp_path / "out" / "report.md").read_text(encoding="utf-8").rstrip()
    assert "`heads` must divide `d_model`, but they are 7 and 512" in refused("complexity", "--heads", 7)
    assert "Each option must have a value, but --rounds has none." in refused("complexity", "--rounds")
    assert "complexity" not in printed("--help").replace("study", "")


@pytest.fixture(scope="module")
def committed():
    return json.loads(PAGE.with_suffix(".json").read_text(encoding="utf-8"))


def test_the_page_was_made_by_today_s_formulas_at_the_default_settings(committed):
    assert committed["command"] == "heedful study complexity --seed 0"
    rows = rows_of(committed)
    assert [row[0] for row in rows["time"]] == STUDY.settings["lengths"]
    assert [row[0] for row in rows["paths"]] == ["formula", *STUDY.settings["reach_lengths"]]
    sizes = Sizes(
        **{name: STUDY.settings[name] for name in ("d_model", "heads", "neighbourhood", "kernel_width", "cell")}
    )
    for kind, row in zip(PAPER, rows["counts"], strict=True):
        assert row[4] == operations(kind, 4096, sizes) / 1e6
    assert "not" not in str(rows["paths"])


def test_what_the_page_says_is_so(committed):
    rows = rows_of(committed)
    growth = {name: row for name, *row in rows["growth"]}
    assert all(growth[NAMES[kind]][3] < 1.05 for kind in PAPER)
    assert all(growth[NAMES[kind]][3] > 1.8 for kind in ("plain", "masked"))
    time = dict(zip(KINDS, list(zip(*rows["time"], strict=True))[1:], strict=True))
    assert time["additive"][5:] == ("–", "–")
    assert time["additive"][4] > 30 * time["plain"][4]  # dot products are faster in practice, section 3.2.1
    assert min(PAPER, key=lambda kind: time[kind][-1]) in ("restricted", "convolutional")
    assert time["restricted"][-1] < time["masked"][-1] / 4
    assert time["self_attention"][0] < time["recurrent"][0]
    assert time["self_attention"][-1] > time["recurrent"][-1]


def test_a_path_that_is_not_the_formula_s_and_costs_that_are_missing_are_shown_as_such():
    sizes = Sizes(16, 2, 4, 3, "lstm")
    costs = {kind: {n: Cost(1.0 * n, 1.0, 9.0, n) for n in (8, 16, 32)} for kind in KINDS}
    del costs["additive"][32]
    paths = {kind: {5: 5} for kind in REACHING}
    rows = outcome_of(Measurements(sizes, costs, paths, {}), rounds=1).rows
    *_, path_row = rows["paths"]
    assert path_row == (5, "5 (not 1)", "5 (not 1)", 5, "5 (not 4)", "5 (not 2)", "5 (not 2)")
    assert rows["time"][-1] == (32, *[32.0] * 6, "–")
    *_, additive = rows["growth"]
    assert (additive[1], additive[-1]) == ("–", "–")  # a growth needs three lengths
