"""The page on training in Python runs as it is written, cell by cell as in a notebook, and prints what it shows."""

import re
import warnings
from pathlib import Path

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "train_in_python.md"
# A block of Python and, right behind it, what it prints.
BLOCK = re.compile(r"```python\n(.*?)```\n\n```\n(.*?)```", re.DOTALL)


def test_the_page_on_training_in_python_prints_what_it_says_it_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = GUIDE.read_text(encoding="utf-8")
    blocks = BLOCK.findall(text)
    assert len(blocks) == text.count("```python") >= 5
    names = {}
    for code, shown in blocks:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # so short a training repeats itself
            exec(code, names)
        assert capsys.readouterr().out == shown
