"""`docs/paper_map.md` covers the whole paper, and everything that it names exists."""

import ast
import re
from dataclasses import fields
from inspect import getsource
from pathlib import Path
from pkgutil import resolve_name
from typing import get_type_hints

import typer
from huggingface_hub.errors import StrictDataclassError
from test_paper_presets import BIGS_VOCABULARIES, LARGEST_VOCABULARY, PUBLISHED, ROWS, SMALLEST_VOCABULARY, count_with

from heedful import HeedConfig
from heedful.cli.main import app
from heedful.training.recipe import Recipe
from heedful_lab.studies.catalogue import NAMES as STUDIES

ROOT = Path(__file__).parents[2]
MAP = (ROOT / "docs" / "paper_map.md").read_text(encoding="utf-8")
# arXiv:1706.03762v7: its sections, numbered equations, tables and figures.
SECTIONS = "1 2 3 3.1 3.2 3.2.1 3.2.2 3.2.3 3.3 3.4 3.5 4 5 5.1 5.2 5.3 5.4 6 6.1 6.2 6.3 7"
PAPER = {
    *SECTIONS.split(),
    *(f"Equation {number}" for number in range(1, 4)),
    *(f"Table {number}" for number in range(1, 5)),
    *(f"Figure {number}" for number in range(1, 6)),
}
# What no code of ours is, and what no test can hold: arguments, and results that nobody has reproduced yet.
WITHOUT_CODE = {"2", "7", "Table 4"}
WITHOUT_TEST = {*WITHOUT_CODE, "6", "6.3", "Table 2"}


def rows_of(title: str) -> list[list[str]]:
    """Return the cells of a section's table, without its header."""
    (section,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", MAP, flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


SECTION_ROWS = rows_of("Sections")
NAMES = sorted({name for row in SECTION_ROWS for name in re.findall(r"`([^`]+)`", row[2])})


def check(name: str) -> None:
    """Raise unless something of this name exists."""
    if name.startswith("HeedConfig("):
        values = {given.arg: ast.literal_eval(given.value) for given in ast.parse(name, mode="eval").body.keywords}
        config = HeedConfig(**values)
        assert values.keys() <= HeedConfig.__dataclass_fields__.keys()
        assert {field: getattr(config, field) for field in values} == values
    elif name.startswith("HeedConfig."):
        assert name.removeprefix("HeedConfig.") in HeedConfig.__dataclass_fields__
    elif name.startswith("heedful "):
        command, *study = name.removeprefix("heedful ").split()
        assert command in typer.main.get_command(app).commands
        assert set(study) <= set(STUDIES)
    elif name.startswith(("heedful.", "heedful_lab.")):
        resolve_name(name)
    elif "/" in name:
        assert (ROOT / name).exists()
    else:
        kind = Recipe
        for part in name.split("."):
            assert part in {entry.name for entry in fields(kind)}
            kind = get_type_hints(kind)[part]


def test_every_section_equation_table_and_figure_of_the_paper_is_in_the_map_and_nothing_else():
    assert {row[0] for row in SECTION_ROWS} == PAPER
    assert {row[0] for row in SECTION_ROWS if not re.search("`[^`]+`", row[2])} == WITHOUT_CODE
    assert {row[0] for row in SECTION_ROWS if not re.search("`[^`]+`", row[3])} == WITHOUT_TEST


def test_what_the_map_names_exists():
    missing = {}
    for name in NAMES:
        try:
            check(name)
        except (AssertionError, AttributeError, ImportError, ValueError, StrictDataclassError) as error:
            missing[name] = error
    assert missing == {}


def test_every_formula_is_computed_by_the_lines_that_the_map_shows_and_no_equation_is_left_out():
    rows, wrong = rows_of("Formulas"), []
    for _, _, name, shown in rows:
        code = re.sub(r"  # .*", "", getsource(resolve_name(name.strip("`"))))
        wrong += [line for line in re.findall("`([^`]+)`", shown) if f" {line}\n" not in code]
    assert wrong == []
    assert {f"Equation {number}" for number in range(1, 4)} <= {row[0] for row in rows} <= PAPER


def test_every_study_is_an_argument_of_the_paper():
    rows = rows_of("Arguments")
    assert {row[0] for row in rows} <= PAPER
    assert {study for row in rows for study in re.findall("`([^`]+)`", row[2])} == set(STUDIES)


def test_the_table_of_parameters_is_what_is_counted_and_the_vocabularies_are_those_that_fit():
    ours = [
        [f"`{name}`", str(PUBLISHED.get(name, "")), f"{exact:,}", f"{count_with(name, 41_100):,}"]
        for name, (_, _, exact) in ROWS.items()
    ]
    assert rows_of("Table 3") == ours
    text = " ".join(MAP.split())
    fitting = f"any number from {SMALLEST_VOCABULARY:,} to {LARGEST_VOCABULARY:,} all ten published figures but big's"
    assert fitting in text
    assert f"`paper-big` needs {BIGS_VOCABULARIES[0]:,} to {BIGS_VOCABULARIES[1]:,}" in text
    assert SMALLEST_VOCABULARY <= 41_100 <= LARGEST_VOCABULARY
