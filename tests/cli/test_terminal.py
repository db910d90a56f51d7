"""What is shown at a terminal: no control character acts, no message is without an end, no figure is lost."""

import errno
import json
import os
import subprocess
import sys
import warnings
from unittest.mock import Mock

import pytest

from heedful import TokenizerPair
from heedful.cli import main as cli
from heedful.cli import options
from heedful.data import sources
from helpers import assert_error

CODES = "a\x1b[2Jb\x07c\x9bd\re\tf\x7f\x00g\n"
SHOWN = "a\\u001b[2Jb\\u0007c\\u009bd\\u000de\tf\\u007f\\u0000g\n"


def test_control_characters_of_a_model_reach_no_terminal_and_every_pipe(whole, capsys, monkeypatch):
    def command():
        sys.stdout.write(CODES)
        sys.stdout.writelines([CODES])
        sys.stdout.flush()

    for is_terminal in (False, True):
        monkeypatch.setattr(sys.stdout, "isatty", lambda is_terminal=is_terminal: is_terminal)
        options.safe_at_terminals(command)()
        assert capsys.readouterr().out == (SHOWN if is_terminal else CODES) * 2
    decode = TokenizerPair.decode_target
    monkeypatch.setattr(TokenizerPair, "decode_target", lambda *arguments: [CODES for _ in decode(*arguments)])
    cli.app(["translate", str(whole), "네.", "--max-new-tokens", "3"], standalone_mode=False)
    assert capsys.readouterr().out == SHOWN.replace("\\u000d", " ").replace("\n", " ") + "\n"


def test_names_and_warnings_are_shown_without_code_and_messages_have_an_end(tmp_path, heedful_command, capsys):
    data = "data: {train: a.tsv, validation: b.tsv, source: a, target: b}"
    recipe = f'"\\e[31mname": 1\n{data}\noptimization: {{max_updates: 1}}\n'
    (tmp_path / "recipe.yaml").write_text(recipe)
    shown = heedful_command("train", tmp_path / "recipe.yaml")[2]
    assert r"`\x1b[31mname` is not a key of a recipe" in shown
    assert "\x1b" not in shown

    def command():
        sys.stderr.write(warnings.formatwarning("a file called \x1b]0;TITLE\x07", UserWarning, "file.py", 1))
        raise ValueError("x" * 500_000)

    with pytest.raises(SystemExit):
        cli.run(command)
    shown = capsys.readouterr().err
    assert shown.startswith("warning: a file called \\u001b]0;TITLE\\u0007\nheedful: x")
    assert "x… (500,000 characters)" in shown
    assert len(shown) < 3000


def output_of(code, **options):
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, **options)
    return finished.stdout, finished.stderr


def test_messages_begin_a_line_where_a_bar_stands():
    code = """
import logging, sys, warnings
from tqdm import tqdm
from heedful.cli import main
def command():
    with tqdm(range(3), file=sys.stderr, mininterval=0) as bar:
        bar.update()
        logging.getLogger("heedful").info("a line of the log")
        bar.update()
        warnings.warn("something", stacklevel=1)
main.run(command)
"""
    lines = output_of(code)[1].decode().split("\n")
    shown = [line.rpartition("\r")[2] for line in lines]  # what a terminal still shows of each line
    assert shown[:2] == ["a line of the log", "warning: something"]


@pytest.mark.parametrize(("encoding", "arrow"), [("cp1252", "\\u2192"), ("cp949", "→"), ("utf-8", "→")])
def test_an_output_of_few_characters_loses_no_figure(encoding, arrow):
    code = """
import atexit
from heedful.cli import main, options
def command():
    options.print_result({}, "a → b 12.5", False)
    options.print_result({"text": "→😀", "bleu": 12.5}, "", True)
    atexit.register(print, "what a library says at the end")
main.run(command)
"""
    output, _ = output_of(code, env=os.environ | {"PYTHONIOENCODING": encoding})
    first, rest = output.decode(encoding).split("\n", 1)
    assert first == f"a {arrow} b 12.5"
    assert json.loads(rest) == {"text": "→😀", "bleu": 12.5}


def test_what_a_machine_or_a_launcher_lacks_is_said_in_a_sentence(tmp_path, capsys, monkeypatch):
    def ended(error):
        with pytest.raises(SystemExit) as done:
            cli.run(Mock(side_effect=error))
        return done.value.code, capsys.readouterr().err

    torch_says = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for error, code, message in (
        (MemoryError(), 1, "The command needs more memory than this machine has."),
        (RuntimeError(torch_says), 1, torch_says),
        (full, 2, f"[Errno {errno.ENOSPC}] No space left on device: standard output"),
    ):
        assert ended(error) == (code, f"heedful: {message}\n")
    (tmp_path / "a.jsonl").touch()
    monkeypatch.setattr(sources, "_json_rows", Mock(side_effect=MemoryError("realloc of size 9 failed")))
    message = r"a\.jsonl has a line, a cell or a block .* realloc of size 9 failed"
    assert_error(message, sources.read_pairs, str(tmp_path / "a.jsonl"), "a", "b", error=MemoryError)
    monkeypatch.setattr(sys, "stdin", None)
    assert ended(lambda: sys.exit(5 + len(sys.stdin.buffer.read()))) == (5, "")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        assert ended(None)[1].startswith("heedful: Standard output must be open, but is closed")
    monkeypatch.setenv("RANK", "x")
    assert ended(None) == (2, "heedful: `RANK`, which a launcher sets, must be a whole number, but is 'x' instead.\n")
