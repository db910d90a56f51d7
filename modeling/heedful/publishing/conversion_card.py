"""The card of a converted model: what it was, whose license and languages it has, how it was converted."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heedful.inference.loading import HUB_ID
from heedful.publishing.model_card import LANGUAGE_CODE

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

UNDETERMINED = "und"  # ISO 639-2's code for a language that nobody named

TEXT = """---
{metadata}
---

# {name}

{origin}, converted by Heedful {version} into a Heed model that computes the same.

## Model description

| | |
|---|---|
| Converted from | {source} |
| Kind | {model_type} |
| Direction | {direction} |
| Parameters | {parameters:,} |
| License | {license} |

## How it was converted

`heedful convert` copied the weights and gave them Heed's names; nothing was trained or approximated. Both models were
run on random padded sentences in float32: their logits differ by {difference:.1e} at most, relative where logits are
above 1.

{notes}

## Intended use, limits, training and evaluation

Those of the model that was converted: {told}

## How to use

With transformers alone (5.17 or later). The model's code travels with its weights, so transformers asks you to trust
it. Read it, and put the commit that you have read in the place of `main`:

```python
from transformers import pipeline

repository = {repository}
revision = "main"
text = "…"  # a sentence of the source language

translate = pipeline(model=repository, revision=revision, trust_remote_code=True)
print(translate(text)[0]["translation_text"])
```

With Heedful installed nothing has to be trusted:

```python
from heedful import Translator

translator = Translator.from_pretrained(repository, revision=revision)
print(translator.translate([text])[0][0].text)
```
"""


@dataclass(frozen=True, kw_only=True)
class ConversionFacts:
    """What the card of a converted model tells.

    Attributes:
        source: Folder or Hub id of the model that was converted.
        model_type: What it was, such as "marian".
        parameters: Number of parameters, shared ones counted once.
        difference: Largest difference of a logit.
        languages: Of source and target, as the tokenizer names them; empty where it names none.
        notes: A sentence each.

    """

    source: str
    model_type: str
    parameters: int
    difference: float
    languages: Sequence[str] = ()
    notes: Sequence[str] = ()


def write_conversion_card(folder: Path, name: str, facts: ConversionFacts) -> Path:
    """Write README.md into the folder of a converted model, as `heedful push` wants it.

    License and, where the tokenizer names none, languages are those of the source's own card; where it has no card,
    or the card does not tell, they are `unknown` and `und`.

    Args:
        folder: Of the converted model.
        name: Of the converted model.
        facts: What happened.

    """
    from importlib.metadata import version

    theirs = _card_of(facts.source)
    base_model = _base_model(facts.source)
    metadata = _metadata(name, facts, theirs, base_model)
    license_told = f"{metadata.license}, as its card says"
    if metadata.license == "unknown":
        license_told = "unknown: the source has no card that tells; find out before you publish it"
    source = base_model or Path(facts.source).name
    text = TEXT.format(
        metadata=metadata.to_yaml(),
        name=name,
        origin=f"The {facts.model_type} model `{source}`",
        version=version("heedful"),
        source=f"[{source}](https://huggingface.co/{source})" if base_model else f"`{source}`",
        model_type=facts.model_type,
        direction=" → ".join(facts.languages or metadata.language or ()),
        parameters=facts.parameters,
        license=license_told,
        difference=facts.difference,
        notes="\n".join(f"- {note}" for note in facts.notes),
        told=f"see [its card](https://huggingface.co/{base_model})." if base_model else "see its card.",
        repository=json.dumps(name, ensure_ascii=False),
    )
    path = folder / "README.md"
    path.write_text(re.sub(r"\n{3,}", "\n\n", text), encoding="utf-8")
    return path


def _metadata(name: str, facts: ConversionFacts, theirs: dict[str, Any], base_model: str | None) -> "ModelCardData":
    from huggingface_hub import ModelCardData

    languages = theirs.get("language") or [UNDETERMINED]
    languages = [languages] if isinstance(languages, str) else languages
    # NLLB's "kor_Hang" and mBART's "ko_KR" are languages with a script or country.
    chosen = [language.split("_")[0] for language in facts.languages]
    if chosen and all(LANGUAGE_CODE.fullmatch(language) for language in chosen):
        languages = list(dict.fromkeys(chosen))
    about = {key: theirs[key] for key in ("license_name", "license_link") if key in theirs}
    return ModelCardData(
        language=languages,
        license=theirs.get("license") or "unknown",
        library_name="transformers",
        pipeline_tag="translation",
        tags=["heed", "translation", "encoder-decoder", facts.model_type],
        base_model=base_model,
        model_name=name,
        **about,
    )


def _card_of(source: str) -> dict[str, Any]:
    """Read the metadata of the source's own card, empty where it has none."""
    from huggingface_hub import ModelCard
    from transformers.utils import cached_file

    try:
        path = cached_file(source, "README.md", _raise_exceptions_for_missing_entries=False)
        return ModelCard.load(path, ignore_metadata_errors=True).data.to_dict() if path else {}
    except Exception:  # of the Hub, of YAML or of huggingface_hub: a card is missing or broken, and nothing else
        return {}


def _base_model(source: str) -> str | None:
    """Return the source's id on the Hub; of a folder, the one that its config remembers, if any."""
    folder = Path(source)
    if not folder.is_dir():
        return source
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    remembered = config.get("_name_or_path") or ""
    return remembered if HUB_ID.fullmatch(remembered) else None
