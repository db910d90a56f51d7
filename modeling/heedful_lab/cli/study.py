"""`heedful study`: one of the paper's arguments as an experiment."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from heedful.cli import options
from heedful.files import read_object


def study(
    name: Annotated[str | None, Argument(metavar="[NAME]", help="Without it, the studies are listed.")] = None,
    output: Annotated[Path | None, Option("-o", "--output", help="New folder. Default: runs/studies/NAME.")] = None,
    seed: Annotated[int, Option(help="Of weights, data and everything drawn.")] = 1,
    updates: Annotated[int | None, Option(help="Of each training. Default: the study's own.")] = None,
    data: Annotated[str | None, Option(help="Other data: builtin:[bold]train[/bold]:COUNT, or a folder.")] = None,
    settings: Annotated[list[str] | None, Argument(metavar="[NAME=VALUE]…", help="Settings of the study.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Run one of the paper's arguments as an experiment: tables, figures and findings in a folder.

    Trained models are kept in the folder `trainings` next to the output, and found there the next time.
    """
    from heedful_lab.studies.catalogue import NAMES, find_study
    from heedful_lab.studies.study import Lab, run_study

    if name is None:
        if (output, seed, updates, data) != (None, 1, None, None):
            raise ValueError("The name of a study must be given where there are options, but is missing.")
        questions = {known: find_study(known).question for known in NAMES}
        lines = "\n".join(f"{known:<12}{question}" for known, question in questions.items())
        return options.print_result(questions, lines, as_json)
    folder = output or Path("runs/studies") / name
    lab = Lab(find_study(name), seed, updates, data, folder.parent / "trainings", changed=settings or ())
    options.quieten()
    made = run_study(lab, folder)
    options.print_result(read_object(made / "results.json"), made / "report.md", as_json)
    return None
