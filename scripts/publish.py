"""Check a trained model's folder, and push weights, code, tokenizers and card to the Hub in one commit.

    python scripts/publish.py runs/quickstart/model me/model --private

Log in first with `hf auth login`, or set HF_TOKEN. `heedful push` does the same.
"""

from pathlib import Path
from typing import Annotated

import typer

from heedful.cards.hub import check_folder, push, read_card
from heedful.cli.main import run


def publish(
    model: Annotated[Path, typer.Argument(help="A run's model folder.")],
    repository: Annotated[str, typer.Argument(help="Name on the Hub, such as name/model.")],
    private: Annotated[bool, typer.Option(help="Make a new repository private.")] = False,
):
    """Print the card's metadata, push, and print the revision to load."""
    check_folder(model)
    print(read_card(model / "README.md").data)
    pushed = push(model, repository, private=private)
    print(f"{pushed.url}\nfrom_pretrained({pushed.repository!r}, revision={pushed.commit!r}) loads it.")


if __name__ == "__main__":
    run(lambda: typer.run(publish))
