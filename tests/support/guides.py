"""Run a guide's commands and code as written, and list the commands that must fail."""

import re
import shlex
from pathlib import Path

GUIDES = Path(__file__).parents[2] / "docs" / "guides"


def text_of(guide: str) -> str:
    """Return the text of a guide."""
    return (GUIDES / f"{guide}.md").read_text(encoding="utf-8")


def commands_of(text: str, names: str = r"\w+") -> list[str]:
    """Return the commands of a text that begin with one of some names, without `heedful`."""
    return re.findall(rf"^(?:\$ )?heedful ((?:{names}) .*)$", text, flags=re.MULTILINE)


def blocks_of(text: str) -> list[tuple[str, str]]:
    """Return the blocks of Python of a text, each with what it prints, if that stands right behind it."""
    return re.findall(r"```python\n(.*?)```(?:\n\n```\n(.*?)```)?", text, flags=re.DOTALL)


def python_of(text: str) -> list[str]:
    """Return the blocks of Python of a text."""
    return [code for code, _ in blocks_of(text)]


def printing_of(text: str) -> list[tuple[str, str]]:
    """Return the blocks of Python of a text that are followed by what they print, and that."""
    return [block for block in blocks_of(text) if block[1]]


def run_commands(printed, commands: list[str], more: dict[str, list[str]] | None = None) -> dict[str, str]:
    """Run commands by the fixture `printed`, with more arguments for some by their first word; return their output."""
    found = {}
    for command in commands:
        first, *rest = shlex.split(command)
        found[command] = printed(first, *rest, *(more or {}).get(first, []))
    return found


def assert_named(command, cases):
    """Run a command with each `(arguments, message)`: it must end with the message, and print nothing else."""
    for arguments, message in cases:
        code, output, errors = command(*arguments)
        assert (code, output) == (2, ""), arguments
        assert message in " ".join(re.sub("[│╭╰─╮╯]", "", errors).split()), arguments
        assert "Traceback" not in errors, arguments
