"""The guide to kernels, compilation and export says what the package does."""

import re
from pathlib import Path

import pytest

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "kernels.md").read_text(encoding="utf-8")
# A block of Python and, right behind it, what it prints.
BLOCKS = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", GUIDE, flags=re.DOTALL)

pytestmark = pytest.mark.slow


def test_the_guide_prints_what_it_says_it_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    assert len(BLOCKS) == GUIDE.count("```python") >= 6
    for code, expected in BLOCKS:
        exec(code, names)
        assert capsys.readouterr().out == expected, code
