"""`heedful card`: a model card after training with `Trainer`."""

from pathlib import Path
from typing import Annotated, Any

from typer import Option

from heedful.cli import options


def card(
    model: options.Model,
    license: Annotated[str, Option(help="License by its Hub name: apache-2.0, mit, cc-by-4.0.")],
    dataset: Annotated[list[str], Option(help="Training data: a Hub id, a file or a name.")],
    base_model: Annotated[str | None, Option(help="Model it was fine-tuned from: a Hub id or folder.")] = None,
    source_language: Annotated[str | None, Option(help="Source language code, such as ko.")] = None,
    target_language: Annotated[str | None, Option(help="Target language code, such as en.")] = None,
    task: Annotated[str | None, Option(help="The task if it is not translation: 'answering questions'.")] = None,
    scores: Annotated[list[Path] | None, Option(help="Files of `heedful evaluate --json`, named by test set.")] = None,
    name: Annotated[str | None, Option(help="Model name. Default: the folder's.")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an existing README.md.")] = False,
) -> None:
    """Write the card that `heedful push` needs, for a model trained by `Trainer`. `heedful train` writes its own."""
    from heedful.cards.model_card import write_finetuned_card

    options.quieten()
    facts: dict[str, Any] = {"license": license, "datasets": dataset, "base_model": base_model, "task": task}
    facts |= {"source_language": source_language, "target_language": target_language}
    facts |= {"name": name} if name else {}
    print(write_finetuned_card(model, overwrite=overwrite, scores=scores or (), **facts))
