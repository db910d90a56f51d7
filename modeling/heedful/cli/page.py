"""`heedful page`: a model as one HTML file."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from heedful.cli import options


def page(
    models: Annotated[list[str], Argument(metavar="MODEL…", help="Folders of saved models, or their ids on the Hub.")],
    output: Annotated[Path, Option("--output", "-o", help="The page to write; it ends in .html.")],
    example: Annotated[str | None, Option(help="Text to begin with. Default: that of the model's card.")] = None,
) -> None:
    """Write a page that translates without any network and shows how: one file, with the models inside."""
    from heedful.export.page import write_page

    options.quieten()
    print(write_page(models, output, example))
