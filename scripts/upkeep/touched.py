"""List the names of other libraries that Heedful uses and that may change without notice, for docs/versions.md.

    python scripts/upkeep/touched.py            # count
    python scripts/upkeep/touched.py --write    # update the table; new rows have ?

A row is a private name that Heedful uses or sets, a method or property that it overrides, or a library setting that it
changes. Methods that a library expects from its users (abstract methods, `forward`, public fields) are left out. Names
and files come from the code; reasons, and the owners of objects' names, are written in the table.
"""

import argparse
import ast
import functools
import importlib
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import heedful

LIBRARIES = ("transformers", "accelerate", "tokenizers", "datasets", "huggingface_hub", "torch")
# Of named tuples, `os` and sacrebleu.
ELSEWHERE = ("_asdict", "_replace", "_exit", "_compute_score_from_stats", "_extract_corpus_statistics")
PACKAGE = Path(heedful.__file__).resolve().parent
PAGE = Path(__file__).resolve().parents[2] / "docs" / "versions.md"
ROW = re.compile(r"^\| `(\S+)` \| (.*?) \| (.*?) \| (.*?) \|$", re.MULTILINE)


def is_private(name: str) -> bool:
    """Return True if a name begins with one underscore."""
    return name.startswith("_") and not name.startswith("__")


def is_of_library(module: str | None) -> bool:
    """Return True if a dotted name begins with one of the libraries."""
    return module is not None and module.split(".")[0] in LIBRARIES


def own_names(trees: list[ast.Module]) -> set[str]:
    """Return the names that our code defines, or sets on its objects."""
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return found


def names_asked_for(node: ast.AST) -> Iterator[str]:
    """Yield the names in a node's attribute accesses, if they are strings."""
    given: list[ast.expr] = []
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
        given = node.args[1:2]
    elif isinstance(node, ast.Subscript):
        given = [node.slice]
    elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In):
        given = [node.left]
    yield from (each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str))


