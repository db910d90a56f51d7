"""`heedful complexity` and what it writes, and the page of the documents that shows it."""

import json
import sys
from pathlib import Path

import pytest

from heedful.cli import main as cli
from heedful.studies.complexity import report as reports
from heedful.studies.complexity.counts import operations
from heedful.studies.complexity.measurement import KINDS, exponent
from heedful.studies.complexity.report import PAPER, REACH_STYLES, STYLES, draw, tables
from heedful.studies.complexity.settings import ComplexitySettings

DOCS = Path(__file__).parents[3] / "docs"
SIZES = ["--d-model=16", "--heads=2", "--neighbourhood=4"]
OPTIONS = [*SIZES, "--lengths=8,16,32", "--reach-lengths=5,9", "--rounds=1"]


@pytest.fixture
def heedful(monkeypatch, capsys):
    """Run the command in this process; return its exit code, output and errors."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["heedful", "complexity", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        output = capsys.readouterr()
        return ended.value.code or 0, output.out, output.err

    return run


def test_the_command_prints_the_tables_and_writes_figure_tables_and_json(heedful, tmp_path):
    code, output, errors = heedful(*OPTIONS, "--output", tmp_path / "new" / "folder")
    assert code == 0, errors
    folder = tmp_path / "new" / "folder"
    assert sorted(path.name for path in folder.iterdir()) == ["complexity.json", "complexity.md", "complexity.png"]
    written = json.loads((folder / "complexity.json").read_text(encoding="utf-8"))
    assert output == (folder / "complexity.md").read_text(encoding="utf-8") == tables(written) + "\n"
    assert (folder / "complexity.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["folder"]


def test_json_holds_every_figure_by_length(heedful):
    code, output, errors = heedful(*OPTIONS, "--json", "--cell", "gru", "--kernel-width", "5")
    assert code == 0, errors
    found = json.loads(output)
    assert found["settings"]["cell"] == "gru"
    assert found["settings"]["kernel_width"] == 5
    assert set(found["layers"]) == set(KINDS)
    for layer in found["layers"].values():
        assert len(layer["milliseconds"]) == len(layer["bytes"]) == len(layer["operations"]) == 3
        assert all(0 < low <= high for low, high in zip(layer["fastest"], layer["slowest"], strict=True))
        assert layer["counted_at_the_shortest"]["operations"] == layer["operations"][0]
    assert all(row["path"] == row["formula"] for row in found["reach"])
    assert {row["length"] for row in found["reach"]} == {5, 9}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--heads", 7), "`--heads` must divide `--d-model`"),
        (
            ("--lengths", "64,x,256"),
            "`--lengths` must be whole numbers with commas between, but is '64,x,256' instead.",
        ),
        (("--kernel-width", 4), "`--kernel-width` must be odd and at least 3, but is 4 instead."),
        (("--rounds", 0), "`--rounds` must be at least 1, but is 0 instead."),
    ],
)
def test_a_mistake_is_told_in_one_line(arguments, message, heedful):
    code, output, errors = heedful(*arguments)
    assert code == 2
    assert output == ""
    assert message in errors
    assert "Traceback" not in errors


def no_measuring(settings):
    raise AssertionError("must not be reached")


def test_a_folder_that_is_there_is_an_error_before_anything_is_measured(heedful, tmp_path, monkeypatch):
    monkeypatch.setattr(reports, "make_report", no_measuring)
    code, _, errors = heedful(*OPTIONS, "--output", tmp_path)
    assert code == 2
    assert f"`--output` must be a folder that does not exist yet, but {tmp_path} does." in errors


def test_a_folder_within_a_file_is_an_error_before_anything_is_measured(heedful, tmp_path, monkeypatch):
    monkeypatch.setattr(reports, "make_report", no_measuring)
    (tmp_path / "file").touch()
    code, _, errors = heedful(*OPTIONS, "--output", tmp_path / "file" / "folder")
    assert code == 2
    assert "must lie in a folder" in errors


def test_without_matplotlib_the_error_names_the_extra_and_tables_are_printed_all_the_same(
    heedful, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with monkeypatch.context() as before_measuring:
        before_measuring.setattr(reports, "make_report", no_measuring)
        code, _, errors = heedful(*OPTIONS, "--output", tmp_path / "folder")
    assert code == 2
    assert "pip install 'heedful[plots]'" in errors
    assert list(tmp_path.iterdir()) == []
    assert heedful(*OPTIONS)[0] == 0


def test_nothing_half_written_is_left_behind(heedful, tmp_path, monkeypatch):
    def fail(report, path):
        raise OSError("No space left on device")

    monkeypatch.setattr(reports, "draw", fail)
    code, output, errors = heedful(*OPTIONS, "--output", tmp_path / "folder")
    assert (code, output) == (2, "")
    assert "No space left on device" in errors
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def committed():
    return json.loads((DOCS / "figures" / "complexity.json").read_text(encoding="utf-8"))


def test_the_page_shows_the_tables_of_the_committed_json(committed):
    page = (DOCS / "complexity.md").read_text(encoding="utf-8")
    begin, end = "<!-- tables of figures/complexity.json -->\n\n", "\n\n<!-- end of tables -->"
    assert page.split(begin)[1].split(end)[0] == tables(committed)
    assert "figures/complexity.png" in page


def test_the_committed_json_was_made_by_today_s_formulas_at_the_default_settings(committed):
    settings = ComplexitySettings(rounds=committed["settings"]["rounds"])
    assert tuple(committed["settings"]["lengths"]) == settings.lengths
    assert committed["settings"]["d_model"] == settings.d_model
    for kind, layer in committed["layers"].items():
        assert layer["operations"] == [operations(kind, n, settings) for n in settings.lengths]
        assert layer["counted_at_the_shortest"]["operations"] == layer["operations"][0]
        assert layer["exponents"]["time"] == pytest.approx(exponent(settings.lengths, layer["milliseconds"]), abs=0.01)
        assert layer["exponents"]["memory"] == pytest.approx(exponent(settings.lengths, layer["bytes"]), abs=0.01)


def test_what_the_page_says_is_so_in_the_committed_json(committed):
    memory = {kind: layer["exponents"]["memory"] for kind, layer in committed["layers"].items()}
    assert all(memory[kind] < 1.05 for kind in PAPER)
    assert memory["plain"] > 1.8
    assert memory["masked"] > 1.8
    time = {kind: layer["milliseconds"] for kind, layer in committed["layers"].items()}
    additive, plain = ([each for each in time[kind] if each is not None] for kind in ("additive", "plain"))
    assert len(additive) == committed["settings"]["lengths"].index(1024) + 1
    assert additive[-1] > 30 * plain[len(additive) - 1]  # dot products are faster in practice, section 3.2.1
    assert min(PAPER, key=lambda kind: time[kind][-1]) in ("restricted", "convolutional")
    assert time["restricted"][-1] < time["masked"][-1] / 4
    assert time["self_attention"][0] < time["recurrent"][0]
    assert time["self_attention"][-1] > time["recurrent"][-1]
    assert all(row["path"] == row["formula"] for row in committed["reach"])


def test_a_path_length_that_is_not_the_formula_s_is_shown_as_such(committed):
    changed = json.loads(json.dumps(committed))
    changed["reach"][0]["formula"] = 99
    assert "(not 99)" in tables(changed)
    assert "(not" not in tables(committed)


def test_every_kind_has_a_name_and_a_line(committed, tmp_path):
    assert set(STYLES) == set(KINDS)
    assert set(REACH_STYLES) == {row["kind"] for row in committed["reach"]}
    draw(committed, tmp_path / "figure.svg")
    text = (tmp_path / "figure.svg").read_text(encoding="utf-8")
    assert text.startswith("<?xml")
