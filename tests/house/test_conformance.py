"""docs/conformance.md agrees with itself, and the script that writes it counts and compares as it says."""

import json
import re
import sys
from pathlib import Path

import pytest

from helpers import load_script

report = load_script("scripts/conformance/report.py")
with pytest.MonkeyPatch.context() as patch:
    patch.setitem(sys.modules, "report", report)  # as it is when the script runs
    run = load_script("scripts/conformance/run.py")
DOCUMENT = Path(__file__).parents[2] / "docs" / "conformance.md"
WRITTEN = DOCUMENT.read_text(encoding="utf-8").split(run.BEGIN)[1].split(run.END)[0]


def rows(text: str, columns: int) -> list[list[str]]:
    """Return the cells of every row of the Markdown tables of so many columns, headings left out."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line] for line in lines if len(line) == columns]
    return [row for row in cells if not set(row[0]) <= {"-"} and row[-1] not in ("tests", "names")]


def section(heading: str) -> str:
    return WRITTEN.split(f"### {heading}")[1].split("###")[0]


def test_the_documents_counts_add_up_and_every_failure_and_every_skip_of_heed_is_named():
    counts = {name: tuple(map(int, cells)) for name, *cells in rows(WRITTEN.split("###")[0], columns=5)}
    assert len(counts) >= 6
    for name, (passed, failed, skipped, tests) in counts.items():
        assert passed + failed + skipped == tests > 0, name
    listed = [line[2:].split(":")[0] for line in section("Failures").splitlines() if line.startswith("- ")]
    assert {name: listed.count(name) for name in counts} == {name: row[1] for name, row in counts.items()}
    assert counts["Heed"][1] == 0
    assert f"**{report.CLEAN}**" in WRITTEN
    table = rows(section("What Heed skips"), columns=4)
    names = [name for row in table for name in re.findall(r"`(test_\w+)`", row[3])]
    assert len(names) == len(set(names)) == sum(int(row[0]) for row in table) == counts["Heed"][2]
    assert {row[2] for row in table} == {"yes"}  # Marian skips them too


def outcomes(tmp_path, **changes) -> dict:
    """Return what is read from a file in which Heed passes one test and skips another that Marian skips too."""
    passed, skipped = {"outcome": "passed", "reason": ""}, {"outcome": "skipped", "reason": "needs a <GPU> | two"}
    noted = {
        **{"HeedTest::test_a": passed, "HeedTest::test_b": skipped, "MarianTest::test_b": skipped},
        **{"MarianTest::test_a": {"outcome": "failed", "reason": "announced:\n\nfirst line\nsecond"}},
        **{name.replace("__", "::"): outcome for name, outcome in changes.items()},
    }
    file = tmp_path / "outcomes.json"
    file.write_text(json.dumps(noted))
    return report.read_outcomes(file)


def test_a_report_names_failures_and_skips_with_one_line_of_reason(tmp_path):
    text = report.report(outcomes(tmp_path), {"transformers": "5.0"}, "ours")
    assert "Measured with transformers 5.0. Generation and export tests: ours." in text
    assert "| Heed | 1 | 0 | 1 | 2 |\n| MarianMTModel | 0 | 1 | 1 | 2 |" in text
    assert "- MarianMTModel: `test_a`: first line\n" in text
    assert "| 1 | needs a ‹GPU› / two | yes | `test_b` |" in text
    assert f"**{report.CLEAN}**" in text


def test_a_failure_of_heed_and_a_skip_of_its_own_are_faults_and_a_skip_of_recurrent_models_is_none(tmp_path):
    failed, passed = {"outcome": "failed", "reason": "x"}, {"outcome": "passed", "reason": ""}
    for changes, fault in (
        ({"HeedTest__test_a": failed}, "Heed: test_a failed"),
        ({"MarianTest__test_b": passed}, "Heed: only ours skips test_b"),
        ({"HeedTokenizerTest__test_c": failed}, "Heed's tokenizer: test_c failed"),
        ({"HeedRNNTest__test_c": failed}, "HeedRNN: test_c failed"),
    ):
        found = outcomes(tmp_path, **changes)
        assert report.faults(found) == [fault]
        assert f"**Faults:**\n- {fault}" in report.report(found, {}, "ours")
    of_every_tokenizer = {"HeedTokenizerTest__test_c": failed, "PlainTokenizerTest__test_c": failed}
    assert report.faults(outcomes(tmp_path, **of_every_tokenizer)) == []
    skipped = {"outcome": "skipped", "reason": "there is no self-attention"}
    found = outcomes(tmp_path, HeedRNNTest__test_a=skipped)
    assert report.faults(found) == []
    text = report.report(found, {}, "ours")
    assert "| HeedRNN | 0 | 0 | 1 | 1 |" in text
    assert "### What HeedRNN skips" in text
    assert "| 1 | there is no self-attention | **0** | `test_a` |" in text


def test_without_a_yardstick_nothing_is_said_of_one(tmp_path):
    found = outcomes(tmp_path)
    del found["MarianMTModel"]
    text = report.report(found, {}, "ours")
    assert "| 1 | needs a ‹GPU› / two | not run | `test_b` |" in text
    assert f"**{report.PARTIAL}**" in text
    del found["Heed"]
    text = report.report(found | {"Heed's tokenizer": {}, "a plain byte-level tokenizer": {}}, {}, "ours")
    assert f"**{report.PARTIAL}**" in text
    assert "What Heed skips" not in text


@pytest.fixture
def checkout(tmp_path):
    for name in run.IN_REPOSITORY:
        (tmp_path / "checkout" / "tests" / name).parent.mkdir(parents=True)
        (tmp_path / "checkout" / "tests" / name).write_text(f"theirs: {name}")
    return tmp_path / "checkout"


def test_tests_of_the_repository_are_fetched_once_from_the_tag(checkout, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "REPOSITORY", f"file://{checkout}/{{release}}/{{name}}")
    fetched = tmp_path / "fetched"
    assert run.add_from_repository(fetched, "5.0").startswith("Heedful's own")
    assert "5.0/generation/test_utils.py cannot be had" in capsys.readouterr().err
    assert not list(fetched.rglob("*.py"))
    (checkout / "tests").rename(checkout / "5.0")
    for printed in (2, 0):
        assert run.add_from_repository(fetched, "5.0").endswith("tag v5.0")
        assert capsys.readouterr().err.count("fetched file://") == printed
    for name in run.IN_REPOSITORY:
        assert (fetched / "tests" / name).read_text() == f"theirs: {name}"


def test_tests_of_a_checkout_are_the_ones_that_run(checkout, tmp_path, monkeypatch, capsys):
    (tmp_path / "fetched" / "tests").mkdir(parents=True)
    run.lay_out(tmp_path / "fetched", tmp_path / "run", checkout)
    for name in run.IN_REPOSITORY:
        assert (tmp_path / "run" / "tests" / name).read_text() == f"theirs: {name}"
    monkeypatch.setattr(sys, "argv", ["run.py", "--tests", str(tmp_path)])
    with pytest.raises(SystemExit):
        run.main()
    assert f"{tmp_path} lacks tests/generation/test_utils.py" in capsys.readouterr().err


def test_stand_ins_fill_gaps_of_the_fetched_tests_and_replace_nothing(checkout, tmp_path):
    (checkout / "tests" / "exporters" / "test_export.py").unlink()
    run.lay_out(checkout, tmp_path / "run")
    tests = tmp_path / "run" / "tests"
    assert (tests / "generation" / "test_utils.py").read_text() == "theirs: generation/test_utils.py"
    for name in run.STAND_INS:
        assert (run.SUITE / name).is_file()
        assert (tests / name).is_file()
    assert (tests / "models" / "test_heed.py").is_file()
    assert (tests / "exporters" / "__init__.py").is_file()
    assert {path.stem.removeprefix("test_") for path in (run.SUITE / "models").glob("test_*.py")} == set(run.MODELS)


def test_writing_replaces_the_written_part_alone(tmp_path, monkeypatch):
    document = tmp_path / "conformance.md"
    document.write_text(f"before\n{run.BEGIN}\nold\n{run.END}\nafter\n")
    monkeypatch.setattr(run, "DOCUMENT", document)
    run.write("new")
    assert document.read_text() == f"before\n{run.BEGIN}\n\nnew\n\n{run.END}\nafter\n"
