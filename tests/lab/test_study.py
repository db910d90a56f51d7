"""What every study has from the harness: settings, trainings, and a folder of results that is whole or not there."""

import json
import re
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import pytest

from heedful.cli.main import app
from heedful.data.sources import read_pairs
from heedful.figures import lines, save_figure
from heedful_lab.figures import bars
from heedful_lab.studies.catalogue import NAMES, find_study
from heedful_lab.studies.pairs import write_pairs
from heedful_lab.studies.report import Outcome, Table, figure_file, render_report
from heedful_lab.studies.study import Lab, Study, run_study
from heedful_lab.studies.training import checksum_of, study_recipe, train_model
from helpers import assert_error, assert_refused

TINY = {
    "data.train": "builtin:train:400",
    "data.validation": "builtin:validation:10",
    "data.test": {"test": "builtin:test:4"},
    "tokenizer.vocab_size": 400,
    "model.options.d_model": 16,
    "decoding.max_length": 8,
    "optimization.tokens_per_update": 512,
    "optimization.max_updates": 3,
}

HALVES = [(1, 0.5), (3, 1.5)]
WORDS = {
    "findings": ["Half of 3 is {of_3:.2f}."],
    "tables": {"halves": {"title": "Halves of {count} numbers", "columns": "n | half :.2f"}},
    "figures": {"line": "A line up to {of_3}."},
}


def found(lab: Lab) -> Outcome:
    return Outcome({"halves": HALVES}, {"line": [lines({"half": HALVES}, "n", "half")]}, {"of_3": 1.5}, {"count": 2})


def trained(lab: Lab) -> Outcome:
    lab.train("first", {"model.options.position_encoding": "rotary"})
    lab.train("second")
    return Outcome({})


PLAIN = Study("plain", "What is a half?", found, data="none", **WORDS)
TRAINED = Study("trained", "What does a training give?", trained, changes=TINY)


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    return tmp_path_factory.mktemp("trainings")


@pytest.fixture(scope="module")
def results(trainings):
    pytest.importorskip("matplotlib")
    folder = run_study(Lab(TRAINED, seed=5, folder=trainings), trainings / "out")
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def test_a_study_of_the_command_leaves_results_a_report_and_its_figures(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("heedful_lab.studies.catalogue.find_study", lambda name: PLAIN)
    folder = tmp_path / "out"
    app(["study", "plain", "--output", str(folder), "--seed", "4"], standalone_mode=False)
    assert capsys.readouterr().out.strip() == str(folder / "report.md")
    assert sorted(path.name for path in folder.iterdir()) == ["plain-line.svg", "report.md", "results.json"]
    report = (folder / "report.md").read_text(encoding="utf-8")
    for line in (
        *("| 3 | 1.50 |", "- Half of 3 is 1.50.", "## Halves of 2 numbers", "heedful study plain --seed 4"),
        "![line](plain-line.svg)\n\nA line up to 1.5.",
    ):
        assert f"{line}\n" in report


def fails(lab: Lab) -> Outcome:
    raise RuntimeError("no such thing")


@pytest.mark.parametrize(
    ("run", "error", "message"),
    [
        (fails, RuntimeError, "no such thing"),
        (lambda lab: Outcome({}, values={"x": float("nan")}), ValueError, "JSON"),
        (lambda lab: Outcome({}, values={"x": float("inf")}), ValueError, "JSON"),
        (lambda lab: Outcome({"halves": HALVES}), AssertionError, "a study must have the tables of its description"),
    ],
)
def test_a_study_that_fails_or_gives_what_cannot_be_written_leaves_nothing(tmp_path, run, error, message):
    pytest.importorskip("matplotlib")
    assert_error(message, run_study, Lab(Study("wrong", "?", run, data="none")), tmp_path / "out", error=error)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="`--output` must be a folder that does not exist yet"):
        run_study(Lab(Study("fails", "?", fails, data="none")), tmp_path)  # before anything runs


