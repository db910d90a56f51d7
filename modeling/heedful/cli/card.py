"""`heedful card`: the card of a model of a Trainer."""

from pathlib import Path
from typing import Annotated, Any

from typer import Option

from heedful.cli import options


def card(
    model: options.Model,
    license: Annotated[str, Option(help="Yours, as the Hub calls it: apache-2.0, mit, cc-by-4.0.")],
    dataset: Annotated[list[str], Option(help="What it was trained on: an id on the Hub, a file, a name.")],
    base_model: Annotated[str | None, Option(help="What it began with: an id, a folder. Default: nothing.")] = None,
    source_language: Annotated[str | None, Option(help="Its code, such as ko.")] = None,
    target_language: Annotated[str | None, Option(help="Likewise.")] = None,
    task: Annotated[str | None, Option(help="If it does not translate, what it does: 'answering questions'.")] = None,
    scores: Annotated[list[Path] | None, Option(help="Of `heedful evaluate --json`; a test set's name each.")] = None,
    name: Annotated[str | None, Option(help="Of the model. Default: the folder's.")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace a README.md that is there.")] = False,
) -> None:
    """Write the card of a model of a Trainer, which `heedful push` asks for; runs of `heedful train` have one."""
    from heedful.cards.model_card import write_finetuned_card

    options.quieten()
    facts: dict[str, Any] = {"license": license, "datasets": dataset, "base_model": base_model, "task": task}
    facts |= {"source_language": source_language, "target_language": target_language}
    facts |= {"name": name} if name else {}
    print(write_finetuned_card(model, overwrite=overwrite, scores=scores or (), **facts))
