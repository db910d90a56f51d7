"""All about Table 1 in one report: as JSON, as Markdown tables, and as a folder with a figure."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from heedful.complexity.counts import count, operations, path_length, sequential_steps, term_of_table_1
from heedful.complexity.figure import MEBIBYTE, REACH_STYLES, STYLES, draw
from heedful.complexity.layers import make_layer
from heedful.complexity.measurement import KINDS, exponent, machine, measure
from heedful.complexity.reach import measure_reach
from heedful.complexity.settings import ComplexitySettings
from heedful.files import check_is_new, check_matplotlib, new_folder

# Of Table 1: complexity per layer, sequential operations, maximum path length, and the power of n in the first.
PAPER = {
    "self_attention": ("O(n²·d)", "O(1)", "O(1)", 2),
    "restricted": ("O(r·n·d)", "O(1)", "O(n/r)", 1),
    "recurrent": ("O(n·d²)", "O(n)", "O(n)", 1),
    "convolutional": ("O(k·n·d²)", "O(1)", "O(n/k), O(log_k n) dilated", 1),
}
FORMULAS = {
    "self_attention": "1",
    "restricted": "⌈(n−1)/r⌉",
    "recurrent": "n",
    "convolutional": "⌈2(n−1)/(k−1)⌉",
    "causal": "⌈(n−1)/(k−1)⌉",
    "dilated": "⌈log_k n⌉",
}


def make_report(settings: ComplexitySettings) -> dict[str, Any]:
    """Count, time and look for path lengths; minutes at the default settings.

    Returns:
        A tree that JSON can hold: `settings`, `machine`, `layers` (by kind: numbers by length, and `exponents` of n)
        and `reach`.
    """
    before = machine()
    measured = measure(settings)
    layers = {kind: {**_counts(kind, settings), **measured[kind]} for kind in KINDS}
    for kind, layer in layers.items():
        costs = {"operations": "operations", "time": "milliseconds", "memory": "bytes"}
        found = {name: round(exponent(settings.lengths, layer[column]), 2) for name, column in costs.items()}
        layer["exponents"] = {"paper": PAPER[kind][3] if kind in PAPER else 2, **found}
        for column in ("milliseconds", "fastest", "slowest"):
            layer[column] = [round(value, 3) for value in layer[column]]
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
        "counted_at_the_shortest": asdict(shortest),
    }


def as_json(report: dict[str, Any]) -> str:
    """Write a report as JSON."""
    return json.dumps(report, indent=1, ensure_ascii=False)


def tables(report: dict[str, Any]) -> str:
    """Write a report as Markdown: what was measured on what, then tables."""
    return "\n\n".join(
        [_told(report), _counts_table(report), _growth_table(report), _times_table(report), _reach_table(report)]
    )


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


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _counts_table(report: dict[str, Any]) -> str:
    header = [f"n = {report['settings']['lengths'][-1]:,}", "Table 1", "million multiply-adds", "Table 1's term"]
    header += ["sequential steps", "maximum path length"]
    rows = []
    for kind, (order, steps, path, _) in PAPER.items():
        layer = report["layers"][kind]
        total, term = layer["operations"][-1], layer["term_of_table_1"][-1]
        row = [STYLES[kind][0], f"{order}; {steps}; {path}", f"{total / 1e6:,.1f}", f"{term / 1e6:,.1f}"]
        rows.append([*row, f"{layer['sequential_steps'][-1]:,}", f"{layer['path_length'][-1]:,}"])
    return _table(header, rows)


def _growth_table(report: dict[str, Any]) -> str:
    header = ["grows with n to the power of", "Table 1", "multiply-adds", "time", "memory"]
    rows = []
    for kind in KINDS:
        found = report["layers"][kind]["exponents"]
        paper = str(found["paper"]) if kind in PAPER else "—"
        rows.append([STYLES[kind][0], paper, *(f"{found[name]:.2f}" for name in ("operations", "time", "memory"))])
    return _table(header, rows)


def _times_table(report: dict[str, Any]) -> str:
    lengths = report["settings"]["lengths"]
    header = ["milliseconds", *(f"n = {n:,}" for n in lengths), f"MiB at {lengths[-1]:,}"]
    rows = []
    for kind in KINDS:
        layer = report["layers"][kind]
        times = [f"{value:,.1f}" for value in layer["milliseconds"]]
        rows.append([STYLES[kind][0], *times, f"{layer['bytes'][-1] / MEBIBYTE:,.1f}"])
    return _table(header, rows)


def _reach_table(report: dict[str, Any]) -> str:
    lengths = report["settings"]["reach_lengths"]
    header = ["path length, by gradient", "formula", *(f"n = {n:,}" for n in lengths)]
    rows = []
    for kind, formula in FORMULAS.items():
        found = [row for row in report["reach"] if row["kind"] == kind]
        cells = [str(row["path"]) + (f" (not {row['formula']})" * (row["path"] != row["formula"])) for row in found]
        rows.append([REACH_STYLES[kind][0], formula, *cells])
    return _table(header, rows)


def write_report(settings: ComplexitySettings, output: Path) -> dict[str, Any]:
    """Make a report and write it into a new folder: `complexity.json`, `complexity.md`, `complexity.png`.

    Raises:
        ValueError: If the folder exists or cannot be made.
        ImportError: If matplotlib is not installed.
    """
    check_is_new(output, "output")
    check_matplotlib()
    with new_folder(output) as folder:
        report = make_report(settings)
        (folder / "complexity.json").write_text(as_json(report) + "\n", encoding="utf-8")
        (folder / "complexity.md").write_text(tables(report) + "\n", encoding="utf-8")
        draw(report, folder / "complexity.png")
    return report
