"""For those who start: the recipes and sizes that come with the package."""

from typing import Annotated

from typer import Argument


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