def test_a_figure_is_drawn_to_the_same_bytes_and_long_names_lie_beside_their_bars_and_not_over_each_other(tmp_path):
    pytest.importorskip("matplotlib")
    names, texts = [f"encoder, layer {number}, head {number}" for number in range(12)], []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        save_figure([bars(dict.fromkeys(names, 0.1), "weight")], folder / "bars.svg")
        texts.append((folder / "bars.svg").read_text(encoding="utf-8"))
    text, again = texts
    assert text == again
    heights = [float(re.search(rf'y="([\d.]+)"[^>]*>{name}<', text)[1]) for name in names]
    assert min(below - above for above, below in pairwise(heights)) > 10  # points, of letters of 10
    for other, legends in (("b", 1), ("c", 3)):  # one that all panels share is drawn once
        panels = [lines({"a": HALVES, name: HALVES}, "x", "y") for name in ("b", other, "b")]
        save_figure(panels, tmp_path / "lines.svg")
        assert (tmp_path / "lines.svg").read_text(encoding="utf-8").count(">a<") == legends


def test_a_training_is_done_once_for_one_recipe_and_its_report_says_what_differs(results, trainings, monkeypatch):
    monkeypatch.setattr("heedful.training.run.train", fails)
    again = train_model("again", {**TINY, "seed": 5}, trainings)
    first = results["trainings"][1]
    assert {name: getattr(again, name) for name in ("seconds", "metrics", "parameters")}.items() <= first.items()
    assert again.curve() == [(3, again.metrics["validation"]["loss"])]
    assert again.translator().model.num_parameters() == again.parameters
    assert_error("`name` must be a value that the log", again.curve, "validation/beauty")
    assert_error("no such thing", train_model, "another", {**TINY, "seed": 7}, trainings, error=RuntimeError)
    report = render_report(results)
    assert "`seed=5`" in report
    assert "| first | `model.options.position_encoding=rotary` |" in report
    assert "| second | no changes |" in report


