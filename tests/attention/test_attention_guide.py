"""The guide to attention says what the package does: its commands and its Python run."""

import re
from pathlib import Path

import pytest

from guides import commands_of, printing_of, python_of, run_commands, text_of
from memorised import saved_in

GUIDE = text_of("attention")
README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
COMMANDS = commands_of(GUIDE + README, "attention|align|attention-numbers|embeddings")


@pytest.fixture
def place(model, tokenizers, tmp_path, monkeypatch):
    """A working directory with the model and the files that the guide speaks of."""
    monkeypatch.chdir(tmp_path)
    saved_in("runs/quickstart/model", model, tokenizers)
    files = {"source.txt": "네.\n비가 온다.\n", "target.txt": "Yes.\nIt rains.\n", "gold.txt": "0-0\n0-0 1?1\n"}
    for name, text in files.items():
        Path(name).write_text(text, encoding="utf-8")
    return tmp_path


def test_every_command_of_the_guide_and_the_readme_runs(place, printed):
    pytest.importorskip("matplotlib")
    assert len(COMMANDS) >= 12
    found = run_commands(printed, COMMANDS)
    for command in map(str.split, COMMANDS):
        assert "-o" not in command or Path(command[command.index("-o") + 1]).stat().st_size > 2000
    (aligned,) = (text for command, text in found.items() if command.endswith("target.txt"))
    assert [re.fullmatch(r"\d+-\d+( \d+-\d+)*", line) is not None for line in aligned.splitlines()] == [True, True]
    (compared,) = (text for command, text in found.items() if "--gold" in command)
    assert compared.splitlines()[-1].startswith("AER ")


def test_the_python_of_the_guide_runs(place, capsys):
    pytest.importorskip("matplotlib")
    _, code = python_of(GUIDE)
    exec(code, {})
    printed = capsys.readouterr().out
    differences = [float(line) for line in printed.splitlines() if re.fullmatch(r"[\d.e-]+", line)]
    assert len(differences) > 3
    assert max(differences) < 1e-5
    assert printed.startswith("['cross', 'encoder', 'decoder'] (2, 4, ")
    assert "</s> looks at " in printed
    assert {path.name for path in place.iterdir()} >= {"heads.png", "attention.html"}
    ((code, expected),) = printing_of(GUIDE)  # of machines that think
    exec(code, {})
    assert capsys.readouterr().out == expected
