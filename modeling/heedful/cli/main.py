"""The command itself: `heedful train`, the other subcommands, its log, and what an error ends it with.

Everything heavy is imported by the command that needs it, so that `heedful --help` answers at once.
"""

import atexit
import functools
import gc
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from typer import Exit, Option, Typer

from heedful.cli import options
from heedful.cli.check import compare, complexity, doctor, plot, study, verify, version
from heedful.cli.publish import EXPORTS, card, convert, export, page, push
from heedful.cli.start import init, pairs, recipes, tune
from heedful.cli.use import attention, backtranslate, distill, embeddings, evaluate, score, translate
from heedful.training.processes.launcher import rank


def train(
    recipe: options.RecipeFile,
    overrides: options.Overrides = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Print sizes, memory and time, and train nothing.")] = False,
):
    """Train a model by a recipe, test it, and save it with its tokenizer and card."""
    from heedful.proposals.proposal import complete
    from heedful.training.recipe_file import read_recipe

    settings = read_recipe(recipe, overrides, complete)
    options.quieten()
    if dry_run:
        from heedful.diagnosis.estimate import dry_run as estimate

        estimated = estimate(settings)  # by all processes together
        if rank() == 0:
            print(estimated)
        return
    from heedful.publishing.exports.transformers_export import check_recipe
    from heedful.publishing.run_card import publish_run
    from heedful.training.run import train as run_recipe

    check_recipe(settings)
    result = run_recipe(settings)
    if rank() == 0:
        for line in publish_run(result):
            print(line)


def safe_at_terminals(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with output and errors as `options.terminal_of` has them."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        with options.terminal_of(command):
            command(*args, **kwargs)

    return run


app = Typer(
    name="heedful",
    help="Encoder-decoder models for Hugging Face users: raw sentence pairs in, a published model out.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
COMMANDS: dict[str, tuple[Callable[..., None], ...]] = {
    "Train": (recipes, init, pairs, doctor, train, tune, plot),
    "Use": (evaluate, translate, score, attention, embeddings, backtranslate, distill),
    "Check": (verify, compare, study, complexity),
    "Publish": (card, page, push, convert),
    "Help": (version,),
}
for panel, commands in COMMANDS.items():
    for command in commands:
        takes_sentences = options.TakesSentences if command in (translate, attention, embeddings) else None
        app.command(cls=takes_sentences, rich_help_panel=panel)(safe_at_terminals(command))
for name, exporter in EXPORTS.items():
    export.command(name)(safe_at_terminals(exporter))
app.add_typer(export, rich_help_panel="Publish")


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise Exit


@app.callback()
def _heedful(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the versions and exit.")
    ] = False,
):
    pass


# The exit codes of errors: for mistakes, for bad luck, for an interruption; a bug has none. By their names, because to
# import the classes costs seconds.
EXIT_CODES = {
    **dict.fromkeys(["ValueError", "OSError", "ImportError", "StrictDataclassError"], 2),
    **dict.fromkeys(["FloatingPointError", "MemoryError", "ProcessLostError"], 1),
    "TrainingInterrupted": 130,
}
# The distributions whose modules have another name.
DISTRIBUTIONS = {"yaml": "pyyaml"}


def main() -> None:
    """Run the `heedful` command."""
    # Else Python looks for garbage among all that was imported before it ends, for a second.
    atexit.register(gc.freeze)
    run(partial(app, prog_name="heedful"))  # also where it is started as `python -m heedful`


def run(command: Callable[[], object]) -> None:
    """Run a command line; a user's mistake ends it with one line on standard error and exit code 2."""
    options.set_up_output("INFO" if rank() == 0 else "ERROR")
    try:
        with options.plain_warnings():
            _check_arguments()
            try:
                command()
            finally:
                sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as error:
        # Whoever read our output has gone, which typer makes an exit code of 1.
        if not isinstance(error, BrokenPipeError) and not isinstance(error.__context__, BrokenPipeError):
            raise
        # Python would complain when it flushes the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        code = next((EXIT_CODES[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in EXIT_CODES), None)
        if code is None:
            raise
        missing = error.name.partition(".")[0] if isinstance(error, ModuleNotFoundError) and error.name else None
        command_for = f": pip install {DISTRIBUTIONS.get(missing, missing)}" if missing else ""
        print(options.visible(f"heedful: {options.without_its_end(str(error))}{command_for}"), file=sys.stderr)
        sys.exit(code)


def _check_arguments() -> None:
    for argument in sys.argv:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise ValueError(f"The arguments must be UTF-8, but {argument!r} is not.") from None
