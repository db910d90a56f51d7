"""Who may import whom, and what importing costs."""

import ast
import functools
import importlib
import re
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import heedful

PACKAGE = Path(heedful.__file__).parent
SCRIPTS = PACKAGE.parents[1] / "scripts"
FILES = sorted(PACKAGE.rglob("*.py"))
# From the ground to the roof, as in CONTRIBUTING.md; a file imports its own floor and those below.
FLOORS = [
    "files figures checksums_* symbols_* versions_* configuration_*",
    "*_heed",
    "modeling_* tokenization_* registration",
    "data/ evaluation/",
    "inference/",
    "training/",
    "publishing/",
    "diagnosis/",
    "proposals/",
    "studies/",
    "cli/",
]


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
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


def home_of(name: str) -> str:
    """Return the module of a dotted name: of a public name where it is defined, of a name in a module the module."""
    parts = name.split(".")
    return heedful._HOMES.get(parts[1], name) if parts[0] == "heedful" and len(parts) > 1 else name


def floor_of(name: str) -> int | None:
    """Return the floor of a dotted name, or `None` for the package itself and everything outside."""
    path = home_of(name).removeprefix("heedful.").replace(".", "/") + "/"
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
    assert (
        floor_of("heedful.configuration_heed") < floor_of("heedful.attention_heed") < floor_of("heedful.modeling_heed")
    )


def test_imports_go_downwards_only():
    upwards = [
        f"{name_of(path)} imports {name}"
        for path in MODULES
        for name in imports_of(path)
        if room_of(name) and (floor_of(name) or 0) > floor_of(name_of(path))
    ]
    assert not upwards


def test_a_model_file_imports_its_own_configuration_and_no_other_model():
    for path in sorted(PACKAGE.glob("modeling_*.py")):
        own = name_of(path).replace("modeling_", "configuration_")
        found = {name for name in imports_of(path) if room_of(name).startswith(("configuration_", "modeling_"))}
        assert found == {own}


def test_imports_inside_the_package_have_no_circle():
    modules = {name_of(path): path for path in MODULES}
    edges = {name: {other for other in imports_of(path) if other in modules} for name, path in modules.items()}
    while leaves := {name for name, targets in edges.items() if not targets & edges.keys() - {name}}:
        edges = {name: targets for name, targets in edges.items() if name not in leaves}
    assert not edges


def test_yaml_is_read_in_one_module():
    readers = [name_of(path) for path in FILES if {name.split(".")[0] for name in imports_of(path)} & {"yaml"}]
    assert len(readers) == 1


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


def test_every_public_name_has_a_file_that_defines_it():
    for name, home in heedful._HOMES.items():
        tree = ast.parse((PACKAGE.parent / (home.replace(".", "/") + ".py")).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}, name


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="HeedTransformer"):
        _ = heedful.HeedTransformer


def test_a_name_that_moved_is_still_found_with_a_warning_that_says_what_to_use():
    for name, home in heedful._MOVED.items():
        instead = heedful._INSTEAD.get(name, f"`from {home} import {name}`")
        with pytest.warns(FutureWarning, match=re.escape(f"will be removed: use {instead}.")):
            found = getattr(heedful, name)
        assert found is getattr(importlib.import_module(home), name)
