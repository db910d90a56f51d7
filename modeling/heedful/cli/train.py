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
    prints = rank() == 0
    if dry_run:
        from heedful.diagnosis.estimate import dry_run as estimate

        quieten()
        estimated = estimate(settings)
        if prints:
            print(estimated)
        return
    from heedful.publishing.run_card import write_run_card
    from heedful.training.run import train as run_recipe

    quieten()
    result = run_recipe(settings)
    if not prints:
        return
    card = write_run_card(result)
    for name, values in result.metrics.items():
        print(
            f"{name}: " + ", ".join(f"{key} {value:.2f}" for key, value in values.items() if isinstance(value, float))
        )
    progress = result.progress
    minutes = progress.seconds / 60
    print(f"{progress.update:,} updates, {progress.target_tokens:,} target tokens, {minutes:.1f} min")
    print(f"model: {result.folder}\ncard: {card}")
