"""`heedful page`: models in one HTML file."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from heedful.cli import options


def page(
    models: Annotated[list[str], Argument(metavar="MODEL…", help="Folders of saved models, or their ids on the Hub.")],
    output: Annotated[Path, Option("--output", "-o", help="Page to write, ending in .html.")],
    example: Annotated[str | None, Option(help="First text on the page. Default: the example of the card.")] = None,
) -> None:
    """Write one HTML file with the models inside, which translates offline and shows attention."""
    from heedful.export.page import write_page

    options.quieten()
    print(write_page(models, output, example))
