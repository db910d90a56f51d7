"""`heedful init`: a first recipe for your pairs."""

import shlex
from pathlib import Path
from typing import Annotated

from typer import Option

from heedful.cli import options


def init(
    data: Annotated[list[Path], Option("--data", help="File or folder with your pairs; twice for two files.")],
    output: Annotated[Path | None, Option("-o", "--output", help="Recipe file to write. Default: DATA.yaml.")] = None,
    source: Annotated[str | None, Option(help="Source language or column: ko, 1, or a,b for two columns.")] = None,
    target: Annotated[str | None, Option(help="Target language or column: en, 2, or a name.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Write a commented recipe that fits your pairs and this machine."""
    from heedful.proposals.first_recipe import named, write_first_recipe

    options.quieten()
    output = output or Path(f"{named(data[0]).lstrip('.').split('.')[0] or 'model'}.yaml")
    found = [*write_first_recipe(data, output, source, target)]
    file = shlex.quote(str(output))
    lines = [*found, f"recipe: {output}", f"Now: heedful doctor {file}", f"then: heedful train {file}"]
    options.print_result({"recipe": str(output), "notes": found}, "\n".join(lines), as_json)