def test_a_training_that_was_interrupted_goes_on(trainings, results):
    changes = {**TINY, "seed": 6, "checkpoints.every_updates": 1, "logging.every_updates": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("heedful.training.run.publish_weights", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train_model("stopped", changes, trainings)
    folder = trainings / checksum_of(study_recipe(changes))
    assert not (folder / "training.json").exists()
    before = (folder / "log.jsonl").read_text(encoding="utf-8")
    training = train_model("stopped", changes, trainings)
    assert training.updates == 3
    assert (folder / "log.jsonl").read_text(encoding="utf-8").startswith(before.strip())
    assert [update for update, _ in training.curve("train/loss")] == [1, 2, 3]


def test_another_seed_option_or_file_is_another_training(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"source": "a", "target": "b"}\n', encoding="utf-8")
    first = {**TINY, "data.train": str(path)}
    names = {checksum_of(study_recipe(first)), checksum_of(study_recipe({**first, "seed": 9}))}
    names.add(checksum_of(study_recipe({**first, "model.options.d_model": 32})))
    path.write_text('{"source": "a", "target": "c"}\n', encoding="utf-8")
    names.add(checksum_of(study_recipe(first)))
    assert len(names) == 4
    assert checksum_of(study_recipe({**first, "output": "elsewhere"})) in names


def test_generated_pairs_are_written_once_and_named_by_what_is_in_them(tmp_path):
    pairs = [("a\u2028b", "나"), ("c", "다")]
    path = write_pairs(pairs, tmp_path)
    assert write_pairs(iter(pairs), tmp_path) == path
    assert write_pairs(pairs[:1], tmp_path) != path
    assert [(row["source"], row["target"]) for row in read_pairs(path, "source", "target")] == pairs


def test_the_command_line_wins_over_the_recipe_but_not_over_data_that_a_training_makes(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr("heedful_lab.studies.study.train_model", lambda name, changes, folder: seen.append(changes))
    lab = Lab(Study("s", "?", found, changes={"optimization.max_updates": 9}), 3, 7, "builtin:train:50", tmp_path)
    lab.train("plain")
    lab.train("own", {"data.train": "own.jsonl"})
    assert seen[0] == {"optimization.max_updates": 7, "seed": 3, "data.train": "builtin:train:50"}
    assert seen[1]["data.train"] == "own.jsonl"
    assert lab.command() == "heedful study s --seed 3 --updates 7 --data builtin:train:50"


def test_data_and_settings_that_a_study_cannot_use_are_errors():
    builtin, folder = (Study("s", "?", found, data=kind) for kind in ("builtin", "folder"))
    cases = [
        ((builtin, {"data": "corpora/multi30k"}), "must be builtin:train:COUNT for the study s"),
        ((builtin, {"data": "builtin:test:100"}), "must be builtin:train:COUNT"),
        ((builtin, {"data": "builtin:train:0"}), "must be builtin:train:COUNT"),
        ((PLAIN, {"data": "builtin:train:100"}), "must be empty for the study plain"),
        ((folder, {}), "must be a folder for the study s, but is empty instead"),
        ((folder, {"data": "no/such/folder"}), "must be a folder for the study s"),
        ((PLAIN, {"seed": -1}), "`--seed` must be at least"),
        ((PLAIN, {"updates": 0}), "`--updates` must be at least"),
        ((PLAIN, {"changed": ["cell=gru"]}), r"must be those of the study plain \(none\), but one is cell instead"),
    ]
    assert_refused(cases, lambda given: Lab(given[0], **given[1]))
    assert_error("but is dilutoin instead; did you mean dilution", find_study, "dilutoin")
    for option in (["--output", "x"], ["--updates", "3"], ["--data", "x"], ["--seed", "2"]):
        assert_error("need the name of a study", app, ["study", *option], standalone_mode=False)


def test_every_study_has_its_module_a_recipe_and_a_question_which_the_command_lists(capsys):
    app(["study"], standalone_mode=False)
    for name, line in zip(NAMES, capsys.readouterr().out.splitlines(), strict=True):
        study = find_study(name)
        assert study.name == name == line.split()[0]
        assert study.question.endswith("?")
        assert line.endswith(study.question)
        assert study_recipe(dict(study.changes)).name == "study"


# The pages of docs/studies are the results of the studies.
FOLDER = Path(__file__).parents[2] / "docs" / "studies"
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")


def numbers(text: str) -> set[str]:
    """Return the numbers that were measured: those with a decimal point and percentages, without those of sections."""
    text = re.sub(r"[Ss]ections?\s\d[\d.]*", "", text)
    return {number for number in NUMBER.findall(text) if "." in number} | set(re.findall(r"(\d+) ?%", text))


@pytest.fixture(scope="module")
def committed():
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*.json")}


def test_every_study_has_results_and_a_row_of_the_index(committed):
    assert committed.keys() == set(NAMES)
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if f"| [{name}]({name}.md) | {find_study(name).question} |" not in index] == []


def test_a_document_is_the_report_of_its_results_and_words_without_other_numbers(committed):
    for name, found in committed.items():
        report = render_report(found)
        page = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
        cut = report.index("\n## ", report.index("\n## Findings\n") + 1)
        findings, measured = report[:cut], report[cut:]
        assert page.startswith(findings), name
        assert measured in page, name
        words = page.removeprefix(findings).replace(measured, "")
        assert len(words.split()) > 40
        assert numbers(words) <= numbers(report), name


def test_results_are_those_of_the_study_as_it_is_with_every_figure_and_its_findings_quote_every_number(committed):
    for name, found in committed.items():
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
        files = [FOLDER / figure_file(name, figure) for figure in found["figures"]]
        assert all(file.stat().st_size < 300_000 for file in files)
        assert set(files) == set(FOLDER.glob(f"{name}-*.svg"))


# Keys that a study sets for all its trainings and changes for some.
DIFFERS = (
    *("data.train", "data.folder", "data.test", "data.validation", "data.source", "data.target"),
    *("tokenizer.algorithm", "tokenizer.vocab_size", "optimization.learning_rate", "optimization.max_updates"),
)
