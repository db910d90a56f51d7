"""Measure Table 1 anew for docs/complexity.md: its tables, and the figure and the JSON that lie beside it.

    python scripts/complexity_page.py                # minutes; best on a machine with nothing else to do

It is `heedful complexity` with its default settings.
"""

from pathlib import Path
from typing import Annotated

import typer

from heedful.studies.complexity.report import as_json, draw, make_report, tables
from heedful.studies.complexity.settings import ComplexitySettings

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "complexity.md"
JSON = DOCS / "figures" / "complexity.json"
FIGURE = DOCS / "figures" / "complexity.png"
BEGIN, END = "<!-- tables of figures/complexity.json -->\n", "<!-- end of tables -->"


def with_tables(page: str, new_tables: str) -> str:
    """Return the text of the page with other tables."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{new_tables}\n\n{END}{rest.split(END)[1]}"


def main(rounds: Annotated[int, typer.Option(help="How often each layer is timed.")] = 5):
    """Write page, figure and JSON."""
    report = make_report(ComplexitySettings(rounds=rounds))
    JSON.write_text(as_json(report) + "\n", encoding="utf-8")
    draw(report, FIGURE)
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), tables(report)), encoding="utf-8")
    print(tables(report))


if __name__ == "__main__":
    typer.run(main)
