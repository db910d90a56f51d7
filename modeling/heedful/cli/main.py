"""The command with its exit codes and its subcommands, imported only if needed."""

import atexit
import gc
import os
import sys
from collections.abc import Callable
from errno import ENOSPC
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points, version
from io import BytesIO, TextIOWrapper
from typing import Annotated, Any

from typer import Exit, Option, Typer
from typer.core import TyperGroup
from typer.main import get_group

from heedful.cli import options
from heedful.training.processes.launcher import rank

PANELS = {
    "Train": ("recipes", "init", "doctor", "train", "tune", "plot", "backtranslate", "distill", "distill-tokens"),
    "Use": ("evaluate", "translate", "score", "attention", "align"),
    "Check": ("verify", "compare"),
    "Publish": ("card", "page", "push", "convert", "export"),
}
PLUGINS = "Laboratory"  # the panel for commands from entry points `heedful.commands`
VERSIONED = ("heedful", "transformers", "torch", "tokenizers", "datasets", "accelerate")


class Heedful(TyperGroup):
    """The command `heedful`, which imports a subcommand only to run it."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.panels = {name: panel for panel, names in PANELS.items() for name in names}
        self.plugins = {each.name: each for each in entry_points(group="heedful.commands")}
        self.commands = dict.fromkeys([*self.panels, *self.plugins])  # type: ignore[assignment]

    def get_command(self, ctx: Any, name: str) -> Any:
        """Import and return a subcommand, or return `None`."""
        if name in self.panels:
            function = name.replace("-", "_")
            found = getattr(import_module(f"heedful.cli.{function}"), function)
        elif name in self.plugins:
            found = self.plugins[name].load()
        else:
            return None
        panel, alone = self.panels.get(name, PLUGINS), Typer()
        if isinstance(found, Typer):  # a group of subcommands
            for each in found.registered_commands:
                each.cls = options.Command
            alone.add_typer(found, name=name, rich_help_panel=panel)
        else:
            show = alone.command(name, cls=options.Command, rich_help_panel=panel)
            show(options.safe_at_terminals(found))
        return get_group(alone).commands[name]


app = Typer(
    name="heedful",
    cls=Heedful,
    help="Encoder-decoder models for Hugging Face users: raw sentence pairs in, a published model out.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_versions(is_wanted: bool) -> None:
    if is_wanted:
        print("\n".join(f"{name} {version(name)}" for name in VERSIONED))
        raise Exit


Versions = Annotated[bool, Option("--version", callback=_print_versions, is_eager=True, help="Print the versions.")]


@app.callback()
def _heedful(versions: Versions = False) -> None:
    pass


DISTRIBUTIONS = {"yaml": "pyyaml"}  # by module, if the names differ
LONGEST_MESSAGE = 2000  # characters


def main() -> None:
    """Run the `heedful` command."""
    # Skips the last garbage collection: 0.03 of 0.26 s of `--help`, 0.1 of 3.7 s of `translate` with a tiny model.
    atexit.register(gc.freeze)
    run(partial(app, prog_name="heedful"))  # also for `python -m heedful`


def run(command: Callable[[], object]) -> None:
    """Run a command. A user's mistake ends it with one line on standard error and exit code 2."""
    try:
        options.set_up_output("INFO" if rank() == 0 else "ERROR")
        with options.plain_warnings():
            _check_arguments()
            try:
                command()
            finally:
                sys.stdout.flush()
                atexit.register(setattr, sys, "stdout", sys.stderr)  # for libraries' late messages
    except (BrokenPipeError, SystemExit) as error:
        # The output's reader is gone. Typer would exit with code 1.
        if not isinstance(error, BrokenPipeError) and not isinstance(error.__context__, BrokenPipeError):
            raise
        # Python's last flush would fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        code, message = exit_code_of(error), str(error)
        if code is None:
            raise
        if isinstance(error, OSError) and error.errno == ENOSPC and not error.filename:  # else it names them
            message += ": standard output"
        if len(message) > LONGEST_MESSAGE:  # it quotes data
            message = f"{message[:LONGEST_MESSAGE]}… ({len(message):,} characters)"
        if isinstance(error, MemoryError):
            message = message or "The command needs more memory than this machine has."
        if isinstance(error, ModuleNotFoundError) and error.name:
            missing = error.name.partition(".")[0]
            message += f": pip install {DISTRIBUTIONS.get(missing, missing)}"
        print(options.visible(f"heedful: {message}"), file=sys.stderr)
        sys.exit(code)


def exit_code_of(error: Exception) -> int | None:
    """Return 2 for a user's mistake, 1 for a failure of the machine or numbers, `None` for a bug."""
    if isinstance(error, ValueError | OSError | ImportError):
        return 2
    lacks_memory = isinstance(error, MemoryError) or "can't allocate memory" in str(error)  # torch's wording
    if lacks_memory or isinstance(error, FloatingPointError):
        return 1
    from huggingface_hub.errors import StrictDataclassError

    return 2 if isinstance(error, StrictDataclassError) else getattr(error, "exit_code", None)


def _check_arguments() -> None:
    if sys.stdout is None:
        raise ValueError("Standard output must be open, but is closed: `> /dev/null` leaves it open.")
    if sys.stdin is None:
        sys.stdin = TextIOWrapper(BytesIO())
    for argument in sys.argv:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise ValueError(f"The arguments must be UTF-8, but {argument!r} is not.") from None
