"""The command itself: its subcommands, its log, and what an error ends it with.

Everything heavy is imported by the command that needs it, so that `heedful --help` answers at once.
"""

import logging
import os
import sys
from collections.abc import Callable

import typer

from heedful.cli.check import complexity, doctor, study, verify, version
from heedful.cli.publish import convert, export, push
from heedful.cli.train import train
from heedful.cli.use import attention, evaluate, translate
from heedful.training.processes.launcher import rank

app = typer.Typer(
    name="heedful",
    help="Encoder-decoder models for Hugging Face users: raw sentence pairs in, a published model out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (train, doctor, evaluate, translate, attention, verify, study, complexity, push, convert, version):
    app.command()(command)
app.add_typer(export)

# The exit codes of our own errors, by name, because to import their classes costs seconds.
EXIT_CODES = {"TrainingInterrupted": 130, "ProcessLostError": 1}


def main() -> None:
    """Run the `heedful` command."""
    run(app)


def run(command: Callable[[], object]) -> None:
    """Run a command line; a user's mistake ends it with one line on standard error and exit code 2."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("heedful").setLevel(logging.INFO if rank() == 0 else logging.ERROR)
    try:
        command()
    except BrokenPipeError:
        # Whoever read our output has gone: Python would complain when it flushes the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            raise
        print(f"heedful: {error}", file=sys.stderr)
        sys.exit(code)


def _exit_code(error: Exception) -> int | None:
    """Return the exit code of an error: 2 for a mistake, 1 for bad luck, 130 for an interruption, `None` for a bug."""
    if isinstance(error, ValueError | OSError | ImportError):
        return 2
    from huggingface_hub.errors import StrictDataclassError

    if isinstance(error, StrictDataclassError):
        return 2
    if isinstance(error, FloatingPointError | MemoryError):
        return 1
    return EXIT_CODES.get(type(error).__name__)
