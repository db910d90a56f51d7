"""For those who train: `heedful train`, and its dry run."""

from typing import Annotated

from typer import Option

from heedful.cli.options import Overrides, RecipeFile, quieten
from heedful.training.processes.launcher import rank


def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Print sizes, memory and time, and train nothing.")] = False,
):
    """Train a model by a recipe, test it, and save it with its tokenizer and card."""
    from heedful.training.recipe_file import read_recipe

    settings = read_recipe(recipe, overrides)
    if dry_run:
        from heedful.diagnosis.estimate import dry_run as estimate

        quieten()
        estimated = estimate(settings)
        if rank() == 0:
            print(estimated)
        return
    from heedful.publishing.run_card import write_run_card
    from heedful.training.run import train as run_recipe

    quieten()
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
