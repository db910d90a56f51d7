"""Which rooms may import which, and how much importing costs."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import heedful
import import_graph
from import_graph import tree_of

PACKAGE = Path(heedful.__file__).parent
ROOT = PACKAGE.parent
SCRIPTS = PACKAGE.parents[1] / "scripts"
FILES = sorted(PACKAGE.rglob("*.py"))
LABORATORY = sorted((ROOT / "heedful_lab").rglob("*.py"))
# From the ground to the roof, as in CONTRIBUTING.md; a file imports its own floor and those below.
FLOORS = [
    "files figures host protocols recipe_keys checksums_* messages_* symbols_* versions_* configuration_*",
    "*_heed",
    "modeling_* tokenization_* registration",
    "data/ evaluation/",
    "decoding/",
    "training/",
    "attention/ cards/ conversion/ distillation/ export/",
    "checking/ verification/",
    "proposals/",
    "cli/",
]
# Nothing below this floor needs it, or what is above it, when it is imported.
LINE = 6


def name_of(path: Path) -> str:
    return import_graph.name_of(path, ROOT)


def imports_of(path: Path) -> frozenset[str]:
    return import_graph.imports_of(path, ROOT)


def floor_of(name: str) -> int | None:
    """Return the floor of a dotted name, or `None` for the package itself and everything outside."""
    home = heedful._HOMES.get(room_of(name), name)  # of a public name
    path = home.removeprefix("heedful.").replace(".", "/") + "/"
    if not room_of(name) or path.startswith("__"):
        return None
    # A flat file belongs to the floor that names it most exactly.
    fits = [
        (len(pattern), number)
        for number, patterns in enumerate(FLOORS)
        for pattern in patterns.split()
        if (path.startswith(pattern) if pattern.endswith("/") else fnmatchcase(path.split("/")[0], pattern))
    ]
    return max(fits)[1] if fits else None


def room_of(name: str) -> str:
    """Return the room or flat file of a dotted name, `""` for what is not of the package."""
    return name.split(".")[1] if name.startswith("heedful.") else ""


MODULES = [path for path in FILES if "__" not in path.name and floor_of(name_of(path)) is not None]


def test_every_file_is_on_a_floor_and_every_floor_has_files():
    assert {floor_of(name_of(path)) for path in MODULES} == {*range(len(FLOORS))}
    floors = [floor_of(f"heedful.{name}_heed") for name in ("configuration", "attention", "modeling")]
    assert floors == sorted({*floors})


def test_imports_go_downwards_only():
    upwards = [
        f"{name_of(path)} imports {name}"
        for path in MODULES
        for name in imports_of(path)
        if room_of(name) and (floor_of(name) or 0) > floor_of(name_of(path))
    ]
    assert not upwards


def test_what_a_reader_needs_is_imported_without_the_other_rooms():
    needed = [path for path in MODULES if floor_of(name_of(path)) < LINE or room_of(name_of(path)) == "cli"]
    crossings = [
        f"{name_of(path)} imports {name}"
        for path in needed
        for name in import_graph.imports_of(path, ROOT, when_imported=True)
        if room_of(name) not in ("", "cli") and (floor_of(name) or 0) >= LINE
    ]
    assert not crossings


def test_the_product_never_imports_the_laboratory_which_names_itself_in_entry_points():
    found = [f"{name_of(path)} imports {name}" for path in FILES for name in imports_of(path) if "heedful_lab" in name]
    assert not found
    assert not [name_of(path) for path in FILES if "heedful_lab" in path.read_text(encoding="utf-8")]
    project = tomllib.loads((SCRIPTS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for group in ("heedful.commands", "heedful.corpora", "heedful.metrics"):
        for home in project["entry-points"][group].values():
            module, name = home.split(":")
            assert hasattr(importlib.import_module(module), name)


def test_a_model_file_imports_its_own_configuration_and_no_other_model():
    for path in sorted(PACKAGE.glob("modeling_*.py")):
        found = {room_of(name) for name in imports_of(path)}
        own = path.stem.replace("modeling_", "configuration_")
        assert {name for name in found if name.startswith(("configuration_", "modeling_"))} == {own}


def test_the_model_has_no_lambda_no_partial_and_no_name_of_a_fast_path_or_of_a_versions_cache():
    path = PACKAGE / "modeling_heed.py"
    taken = re.findall(r"(?:fast_paths|packed_rows|versions)_heed\.(\w+)", " ".join(imports_of(path)))
    assert {*taken} <= {"HeedDropout", "normalise", "project", "decoder_output", "either_cache_name"}
    nodes = [*ast.walk(tree_of(path))]
    assert not [node for node in nodes if isinstance(node, ast.Lambda)]
    names = " ".join({str(getattr(node, field, "")) for node in nodes for field in ("id", "attr", "arg", "name")})
    assert re.findall(r"\S*(?:partial|lean|eager|pack(?:ed|ing)|onednn|past_key|hasattr|version)\S*", names) == []


def test_imports_inside_the_package_have_no_circle():
    paths = {name_of(path): path for path in [*MODULES, *LABORATORY]}
    edges = {name: {other for other in imports_of(path) if other in paths} - {name} for name, path in paths.items()}
    while leaves := {name for name, targets in edges.items() if not targets & edges.keys() - {name}}:
        edges = {name: targets for name, targets in edges.items() if name not in leaves}
    assert not edges


def importing(*outer: str) -> list[str]:
    """Return the names of the package's files that import one of these outer names."""
    return [name_of(path) for path in FILES if {name.split(".")[0] for name in imports_of(path)} & {*outer}]


def test_one_module_reads_yaml_only_the_command_line_parses_arguments_and_prints_and_no_script_is_imported():
    assert len(importing("yaml")) == 1
    assert {*map(room_of, importing("argparse", "typer", "click"))} == {"cli"}
    assert not importing("scripts", "tests", "helpers", *(path.stem for path in SCRIPTS.rglob("*.py")))
    printing = [path for path in FILES if re.search(r"(?<![\w.])print\(", path.read_text())]
    assert {room_of(name_of(path)) for path in printing} == {"cli"}


def test_room_docstrings_are_all_that_room_files_hold():
    for path in [*PACKAGE.glob("*/**/__init__.py"), *(path for path in LABORATORY if path.stem == "__init__")]:
        assert [type(node) for node in tree_of(path).body] == [ast.Expr], path


def test_importing_heed_imports_neither_torch_nor_transformers():
    script = "import sys, heedful; dir(heedful); print(sorted({'torch', 'transformers', 'yaml'} & sys.modules.keys()))"
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "[]\n"


def test_every_public_name_has_a_file_that_defines_it_and_any_other_is_an_attribute_error():
    for name, home in heedful._HOMES.items():
        body = tree_of(PACKAGE.parent / (home.replace(".", "/") + ".py")).body
        assert name in {node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}, name
    with pytest.raises(AttributeError, match="HeedTransformer"):
        _ = heedful.HeedTransformer
