"""Table 1, counted, timed, and checked by gradient: each kind of layer's costs and path lengths."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, NamedTuple

from heedful.checking.memory import MIB
from heedful.figures import Panel, lines
from heedful.files import check_at_least
from heedful_lab.studies.complexity import reach
from heedful_lab.studies.complexity.counts import Sizes, operations, path_length, sequential_steps, term_of_table_1
from heedful_lab.studies.complexity.measurement import FEWEST_LENGTHS, KINDS, Cost, exponent, machine, measure
from heedful_lab.studies.report import Cell, Outcome
from heedful_lab.studies.study import Lab, description_of

DESCRIPTION = description_of(__file__)
NAMES, PAPER, FORMULAS = (DESCRIPTION[part] for part in ("names", "paper", "formulas"))
NONE, PATH = "–", "maximum path length"


class Measurements(NamedTuple):
    """Measurements of layers of some sizes."""

    sizes: Sizes
    costs: Mapping[str, Mapping[int, Cost]]  # by kind and length
    paths: Mapping[str, Mapping[int, int]]  # maximum path lengths by gradient, by kind and length
    machine: Mapping[str, Any]  # of the measurements


def run(lab: Lab) -> Outcome:
    """Count operations, time layers and find path lengths; takes minutes at the default settings."""
    settings = lab.settings()
    sizes = Sizes(**{field.name: settings[field.name] for field in fields(Sizes)})
    check_at_least(1, rounds=settings["rounds"])
    for name, fewest in (("lengths", FEWEST_LENGTHS), ("reach_lengths", 1)):
        found = settings[name]
        if len(found) < fewest or min(found) < 2 or found != sorted({*found}):
            raise ValueError(f"`{name}` must be at least {fewest} rising numbers from 2 on, but is {found} instead.")
    lengths, longest = settings["reach_lengths"], reach.LONGEST_REACH
    if lengths[-1] > longest:
        raise ValueError(f"`reach_lengths` must be at most {longest}, but the last is {lengths[-1]} instead.")
    where = machine()
    costs = measure(sizes, settings["lengths"], settings["rounds"], lab.seed)
    where["load_after"] = machine()["load"]
    paths = {kind: {n: reach.path_by_gradient(kind, n, sizes, lab.seed) for n in lengths} for kind in reach.KINDS}
    return outcome_of(Measurements(sizes, costs, paths, where), settings["rounds"])


def outcome_of(measured: Measurements, rounds: int) -> Outcome:
    """Return the tables and figures of measurements in some rounds."""
    sizes, costs, paths, where = measured
    lengths = list(costs["plain"])  # additive scores may lack the last

    def by_length(cell_of: Callable[[Cost], Cell]) -> list[tuple[Cell, ...]]:
        return [(n, *(cell_of(costs[kind][n]) if n in costs[kind] else NONE for kind in KINDS)) for n in lengths]

    def panel(label: str, value_of: Callable[[Cost], float]) -> Panel:
        curves = {NAMES[kind]: [(n, value_of(cost)) for n, cost in found.items()] for kind, found in costs.items()}
        top = 300 * max(value for curve in curves.values() for _, value in curve)  # room for the legend
        return lines(curves, "length n", label, log="xy", ylim=(None, top))

    def path_cell(kind: str, length: int) -> Cell:
        path, formula = paths[kind][length], path_length(kind, length, sizes)
        return path if path == formula else f"{path} (not {formula})"

    growth = {kind: _growth(kind, costs[kind], lengths, sizes) for kind in KINDS}
    return Outcome(
        {
            "counts": [
                (
                    *(NAMES[kind], *PAPER[kind][:3]),
                    *(count(kind, lengths[-1], sizes) / 1e6 for count in (operations, term_of_table_1)),
                    *(sequential_steps(kind, lengths[-1]), path_length(kind, lengths[-1], sizes)),
                )
                for kind in PAPER
            ],
            "growth": [(NAMES[kind], PAPER[kind][3] if kind in PAPER else NONE, *growth[kind]) for kind in KINDS],
            "time": by_length(lambda cost: cost.milliseconds),
            "range": by_length(lambda cost: f"{cost.fastest:,.1f}–{cost.slowest:,.1f}"),
            "memory": by_length(lambda cost: cost.held_bytes / MIB),
            "paths": [
                ("formula", *(FORMULAS[kind] for kind in paths)),
                *((n, *(path_cell(kind, n) for kind in paths)) for n in paths["recurrent"]),
            ],
        },
        {
            "costs": [
                panel("CPU time of a layer in milliseconds", lambda cost: cost.milliseconds),
                panel("memory of a layer in MiB", lambda cost: cost.held_bytes / MIB),
            ],
            "paths": [
                lines({NAMES[kind]: list(found.items()) for kind, found in paths.items()}, "length n", PATH, log="xy")
            ],
        },
        where,
        {**asdict(sizes), "rounds": rounds, "longest": lengths[-1], "middle": lengths[len(lengths) // 2]},
    )


def _growth(kind: str, costs: Mapping[int, Cost], lengths: Sequence[int], sizes: Sizes) -> list[Cell]:
    """Return the powers of the length by which operations, time and memory grow."""
    counted = [(n, operations(kind, n, sizes)) for n in lengths]
    times, held = ([(n, cost[column]) for n, cost in costs.items()] for column in (0, 3))
    return [NONE if (power := exponent(points)) is None else power for points in (counted, times, held)]
