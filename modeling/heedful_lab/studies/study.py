"""A study: its definition, its run, and its results in a new folder.

A study is a module with a function `run`, which measures, and a TOML file of the same name with words and settings:

    >>> from heedful_lab.studies.report import Outcome
    >>> from heedful_lab.studies.study import Lab, Study, results_of
    >>> def run(lab: Lab) -> Outcome:
    ...     weights = {n: 1 / n for n in (10, 100)}
    ...     return Outcome({"weights": weights.items()})
    >>> findings = ["Of 100 equal scores each has a weight of {weights[100][weight]:.1%}."]
    >>> tables = {"weights": {"title": "Weight of one of n equal scores", "columns": "n | weight :.1%"}}
    >>> study = Study("equal", "What is the weight of one of n equal scores?", run, findings, tables, data="none")
    >>> results_of(Lab(study), run(Lab(study)))["tables"][0]["rows"]
    [(10, 0.1), (100, 0.01)]
"""

import json
import shlex
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from types import MappingProxyType
from typing import Any, Literal

from heedful.figures import save_figure
from heedful.files import check_at_least, check_is_new, import_extra, new_folder
from heedful_lab.studies.pairs import Pair, write_pairs
from heedful_lab.studies.report import Outcome, Table, figure_file, render_report
from heedful_lab.studies.training import Training, train_model

Data = Literal["builtin", "folder", "none"]
NO_CHANGES: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Study:
    """An experiment; its `data` are "builtin" (sized by `builtin:train:COUNT`), a "folder", or "none" (its own)."""

    name: str  # module name, also in the command
    question: str  # one line
    run: Callable[["Lab"], Outcome]
    findings: Sequence[str] = ()  # may use numbers from `tables` or `Outcome.values`
    tables: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # `title` and `columns`, see `Table.of`
    figures: Mapping[str, str] = field(default_factory=dict)  # captions
    changes: Mapping[str, Any] = field(default_factory=dict)  # changes to `recipe.yaml` for all trainings, by key
    settings: Mapping[str, Any] = field(default_factory=dict)  # changeable by the command: numbers, texts, lists
    data: Data = "builtin"


def description_of(module_file: str | Path) -> dict[str, Any]:
    """Read the description next to a study's module."""
    return tomllib.loads(Path(module_file).with_suffix(".toml").read_text(encoding="utf-8"))


