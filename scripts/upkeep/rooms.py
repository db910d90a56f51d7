"""Count the lines of the rooms: the product's, the laboratory's, and those of the tests.

    python scripts/upkeep/rooms.py            # print the rooms with their lines
    python scripts/upkeep/rooms.py --write    # update docs/reading.md

The limits cover all rooms together, so moving a file changes nothing.
"""

import argparse
import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ROOT / "modeling" / "heedful"
LABORATORY = ROOT / "modeling" / "heedful_lab"
MOST = {PRODUCT: 28_000, ROOT / "tests": 32_000}  # lines of Python
MOST_OF_A_FILE = 500

# Rooms to read first; they import none of the others at module level.
NEEDED = ("data", "training", "decoding", "evaluation", "cli")
FLAT = "The models in files that travel to the Hub with saved models; public names and files."
TABLE = re.compile(r"^\| room \| lines \| \|\n\|.*\n(?:\|.*\n)+", re.MULTILINE)
STATION = re.compile(r"^(\| \d+ \| `)([\w/.]+)(` \| +)[\d,]+( \|)", re.MULTILINE)


def lines_of(*places: Path) -> int:
    """Return the lines of Python files, also inside folders."""
    paths = {path for place in places for path in (place.rglob("*.py") if place.is_dir() else [place])}
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def rooms() -> dict[str, tuple[int, str]]:
    """Return each room's lines and sentence: the first ones, the others, and the laboratory."""
    found = {"*.py": (lines_of(*PRODUCT.glob("*.py")), FLAT)}
    others = sorted(path.parent.name for path in PRODUCT.glob("*/__init__.py") if path.parent.name not in NEEDED)
    for folder in (*(PRODUCT / name for name in (*NEEDED, *others)), LABORATORY):
        sentence = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
        found[f"{'../' * (folder == LABORATORY)}{folder.name}/"] = lines_of(folder), str(sentence)
    return found


def with_todays_lines(text: str) -> str:
    """Return the tour with today's table and line counts."""
    rows = [f"| `{name}` | {round(lines, -2):,} | {sentence} |\n" for name, (lines, sentence) in rooms().items()]
    text = TABLE.sub(f"| room | lines | |\n|---|---|---|\n{''.join(rows)}".replace("\\", r"\\"), text)
    return STATION.sub(lambda match: f"{match[1]}{match[2]}{match[3]}{lines_of(PRODUCT / match[2]):,}{match[4]}", text)


def main() -> None:
    """Print rooms and limited sums; with --write update the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="update docs/reading.md")
    for name, (lines, sentence) in rooms().items():
        print(f"{lines:>7,}  {name:<15}{sentence}")
    for folder, most in MOST.items():
        print(f"{lines_of(folder):>7,}  of {most:,} in {folder.relative_to(ROOT)}")
    if parser.parse_args().write:
        page = ROOT / "docs" / "reading.md"
        page.write_text(with_todays_lines(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
