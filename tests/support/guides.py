"""What a guide shows, run as it is written, and what commands refuse."""

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


def python_of(text: str) -> list[str]:
    """Return the blocks of Python of a text."""
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def printing_of(text: str) -> list[tuple[str, str]]:
    """Return the blocks of Python of a text that are followed by what they print, and that."""
    return re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", text, flags=re.DOTALL)


def run_commands(heedful_command, commands: list[str], more: dict[str, list[str]] | None = None) -> dict[str, str]:
    """Run commands, which must succeed, with more arguments for some by their first word; return what they print."""
    printed = {}
    for command in commands:
        words = shlex.split(command)
        code, printed[command], errors = heedful_command(*words, *(more or {}).get(words[0], []))
        assert code == 0, (command, errors)
    return printed


def assert_named(command, cases):
    """Run a command with each `(arguments, message)`: it must end with the message, and print nothing else."""
    for arguments, message in cases:
        code, output, errors = command(*arguments)
        assert (code, output) == (2, ""), arguments
        assert message in " ".join(re.sub("[│╭╰─╮╯]", "", errors).split()), arguments
        assert "Traceback" not in errors, arguments
