"""What a study is, how it runs, and how its results are written: all of them, or nothing.

A study is a module of this room that ends in its `STUDY`:

    >>> from heedful.studies.report import Outcome, Table
    >>> from heedful.studies.study import Lab, Study
    >>> def run(lab: Lab) -> Outcome:
    ...     weights = {n: 1 / n for n in (10, 100)}
    ...     table = Table.of("weights", "Weight of one of n equal scores", "n | weight :.1%", weights.items())
    ...     finding = "Of 100 equal scores each has a weight of {at_100:.1%}."
    ...     return Outcome([table], values={"at_100": weights[100]}, findings=[finding])
    >>> study = Study("equal", "What is the weight of one of n equal scores?", run, data="none")
    >>> print(run(Lab(study)).tables[0].markdown())
    | n | weight |
    | --- | --- |
    | 10 | 10.0% |
    | 100 | 1.0% |
"""

import json
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any, Literal

from heedful.files import check_at_least, new_folder
from heedful.studies.figures import check_matplotlib, save_figure
from heedful.studies.pairs import Pair, write_pairs
from heedful.studies.report import Outcome, figure_file, render_report
from heedful.studies.training import Training, train_model

Data = Literal["builtin", "folder", "none"]

DEFAULT_SEED = 1
RESULTS = "results.json"
REPORT = "report.md"


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
    """What a study gets: its settings, and a folder to train models in.

    Attributes:
        study: The study that runs.
        seed: Of weights, data and everything drawn.
        updates: Updates of each training, if not those of the recipe.
        data: Other data than the recipe's, as `Study.data` allows.
        folder: Where its trainings are kept; those of other studies may be there too.
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
        check_at_least(0, **{"--seed": self.seed})
        check_at_least(1, **{"--updates": self.updates})
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
        training = train_model(name, {**self.study.changes, **(changes or {}), **given}, self.folder)
        self.trainings.append(training)
        return training

    def write_data(
        self, train: Iterable[Pair], validation: Iterable[Pair], **tests: Iterable[Pair]
    ) -> dict[str, str | dict[str, str]]:
        """Write generated pairs into files, and return the changes that train and test a model on them.

        `data.source` "source" and `data.target` "target" are to be set beside them.

        Args:
            train: Pairs to train on.
            validation: Pairs to validate with.
            **tests: The pairs of each test set.
        """
        return {
            "data.train": write_pairs(train, self.folder),
            "data.validation": write_pairs(validation, self.folder),
            "data.test": {name: write_pairs(pairs, self.folder) for name, pairs in tests.items()},
        }

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
            save_figure(figure, folder / figure_file(lab.study.name, figure.name))
    return output


def results_of(lab: Lab, outcome: Outcome) -> dict[str, Any]:
    """Return everything that a report says, as JSON can hold it."""
    trainings = [{key: value for key, value in asdict(one).items() if key != "folder"} for one in lab.trainings]
    versions = {"python": python_version()} | {name: version(name) for name in ("heedful", "torch", "transformers")}
    return {
        "study": lab.study.name,
        "question": lab.study.question,
        "command": lab.command(),
        "seed": lab.seed,
        "versions": versions,
        "values": dict(outcome.values),
        "findings": list(outcome.findings),
        "tables": [asdict(table) for table in outcome.tables],
        "figures": {figure.name: figure.caption for figure in outcome.figures},
        "trainings": trainings,
    }