@dataclass
class Lab:
    """A running study: its settings, and a folder for trained models."""

    study: Study
    seed: int = 1  # for weights, data and sampling
    updates: int | None = None  # for each training, instead of the recipe's number
    data: str | None = None  # instead of the recipe's data, as `Study.data` allows
    folder: Path = Path("runs/studies/trainings")  # trained models, shared with other studies
    trainings: list[Training] = field(default_factory=list)  # all so far, for the report
    changed: Sequence[str] = ()  # "NAME=VALUE" for each changed setting

    def __post_init__(self) -> None:
        """Check settings and data."""
        check_at_least(0, **{"--seed": self.seed})
        check_at_least(1, **{"--updates": self.updates})
        self.settings()
        data, name = self.data, self.study.name
        head, _, count = (data or "").rpartition(":")
        is_builtin = head == "builtin:train" and count.isdecimal() and int(count) > 0
        if self.study.data == "folder" and not (data and Path(data).is_dir()):
            wanted = f"a folder for the study {name}"
        elif self.study.data == "none" and data is not None:
            wanted = f"empty for the study {name}, which makes its own"
        elif self.study.data == "builtin" and data is not None and not is_builtin:
            wanted = f"builtin:train:COUNT for the study {name}, which is about the built-in corpus"
        else:
            return
        raise ValueError(f"`--data` must be {wanted}, but is {data or 'empty'} instead.")

    def settings(self) -> dict[str, Any]:
        """Return the study's settings with the changes."""
        settings = dict(self.study.settings)
        for name, _, text in (one.partition("=") for one in self.changed):
            if name not in settings:
                known = f"{self.study.name} ({', '.join(settings) or 'none'})"
                raise ValueError(f"Settings must be those of the study {known}, but one is {name} instead.")
            settings[name] = _read_setting(name, text, settings[name])
        return settings

    def train(self, name: str, changes: Mapping[str, Any] = NO_CHANGES) -> Training:
        """Train a model with changes to the study's recipe, or load its earlier run; `name` is for the report."""
        given: dict[str, Any] = {"seed": self.seed}
        if self.updates is not None:
            given["optimization.max_updates"] = self.updates
        where = "data.train" if self.study.data == "builtin" else "data.folder"
        if self.data is not None and where not in changes:  # otherwise this training makes its data
            given[where] = self.data
        training = train_model(name, {**self.study.changes, **changes, **given}, self.folder)
        self.trainings.append(training)
        return training

    def write_data(
        self, train: Iterable[Pair], validation: Iterable[Pair], **tests: Iterable[Pair]
    ) -> dict[str, str | dict[str, str]]:
        """Write generated pairs into files, and return the changes to train and test on them."""
        return {
            "data.source": "source",
            "data.target": "target",
            "data.train": write_pairs(train, self.folder),
            "data.validation": write_pairs(validation, self.folder),
            "data.test": {name: write_pairs(pairs, self.folder) for name, pairs in tests.items()},
        }

    def command(self) -> str:
        """Return the command for the same results."""
        words = ["heedful", "study", self.study.name, "--seed", str(self.seed)]
        words += [] if self.updates is None else ["--updates", str(self.updates)]
        words += [] if self.data is None else ["--data", self.data]
        return shlex.join([*words, *self.changed])


def _read_setting(name: str, text: str, described: Any) -> Any:
    """Parse a setting by the type of its described value: text, number, or numbers with commas."""
    is_list = isinstance(described, list)
    try:
        return [int(number) for number in text.split(",")] if is_list else type(described)(text)
    except ValueError:
        kind = "whole numbers with commas between" if is_list else "a whole number"
        raise ValueError(f"`{name}` must be {kind}, but is {text!r} instead.") from None


def run_study(lab: Lab, output: Path) -> Path:
    """Run a study, write `results.json`, `report.md` and figures into a new folder, and return the folder.

    After Ctrl-C or SIGTERM in a training (`TrainingInterrupted`), the same call continues it.
    """
    check_is_new(output, "--output")
    import_extra("matplotlib", "plots")
    outcome = lab.study.run(lab)
    results = results_of(lab, outcome)
    with new_folder(output) as folder:
        text = json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False)
        (folder / "results.json").write_text(text + "\n", encoding="utf-8")
        (folder / "report.md").write_text(render_report(results), encoding="utf-8")
        for name in lab.study.figures:
            save_figure(outcome.panels[name], folder / figure_file(lab.study.name, name))
    return output


def results_of(lab: Lab, outcome: Outcome) -> dict[str, Any]:
    """Return the report's content for JSON: the study's words and results."""
    study, known = lab.study, {**outcome.values, **outcome.settings}
    assert outcome.rows.keys() == study.tables.keys(), "a study must have the tables of its description"
    assert outcome.panels.keys() == study.figures.keys(), "a study must have the figures of its description"
    trainings = [{key: value for key, value in asdict(one).items() if key != "folder"} for one in lab.trainings]
    versions = {"python": python_version()} | {name: version(name) for name in ("heedful", "torch", "transformers")}
    tables = (
        Table.of(name, words["title"].format(**known), words["columns"], outcome.rows[name])
        for name, words in study.tables.items()
    )
    made = {"study": study.name, "question": study.question, "command": lab.command(), "seed": lab.seed}
    made |= {"versions": versions, "values": dict(outcome.values), "findings": list(study.findings)}
    return made | {
        "tables": [asdict(table) for table in tables],
        "figures": {name: caption.format(**known) for name, caption in study.figures.items()},
        "trainings": trainings,
    }
