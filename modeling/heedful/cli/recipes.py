"""`heedful recipes`: the recipes and sizes that come with the package."""

from typing import Annotated

from typer import Argument

from heedful.cli import options

Name = Annotated[str | None, Argument(metavar="[NAME]", help="Recipe or size to print; `keys` explains all keys.")]


def recipes(name: Name = None, as_json: options.AsJson = False) -> None:
    """List Heedful's recipes and model sizes, or print one."""
    from heedful.training import recipe_file

    if name is not None:
        text = recipe_file.known_text(name).rstrip("\n")
        options.print_result({"name": name, "text": text}, text, as_json)
        return
    recipes, sizes = recipe_file.recipes(), recipe_file.sizes()
    width, lines = max(map(len, recipes | sizes)) + 2, []
    for title, names in (("recipes, for `heedful train NAME`", recipes), ("sizes, for `model.config`", sizes)):
        lines += [f"{title}:", *(f"  {entry:<{width}}{sentence}" for entry, sentence in names.items())]
    options.print_result({"recipes": recipes, "sizes": sizes}, "\n".join(lines), as_json)
