"""The card of a model that was trained with a Trainer: from its folder, and what its maker says."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from heedful.cards.model_card import CARD_FILE, facts_of_model, write_model_card
from heedful.configuration_base_heed import TASK, TEXT_TASK
from heedful.data.languages import code_of
from heedful.data.tokenization import TokenizerPair
from heedful.decoding.loading import load_model
from heedful.files import read_object, write_text
from heedful.pipeline_heed import pipelines_of_folder
from heedful.training.publication import UNDETERMINED


def write_finetuned_card(
    folder: str | Path,
    *,
    overwrite: bool = False,
    source_language: str | None = None,
    target_language: str | None = None,
    scores: Sequence[str | Path] = (),
    **facts: Any,
) -> Path:
    """Write the card of a model that a Trainer trained, README.md, into its folder, as `heedful push` wants it.

    The folder's config.json then says which pipeline is for the model: `heed-text2text` if there is a `task`. The card
    of the model that fine-tuning began with gives it nothing, least of all its license.

    `scores` are files that `heedful evaluate --json` printed; their names are those of the test sets. `facts` are what
    no program can know, other fields of `CardFacts`: `license`, `datasets`, `base_model` of a model that was not
    trained from nothing, and, if the model does not translate, `task`, without which there must be two languages;
    `name` is by default the folder's. What is empty or impossible, or no Heed model, is a `ValueError`; a README.md is
    replaced only if `overwrite`.
    """
    folder = Path(folder)
    if (folder / CARD_FILE).exists() and not overwrite:
        raise FileExistsError(f"{folder} must not have a card yet, but has {CARD_FILE}; `--overwrite` replaces it.")
    for file in scores:
        if not Path(file).is_file():
            must = "files that `heedful evaluate --json` printed"
            raise FileNotFoundError(f"`scores` must be {must}, but {file} is none.")
    source, target = (language and (code_of(language) or language) for language in (source_language, target_language))
    model, tokenizers = load_model(folder), TokenizerPair.from_pretrained(folder)
    if not model.config.model_type.startswith("heed"):
        raise ValueError(f"{folder} must hold a Heed model, but holds a {model.config.model_type} instead.")
    all_facts = facts_of_model(
        model,
        tokenizers,
        ("tokens", "tokens"),
        **{"name": folder.resolve().name, **facts},
        source_language=source or UNDETERMINED,
        target_language=target or (facts.get("task") and source) or UNDETERMINED,
        scores={Path(file).stem: read_object(Path(file)) for file in scores},
    )
    path = write_model_card(folder, all_facts)
    settings = read_object(folder / "config.json")
    if "custom_pipelines" in settings:
        settings["custom_pipelines"] = pipelines_of_folder(TASK if all_facts.is_translation else TEXT_TASK)
        write_text(folder / "config.json", json.dumps(settings, indent=2, sort_keys=True) + "\n")
    return path
