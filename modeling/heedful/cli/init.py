"""`heedful init`: a first recipe for your pairs."""

import shlex
from pathlib import Path
from typing import Annotated

from typer import Option

from heedful.cli import options


def init(
    data: Annotated[list[Path], Option("--data", help="File or folder with your pairs; twice: two aligned files.")],
    output: Annotated[Path | None, Option("-o", "--output", help="Recipe to write; its default is DATA.yaml.")] = None,
    source: Annotated[str | None, Option(help="Language or column of the source; 1, a name, or a,b.")] = None,
    target: Annotated[str | None, Option(help="Likewise of the target.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Look at your pairs, and write a commented recipe that fits them and this machine."""
    from heedful.proposals.first_recipe import named, write_first_recipe

    options.quieten()
    output = output or Path(f"{named(data[0]).lstrip('.').split('.')[0] or 'model'}.yaml")
    found = [*write_first_recipe(data, output, source, target)]
    file = shlex.quote(str(output))
    lines = [*found, f"recipe: {output}", f"Now: heedful doctor {file}", f"then: heedful train {file}"]
    options.print_result({"recipe": str(output), "notes": found}, "\n".join(lines), as_json)
