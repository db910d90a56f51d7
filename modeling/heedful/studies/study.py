"""What a study is, how it runs, and how its results are written: all of them, or nothing.

A study is a module of this room that ends in its `STUDY`:

    >>> from heedful.studies.study import Figure, Lab, Outcome, Study, Table
    >>> def run(lab: Lab) -> Outcome:
    ...     rows = [(n, 1 / n) for n in (10, 100)]
    ...     table = Table("weights", "Weight of one of n equal scores", ("n", "weight"), rows, {"weight": ".1%"})
    ...     finding = "Of 100 equal scores each has a weight of {at_100:.1%}."
    ...     return Outcome([table], values={"at_100": rows[1][1]}, findings=[finding])
    >>> study = Study("equal", "What is the weight of one of n equal scores?", run, data="none")
    >>> print(run(Lab(study)).tables[0].markdown())
    | n | weight |
    | --- | --- |
    | 10 | 10.0% |
    | 100 | 1.0% |
"""

import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import TYPE_CHECKING, Any, Literal

from heedful.files import new_folder
from heedful.studies.figures import check_matplotlib, save_figure
from heedful.studies.training import Training, train_model, write_pairs

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

Data = Literal["builtin", "folder", "none"]
Cell = str | int | float

DEFAULT_SEED = 1
RESULTS = "results.json"
REPORT = "report.md"


@dataclass(frozen=True)
class Table:
    """A table of a report.

    Attributes:
        name: A word for it, unique in the study.
        title: A line above it.
        columns: Heads of the columns.
        rows: Cells; a row has one for every column.
        formats: How Python formats the numbers of a column (".3f", ".1%", ","); without one, as they are.
    """

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    formats: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self):
        """Check that every row has a cell for every column, and every format a column."""
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"A row of the table {self.name} must have {len(self.columns)} cells: {row}")
        if unknown := set(self.formats) - set(self.columns):
            raise ValueError(f"`formats` must name columns of the table {self.name}, but names {unknown}.")

    def markdown(self) -> str:
        """Write the table as Markdown."""
        lines = [self.columns, ["---"] * len(self.columns)]
        for row in self.rows:
            lines.append([self._told(column, cell) for column, cell in zip(self.columns, row, strict=True)])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def _told(self, column: str, cell: Cell) -> str:
        return str(cell) if isinstance(cell, str) else format(cell, self.formats.get(column, ""))


@dataclass(frozen=True)
class Figure:
    """A picture of a report.

    Attributes:
        name: A word for it, unique in the study; its file is STUDY-NAME.svg.
        caption: What it shows.
        picture: The matplotlib figure, such as `heedful.studies.figures` makes.
    """

    name: str
    caption: str
    picture: "Picture"


@dataclass
class Outcome:
    """What a study found.

    Attributes:
        tables: Its tables.
        figures: Its pictures.
        values: The numbers that its findings tell, by name.
        findings: Sentences in which every number is a field of `values`: "… keeps a weight of {at_10:.1%}."
    """

    tables: Sequence[Table]
    figures: Sequence[Figure] = ()
    values: Mapping[str, Cell] = field(default_factory=dict)
    findings: Sequence[str] = ()


@dataclass(frozen=True)
class Study:
    """An experiment.

    Attributes:
        name: The name of its module, and on the command line.
        question: One line.
        run: Does it all; gets a `Lab`.
        changes: What differs from the shared recipe (`recipe.yaml`) in all its trainings, by dotted key.
        data: What it can use: "builtin" is the built-in corpus, of which `--data builtin:train:COUNT` sets the size;
            "folder" is a folder with the files that `changes` names as `data.train` and so on; "none" is a study that
            makes its own data.
    """

    name: str
    question: str
    run: Callable[["Lab"], Outcome]
    changes: Mapping[str, Any] = field(default_factory=dict)
    data: Data = "builtin"


@dataclass
class Lab:
    """What a study gets: its settings, and a place to train models in.

    Attributes:
        study: The study that runs.
        seed: Of weights, data and everything drawn.
        updates: Updates of each training, if not those of the recipe.
        data: Other data than the recipe's, as `Study.data` allows.
        folder: Where its trainings lie; those of other studies may lie there too.
        trainings: All trainings so far, in order; they go into the report.
    """

    study: Study
    seed: int = DEFAULT_SEED
    updates: int | None = None
    data: str | None = None
    folder: Path = Path("runs/studies/trainings")
    trainings: list[Training] = field(default_factory=list)

    def __post_init__(self):
        """Check the settings.

        Raises:
            ValueError: If one is out of range, or the study cannot use the data.
        """
        if self.seed < 0:
            raise ValueError(f"`--seed` must be at least 0, but is {self.seed} instead.")
        if self.updates is not None and self.updates < 1:
            raise ValueError(f"`--updates` must be at least 1, but is {self.updates} instead.")
        self._check_data()

    def _check_data(self) -> None:
        kind, data, name = self.study.data, self.data, self.study.name
        if kind == "folder" and (data is None or not Path(data).is_dir()):
            raise ValueError(f"`--data` must be a folder for the study {name}, but is {data or 'empty'} instead.")
        if kind == "none" and data is not None:
            raise ValueError(
                f"`--data` must be empty for the study {name}, which makes its own, but is {data} instead."
            )
        if kind == "builtin" and data is not None:
            head, _, count = data.rpartition(":")
            if head != "builtin:train" or not count.isdecimal() or int(count) < 1:
                raise ValueError(
                    f"`--data` must be builtin:train:COUNT for the study {name}, which is about the built-in corpus, "
                    f"but is {data} instead."
                )

    def train(self, name: str, changes: Mapping[str, Any] | None = None) -> Training:
        """Train a model, or find it trained.

        Args:
            name: What to call it in the report.
            changes: On top of the study's own, by dotted key.

        Raises:
            ValueError: If a change or the data cannot be used.
        """
        given: dict[str, Any] = {"seed": self.seed}
        if self.updates is not None:
            given["optimization.max_updates"] = self.updates
        where = "data.train" if self.study.data == "builtin" else "data.folder"
        if self.data is not None and where not in (changes or {}):  # else this training makes its own data
            given[where] = self.data
        merged = {**self.study.changes, **(changes or {}), **given}
        training = train_model(name, merged, self.folder)
        self.trainings.append(training)
        return training

    def write_pairs(self, pairs: Iterable[tuple[str, str]]) -> str:
        """Write generated pairs (source, target) into a file; see `heedful.studies.training.write_pairs`."""
        return write_pairs(pairs, self.folder)

    def command(self) -> str:
        """Return the command that gives the same results."""
        words = ["heedful", "study", self.study.name, "--seed", str(self.seed)]
        words += [] if self.updates is None else ["--updates", str(self.updates)]
        words += [] if self.data is None else ["--data", self.data]
        return shlex.join(words)


