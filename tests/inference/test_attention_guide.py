"""The guide to attention says what the package does: its commands and its Python run."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from heedful.cli import main as cli

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "attention.md").read_text(encoding="utf-8")
FOLDER = "runs/quickstart/model"
README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(
    r"^(?:\$ )?heedful ((?:attention|align|attention-numbers|embeddings) .*)$", GUIDE + README, flags=re.MULTILINE
)


@pytest.fixture
def place(model, tokenizers, tmp_path, monkeypatch):
    """A working directory with the model and the files that the guide speaks of."""
    monkeypatch.chdir(tmp_path)
    model.save_pretrained(FOLDER)
    tokenizers.save_pretrained(FOLDER)
    files = {"source.txt": "네.\n비가 온다.\n", "target.txt": "Yes.\nIt rains.\n", "gold.txt": "0-0\n0-0 1?1\n"}
    for name, text in files.items():
        Path(name).write_text(text, encoding="utf-8")
    return tmp_path


def test_every_command_of_the_guide_and_the_readme_runs(place, monkeypatch, capsys):
    assert len(COMMANDS) >= 12
    printed = {}
    for command in COMMANDS:
        arguments = shlex.split(command)
        monkeypatch.setattr(sys, "argv", ["heedful", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code, command
        printed[command] = capsys.readouterr().out
        if "-o" in arguments:
            assert Path(arguments[arguments.index("-o") + 1]).stat().st_size > 2000
    (aligned,) = (text for command, text in printed.items() if command.endswith("target.txt"))
    assert [re.fullmatch(r"\d+-\d+( \d+-\d+)*", line) is not None for line in aligned.splitlines()] == [True, True]
    (compared,) = (text for command, text in printed.items() if "--gold" in command)
    assert compared.splitlines()[-1].startswith("AER ")


def test_the_python_of_the_guide_runs(place, capsys):
    _, code = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)
    exec(code, {})
    printed = capsys.readouterr().out
    differences = [float(line) for line in printed.splitlines() if re.fullmatch(r"[\d.e-]+", line)]
    assert len(differences) > 3
    assert max(differences) < 1e-5
    assert printed.startswith("['cross', 'encoder', 'decoder'] (2, 4, ")
    assert "</s> looks at " in printed
    assert {path.name for path in place.iterdir()} >= {"heads.png", "attention.html"}


def test_thinking_machines_give_the_weights_that_the_guide_prints(capsys):
    code, printed = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", GUIDE, flags=re.DOTALL).groups()
    exec(code, {})
    assert capsys.readouterr().out == printed
    assert "112 / 8 = 14, weight 0.88" in printed
    assert "96 / 8 = 12, weight 0.12" in printed


def test_every_public_name_of_the_room_is_in_the_guide():
    import heedful

    homes = {**heedful._HOMES, **heedful._MOVED}
    names = [name for name, home in homes.items() if home.startswith("heedful.inference.attention")]
    assert len(names) >= 9
    shown = {name for name in names if name in GUIDE}
    assert set(names) - shown <= {"draw_attention", "alignment_errors"}
