"""Small pictures: rows of two panels, each with its axes."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from heedful.files import import_extra, written_whole

Panel = Callable[[Any], None]  # draws into matplotlib axes
Points = Sequence[tuple[float, float]]
WIDTH, HEIGHT = 6.0, 3.6  # inches


def save_figure(panels: Sequence[Panel], path: Path) -> None:
    """Draw panels, two in a row, into a reproducible SVG or PNG; a common legend appears once."""
    import_extra("matplotlib", "plots")
    import matplotlib
    from matplotlib.figure import Figure

    rows, columns = (len(panels) + 1) // 2, min(len(panels), 2)
    figure = Figure(figsize=(WIDTH * (0.6 + 0.4 * columns), HEIGHT * rows), dpi=150, layout="constrained")
    for number, draw in enumerate(panels, 1):
        draw(figure.add_subplot(rows, columns, number))
    legends = [legend for axes in figure.axes if (legend := axes.get_legend())]
    if len({str([text.get_text() for text in legend.get_texts()]) for legend in legends}) == 1:
        for legend in legends[1:]:
            legend.remove()
    kind = path.suffix[1:].lower()
    same_bytes = matplotlib.rc_context({"svg.hashsalt": path.name, "svg.fonttype": "none"})
    with same_bytes, written_whole(path) as written:
        figure.savefig(written, format=kind, metadata={"Date": None} if kind == "svg" else None)


def lines(
    points_by_name: Mapping[str, Points],
    x_label: str,
    y_label: str,
    title: str = "",
    log: str = "",
    families: Sequence[str] | None = None,
    **settings: Any,
) -> Panel:
    """Return a panel with lines through points (x, y); `log` are logarithmic axes, such as "xy"."""

    def draw(axes: Any) -> None:
        drawn = []
        for points in points_by_name.values():
            size = 3 if len(points) < 50 else 0
            drawn += axes.plot(*zip(*points, strict=True), marker="o", markersize=size, linewidth=1.3)
        axes.set(xlabel=x_label, ylabel=y_label, title=title)
        axes.set(**{f"{axis}scale": "log" for axis in log}, **settings)
        axes.grid(alpha=0.3)
        name_lines(axes, drawn, list(points_by_name), families)

    return draw


def name_lines(axes: Any, drawn: Sequence[Any], names: Sequence[str], families: Sequence[str] | None) -> None:
    """Add a legend if there are several lines."""
    if len(names) > 1:
        for text in axes.legend(drawn, names, fontsize=8 if len(names) < 8 else 6).get_texts():
            text.set(parse_math=False, family=families)  # no formulas
