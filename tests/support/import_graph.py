"""The import graph, found in the source without running it."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def name_of(path: Path, root: Path) -> str:
    """Return the dotted name of a file or of a package below a source root."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def statements_of(path: Path, when_imported: bool) -> Iterator[ast.AST]:
    """Yield the parts of a file: all, or those that are run when it is imported, annotations' imports left out."""
    nodes: list[ast.AST] = list(tree_of(path).body)
    while nodes:
        node = nodes.pop()
        yield node
        if when_imported and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        is_for_annotations = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        nodes.extend(node.orelse if when_imported and is_for_annotations else ast.iter_child_nodes(node))


@functools.cache
def imports_of(path: Path, root: Path, when_imported: bool = False) -> frozenset[str]:
    """Return the dotted names that a file imports, by statement or by a string that is a module's name."""
    found = set[str]()
    for node in statements_of(path, when_imported):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = path.relative_to(root).parts[: -node.level] if node.level else ()
            module = ".".join([*above, *filter(None, [node.module])])
            # `from heedful.data import tables` imports a module, `from heedful.data.tables import x` does not.
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "import_module":
            found |= {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
    return frozenset(found)
