"""List what Heedful touches of the libraries below it that they may change without notice: docs/versions.md.

    python scripts/touched.py            # count
    python scripts/touched.py --write    # bring the table up to date: new rows have a ? to be filled in

A row is a private name that Heedful reads, calls or declares, a method or property that it overrides, or a setting of a
library that it changes. What a library asks its users to write (abstract methods, `forward` of a module, public fields
of a class) is none. Names are read off the tree; whose they are, for those that only an object has, is in the table.
"""

import ast
import importlib
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import heedful

LIBRARIES = ("transformers", "accelerate", "tokenizers", "datasets", "huggingface_hub", "torch", "peft")
PACKAGE = Path(heedful.__file__).resolve().parent
PAGE = Path(__file__).resolve().parents[1] / "docs" / "versions.md"
ROW = re.compile(r"^\| `(\S+)` \| (.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE)


def is_private(name: str) -> bool:
    """Tell whether a name begins with one underscore."""
    return name.startswith("_") and not name.startswith("__")


def is_of_library(module: str | None) -> bool:
    """Tell whether a module belongs to one of the libraries."""
    return bool(module) and module.split(".")[0] in LIBRARIES


def own_names(trees: list[ast.AST]) -> set[str]:
    """Return the names that our own code defines, or sets on its own objects."""
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") else set()
    return found


def strings_as_names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node asks an object for by a string."""
    given: list[ast.AST] = []
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
        given = node.args[1:2]
    elif isinstance(node, ast.Subscript):
        given = [node.slice]
    elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In):
        given = [node.left]
    yield from (each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str))


def private_names(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """Yield what a file reads, calls, sets or imports that is private: dotted where the tree tells whose it is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and is_of_library(node.module):
            for name in (alias.name for alias in node.names):
                if any(map(is_private, [name, *node.module.split(".")])):
                    yield f"{node.module}.{name}"
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            yield node.attr
        elif isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (text for text in map(ast.unparse, targets) if text.startswith("torch."))
        yield from (name for name in strings_as_names(node) if is_private(name) and name not in own)


def asks_to_be_written(base: type, name: str) -> bool:
    """Tell whether a library leaves a name to its users, or lets them declare it in public."""
    known = inspect.getattr_static(base, name)
    code = getattr(getattr(known, "__func__", known), "__code__", None)
    if code is None and not isinstance(known, property):
        return not name.startswith("_")  # a field
    is_abstract = getattr(known, "__isabstractmethod__", False) or known is inspect.getattr_static(base, "forward", 0)
    return is_abstract or (code is not None and "NotImplementedError" in code.co_names and len(code.co_code) < 60)


def overrides(path: Path, tree: ast.Module) -> Iterator[str]:
    """Yield what the classes of a file override of the libraries' classes, and what they declare for these to find."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    module = None
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        module = module or importlib.import_module(".".join(part for part in parts if part != "__init__"))
        kind = getattr(module, node.name)
        bases = [base for base in kind.__mro__[1:] if is_of_library(base.__module__)]
        names = {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}
        stored = (inner for inner in ast.walk(node) if isinstance(getattr(inner, "ctx", None), ast.Store))
        for inner in stored:
            is_field = isinstance(inner, ast.Name) and any(
                inner in ast.walk(part) for part in node.body if isinstance(part, ast.Assign | ast.AnnAssign)
            )
            is_own = isinstance(inner, ast.Attribute) and ast.unparse(inner.value) == "self"
            names |= {inner.id} if is_field else {inner.attr} if is_own else set()
        for name in sorted(names):
            base = next((base for base in bases if name in vars(base)), None)
            if name.startswith("__") or (base is None and not is_private(name)):
                continue
            if base is None:  # a library may still look for it
                base = next((each for each in bases if name in words_of(each.__module__)), None)
            elif asks_to_be_written(base, name):
                continue
            if base is not None:
                yield f"{base.__module__}.{base.__qualname__}.{name}"


def words_of(module: str, known: dict[str, set[str]] = {}) -> set[str]:  # noqa: B006 - a cache
    """Return all words of a module's source."""
    if module not in known:
        known[module] = set(re.findall(r"\w+", inspect.getsource(sys.modules[module])))
    return known[module]


def touched() -> dict[str, set[str]]:
    """Return all names with the files of the package that touch them; dotted only where the tree tells whose it is."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    own, found = own_names([*trees.values()]), defaultdict(set)
    for path, tree in trees.items():
        for name in (*private_names(tree, own), *overrides(path, tree)):
            found[name].add(str(path.relative_to(PACKAGE)))
    return found


if __name__ == "__main__":
    found = touched()
    for name, files in sorted(found.items()):
        print(name, *sorted(files))
    print(len(found))
