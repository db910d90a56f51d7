"""For those who start: the recipes and sizes that come with the package, and a first one of their own."""

import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from heedful.cli import options


def recipes(
    name: Annotated[str | None, Argument(metavar="[NAME]", help="Of a recipe or a size, to print its file.")] = None,
    as_json: options.AsJson = False,
):
    """List the recipes and model sizes that come with Heedful, or print one."""
    from heedful.training import recipe_file

    if name is not None:
        text = recipe_file.find_known(name).read_text(encoding="utf-8").rstrip("\n")
        options.print_result({"name": name, "text": text}, text, as_json)
        return
    recipes, sizes = recipe_file.recipes(), recipe_file.sizes()
    width, lines = max(map(len, recipes | sizes)) + 2, []
    for title, names in (("recipes, for `heedful train NAME`", recipes), ("sizes, for `model.config`", sizes)):
        lines += [f"{title}:", *(f"  {entry:<{width}}{sentence}" for entry, sentence in names.items())]
    options.print_result({"recipes": recipes, "sizes": sizes}, "\n".join(lines), as_json)


def init(
    data: Annotated[list[Path], Option("--data", help="File or folder with your pairs; twice: two aligned files.")],
    output: Annotated[Path | None, Option("-o", "--output", help="Recipe to write; its default is DATA.yaml.")] = None,
    source: Annotated[str | None, Option(help="Language or column of the source; 1, a name, or a,b.")] = None,
    target: Annotated[str | None, Option(help="Likewise of the target.")] = None,
    as_json: options.AsJson = False,
):
    """Look at your pairs, and write a commented recipe that fits them and this machine."""
    from heedful.proposals.first_recipe import named, write_first_recipe

    options.quieten()
    output = output or Path(f"{named(data[0]).lstrip('.').split('.')[0] or 'model'}.yaml")
    found = [*write_first_recipe(data, output, source, target)]
    file = shlex.quote(str(output))
    lines = [*found, f"recipe: {output}", f"Now: heedful doctor {file}", f"then: heedful train {file}"]
    options.print_result({"recipe": str(output), "notes": found}, "\n".join(lines), as_json)


def tune(
    recipe: options.RecipeFile,
    overrides: options.Overrides = None,
    minutes: Annotated[float, Option(min=0.1, help="When to stop; the same command goes on later.")] = 60,
    output: Annotated[Path | None, Option("-o", "--output", help="Its folder. Default: runs/NAME-tune.")] = None,
    vary: Annotated[list[str] | None, Option(help="vocabulary, width, depth, dropout, learning_rate, KEY=A,B")] = None,
    as_json: options.AsJson = False,
):
    """Search for the settings that suit the data: train many times, give up what is worse, write the best recipe."""
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
        note = f"given up after {trial.updates} updates" if trial.is_pruned else ""
        lines.append(f"{trial.loss:.4f}  {values}  {note}".rstrip())
    if search.has_unfinished:
        print("The last trial is not at its end: the same command goes on with it.", file=sys.stderr)
    if search.trials:
        lines += [f"picture: {folder / tuning.PICTURE}", f"recipe: {search.recipe}"]
        lines.append(f"Now: heedful train {search.recipe}")
    found = {"recipe": str(search.recipe), "trials": [asdict(trial) for trial in search.trials]}
    options.print_result(found, "\n".join(lines), as_json)
