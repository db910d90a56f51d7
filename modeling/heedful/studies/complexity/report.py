"""All about Table 1 in one report: as JSON, as Markdown tables, as a figure, and as a folder with all three."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from heedful.diagnosis.memory import MIB
from heedful.files import check_is_new, check_matplotlib, new_folder
from heedful.studies.complexity.counts import count, operations, path_length, sequential_steps, term_of_table_1
from heedful.studies.complexity.layers import make_layer
from heedful.studies.complexity.measurement import exponent, machine, measure
from heedful.studies.complexity.reach import measure_reach
from heedful.studies.complexity.settings import ComplexitySettings

# Of Table 1: complexity per layer, sequential operations, maximum path length, and the power of n in the first.
PAPER = {
    "self_attention": ("O(n²·d)", "O(1)", "O(1)", 2),
    "restricted": ("O(r·n·d)", "O(1)", "O(n/r)", 1),
    "recurrent": ("O(n·d²)", "O(n)", "O(n)", 1),
    "convolutional": ("O(k·n·d²)", "O(1)", "O(n/k), O(log_k n) dilated", 1),
}
# What is measured: label, colour, line; the last three are no layers of Table 1.
STYLES = {
    "self_attention": ("self-attention", "tab:blue", "-"),
    "restricted": ("restricted self-attention", "tab:green", "-"),
    "recurrent": ("recurrent", "tab:red", "-"),
    "convolutional": ("convolutional", "tab:orange", "-"),
    "plain": ("self-attention, all scores in memory", "tab:blue", ":"),
    "masked": ("restricted by a mask of all pairs", "tab:green", ":"),
    "additive": ("self-attention, additive scores", "tab:purple", ":"),
}
# What path lengths are looked for in: label, formula, colour, marker.
REACH_STYLES = {
    "self_attention": ("self-attention", "1", "tab:blue", "o"),
    "restricted": ("restricted self-attention", "⌈(n−1)/r⌉", "tab:green", "o"),
    "recurrent": ("recurrent", "n", "tab:red", "o"),
    "convolutional": ("convolutional, to both sides", "⌈2(n−1)/(k−1)⌉", "tab:orange", "o"),
    "causal": ("convolutional, causal", "⌈(n−1)/(k−1)⌉", "tab:orange", "^"),
    "dilated": ("convolutional, causal, dilated", "⌈log_k n⌉", "tab:brown", "^"),
}


def make_report(settings: ComplexitySettings) -> dict[str, Any]:
    """Count, time and look for path lengths; minutes at the default settings.

    The tree can be JSON: `settings`, `machine`, `layers` (by kind: numbers by length, and `exponents` of n), `reach`.
    """
    before = machine()
    layers = {kind: {**_counts(kind, settings), **measured} for kind, measured in measure(settings).items()}
    for kind, layer in layers.items():
        costs = {"operations": "operations", "time": "milliseconds", "memory": "bytes"}
        found = {name: round(exponent(settings.lengths, layer[column]), 2) for name, column in costs.items()}
        layer["exponents"] = {"paper": PAPER[kind][3] if kind in PAPER else 2, **found}
        for column in ("milliseconds", "fastest", "slowest"):
            layer[column] = [None if value is None else round(value, 3) for value in layer[column]]
    after = machine()["load_average"]
    return {
        "settings": {**asdict(settings), "lengths": [*settings.lengths], "reach_lengths": [*settings.reach_lengths]},
        "machine": {**before, "load_average_after": after},
        "layers": layers,
        "reach": measure_reach(settings),
    }


def _counts(kind: str, settings: ComplexitySettings) -> dict[str, Any]:
    with torch.device("meta"):
        layer = make_layer(kind, settings, kernel="eager")
    shortest = count(layer, settings.lengths[0], settings.d_model)
    return {
        "operations": [operations(kind, n, settings) for n in settings.lengths],
        "term_of_table_1": [term_of_table_1(kind, n, settings) for n in settings.lengths],
        "sequential_steps": [sequential_steps(kind, n) for n in settings.lengths],
        "path_length": [path_length(kind, n, settings) for n in settings.lengths],
        "counted_at_the_shortest": shortest._asdict(),
    }


def as_json(report: dict[str, Any]) -> str:
    """Write a report as JSON."""
    return json.dumps(report, indent=1, ensure_ascii=False)


def tables(report: dict[str, Any]) -> str:
    """Write a report as Markdown: what was measured on what, then tables."""
    lengths, reach_lengths = report["settings"]["lengths"], report["settings"]["reach_lengths"]
    steps = ["sequential steps", "maximum path length"]
    counts = [[f"n = {lengths[-1]:,}", "Table 1", "million multiply-adds", "Table 1's term", *steps]]
    growth = [["grows with n to the power of", "Table 1", "multiply-adds", "time", "memory"]]
    times = [["milliseconds", *(f"n = {n:,}" for n in lengths), f"MiB at {lengths[-1]:,}"]]
    reach = [["path length, by gradient", "formula", *(f"n = {n:,}" for n in reach_lengths)]]
    for kind, layer in report["layers"].items():
        label = STYLES[kind][0]
        if kind in PAPER:
            millions = [f"{layer[name][-1] / 1e6:,.1f}" for name in ("operations", "term_of_table_1")]
            numbers = [f"{layer[name][-1]:,}" for name in ("sequential_steps", "path_length")]
            counts.append([label, "; ".join(map(str, PAPER[kind][:3])), *millions, *numbers])
        powers = layer["exponents"]
        paper = str(powers["paper"]) if kind in PAPER else "—"
        growth.append([label, paper, *(f"{powers[name]:.2f}" for name in ("operations", "time", "memory"))])
        milliseconds = ("–" if value is None else f"{value:,.1f}" for value in layer["milliseconds"])
        largest, held = max((n, held) for n, held in zip(lengths, layer["bytes"], strict=True) if held is not None)
        times.append([label, *milliseconds, f"{held / MIB:,.1f}" + f" at {largest:,}" * (largest != lengths[-1])])
    for kind, (label, formula, *_) in REACH_STYLES.items():
        found = [row for row in report["reach"] if row["kind"] == kind]
        cells = [str(row["path"]) + (f" (not {row['formula']})" * (row["path"] != row["formula"])) for row in found]
        reach.append([label, formula, *cells])
    return "\n\n".join([_told(report), *map(_table, (counts, growth, times, reach))])


def _told(report: dict[str, Any]) -> str:
    settings, where = report["settings"], report["machine"]
    upper = settings["lengths"][len(settings["lengths"]) // 2 :]
    load = ""
    if where["load_average"] is not None:
        load = f", load average {where['load_average']:.1f} before and {where['load_average_after']:.1f} after"
        load += " (other programs were running)" * (max(where["load_average"], where["load_average_after"]) > 2)
    return (
        f"d = {settings['d_model']}, {settings['heads']} heads, r = {settings['neighbourhood']}, "
        f"k = {settings['kernel_width']}, {settings['cell'].upper()}; forward, one sequence, float32, one thread, CPU "
        f"time, medians of {settings['rounds']} rounds; exponents of n from {upper[0]:,} to {upper[-1]:,}. "
        f"{where['processor']}, {where['cores']} cores{load}; torch {where['torch']}."
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    header, *others = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *others))


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw time, memory and path length against the length, on logarithmic axes, without pyplot or its settings."""
    check_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.8), dpi=100, layout="constrained")
    time, memory, reach = figure.subplots(1, 3)
    lengths, reach_lengths = report["settings"]["lengths"], report["settings"]["reach_lengths"]
    for kind, layer in report["layers"].items():
        label, colour, line = STYLES[kind]
        milliseconds = [math.nan if value is None else value for value in layer["milliseconds"]]
        mebibytes = [math.nan if value is None else value / MIB for value in layer["bytes"]]
        for axes, name, costs in ((time, "time", milliseconds), (memory, "memory", mebibytes)):
            named = f"{label}: n^{layer['exponents'][name]:.2f}"
            axes.plot(lengths, costs, label=named, color=colour, linestyle=line, marker="o", markersize=3)
    for kind, (label, _, colour, marker) in REACH_STYLES.items():
        rows = [row for row in report["reach"] if row["kind"] == kind]
        numbers, formulas, paths = ([row[column] for row in rows] for column in ("length", "formula", "path"))
        reach.plot(numbers, formulas, color=colour, linewidth=1)
        reach.plot(numbers, paths, label=label, color=colour, marker=marker, markersize=5, linestyle="none")
    for axes, title, ticks in (
        (time, "CPU time of a layer, ms", lengths),
        (memory, "memory of a layer, MiB", lengths),
        (reach, "maximum path length (line: formula)", reach_lengths),
    ):
        axes.set(title=title, xscale="log", yscale="log", xlabel="length n")
        axes.set_xticks(ticks, [f"{n:,}" for n in ticks], minor=False)
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    figure.savefig(path)


def write_report(settings: ComplexitySettings, output: Path) -> dict[str, Any]:
    """Make a report and write it into a new folder: `complexity.json`, `complexity.md`, `complexity.png`."""
    check_is_new(output, "output")
    check_matplotlib()
    with new_folder(output) as folder:
        report = make_report(settings)
        (folder / "complexity.json").write_text(as_json(report) + "\n", encoding="utf-8")
        (folder / "complexity.md").write_text(tables(report) + "\n", encoding="utf-8")
        draw(report, folder / "complexity.png")
    return report
