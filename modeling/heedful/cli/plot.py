"""`heedful plot`: learning curves of runs."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option


def plot(
    runs: Annotated[list[Path], Argument(metavar="RUN…", help="Folders of runs, finished or not.")],
    output: Annotated[Path, Option("-o", "--output", help="Picture: .png or .svg.")] = Path("learning_curve.png"),
    metric: Annotated[list[str] | None, Option(help="Such as bleu, train/loss. Default: losses and scores.")] = None,
) -> None:
    """Draw the learning curve of a run, or of several runs in one picture."""
    from heedful.cards.learning_curve import draw_learning_curves

    print(draw_learning_curves(runs, output, metric or ()))
