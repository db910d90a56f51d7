"""What docs/studies tells is what the studies found."""

import json
import re
from pathlib import Path

import pytest

from heedful.studies.catalogue import NAMES, find_study
from heedful.studies.report import Table, figure_file, render_report

FOLDER = Path(__file__).parents[2] / "docs" / "studies"
RESULTS = sorted(FOLDER.glob("*.json"))
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")


def results_of(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def numbers(text: str) -> set[str]:
    """Return the numbers that were measured: those with a decimal point and percentages, without those of sections."""
    text = re.sub(r"[Ss]ections? \d[\d.]*", "", text)
    return {number for number in NUMBER.findall(text) if "." in number} | set(re.findall(r"(\d+) ?%", text))


def test_every_study_has_results():
    assert {path.stem for path in RESULTS} == set(NAMES)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_document_begins_with_the_report_of_its_results(path):
    report = render_report(results_of(path))
    assert path.with_suffix(".md").read_text(encoding="utf-8").startswith(report + "\n## What it shows\n")


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_words_below_tell_no_number_that_the_report_does_not(path):
    report = render_report(results_of(path))
    words = path.with_suffix(".md").read_text(encoding="utf-8").removeprefix(report)
    assert len(words.split()) > 40
    assert numbers(words) <= numbers(report)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_are_those_of_the_study_as_it_is(path):
    results = results_of(path)
    study = find_study(path.stem)
    assert (results["study"], results["question"]) == (study.name, study.question)
    assert results["findings"] == list(study.findings)
    assert [table["name"] for table in results["tables"]] == list(study.tables)
    for table, words in zip(results["tables"], study.tables.values(), strict=True):
        assert Table.of("", "", words["columns"], table["rows"]).columns == table["columns"]
    assert list(results["figures"]) == list(study.figures)
    assert results["command"].startswith(f"heedful study {study.name} --seed {results['seed']}")
    for one in results["trainings"]:
        assert {key for key, value in study.changes.items() if one["changes"][key] != value} <= set(DIFFERS)


# Keys that a study sets for all its trainings and changes for some.
DIFFERS = (
    *("data.train", "data.folder", "data.test", "data.validation", "data.source", "data.target"),
    *("tokenizer.algorithm", "tokenizer.vocab_size", "optimization.learning_rate", "optimization.max_updates"),
)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_number_of_a_finding_is_a_value(path):
    for finding in results_of(path)["findings"]:
        without = re.sub(r"\{[^}]*\}", "", finding)
        assert not {number for number in numbers(without) if "." in number}, finding


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_figure_is_there_and_small(path):
    results = results_of(path)
    files = [FOLDER / figure_file(path.stem, name) for name in results["figures"]]
    assert all(file.stat().st_size < 300_000 for file in files)
    assert set(files) == set(FOLDER.glob(f"{path.stem}-*.svg"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_index_links_every_study(path):
    row = f"| [{path.stem}]({path.stem}.md) | {find_study(path.stem).question} |"
    assert row in (FOLDER / "README.md").read_text(encoding="utf-8")
