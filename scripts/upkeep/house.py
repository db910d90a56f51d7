"""Count the house, which a reader needs, and the annexes, which he may open later.

    python scripts/upkeep/house.py            # print the rooms with their lines
    python scripts/upkeep/house.py --write    # bring docs/reading.md up to date

The house is how a pair becomes a gradient, and a text a translation. It imports no annex but by name, inside
a function, so it can be read and run without them. tests/house/test_house.py holds this line, and the size of both
together, so that moving a file wins nothing.
"""

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "modeling" / "heedful"
MOST = 33_058  # lines of the house and the annexes

# The rows of the tour's tables: what a row holds, and what it is for. What no annex holds is the house's.
HOUSE = {
    "*_heed.py": "the Transformer, in flat files that travel to the Hub with what is saved",
    "data/": "corpora in, batches out: reading, cleaning, tokenizers, updates",
    "training/": "recipes, preparation, the loop, checkpoints, processes, publication",
    "inference/": "text in, text out: `Translator`, loading, engines",
    "evaluation/": "BLEU, chrF, TER, exact match and error rates, with intervals",
    "cli/": "`heedful train`, `translate`, `evaluate`",
}
ANNEXES = {
    "*_rnn.py cells_heed.py pipeline_heed.py figures.py": "the recurrent models; the pipelines; small pictures",
    "data/epochs/ data/korean_english/ data/tasks/ data/scripts.py": (
        "what an epoch draws or changes; the built-in corpus; tasks; scripts"
    ),
    "training/trainer/ training/launch/ training/speed/ training/objectives/": "Trainer; processes; GPUs; R-Drop",
    "proposals/": "settings that fit: proposed from the data, or found by a search",
    "inference/native/ inference/ctranslate2/": "engines for the CPU",
    "inference/strategies/ inference/teaching/ inference/adapters.py inference/confidence.py inference/paragraphs.py "
    "inference/scoring.py": (
        "ways to decode; what another model learns from; merged adapters; how good an output is likely to be; lines "
        "taken apart; scores of given pairs"
    ),
    "inference/attention/": "what a model looks at: maps, pages, alignments, words",
    "evaluation/comparison.py evaluation/confusions.py evaluation/translation_metric.py": (
        "systems compared; tokens taken for others; an `evaluate.Metric`"
    ),
    "diagnosis/": "a recipe checked before training, a model after it",
    "publishing/": "cards, the Hub, conversion of other models, exports",
    "studies/": "the paper's arguments as experiments, its Table 1 measured",
    "cli/start.py cli/teach.py cli/look.py cli/check.py cli/publish.py": "the others",
}
TABLE = re.compile(r"^\| (?:The house|The annexes) \|.*\n\|.*\n(?:\|.*\n)+", re.MULTILINE)
STATION = re.compile(r"^(\| \d+ \| `)([\w/.]+)(` \| +)[\d,]+( \|)", re.MULTILINE)


def files_of(row: str) -> set[Path]:
    """Return the Python files of a row: its folders with all that is below them, and what its patterns match."""
    parts = (PACKAGE.rglob(f"{part}**/*.py") if part.endswith("/") else PACKAGE.glob(part) for part in row.split())
    return {path for paths in parts for path in paths}


def rooms() -> dict[str, dict[str, set[Path]]]:
    """Return the files of each row of the house and of the annexes; every file of the package is in one of them."""
    annexes = {row: files_of(row) for row in ANNEXES}
    rest = set(PACKAGE.rglob("*.py")) - set().union(*annexes.values())
    house = {row: {path for path in rest if path.is_relative_to(PACKAGE / row)} for row in HOUSE}
    flat = next(iter(HOUSE))
    house[flat] = {path for path in rest if path.parent == PACKAGE}
    return {"The house": house, "The annexes": annexes}


def lines_of(paths: set[Path]) -> int:
    """Return the lines of files together."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def table(part: str, rows: dict[str, set[Path]]) -> str:
    """Return a table of the tour: a row for each room, its lines to the nearest hundred."""
    total = lines_of(set().union(*rows.values()))
    lines = [f"| {part} | {round(total, -2):,} lines | |", "|---|---|---|"]
    for row, paths in rows.items():
        names = ", ".join(f"`{name}`" for name in row.split())
        lines.append(f"| {names} | {round(lines_of(paths), -2):,} | {(HOUSE | ANNEXES)[row]} |")
    return "\n".join(lines) + "\n"


def module_level_imports(path: Path) -> Iterator[str]:
    """Yield the dotted names that a file of the package imports when it is imported itself, but for annotations."""
    nodes: list[ast.AST] = list(ast.parse(path.read_text(encoding="utf-8")).body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = path.relative_to(PACKAGE.parent).parts[: -node.level] if node.level else ()
            module = ".".join([*above, *filter(None, [node.module])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_for_annotations = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            nodes.extend(node.orelse if is_for_annotations else ast.iter_child_nodes(node))


def crossings() -> list[str]:
    """Return the imports by which the house needs an annex, `FILE imports MODULE`; there must be none."""
    parts = rooms()
    annexes = set().union(*parts["The annexes"].values())
    names = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in annexes}
    house = sorted(set().union(*parts["The house"].values()))
    return [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in house
        for name in sorted(set(module_level_imports(path)) & names)
    ]


def with_todays_lines(text: str) -> str:
    """Return the tour with its tables and the lines of its files as they are now."""
    tables = {part: table(part, rows) for part, rows in rooms().items()}
    text = TABLE.sub(lambda match: tables[match[0].split(" | ")[0].removeprefix("| ").strip(" |")], text)

    def with_lines(match: re.Match) -> str:
        return f"{match[1]}{match[2]}{match[3]}{lines_of({PACKAGE / match[2]}):,}{match[4]}"

    return STATION.sub(with_lines, text)


def main() -> None:
    """Print the rooms of both parts, and what crosses the line; with --write bring the pages up to date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="bring docs/reading.md up to date")
    for part, rows in rooms().items():
        print(f"{lines_of(set().union(*rows.values())):>7,}  {part.lower()}")
        for row, paths in rows.items():
            print(f"{lines_of(paths):>9,}  {row}")
    print(*crossings(), sep="\n")
    if parser.parse_args().write:
        page = ROOT / "docs" / "reading.md"
        page.write_text(with_todays_lines(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
