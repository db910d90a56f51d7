"""`heedful pairs`: pairs for tasks other than translation."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

from typer import Option, Typer

from heedful.cli import options
from heedful.cli.options import PairsFile, write_pairs

pairs = Typer(help="Make pairs (`source`, `target`) for a task other than translation.", no_args_is_help=True)
COLUMNS = "source", "target", "document"
Texts = Annotated[str, Option(help="Correct texts: a file, or any location that `data.train` accepts.")]
Column = Annotated[str | None, Option(help="The texts' column or language. Default: the only one, or whole lines.")]
Typos = Annotated[float, Option(help="Share of words that get a typing mistake.")]
Nouns = Annotated[str | None, Option(help="File of Korean nouns that replace most nouns of the texts.")]
Actions = Annotated[str | None, Option("--lengths", help="Fewest and most actions, such as 1-25. Default: all.")]
Lengths = Annotated[str, Option(help="Shortest and longest sequence, such as 1-25.")]
Symbols = Annotated[int, Option(help="Number of different symbols.")]
Language = Annotated[str, Option(help="Language of words and digits, as in num2words. For dates: en or ko.")]
Most = Annotated[int | None, Option("--count", min=1, help="Number of pairs. Default: one for each text.")]
Count = Annotated[int, Option(min=1, help="Number of pairs, or of documents.")]
Split = Annotated[str, Option(help="Split of the built-in corpus that the sentences are from.")]
Seed = Annotated[int, Option(min=0, help="Random seed: another seed gives other pairs.")]


def task(command: Callable[..., None]) -> Callable[..., None]:
    """Make a subcommand of `heedful pairs` that writes the pairs of its function in `task_pairs`."""

    @wraps(command)
    def run(output: Path, **settings: Any) -> None:
        from heedful_lab.tasks import task_pairs

        options.check_pairs_file(output)
        if "column" in settings:
            from heedful.proposals.first_recipe import find_text_column

            settings["column"] = find_text_column(settings["texts"], settings["column"], "--column")
        made = getattr(task_pairs, f"{command.__name__.removesuffix('s')}_pairs")(**settings)
        write_pairs(output, (dict(zip(COLUMNS, pair, strict=False)) for pair in made))

    return pairs.command()(options.safe_at_terminals(run))


@task
def spelling(
    output: PairsFile, texts: Texts, column: Column = None, typos: Typos = 0.1, count: Most = None, seed: Seed = 1
) -> None:
    """Make pairs of texts with typing mistakes and the correct texts."""


@task
def spacing(
    output: PairsFile, texts: Texts, column: Column = None, nouns: Nouns = None, count: Most = None, seed: Seed = 1
) -> None:
    """Make pairs of texts without spaces and with them."""


@task
def scan(output: PairsFile, texts: Texts, lengths: Actions = None, count: Most = None) -> None:
    """Make pairs of commands and actions from SCAN's files."""


@task
def numbers(output: PairsFile, count: Count, language: Language = "en", seed: Seed = 1) -> None:
    """Make pairs of numbers in digits and in words."""


@task
def dates(output: PairsFile, count: Count, language: Language = "en", seed: Seed = 1) -> None:
    """Make pairs of dates in digits and in words."""


@task
def reverse(output: PairsFile, count: Count, lengths: Lengths = "1-25", symbols: Symbols = 50, seed: Seed = 1) -> None:
    """Make pairs of symbol sequences and their reversals."""


@task
def documents(output: PairsFile, count: Count, split: Split = "train", seed: Seed = 1) -> None:
    """Make documents (with the column `document`) of Korean and English sentences whose pronouns need context."""
