"""The card of a converted model: what it was, whose license and languages it has, how it was converted."""

import json
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from heedful.inference.loading import HUB_ID
from heedful.publishing.card_text import LANGUAGE_CODE, UNDETERMINED, metadata_of_card, render

TEMPLATE = "conversion_card_template.md"


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What became of a converted model.

    Attributes:
        source: Folder or Hub id of the model that was converted.
        folder: The folder of the Heed model.
        model_type: What it was, such as "marian".
        parameters: Number of parameters, shared ones counted once.
        difference: Largest difference of a logit, in float32; relative where logits are above 1.
        languages: Source and target language, as the tokenizer names them; empty where it names none.
        notes: What a user should know, a sentence each.
    """

    source: str
    folder: Path
    model_type: str
    parameters: int
    difference: float
    languages: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def write_conversion_card(folder: Path, conversion: Conversion) -> Path:
    """Write README.md into the folder of a converted model, as `heedful push` wants it.

    License and, where the tokenizer names none, languages are those of the source's own card; where it has no card,
    or its card does not name them, they are `unknown` and `und`.

    Args:
        folder: Where to write; `conversion.folder`, or what will get its name.
        conversion: What happened.

    Returns:
        The path of the card.
    """
    name = conversion.folder.name
    theirs = _card_of(conversion.source)
    base_model = _base_model(conversion.source)
    license_id = theirs.get("license") or "unknown"
    languages = _languages(conversion, theirs)
    about = {key: theirs[key] for key in ("license_name", "license_link") if key in theirs}
    metadata = metadata_of_card(
        name, languages, [conversion.model_type], license=license_id, base_model=base_model, **about
    )
    license_told = f"{license_id}, as its card says"
    if license_id == "unknown":
        license_told = "unknown: the source has no card that tells; find out before you publish it"
    text = render(
        TEMPLATE,
        metadata,
        name=name,
        version=version("heedful"),
        source=base_model or Path(conversion.source).name,
        base_model=base_model,
        direction=" → ".join(conversion.languages or languages),
        license=license_told,
        conversion=conversion,
    )
    path = folder / "README.md"
    path.write_text(text, encoding="utf-8")
    return path


def _languages(conversion: Conversion, theirs: dict[str, Any]) -> list[str]:
    """Return the codes of the languages: of the direction, or else of the source's own card."""
    # NLLB's "kor_Hang" and mBART's "ko_KR" are languages with a script or country.
    chosen = [language.split("_")[0] for language in conversion.languages]
    if chosen and all(LANGUAGE_CODE.fullmatch(language) for language in chosen):
        return list(dict.fromkeys(chosen))
    languages = theirs.get("language") or [UNDETERMINED]
    return [languages] if isinstance(languages, str) else languages


def _card_of(source: str) -> dict[str, Any]:
    """Read the metadata of the source's own card, empty where it has none."""
    from huggingface_hub import ModelCard
    from transformers.utils import cached_file

    try:
        path = cached_file(source, "README.md", _raise_exceptions_for_missing_entries=False)
        return ModelCard.load(path, ignore_metadata_errors=True).data.to_dict() if path else {}
    except Exception:  # whatever the Hub, YAML or huggingface_hub raise: the card is missing or broken
        return {}


def _base_model(source: str) -> str | None:
    """Return the source's id on the Hub; for a folder, the id that its config remembers, if any."""
    folder = Path(source)
    if not folder.is_dir():
        return source
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    remembered = config.get("_name_or_path") or ""
    return remembered if HUB_ID.fullmatch(remembered) else None
