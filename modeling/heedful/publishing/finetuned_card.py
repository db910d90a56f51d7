"""The card of a model that was fine-tuned with a Trainer: from its folder, and what its maker says."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from heedful.data.tokenization import TokenizerPair
from heedful.files import read_object, write_text
from heedful.inference.loading import HUB_ID, load_model
from heedful.pipeline_heed import TASK, TEXT_TASK, pipelines_of_folder
from heedful.publishing.model_card import CARD_FILE, REQUIRED_VERSIONS, CardFacts, card_metadata, render
from heedful.publishing.run_card import architecture_of
from heedful.training.publication import UNDETERMINED


@dataclass(frozen=True, kw_only=True)
class FinetunedFacts(CardFacts):
    """What the card of a fine-tuned model tells."""

    base_model: str  # that fine-tuning began with: an id on the Hub, or a folder
    task: str | None = None  # what it does, such as "answering questions"; None translates
    scores: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def is_translation(self) -> bool:
        """Whether the model translates."""
        return self.task is None

    def __post_init__(self):
        """Check every field."""
        super().__post_init__()
        if self.task is None and not super().is_translation:
            raise ValueError(
                f"`source_language` and `target_language` must be two languages, but are {self.source_language} and "
                f"{self.target_language} instead; for what is no translation, `task` must say what the model does."
            )


def write_finetuned_card(
    folder: str | Path,
    *,
    overwrite: bool = False,
    source_language: str | None = None,
    target_language: str | None = None,
    scores: Sequence[str | Path] = (),
    **told: Any,
) -> Path:
    """Write the card of a fine-tuned model, README.md, into its folder, as `heedful push` wants it.

    The folder's config.json then says which pipeline is for the model: `heed-text2text` if there is a `task`. Nothing
    is taken over from the card of the model that fine-tuning began with, least of all its license.

    Args:
        folder: Of a Heed model and its tokenizers, as a Trainer's `save_model` leaves it.
        overwrite: Whether a README.md that is there may be replaced.
        source_language: Its code, such as ko; may be left out if `task` is given.
        target_language: Likewise.
        scores: Files that `heedful evaluate --json` printed; their names are those of the test sets.
        **told: What no program can know, the other fields of `FinetunedFacts`: `license`, `datasets`, `base_model`,
            and, if it does not translate, `task`; `name` is by default the folder's.

    Raises:
        FileExistsError: If there is a README.md already.
        ValueError: If something is empty or impossible, or the folder holds no Heed model.
    """
    folder = Path(folder)
    path = folder / CARD_FILE
    if path.exists() and not overwrite:
        raise FileExistsError(f"{folder} must not have a card yet, but has {CARD_FILE}; `--overwrite` replaces it.")
    for file in scores:
        if not Path(file).is_file():
            raise FileNotFoundError(
                f"`scores` must be files that `heedful evaluate --json` printed, but {file} is none."
            )
    measured = {Path(file).stem: read_object(Path(file)) for file in scores}
    model, tokenizers = load_model(folder), TokenizerPair.from_pretrained(folder)
    if not model.config.model_type.startswith("heed"):
        raise ValueError(f"{folder} must hold a Heed model, but holds a {model.config.model_type} instead.")
    sizes = f"{len(tokenizers.source):,} tokens for both sides"
    if not tokenizers.is_joint:
        sizes = f"{len(tokenizers.source):,} tokens for the source, {len(tokenizers.target):,} for the target"
    facts = FinetunedFacts(
        **{"name": folder.resolve().name, **told},
        source_language=source_language or UNDETERMINED,
        target_language=target_language or (told.get("task") and source_language) or UNDETERMINED,
        parameters=model.num_parameters(),
        architecture=architecture_of(model.config),
        vocabulary=sizes,
        scores=measured,
        versions={name: version(name) for name in REQUIRED_VERSIONS},
    )
    on_the_hub = (
        facts.base_model if HUB_ID.fullmatch(facts.base_model) and not Path(facts.base_model).exists() else None
    )
    metadata = card_metadata(facts, on_the_hub)
    write_text(path, render("finetuned_card_template.md", metadata, facts=facts, on_the_hub=on_the_hub))
    settings = read_object(folder / "config.json")
    if "custom_pipelines" in settings:
        settings["custom_pipelines"] = pipelines_of_folder(TASK if facts.is_translation else TEXT_TASK)
        write_text(folder / "config.json", json.dumps(settings, indent=2, sort_keys=True) + "\n")
    return path
