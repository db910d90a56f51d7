"""`heedful plot`: learning curves of runs."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option


def plot(
    runs: Annotated[list[Path], Argument(metavar="RUN…", help="Folders of runs, finished or not.")],
    output: Annotated[Path, Option("-o", "--output", help="Picture file: .png or .svg.")] = Path("learning_curve.png"),
    metric: Annotated[list[str] | None, Option(help="Curve, such as bleu. Default: losses and scores.")] = None,
) -> None:
    """Draw the learning curves of one or more runs in one picture."""
    from heedful.cards.learning_curve import draw_learning_curves

    print(draw_learning_curves(runs, output, metric or ()))
