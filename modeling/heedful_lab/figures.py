"""Panels that only the laboratory draws: labelled points, bars, and a matrix."""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from heedful.figures import Panel, name_lines


def labelled_points(
    points_by_name: Mapping[str, Sequence[tuple[float, float, str]]],
    title: str = "",
    families: Sequence[str] | None = None,
    **settings: Any,
) -> Panel:
    """Return a panel of points (x, y, label or "") with a colour for each name; `families` are fonts."""

    def draw(axes: Any) -> None:
        drawn = []
        for points in points_by_name.values():
            drawn.append(axes.scatter([x for x, _, _ in points], [y for _, y, _ in points], s=14, alpha=0.7))
            for x, y, text in filter(itemgetter(2), points):
                beside = {"xytext": (3, 3), "textcoords": "offset points", "fontsize": 7, "parse_math": False}
                axes.annotate(text, (x, y), family=families, **beside)
        axes.set(title=title, xticks=[], yticks=[], **settings)
        name_lines(axes, drawn, list(points_by_name), families)

    return draw


def bars(values: Mapping[str, float], x_label: str) -> Panel:
    """Return a panel with a horizontal bar for each value, next to its name."""

    def draw(axes: Any) -> None:
        drawn = axes.barh(list(values), list(values.values()), height=0.6)
        axes.bar_label(drawn, fmt="%.3g", fontsize=8, padding=2)
        axes.set(xlabel=x_label, ylim=(len(values) - 0.5, -0.5), xmargin=0.15)

    return draw


def matrix(values: Any, label: str = "", *, image: Mapping[str, Any], **settings: Any) -> Panel:
    """Return a panel with a coloured cell for each number (NaN is white) and a colour bar; `image` is for `imshow`."""

    def draw(axes: Any) -> None:
        drawn = axes.imshow(values, **image)
        axes.set(**settings)
        axes.figure.colorbar(drawn, ax=axes, label=label)

    return draw
