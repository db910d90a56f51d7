"""What docs/studies tells is what the studies found."""

import json
import re
from pathlib import Path

import pytest

from heedful.studies.catalogue import NAMES, find_study
from heedful.studies.report import Table, figure_file, render_report

FOLDER = Path(__file__).parents[2] / "docs" / "studies"
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")


def numbers(text: str) -> set[str]:
    """Return the numbers that were measured: those with a decimal point and percentages, without those of sections."""
    text = re.sub(r"[Ss]ections? \d[\d.]*", "", text)
    return {number for number in NUMBER.findall(text) if "." in number} | set(re.findall(r"(\d+) ?%", text))


@pytest.fixture(scope="module")
def results():
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*.json")}


def test_every_study_has_results_and_a_row_of_the_index(results):
    assert results.keys() == set(NAMES)
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if f"| [{name}]({name}.md) | {find_study(name).question} |" not in index] == []


def test_a_document_is_the_report_of_its_results_and_words_without_other_numbers(results):
    for name, found in results.items():
        report = render_report(found)
        page = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
        assert page.startswith(report + "\n## What it shows\n"), name
        words = page.removeprefix(report)
        assert len(words.split()) > 40
        assert numbers(words) <= numbers(report), name


def test_results_are_those_of_the_study_as_it_is_and_its_findings_quote_every_number(results):
    for name, found in results.items():
        study = find_study(name)
        assert (found["study"], found["question"]) == (study.name, study.question)
        assert found["findings"] == list(study.findings)
        assert [table["name"] for table in found["tables"]] == list(study.tables)
        for table, words in zip(found["tables"], study.tables.values(), strict=True):
            assert Table.of("", "", words["columns"], table["rows"]).columns == table["columns"]
        assert list(found["figures"]) == list(study.figures)
        assert found["command"].startswith(f"heedful study {study.name} --seed {found['seed']}")
        for one in found["trainings"]:
            assert {key for key, value in study.changes.items() if one["changes"][key] != value} <= set(DIFFERS)
        for finding in found["findings"]:  # quotes every number
            assert not {number for number in numbers(re.sub(r"\{[^}]*\}", "", finding)) if "." in number}, finding


# Keys that a study sets for all its trainings and changes for some.
DIFFERS = (
    *("data.train", "data.folder", "data.test", "data.validation", "data.source", "data.target"),
    *("tokenizer.algorithm", "tokenizer.vocab_size", "optimization.learning_rate", "optimization.max_updates"),
)


def test_every_figure_is_there_and_small(results):
    for name, found in results.items():
        files = [FOLDER / figure_file(name, figure) for figure in found["figures"]]
        assert all(file.stat().st_size < 300_000 for file in files)
        assert set(files) == set(FOLDER.glob(f"{name}-*.svg"))
