"""Who may import whom, and what importing costs."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import heedful

PACKAGE = Path(heedful.__file__).parent
SCRIPTS = PACKAGE.parents[1] / "scripts"
FILES = sorted(PACKAGE.rglob("*.py"))
# From the bottom to the top; a room may import those before it and itself.
ORDER = [
    "symbols",
    "files",
    "figures",
    "checksums",
    "versions",
    "configuration",
    "packed",
    "positions",
    "relative",
    "fast",
    "generation",
    "loss",
    "encoder",
    "masks",
    "kernels",
    "attention",
    "pipeline",
    "pretrained",
    "cells",
    "tokenization",
    "modeling",
    "registration",
    "data",
    "evaluation",
    "inference",
    "training",
    "publishing",
    "diagnosis",
    "proposals",
    "studies",
    "cli",
]


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> set[str]:
    """Return the dotted names that a file imports, those inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = ".".join(path.relative_to(PACKAGE.parent).parts[: -node.level])
            found |= {f"{base}.{node.module or alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # `from heedful.data import batching` imports a module, `from heedful.data.batching import x` does not.
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def room_of(name: str) -> str | None:
    """Return the room of a dotted name, or `None` for the package itself and everything outside."""
    parts = name.split(".")
    if parts[0] != "heedful" or len(parts) == 1:
        return None
    public_home = heedful._HOMES.get(parts[1])
    return room_of(public_home) if public_home else parts[1].split("_")[0]


MODULES = [path for path in FILES if room_of(name_of(path))]


def test_every_file_stands_in_a_known_room():
    assert {room_of(name_of(path)) for path in MODULES} <= set(ORDER)
    assert {"configuration", "modeling", "data"} <= {room_of(name_of(path)) for path in MODULES}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_downwards_only(path):
    own = ORDER.index(room_of(name_of(path)))
    rooms = {name: room_of(name) for name in imports_of(path) if room_of(name)}
    above = {name for name, room in rooms.items() if room not in ORDER or ORDER.index(room) > own}
    assert not above


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("modeling_*.py")), ids=name_of)
def test_a_model_file_imports_its_own_configuration_and_no_other_model(path):
    own = name_of(path).replace("modeling_", "configuration_")
    configurations = {name for name in imports_of(path) if room_of(name) in ("configuration", "modeling")}
    assert configurations == {own}


def test_imports_inside_the_package_have_no_circle():
    modules = {name_of(path): path for path in MODULES}
    edges = {name: {other for other in imports_of(path) if other in modules} for name, path in modules.items()}
    while leaves := {name for name, targets in edges.items() if not targets & edges.keys() - {name}}:
        edges = {name: targets for name, targets in edges.items() if name not in leaves}
    assert not edges


def test_yaml_is_read_in_one_module():
    readers = [name_of(path) for path in FILES if {name.split(".")[0] for name in imports_of(path)} & {"yaml"}]
    assert len(readers) <= 1


def uses(path: Path, function: str) -> bool:
    calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return any(isinstance(call, ast.Name) and call.id == function for call in calls)


def test_only_the_command_line_prints():
    assert {room_of(name_of(path)) for path in FILES if uses(path, "print")} == {"cli"}


def test_only_the_command_line_parses_arguments():
    parsers = {"argparse", "typer", "click"}
    found = {room_of(name_of(path)) for path in FILES if {name.split(".")[0] for name in imports_of(path)} & parsers}
    assert found == {"cli"}


def test_no_script_is_imported_by_the_package():
    scripts = {path.stem for path in SCRIPTS.rglob("*.py")} | {"scripts", "tests", "helpers"}
    assert not {(name_of(path), name) for path in FILES for name in imports_of(path) if name.split(".")[0] in scripts}


def test_room_docstrings_are_all_that_room_files_hold():
    for path in PACKAGE.glob("*/__init__.py"):
        assert [type(node) for node in ast.parse(path.read_text()).body] == [ast.Expr], path


def test_importing_heed_imports_neither_torch_nor_transformers():
    script = "import sys, heedful; dir(heedful); print(sorted({'torch', 'transformers', 'yaml'} & sys.modules.keys()))"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"


@pytest.mark.parametrize("name", sorted(set(heedful._HOMES)))
def test_every_public_name_has_a_file_that_defines_it(name):
    path = PACKAGE.parent / (heedful._HOMES[name].replace(".", "/") + ".py")
    tree = ast.parse(path.read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="HeedTransformer"):
        _ = heedful.HeedTransformer


def test_a_name_that_moved_is_still_found_with_a_warning_that_names_its_import():
    for name, home in heedful._MOVED.items():
        with pytest.warns(FutureWarning, match=f"use `from {home} import {name}`"):
            found = getattr(heedful, name)
        assert found is getattr(importlib.import_module(home), name)
