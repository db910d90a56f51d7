"""`heedful tune`: a search for good settings."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Option

from heedful.cli import options

KNOBS = "Setting to vary: vocabulary, width, depth, dropout, learning_rate, or KEY=A,B. Default: all that fit."
Vary = Annotated[list[str] | None, Option(help=KNOBS)]


def tune(
    recipe: options.RecipeFile,
    overrides: options.Overrides = None,
    minutes: Annotated[float, Option(min=0.1, help="Time limit. The same command continues later.")] = 60,
    output: Annotated[Path | None, Option("-o", "--output", help="Folder to write. Default: runs/NAME-tune.")] = None,
    vary: Vary = None,
    as_json: options.AsJson = False,
) -> None:
    """Search for the settings that suit the data: train many models, stop bad ones early, write the best recipe."""
    from heedful.proposals import tuning
    from heedful.proposals.proposal import complete
    from heedful.training.recipe_file import read_recipe, read_values

    options.quieten()
    wanted = read_recipe(recipe, overrides, complete)
    folder = output or Path(f"runs/{wanted.name}-tune")
    knobs = [entry.partition("=") for entry in vary or []]
    chosen = {knob: read_values(values) if equals else None for knob, equals, values in knobs}
    if len(chosen) < len(knobs):
        raise ValueError(f"`--vary` must name each setting once, but names {', '.join(knob for knob, *_ in knobs)}.")
    search = tuning.tune(wanted, folder, minutes, None if vary is None else chosen)
    lines = []
    for trial in search.trials:
        values = ", ".join(f"{knob} {value}" for knob, value in trial.values.items())
        note = f"stopped after {trial.updates} updates" if trial.is_pruned else ""
        lines.append(f"{trial.loss:.4f}  {values}  {note}".rstrip())
    if search.has_unfinished:
        print("The last trial is unfinished. Run the same command again to continue it.", file=sys.stderr)
    if search.trials:
        lines += [f"picture: {folder / tuning.PICTURE}", f"recipe: {search.recipe}"]
        lines.append(f"Now: heedful train {search.recipe}")
    found = {"recipe": str(search.recipe), "trials": [asdict(trial) for trial in search.trials]}
    options.print_result(found, "\n".join(lines), as_json)
