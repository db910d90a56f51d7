"""`heedful train`: train a model from a recipe."""

from importlib import import_module
from typing import Annotated

from typer import Option

from heedful.cli import options
from heedful.training.processes.launcher import rank


def train(
    recipe: options.RecipeFile,
    overrides: options.Overrides = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Print sizes, memory and time without training.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Train a model from a recipe, test it, and save it with its tokenizer and card."""
    from heedful.proposals.proposal import complete
    from heedful.training.recipe_file import read_recipe

    options.check_apart(dry_run=dry_run, json=as_json)
    settings = read_recipe(recipe, overrides, complete)
    options.quieten()
    if dry_run:
        estimate = import_module("heedful.checking.estimate").dry_run(settings)  # in all processes
        if rank() == 0:
            print(estimate)
        return
    from heedful.cards.run_card import facts_in_numbers, publish_run
    from heedful.export.transformers_export import check_recipe
    from heedful.training.run import train as run_recipe

    check_recipe(settings)
    result = run_recipe(settings)
    if rank() == 0:
        options.print_result(facts_in_numbers(result), "\n".join(publish_run(result)), as_json)
