"""`heedful pairs`: pairs for a task that is no translation."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

from typer import Option, Typer

from heedful.cli import options
from heedful.cli.options import PairsFile, write_pairs

pairs = Typer(help="Make pairs (`source`, `target`) for a task that is no translation.", no_args_is_help=True)
Texts = Annotated[str, Option(help="Right texts: a file, or whatever `data.train` takes.")]
Column = Annotated[str | None, Option(help="Theirs, or their language. Default: the only one, or whole lines.")]
Typos = Annotated[float, Option(help="Share of the words.")]
Nouns = Annotated[str | None, Option(help="File of Korean nouns to put in the places of the texts'.")]
Actions = Annotated[str | None, Option("--lengths", help="Fewest and most actions, such as 1-25. Default: all.")]
Lengths = Annotated[str, Option(help="Fewest and most symbols.")]
Symbols = Annotated[int, Option(help="How many there are.")]
Language = Annotated[str, Option(help="Of the words, which num2words writes, and of the digits; of dates en or ko.")]
Most = Annotated[int | None, Option("--count", min=1, help="Of pairs. Default: one for each text.")]
Count = Annotated[int, Option(min=1, help="Of pairs.")]
Seed = Annotated[int, Option(min=0, help="Another one gives other pairs.")]


def task(command: Callable[..., None]) -> Callable[..., None]:
    """Make a subcommand of `heedful pairs` that writes what the function of its name in `task_pairs` returns."""

    @wraps(command)
    def run(output: Path, **settings: Any) -> None:
        from heedful_lab.tasks import task_pairs

        options.check_pairs_file(output)
        if "column" in settings:
            from heedful.proposals.first_recipe import find_text_column

            settings["column"] = find_text_column(settings["texts"], settings["column"], "--column")
        made = getattr(task_pairs, f"{command.__name__.removesuffix('s')}_pairs")(**settings)
        write_pairs(output, ({"source": source, "target": target} for source, target in made))

    return pairs.command()(options.safe_at_terminals(run))


@task
def spelling(
    output: PairsFile, texts: Texts, column: Column = None, typos: Typos = 0.1, count: Most = None, seed: Seed = 1
) -> None:
    """Words with typing mistakes to what was meant."""


@task
def spacing(
    output: PairsFile, texts: Texts, column: Column = None, nouns: Nouns = None, count: Most = None, seed: Seed = 1
) -> None:
    """Texts without spaces to texts with them."""


@task
def scan(output: PairsFile, texts: Texts, lengths: Actions = None, count: Most = None) -> None:
    """Commands to actions, from SCAN's own files."""


@task
def numbers(output: PairsFile, count: Count, language: Language = "en", seed: Seed = 1) -> None:
    """Numbers to words."""


@task
def dates(output: PairsFile, count: Count, language: Language = "en", seed: Seed = 1) -> None:
    """Dates to words."""


@task
def reverse(output: PairsFile, count: Count, lengths: Lengths = "1-25", symbols: Symbols = 50, seed: Seed = 1) -> None:
    """Symbols to the same from the last to the first."""
