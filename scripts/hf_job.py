# /// script
# requires-python = ">=3.11"
# dependencies = ["heedful[plots,trackers]"]
# ///
"""Train from a recipe on a machine of the Hub, and push the model: if you have no GPU.

    hf jobs uv run --flavor a10g-small --secrets HF_TOKEN scripts/hf_job.py me/model quickstart
    uv run scripts/hf_job.py me/model quickstart optimization.max_updates=20 --no-push

Data must be on the Hub or built in: `data.train=me/pairs data.validation=me/pairs`. The lines above are `uv`'s
list of packages. A stopped job leaves nothing: give it enough time (`--timeout 4h`).
"""

from typing import Annotated

import typer
from huggingface_hub import HfApi

from heedful.cards.hub import push
from heedful.cards.run_card import publish_run
from heedful.cli.main import run
from heedful.export.transformers_export import check_recipe
from heedful.proposals.proposal import complete
from heedful.training.recipe_file import read_recipe
from heedful.training.run import train


def main(
    repository: Annotated[str, typer.Argument(help="Name of the model on the Hub, such as me/model.")],
    recipe: Annotated[str, typer.Argument(help="Recipe from `heedful recipes`, or a file.")],
    changes: Annotated[list[str] | None, typer.Argument(help="Changed recipe keys, as key=value.")] = None,
    is_pushed: Annotated[bool, typer.Option("--push/--no-push")] = True,
    private: Annotated[bool | None, typer.Option("--private/--public")] = None,
) -> None:
    """Train, print the scores, and push."""
    settings = read_recipe(recipe, changes, complete)
    check_recipe(settings)
    if is_pushed:  # reports a wrong name or token before the training
        HfApi().create_repo(repository, private=private, exist_ok=True)
    result = train(settings)
    print(*publish_run(result), sep="\n")
    if is_pushed:
        print(push(result.folder, repository, private=private).url)


if __name__ == "__main__":
    run(lambda: typer.run(main))
