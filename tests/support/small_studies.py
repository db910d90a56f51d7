"""Every study at its smallest, and checks that all their results must pass."""

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from string import Formatter
from typing import Any

import pytest

from heedful.data.sources import read_pairs
from heedful_lab.studies import pairs
from heedful_lab.studies.attention import homonyms
from heedful_lab.studies.catalogue import ROOMS, find_study
from heedful_lab.studies.models import ladder
from heedful_lab.studies.report import figure_file, filled_findings, render_report
from heedful_lab.studies.study import Lab, run_study
from heedful_lab.studies.training import Training

SMALL = {
    "data.test": {"test": "builtin:test:4"},
    "data.validation": "builtin:validation:6",
    "tokenizer.vocab_size": 400,
    "decoding.max_length": 6,
    "logging.every_updates": 1,
    "optimization.tokens_per_update": 256,
}
SHORT = {"decoding.max_length": 6, "optimization.tokens_per_update": 256, "validation.sentences": 0}


@dataclass(frozen=True)
class Smallest:
    """How a study is run in about five seconds."""

    parts: Mapping[str | tuple[str, str], Any] = field(default_factory=dict)  # of its module, or entries of these
    changes: Mapping[str, Any] = field(default_factory=lambda: SMALL)
    updates: int = 2
    data: str | None = "builtin:train:400"
    settings: tuple[str, ...] = ()
    trains: bool = True  # or a stand-in gives every training the same results


OF_ITS_OWN = {"changes": SHORT, "data": None}  # data that it makes
SMALLEST = {
    "dilution": Smallest(
        {"PAIRS": {"train": 300, "validation": 5, "test": 4}, "JOINED_IN_MEASURE": (1, 3), "MEASURED": 2}, **OF_ITS_OWN
    ),
    "scaling": Smallest({"QUERIES": 64}, trains=False),
    "masking": Smallest({"LENGTHS": (3, 6), "REPEATS": 1}, SMALL | {"validation.every_updates": 1}),
    "heads": Smallest({"SEEDS": 1, "SHARES": (0, 0.5, 1), "RANDOM_ORDERS": 1}),
    "questions": Smallest({"PAIRS": 6}),
    "homonyms": Smallest({"HELD_OUT": 2, "PROBED": 2, "WORDS": homonyms.WORDS[:2]}),
    "positions": Smallest({"PAIRS": {"train": 60, "validation": 4, "test": 4}}, trains=False),
    "sharing": Smallest({"SEEDS": 1}),
    "markov": Smallest({"TRANSLATED": 2}),
    "dependence": Smallest(
        {
            "SENTENCES": {"train": 300, "validation": 10, "test": 400},
            "SEQUENCES": {"train": 200, "validation": 4, "test": 40},
            "MEASURED": 2,
            **{(part, key): value for part in ("JOINED", "REVERSAL") for key, value in SHORT.items()},
            ("JOINED", "tokenizer.vocab_size"): 500,
        },
        **OF_ITS_OWN,
    ),
    "ladder": Smallest(
        {("DESCRIPTION", "recurrent"): ladder.DESCRIPTION["recurrent"] | {"embedding_size": 32, "hidden_size": 32}},
        {**SHORT, "tokenizer.vocab_size": 500, "optimization.mixed_precision": "no", "decoding.num_beams": 1},
        data=None,
    ),
    "paths": Smallest({"LENGTHS": (2, 3)}, data=None),
    "gradients": Smallest({"LENGTHS": (2, 3, 4), "TESTED": 8}, updates=3, data=None),
    "cells": Smallest({"MEASURED": 3, "FEW": 300, "SEEDS": 1}),
    "robustness": Smallest({"PAIRS": 3}),
    "clue": Smallest({"PAIRS": {"train": 400, "validation": 8, "test": 64}, "LOOKED_AT": 4}, **OF_ITS_OWN),
    "complexity": Smallest(
        data=None,
        settings=("d_model=16", "heads=2", "neighbourhood=4", "lengths=8,16,32", "reach_lengths=5,9", "rounds=1"),
    ),
}


def run_smallest(name: str, folder: Path) -> tuple[Lab, dict[str, Any], dict[str, list[list[Any]]]]:
    """Run a study at its smallest, check what every study promises, and return what it ran in, its results, and rows.

    The rows are those of each table, by its name.
    """
    pytest.importorskip("matplotlib")
    smallest, study = SMALLEST[name], find_study(name)
    (room,) = (room for room, names in ROOMS.items() if name in names)
    module = import_module(f"heedful_lab.studies.{room}.{name}")
    data = write_parallel_files(folder / "pairs") if study.data == "folder" else smallest.data
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairs, "TEST_PAIRS", "builtin:test:6")
        for part, value in smallest.parts.items():
            if isinstance(part, str):
                patch.setattr(module, part, value)
            else:
                patch.setitem(getattr(module, part[0]), part[1], value)
        if not smallest.trains:
            patch.setattr("heedful_lab.studies.study.train_model", stand_in_training)
        study = replace(study, changes={**study.changes, **smallest.changes})
        lab = Lab(study, 1, smallest.updates, data, folder / "trainings", changed=smallest.settings)
        written = run_study(lab, folder / "out")
    results = json.loads((written / "results.json").read_text(encoding="utf-8"))
    check_promises(lab, results, written)
    return lab, results, rows_of(results)


def check_promises(lab: Lab, results: dict[str, Any], written: Path) -> None:
    """Check the report, the figures, the command, and that each value is quoted."""
    study = lab.study
    assert (written / "report.md").read_text(encoding="utf-8") == render_report(results)
    figures = {figure_file(study.name, name) for name in study.figures}
    assert {path.name for path in written.iterdir()} == {"report.md", "results.json", *figures}
    assert all(table["rows"] for table in results["tables"])
    assert len(filled_findings(results)) == len(study.findings)
    words = [*study.findings, *study.figures.values(), *(table["title"] for table in study.tables.values())]
    quoted = {name for text in words for _, name, _, _ in Formatter().parse(text) if name}
    assert results["values"].keys() <= quoted
    assert results["command"].startswith(f"heedful study {study.name} --seed 1 --updates {lab.updates}")
    assert {training["updates"] for training in results["trainings"]} <= {lab.updates}


def rows_of(results: dict[str, Any]) -> dict[str, list[list[Any]]]:
    """Return the rows of each table."""
    return {table["name"]: table["rows"] for table in results["tables"]}


def stand_in_training(name: str, changes: dict[str, Any], folder: Path) -> Training:
    """Return a training that was none."""
    scores = {"bleu": 1.0, "exact_match": 2.0}
    metrics = {"validation": {"loss": 2.0}, **dict.fromkeys(("test", "compositional", "longer"), scores)}
    return Training(name, changes, folder, changes["optimization.max_updates"], 1, 1, 1.0, metrics)


def write_parallel_files(folder: Path) -> str:
    """Write pairs of the built-in corpus into the files of the ladder."""
    folder.mkdir()
    for name, where in (("train", "train:400"), ("validation", "validation:6"), ("test_2016_flickr", "test:4")):
        rows = [{"de": pair["source"], "en": pair["target"]} for pair in read_pairs(f"builtin:{where}", "ko", "en")]
        text = "\n".join(json.dumps(row) for row in rows)
        (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    return str(folder)