def run_study(lab: Lab, output: Path) -> Path:
    """Run a study and write its folder: `results.json`, `report.md` and the figures.

    Args:
        lab: The study and its settings.
        output: The folder to make; it must not exist. It appears when everything has been found.

    Returns:
        The folder.

    Raises:
        ValueError: If `output` exists, or the study cannot use its data.
        ImportError: If matplotlib is missing.
        TrainingInterrupted: After Ctrl-C or SIGTERM in a training; the same call goes on with it.
    """
    if output.exists() or output.is_symlink():
        raise ValueError(f"`--output` must be a folder that does not exist yet, but {output} does.")
    check_matplotlib()
    outcome = lab.study.run(lab)
    results = results_of(lab, outcome)
    with new_folder(output) as folder:
        text = json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False)
        (folder / RESULTS).write_text(text + "\n", encoding="utf-8")
        (folder / REPORT).write_text(render_report(results), encoding="utf-8")
        for figure in outcome.figures:
            save_figure(figure.picture, folder / figure_file(lab.study.name, figure.name))
    return output


def figure_file(study: str, name: str) -> str:
    """Return the file name of a figure."""
    return f"{study}-{name}.svg"


def results_of(lab: Lab, outcome: Outcome) -> dict[str, Any]:
    """Return everything that a report tells, as JSON can hold it."""
    trainings = [{key: value for key, value in asdict(one).items() if key != "folder"} for one in lab.trainings]
    return {
        "study": lab.study.name,
        "question": lab.study.question,
        "command": lab.command(),
        "seed": lab.seed,
        "versions": {"python": python_version()}
        | {name: version(name) for name in ("heedful", "torch", "transformers")},
        "values": dict(outcome.values),
        "findings": list(outcome.findings),
        "tables": [asdict(table) for table in outcome.tables],
        "figures": {figure.name: figure.caption for figure in outcome.figures},
        "trainings": trainings,
    }


def told_findings(results: Mapping[str, Any]) -> list[str]:
    """Return the findings of results with their numbers put in."""
    return [finding.format(**results["values"]) for finding in results["findings"]]


def render_report(results: Mapping[str, Any]) -> str:
    """Write results as Markdown: findings, tables, figures, and how they came about."""
    parts = [f"# {results['study']}", results["question"]]
    if results["findings"]:
        parts.append("\n".join(f"- {finding}" for finding in told_findings(results)))
    for table in results["tables"]:
        parts += [f"## {table['title']}", Table(**table).markdown()]
    for name, caption in results["figures"].items():
        parts.append(f"![{name}]({figure_file(results['study'], name)})\n\n{caption}")
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    parts += ["## How it was made", f"```\n{results['command']}\n```", f"With {versions}."]
    if results["trainings"]:
        parts += [_told_trainings(results["trainings"])]
    return "\n\n".join(parts) + "\n"


def _told_trainings(trainings: list[dict[str, Any]]) -> str:
    """Tell how models were trained: what all have in common once, what one has for itself in its row."""
    common = {
        key: value
        for key, value in trainings[0]["changes"].items()
        if all(key in one["changes"] and one["changes"][key] == value for one in trainings)
    }
    rows = []
    for one in trainings:
        own = {key: value for key, value in one["changes"].items() if key not in common}
        rows.append((one["name"], _told_changes(own), one["parameters"], one["updates"], one["target_tokens"]))
    columns = ("training", "changes", "parameters", "updates", "target tokens")
    table = Table("trainings", "Trainings", columns, rows, dict.fromkeys(columns[2:], ","))
    shared = (
        f"Trained by the studies' shared recipe, `modeling/heedful/studies/recipe.yaml`, with {_told_changes(common)}:"
    )
    return f"{shared}\n\n{table.markdown()}"


def _told_changes(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"`{key}={_told_value(value)}`" for key, value in changes.items()) or "no changes"


def _told_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_told_value(part)}" for name, part in value.items()) + "}"
    if isinstance(value, str):
        return Path(value).name if value.endswith(".jsonl") else value  # where generated pairs lie is nobody's matter
    return json.dumps(value)
