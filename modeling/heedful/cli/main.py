"""The command itself: `heedful train`, the other subcommands, its log, and what an error ends it with.

Everything heavy is imported by the command that needs it, so that `heedful --help` answers at once.
"""

import logging
import os
import sys
from collections.abc import Callable
from typing import Annotated

from typer import Option, Typer

from heedful.cli import options
from heedful.cli.check import complexity, doctor, study, verify, version
from heedful.cli.publish import convert, export, push
from heedful.cli.start import init, recipes
from heedful.cli.use import attention, evaluate, translate
from heedful.training.processes.launcher import rank


def train(
    recipe: options.RecipeFile,
    overrides: options.Overrides = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Print sizes, memory and time, and train nothing.")] = False,
):
    """Train a model by a recipe, test it, and save it with its tokenizer and card."""
    from heedful.training.recipe_file import read_recipe

    settings = read_recipe(recipe, overrides)
    if dry_run:
        from heedful.diagnosis.estimate import dry_run as estimate

        options.quieten()
        estimated = estimate(settings)
        if rank() == 0:
            print(estimated)
        return
    from heedful.publishing.run_card import write_run_card
    from heedful.training.run import train as run_recipe

    options.quieten()
    result = run_recipe(settings)
    if rank() != 0:
        return
    card = write_run_card(result)
    for name, values in result.metrics.items():
        scores = ", ".join(f"{key} {value:.2f}" for key, value in values.items() if isinstance(value, float))
        print(f"{name}: {scores}")
    done = result.progress
    print(f"{done.update:,} updates, {done.target_tokens:,} target tokens, {done.seconds / 60:.1f} min")
    print(f"model: {result.folder}\ncard: {card}")


app = Typer(
    name="heedful",
    help="Encoder-decoder models for Hugging Face users: raw sentence pairs in, a published model out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (
    recipes,
    init,
    train,
    doctor,
    evaluate,
    translate,
    attention,
    verify,
    study,
    complexity,
    push,
    convert,
    version,
):
    app.command()(command)
app.add_typer(export)

# The exit codes of errors: for mistakes, for bad luck, for an interruption; a bug has none. By their names, because to
# import the classes costs seconds.
EXIT_CODES = {
    **dict.fromkeys(["ValueError", "OSError", "ImportError", "StrictDataclassError"], 2),
    **dict.fromkeys(["FloatingPointError", "MemoryError", "ProcessLostError"], 1),
    "TrainingInterrupted": 130,
}


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
        code = next((EXIT_CODES[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in EXIT_CODES), None)
        if code is None:
            raise
        print(f"heedful: {error}", file=sys.stderr)
        sys.exit(code)
