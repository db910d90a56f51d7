"""`heedful doctor`: checks of a recipe before training."""

from typing import Annotated

from typer import Exit, Option

from heedful.cli import options


def doctor(
    recipe: options.RecipeFile,
    overrides: options.Overrides = None,
    pairs: Annotated[int, Option("--pairs", help="Training pairs to check; in a stream, the first.")] = 100_000,
    as_json: options.AsJson = False,
) -> None:
    """Check a recipe's data, tokenizer, model and schedule before training. Exit code 1 if a check fails."""
    from heedful.proposals.proposal import complete
    from heedful.training.recipe_file import read_recipe

    settings = read_recipe(recipe, overrides, complete)
    from heedful.checking.doctor import diagnose

    options.quieten()
    diagnosis = diagnose(settings, pairs)
    options.print_result(diagnosis.to_dict(), diagnosis, as_json)
    if diagnosis.has_errors:
        raise Exit(1)
