"""`heedful study`: an argument of the paper as an experiment."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from heedful.cli import options
from heedful.files import read_object


def study(
    name: Annotated[str | None, Argument(metavar="[NAME]", help="Without a name, all studies are listed.")] = None,
    output: Annotated[Path | None, Option("-o", "--output", help="New folder. Default: runs/studies/NAME.")] = None,
    seed: Annotated[int, Option(help="Random seed of weights, data and sampling.")] = 1,
    updates: Annotated[int | None, Option(help="Number of updates of each training. Default: the study's.")] = None,
    data: Annotated[str | None, Option(help="Other data: builtin:[bold]train[/bold]:COUNT, or a folder.")] = None,
    settings: Annotated[list[str] | None, Argument(metavar="[NAME=VALUE]…", help="Settings to change.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Run an argument of the paper as an experiment, with tables, figures and findings in a folder.

    Trained models stay in the folder `trainings` next to the output, and later runs reuse them.
    """
    from heedful_lab.studies.catalogue import NAMES, find_study
    from heedful_lab.studies.study import Lab, run_study

    if name is None:
        if (output, seed, updates, data) != (None, 1, None, None):
            raise ValueError("Options need the name of a study, but it is missing.")
        questions = {known: find_study(known).question for known in NAMES}
        lines = "\n".join(f"{known:<12}{question}" for known, question in questions.items())
        return options.print_result(questions, lines, as_json)
    folder = output or Path("runs/studies") / name
    lab = Lab(find_study(name), seed, updates, data, folder.parent / "trainings", changed=settings or ())
    options.quieten()
    made = run_study(lab, folder)
    options.print_result(read_object(made / "results.json"), made / "report.md", as_json)
    return None
