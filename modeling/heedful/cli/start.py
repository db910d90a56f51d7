"""For those who start: the recipes and sizes that come with the package, and a first one of their own."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from heedful.cli import options


def recipes(
    name: Annotated[str | None, Argument(metavar="[NAME]", help="Of a recipe or a size, to print its file.")] = None,
):
    """List the recipes and model sizes that come with Heedful, or print one."""
    from heedful.training import recipe_file

    known = {
        "recipes, for `heedful train NAME`": recipe_file.recipes(),
        "sizes, for `model.config`": recipe_file.sizes(),
    }
    if name is None:
        width = max(len(entry) for names in known.values() for entry in names) + 2
        for title, names in known.items():
            print(f"{title}:")
            for entry, sentence in names.items():
                print(f"  {entry:<{width}}{sentence}")
        return
    print(recipe_file.find_known(name).read_text(encoding="utf-8").rstrip("\n"))


def init(
    data: Annotated[Path, Option("--data", help="File or folder with your pairs.")],
    output: Annotated[
        Path | None, Option("-o", "--output", help="Recipe to write. Default: named after the data.")
    ] = None,
    source: Annotated[str | None, Option(help="Language or column of the source; 1 is a table's first.")] = None,
    target: Annotated[str | None, Option(help="Likewise of the target.")] = None,
):
    """Look at your pairs, and write a commented recipe that fits them and this machine."""
    from heedful.diagnosis.first_recipe import write_first_recipe

    options.quieten()
    written = write_first_recipe(data, output or Path(f"{data.name.split('.')[0]}.yaml"), source, target)
    print("\n".join(written.told))
    print(f"recipe: {written.path}\nNow: heedful train {written.path}")