def private_names(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """Yield a file's private names and library settings, dotted if the code shows the owner."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and is_of_library(node.module):
            names = [alias.name for alias in node.names]
            in_private = any(map(is_private, str(node.module).split(".")))
            yield from (f"{node.module}.{name}" for name in names if in_private or is_private(name))
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in (*own, *ELSEWHERE):
            whose = ast.unparse(node.value)
            yield f"{whose}.{node.attr}" if is_of_library(whose) else node.attr
        elif isinstance(node, ast.Assign):
            yield from (text for text in map(ast.unparse, node.targets) if is_of_library(text) and "." in text)
        yield from (name for name in names_asked_for(node) if is_private(name) and name not in own)


def asks_to_be_written(base: type, name: str) -> bool:
    """Return True if a library expects a name from its users, or lets them declare it."""
    known = inspect.getattr_static(base, name)
    code = getattr(getattr(known, "__func__", known), "__code__", None)
    if code is None and not isinstance(known, property):
        return not is_private(name)  # a field
    is_empty = code is not None and "NotImplementedError" in code.co_names and len(code.co_code) < 60
    return name == "forward" or is_empty or getattr(known, "__isabstractmethod__", False)


def declared(node: ast.ClassDef) -> set[str]:
    """Return the names of a class's methods and fields, and of fields that its methods set."""
    names = {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}
    for part in node.body:
        names |= {ast.unparse(part.target)} if isinstance(part, ast.AnnAssign) else set()
        names |= {ast.unparse(target) for target in part.targets} if isinstance(part, ast.Assign) else set()
    stored = (inner for inner in ast.walk(node) if isinstance(inner, ast.Attribute))
    own = (inner for inner in stored if isinstance(inner.ctx, ast.Store) and ast.unparse(inner.value) == "self")
    return names | {inner.attr for inner in own}


@functools.cache
def words_of(module: str) -> set[str]:
    """Return all words in a module's source."""
    return set(re.findall(r"\w+", inspect.getsource(sys.modules[module])))


def bases_of(kind: type) -> list[type]:
    """Return the libraries' classes with methods that a class of ours hides, directly or in a subclass."""
    subclasses = [each for subclass in kind.__subclasses__() for each in (subclass, *subclass.__subclasses__())]
    subclasses = [each for each in subclasses if each.__module__.startswith("heedful.")]
    found = dict.fromkeys(base for each in (kind, *subclasses) for base in each.__mro__)
    return [base for base in found if base is not kind and is_of_library(base.__module__)]


def overrides(path: Path, tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Yield the names that a file's classes override or declare for the libraries' classes, and the class."""
    for node in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        kind = getattr(importlib.import_module(module_of(path)), node.name)
        bases = bases_of(kind)
        for name in sorted(name for name in declared(node) if not name.startswith("__")):
            base = next((base for base in bases if name in vars(base)), None)
            if base is None and is_private(name):  # a library may still look for it
                base = next((each for each in bases if name in words_of(each.__module__)), None)
            elif base is not None and asks_to_be_written(base, name):
                continue
            if base is not None:
                yield f"{base.__module__}.{base.__qualname__}.{name}", getattr(kind, name, None)


def module_of(path: Path) -> str:
    """Return a package file's dotted name."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


@functools.cache
def touched() -> tuple[dict[str, set[str]], dict[str, list[Any]]]:
    """Return the files by name (dotted if the code shows the owner), and our overrides."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    own, files, ours = own_names([*trees.values()]), defaultdict(set), defaultdict(list)
    for path in trees:  # subclasses are known when all modules are imported
        if path.name != "__main__.py":
            importlib.import_module(module_of(path))
    for path, tree in trees.items():
        for name, override in overrides(path, tree):
            ours[name].append(override)
            files[name].add(str(path.relative_to(PACKAGE)))
        for name in private_names(tree, own):
            files[name].add(str(path.relative_to(PACKAGE)))
    for name in list(files):  # part of another, or the same without its owner
        longer = [other for other in files if other.startswith(f"{name}.") or other.endswith(f".{name}")]
        for other in longer:
            files[other] |= files[name]
        if longer:
            del files[name]
    return files, ours


def rows(page: str) -> dict[str, tuple[str, ...]]:
    """Return a page's table by name: files, reason, and effect of its absence."""
    return {name: tuple(rest) for name, *rest in ROW.findall(page)}


def resolve(name: str) -> Any:
    """Return the object with a library's dotted name; for attributes of instances, its class or module.

    Raises:
        LookupError: If the installed version lacks it.
    """
    parts, found = name.split("."), None
    for end in range(1, len(parts) + 1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            break
    for place, part in enumerate(parts[end - (found.__name__ != name) :], end - 1):
        if not hasattr(found, part):
            if place == len(parts) - 1 and re.search(rf"\b{part}\b", inspect.getsource(found)):
                return found
            raise LookupError(f"{name} is gone: {'.'.join(parts[:place])} has no {part}")
        found = getattr(found, part)
    return found


def table(page: str) -> str:
    """Return a page with its updated table."""
    known, lines = rows(page), ["| name | where | why | without it |", "|---|---|---|---|"]
    by_last = {name.rpartition(".")[2]: name for name in known}
    found = {(name if "." in name else by_last.get(name, f"?.{name}")): where for name, where in touched()[0].items()}
    for name, where in sorted(found.items()):
        _, *reasons = known.get(name, ("?", "?", "?"))
        lines.append(f"| `{name}` | {', '.join(sorted(where))} | {reasons[0]} | {reasons[1]} |")
    begin, end = page.index("| name | where |"), page.rindex("|\n") + 2
    return page[:begin] + "\n".join(lines) + "\n" + page[end:]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="update the table of docs/versions.md")
    if parser.parse_args().write:
        PAGE.write_text(table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(len(touched()[0]), "names")
