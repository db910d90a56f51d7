"""Count the project's English words, and habits that make sentences hard to read.

    python scripts/upkeep/prose.py                       # counts and ceilings; exit status 1 above one
    python scripts/upkeep/prose.py --show what           # places with a habit
    python scripts/upkeep/prose.py docs/install.md       # counts of some files

Ceilings only fall: lower them when the counts have fallen. CONTRIBUTING.md has the rules with examples.
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES, COMMENTS, MESSAGES = "pages", "docstrings and comments", "messages"  # help and errors
MOST_WORDS = {PAGES: 65_000, COMMENTS: 50_000}
LONG, MOST_LONG = 30, {PAGES: 20, COMMENTS: 5, MESSAGES: 1}  # words, and the most longer sentences
# Habits, with ceilings per 1,000 words in pages, docstrings and comments, and messages.
HABITS = {
    "what": (r"\bwhat\b", 0.7, 0.2, 0.1),
    "of a": (r"\bof an?\b", 2.4, 1.3, 1.8),
    "tell": (r"\b(?:tells?|told|says?|said|asks?|asked|knows?|reads?)\b", 1.3, 0.8, 0.4),
    "where": (r"\bwhere\b", 0.6, 0.6, 0.3),
    "which": (r",(?: \w+)? which\b", 1.3, 2.0, 3.4),
    "who": (r"\bwho\b", 0.1, 0.1, 0.1),
    "beside": (r"\b(?:beside|behind|stands?|foretell|foretold)\b", 0.1, 0.1, 0.1),
    "so many": (r"\b(?:so|as) (?:many|much|often)\b", 0.5, 0.2, 0.3),
    "own": (r"\bown\b", 1.7, 1.1, 1.2),
    "alone": (r"\balone\b", 0.5, 0.3, 0.3),
}
NO_PROSE = re.compile(r"^( *)(```|~~~).*?^\1\2`*\s*$|^---\n.*?^---$|<!--.*?-->|https?://\S+|<[^>\n]+>", re.M | re.S)
WORD = re.compile(r"[A-Za-z][\w'-]*")
SENTENCE = re.compile(r"(?<=[.!?:;])\s|\n\s*\n|\n\s*(?:[-*#|>]|\d+\.)|\|")


def texts_of_code(path: Path) -> Iterator[tuple[str, int, str]]:
    """Yield kind, line and text of the Python file's docstrings, comments and messages."""
    source = path.read_text(encoding="utf-8")
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            docstrings.add(node.body[0].value)
            yield COMMENTS, node.body[0].lineno, ast.get_docstring(node)
        # `ast.walk` finds a docstring before its string.
        is_string = isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings
        if is_string and len(WORD.findall(node.value)) > 3 and "\n" not in node.value.strip():
            yield MESSAGES, node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield COMMENTS, token.start[0], token.string.lstrip("# ")


def texts_of(path: Path) -> list[tuple[str, int, str]]:
    """Return kind, first line and prose of each text in a page or Python file."""
    if path.suffix == ".py":
        return [*texts_of_code(path)]
    page = NO_PROSE.sub(lambda found: "\n" * found[0].count("\n"), path.read_text(encoding="utf-8"))
    return [(PAGES, 1, page)]


def counted_files() -> list[Path]:
    """Return the English pages in git, and the Python files of the packages."""
    command = ["git", "ls-files", "-z", "*.md", "modeling/*.py"]
    names = subprocess.check_output(command, cwd=ROOT, text=True).split("\0")
    return [ROOT / name for name in names if name and "/ko/" not in name and ".ko." not in name]


def places(habit: str, files: Sequence[Path]) -> Iterator[str]:
    """Yield file, line and surroundings of each place with a habit."""
    pattern = re.compile(HABITS[habit][0], re.IGNORECASE)
    for path in files:
        for _, first, text in texts_of(path):
            for found in pattern.finditer(text):
                line = first + text.count("\n", 0, found.start())
                around = text[max(0, found.start() - 60) : found.end() + 60]
                yield f"{path.relative_to(ROOT)}:{line}: {' '.join(around.split())}"


def report(files: Sequence[Path]) -> tuple[list[str], list[str]]:
    """Return a table in lines, and the counts above their ceiling."""
    texts: dict[str, list[str]] = {PAGES: [], COMMENTS: [], MESSAGES: []}
    for path in files:
        for kind, _, text in texts_of(path):
            texts[kind].append(text)
    words = {kind: sum(len(WORD.findall(text)) for text in texts[kind]) for kind in texts}
    rows = {"words": {kind: (float(words[kind]), float(MOST_WORDS.get(kind, 10**6))) for kind in texts}}
    for habit, (pattern, *most) in HABITS.items():
        found = {kind: sum(len(re.findall(pattern, text, re.IGNORECASE)) for text in texts[kind]) for kind in texts}
        shares = {kind: round(1000 * found[kind] / max(1, words[kind]), 2) for kind in texts}
        rows[f"{habit}, per 1,000 words"] = dict(zip(texts, zip(shares.values(), most, strict=True), strict=True))
    sentences = {kind: [part for text in texts[kind] for part in SENTENCE.split(text)] for kind in texts}
    long = {kind: sum(len(WORD.findall(part)) > LONG for part in sentences[kind]) for kind in texts}
    rows[f"sentences above {LONG} words"] = {kind: (float(long[kind]), float(MOST_LONG[kind])) for kind in texts}
    lines = [f"{'':30}" + "".join(f"{kind:>28}" for kind in texts)]
    for name, row in rows.items():
        lines.append(f"{name:30}" + "".join(f"{f'{found:,g} of {most:,g}':>28}" for found, most in row.values()))
    above = [
        f"{kind}: {name}: {found:,g}, at most {most:,g}"
        for name, row in rows.items()
        for kind, (found, most) in row.items()
        if found > most
    ]
    return lines, above


def main() -> int:
    """Print counts, or places with a habit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="pages and Python files; all of the project if none")
    parser.add_argument("--show", choices=HABITS, help="print each place with a habit")
    options = parser.parse_args()
    files = [path.resolve() for path in options.files] or counted_files()
    if options.show:
        print("\n".join(places(options.show, files)))
        return 0
    lines, above = report(files)
    print("\n".join(lines))
    if above and not options.files:
        print("Above the ceiling (scripts/upkeep/prose.py --show finds the places):", *above, sep="\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
