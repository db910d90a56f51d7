"""The package is called heedful everywhere; `heed` on the package index is a stranger's. The model family is Heed."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = (".ci", "configuration", "docs", "modeling", "scripts", "tests")
TEXTS = sorted(
    path
    for path in [
        *ROOT.glob("*.*"),
        ROOT / "Makefile",
        *(path for name in FOLDERS for path in (ROOT / name).rglob("*")),
    ]
    if path.is_file()
    and (
        path.suffix in (".py", ".md", ".yaml", ".toml", ".cff", ".txt", ".html", ".json", "")
        or path.parent.name == ".ci"
    )
    and not any(part in ("saved", "__pycache__") or part.endswith(".egg-info") for part in path.parts)
)
COMMANDS = (
    "train|doctor|evaluate|translate|attention|verify|study|complexity|push|convert|export|version|tune|score|compare|"
    "backtranslate"
)
STRANGERS = {
    "imports it": r"(?:from|import) heed(?=[ .,;\n]|$)",
    "installs it": r"pip install [^\n]*?(?<![\w-])heed(?![\w-])",
    "names an extra of it": r"(?<![\w-])heed\[",
    "calls it": rf"(?<![\w-])heed (?:{COMMANDS})\b|-m heed\b",
    "names a module of it": r"(?<![\w/-])heed\.(?:cli|data|training|inference|evaluation|publishing|diagnosis|studies|"
    r"complexity|configuration_heed|modeling_heed|pipeline_heed)\b|modeling/heed/|modules\[.heed.\]|version\(.heed.\)",
}


@pytest.mark.parametrize("what", STRANGERS)
def test_no_text(what):
    pattern = re.compile(STRANGERS[what], re.MULTILINE)
    assert len(TEXTS) > 300
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in TEXTS
        if path != Path(__file__)
        for match in pattern.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not found


@pytest.mark.parametrize(
    ("what", "text"),
    [
        *[
            ("imports it", text)
            for text in ("import heed", "from heed.data import x", "import sys, os; from heed import y")
        ],
        *[("installs it", text) for text in ("pip install heed", "pip install -U heed", "pip install 'heed[onnx]'")],
        *[("calls it", text) for text in ("`heed train recipe.yaml`", "python -m heed.cli", "$ heed verify model")],
        *[("names a module of it", text) for text in ("modeling/heed/cli.py", "heed.training.run", 'modules["heed"]')],
        ("names an extra of it", "the extra `heed[train]`"),
    ],
)
def test_a_stranger_would_be_found(what, text):
    assert re.search(STRANGERS[what], text, re.MULTILINE)
    assert not re.search(STRANGERS[what], text.replace("heed", "heedful"), re.MULTILINE)
