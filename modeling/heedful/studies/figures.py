"""Small pictures of what a study found."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]
SIZE = (6.0, 3.6)  # inches


def check_matplotlib() -> None:
    """Raise an `ImportError` that names the extra if figures cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError("A study draws figures with matplotlib: pip install 'heedful[plots]'") from error


def new_figure(rows: int = 1, columns: int = 1) -> "Figure":
    """Return a figure with a grid of axes (`figure.axes`, row by row), without touching pyplot or its settings."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(SIZE[0] * (1 if columns == 1 else 0.7 * columns), SIZE[1] * rows), layout="constrained")
    figure.subplots(rows, columns)
    return figure


def line_chart(
    lines: Mapping[str, Points], x_label: str, y_label: str, title: str = "", log: str = "", floor: float | None = None
) -> "Figure":
    """Draw lines through points.

    Args:
        lines: Points (x, y) by the name in the legend, drawn in this order.
        x_label: What x is, with its unit.
        y_label: What y is, with its unit.
        title: Above the picture.
        log: Axes with a logarithmic scale: "x", "y", "xy" or none.
        floor: Where the y axis begins.
    """
    figure = new_figure()
    draw_lines(figure.axes[0], lines, x_label, y_label, log)
    figure.axes[0].set_title(title)
    if floor is not None:
        figure.axes[0].set_ylim(bottom=floor)
    return figure


def draw_lines(axes, lines: Mapping[str, Points], x_label: str, y_label: str, log: str = "") -> None:
    """Draw lines into axes of a figure; arguments as in `line_chart`."""
    for name, points in lines.items():
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            marker="o",
            markersize=3 if len(points) < 50 else 0,
            linewidth=1.3,
            label=name,
        )
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    if "x" in log:
        axes.set_xscale("log")
    if "y" in log:
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    if len(lines) > 1:
        axes.legend(fontsize=8)


def bar_chart(bars: Mapping[str, float], y_label: str, title: str = "") -> "Figure":
    """Draw a bar for every value.

    Args:
        bars: Values by the name below the bar.
        y_label: What they are, with their unit.
        title: Above the picture.
    """
    figure = new_figure()
    axes = figure.axes[0]
    drawn = axes.bar(list(bars), list(bars.values()), width=0.6)
    axes.bar_label(drawn, fmt="%.3g", fontsize=8)
    axes.set_ylabel(y_label)
    axes.set_title(title)
    return figure


def save_figure(figure: "Figure", path: Path) -> None:
    """Save a figure as SVG with its text as text, the same bytes for the same figure."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": path.name, "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})
