"""A study's results, and its report from results and descriptions."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heedful.figures import Panel

Cell = str | int | float


@dataclass(frozen=True)
class Table:
    """A table in a report."""

    name: str  # unique in the study
    title: str  # line above it
    columns: Sequence[str]  # headings
    rows: Sequence[Sequence[Cell]]  # a cell for each column
    formats: Mapping[str, str] = field(default_factory=dict)  # by column: ".3f", ".1%", ","

    @classmethod
    def of(cls, name: str, title: str, header: str, rows: Iterable[Sequence[Cell]]) -> "Table":
        """Make a table; columns and formats are one line: "model | parameters :, | BLEU :.1f"."""
        fields = [field.partition(" :") for field in header.split(" | ")]
        formats = {head: form for head, _, form in fields if form}
        return cls(name, title, [head for head, _, _ in fields], list(rows), formats)

    def markdown(self) -> str:
        """Return the table as Markdown."""
        lines = [self.columns, ["---"] * len(self.columns)]
        for row in self.rows:
            cells = zip(row, (self.formats.get(column, "") for column in self.columns), strict=True)
            lines.append([cell if isinstance(cell, str) else format(cell, form) for cell, form in cells])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines).replace("<", "&lt;")  # or </s> would be HTML


@dataclass
class Outcome:
    """A study's results; its description has the words."""

    rows: Mapping[str, Iterable[Sequence[Cell]]]  # by table
    panels: Mapping[str, Sequence[Panel]] = field(default_factory=dict)  # by figure
    values: Mapping[str, Cell] = field(default_factory=dict)  # further numbers for findings, by name
    settings: Mapping[str, Cell] = field(default_factory=dict)  # other fields of titles and captions


def figure_file(study: str, name: str) -> str:
    """Return a figure's file name."""
    return f"{study}-{name}.svg"


def filled_findings(results: Mapping[str, Any]) -> list[str]:
    """Return the findings with their numbers: values by name, cells by table, row and column.

    "{quality[LSTM][BLEU]:.1f}" is a cell. A row's key is its first cells that no other row begins with:
    "{gates[LSTM, forget][mean]:.0%}".
    """
    cells = {table["name"]: _cells_by_name(table["columns"], table["rows"]) for table in results["tables"]}
    return [finding.format(**results["values"], **cells) for finding in results["findings"]]


def _cells_by_name(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> dict[str | int, dict[str | int, Cell]]:
    beginnings = Counter(tuple(row[:count]) for row in rows for count in range(1, len(row) + 1))
    cells = {}
    for row in rows:
        count = next((n for n in range(1, len(row)) if beginnings[tuple(row[:n])] == 1), len(row))
        cells[_key(", ".join(map(str, row[:count])))] = dict(zip(map(_key, columns), row, strict=True))
    return cells


def _key(name: str) -> str | int:
    return int(name) if name.isdecimal() else name  # as `str.format` parses the key in brackets


def render_report(results: Mapping[str, Any]) -> str:
    """Write `results.json` as Markdown: findings, tables, figures, command and trainings."""
    parts = [f"# {results['study']}", results["question"]]
    if results["findings"]:
        parts += ["## Findings", "\n".join(f"- {finding}" for finding in filled_findings(results))]
    for table in results["tables"]:
        parts += [f"## {table['title']}", Table(**table).markdown()]
    for name, caption in results["figures"].items():
        parts.append(f"![{name}]({figure_file(results['study'], name)})\n\n{caption}")
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    parts += ["## How it was measured", f"```\n{results['command']}\n```", f"With {versions}."]
    if results["trainings"]:
        parts.append(_render_trainings(results["trainings"]))
    return "\n\n".join(parts) + "\n"


def _render_trainings(trainings: list[dict[str, Any]]) -> str:
    """Write the changes that all trainings, or all recurrent ones, have in common, then a row for each training."""
    changes = [one["changes"] for one in trainings]
    recurrent = [one for one in changes if "model_type" in one.get("model.options", {})]
    common = _common(changes)
    shared = _common(recurrent) if len(recurrent) > 1 else common
    listed = _listed_changes(common)
    if more := _without(shared, common):
        listed += f"; recurrent models also have {_listed_changes(more)}"
    rows = []
    for one in trainings:
        own = _without(one["changes"], shared if one["changes"] in recurrent else common)
        rows.append((one["name"], _listed_changes(own), one["parameters"], one["updates"], one["target_tokens"]))
    header = "training | changes | parameters :, | updates :, | target tokens :,"
    table = Table.of("trainings", "Trainings", header, rows)
    return f"Trained by `heedful_lab/studies/recipe.yaml` with {listed}:\n\n{table.markdown()}"


def _common(changes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the changes that all have, and of mappings the entries that all have."""
    first, *others = changes
    common: dict[str, Any] = {}
    for key, value in first.items():
        values = [one.get(key, ...) for one in others]
        if isinstance(value, Mapping) and all(isinstance(one, Mapping) for one in values):
            shared = _common([value, *values])
            common |= {key: shared} if shared or not value else {}
        elif all(one == value for one in values):
            common[key] = value
    return common


def _without(changes: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, Any]:
    own = {key: value for key, value in changes.items() if common.get(key, ...) != value}
    return {
        key: _without(value, common[key]) if isinstance(common.get(key), Mapping) else value
        for key, value in own.items()
    }


def _listed_changes(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"`{key}={_written(value)}`" for key, value in changes.items()) or "no changes"


def _written(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_written(part)}" for name, part in value.items()) + "}"
    if isinstance(value, str):
        return Path(value).name if value.endswith(".jsonl") else value  # without the folder of generated pairs
    return json.dumps(value)
