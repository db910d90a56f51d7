"""Time, memory and path length against the length, on logarithmic axes."""

from pathlib import Path
from typing import Any

from heedful.files import check_matplotlib

MEBIBYTE = 2**20
# Label, colour, line; the last two are no layers of Table 1.
STYLES = {
    "self_attention": ("self-attention", "tab:blue", "-"),
    "restricted": ("restricted self-attention", "tab:green", "-"),
    "recurrent": ("recurrent", "tab:red", "-"),
    "convolutional": ("convolutional", "tab:orange", "-"),
    "plain": ("self-attention, all scores in memory", "tab:blue", ":"),
    "masked": ("restricted by a mask of all pairs", "tab:green", ":"),
}
REACH_STYLES = {
    "self_attention": ("self-attention", "tab:blue", "o"),
    "restricted": ("restricted self-attention", "tab:green", "o"),
    "recurrent": ("recurrent", "tab:red", "o"),
    "convolutional": ("convolutional, to both sides", "tab:orange", "o"),
    "causal": ("convolutional, causal", "tab:orange", "^"),
    "dilated": ("convolutional, causal, dilated", "tab:brown", "^"),
}


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw a report of `heedful.complexity.report.make_report`; neither pyplot nor its settings are touched.

    Args:
        report: The report.
        path: Picture to write, of a kind that matplotlib knows.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    check_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.8), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    time, memory, reach = figure.subplots(1, 3)
    lengths = report["settings"]["lengths"]
    for kind, (label, colour, line) in STYLES.items():
        layer = report["layers"][kind]
        power = layer["exponents"]
        style = {"color": colour, "linestyle": line, "marker": "o", "markersize": 3}
        time.plot(lengths, layer["milliseconds"], label=f"{label}: n^{power['time']:.2f}", **style)
        mebibytes = [value / MEBIBYTE for value in layer["bytes"]]
        memory.plot(lengths, mebibytes, label=f"{label}: n^{power['memory']:.2f}", **style)
    for kind, (label, colour, marker) in REACH_STYLES.items():
        rows = [row for row in report["reach"] if row["kind"] == kind]
        numbers = [row["length"] for row in rows]
        reach.plot(numbers, [row["formula"] for row in rows], color=colour, linewidth=1)
        paths = [row["path"] for row in rows]
        reach.plot(numbers, paths, label=label, color=colour, marker=marker, markersize=5, linestyle="none")
    time.set_title("CPU time of a layer, ms")
    memory.set_title("memory of a layer, MiB")
    reach.set_title("maximum path length (line: formula)")
    for axes, ticks in ((time, lengths), (memory, lengths), (reach, report["settings"]["reach_lengths"])):
        axes.set(xscale="log", yscale="log", xlabel="length n")
        axes.set_xticks(ticks, [f"{n:,}" for n in ticks], minor=False)
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    figure.savefig(path)
