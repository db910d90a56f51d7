"""docs/conformance.md agrees with itself, and its script counts and compares as described."""

import json
import re
from pathlib import Path

import pytest

from helpers import load_script

report = load_script("scripts/conformance/report.py")
DOCUMENT = Path(__file__).parents[2] / "docs" / "conformance.md"
WRITTEN = DOCUMENT.read_text(encoding="utf-8").split("<!-- begin")[1].split("<!-- end")[0]


def rows(text: str, columns: int) -> list[list[str]]:
    """Return the cells of every row of the Markdown tables of so many columns, headings left out."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line] for line in lines if len(line) == columns]
    return [row for row in cells if not set(row[0]) <= {"-"} and row[-1] not in ("tests", "names")]


def section(heading: str) -> str:
    return WRITTEN.split(f"### {heading}")[1].split("###")[0]


def test_the_documents_counts_add_up_and_every_failure_and_every_skip_of_heed_is_named():
    counts = {name: tuple(map(int, cells)) for name, *cells in rows(WRITTEN.split("###")[0], columns=5)}
    for name, (passed, failed, skipped, tests) in counts.items():
        assert passed + failed + skipped == tests > 0, name
    listed = [line[2:].split(":")[0] for line in section("Failures").splitlines() if line.startswith("- ")]
    assert {name: listed.count(name) for name in counts} == {name: row[1] for name, row in counts.items()}
    assert counts["Heed"][1] == 0
    assert f"**{report.CLEAN}**" in WRITTEN
    table = rows(section("Tests that Heed skips"), columns=4)
    names = [name for row in table for name in re.findall(r"`(test_\w+)`", row[3])]
    assert len(names) == len(set(names)) == sum(int(row[0]) for row in table) == counts["Heed"][2]
    assert {row[2] for row in table} == {"yes"}  # Marian skips them too


FAILED, PASSED, SKIPPED = (
    {"outcome": outcome, "reason": "announced:\n\nno <GPU> | two\nsecond"}
    for outcome in ("failed", "passed", "skipped")
)
# Heed passes one test, and skips another that Marian skips too.
NOTED = {"HeedTest::test_a": PASSED, "HeedTest::test_b": SKIPPED}
NOTED |= {"MarianTest::test_a": FAILED, "MarianTest::test_b": SKIPPED}


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        ({}, []),
        ({"HeedTest::test_a": FAILED}, ["Heed: test_a failed"]),
        ({"MarianTest::test_b": PASSED}, ["Heed: only ours skips test_b"]),
        ({"HeedTokenizerTest::test_c": FAILED}, ["Heed's tokenizer: test_c failed"]),
        ({"HeedRNNTest::test_c": FAILED}, ["HeedRNN: test_c failed"]),
        ({"HeedTokenizerTest::test_c": FAILED, "PlainTokenizerTest::test_c": FAILED}, []),
        ({"HeedRNNTest::test_a": SKIPPED, "HeedRNNTest::test_b": SKIPPED}, []),
    ],
)
def test_a_failure_of_heed_and_a_skip_of_its_own_are_faults_and_what_others_share_is_none(tmp_path, changes, faults):
    file = tmp_path / "outcomes.json"
    file.write_text(json.dumps(NOTED | changes))
    found = report.read_outcomes(file)
    assert report.faults(found) == faults
    text = report.report(found, {"transformers": "5.0"}, "ours")
    assert "Measured with transformers 5.0. Generation and export tests: ours." in text
    assert "- MarianMTModel: `test_a`: no ‹GPU› / two\n" in text
    assert ("| 1 | no ‹GPU› / two | **0** | `test_a` |" in text) == ("HeedRNNTest::test_a" in changes)
    assert text.count("`test_b` |") == 1  # also where the recurrent model skips it
    assert ("**Faults:**\n- " + "\n- ".join(faults) if faults else f"**{report.CLEAN}**") in text
