"""What all cards share: the metadata that every Heed model has, and how a template becomes a card."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

TEMPLATES = Path(__file__).parent
LANGUAGE_CODE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]+)*")
UNDETERMINED = "und"  # ISO 639-2's code for a language that nobody named


def metadata_of_card(name: str, languages: Sequence[str], tags: Sequence[str], **others: Any) -> "ModelCardData":
    """Make the metadata by which the Hub files a model.

    Args:
        name: Name of the model.
        languages: Codes of its languages.
        tags: Tags besides those of every Heed model.
        others: Further fields, such as `license`; None leaves one out.
    """
    from huggingface_hub import ModelCardData

    return ModelCardData(
        language=list(dict.fromkeys(languages)),
        library_name="transformers",
        pipeline_tag="translation",
        tags=["heed", "translation", "encoder-decoder", *tags],
        model_name=name,
        **others,
    )


def render(template: str, metadata: "ModelCardData", **facts: Any) -> str:
    """Fill in a template.

    Args:
        template: Its file name; it lies beside this file.
        metadata: For the lines between the two `---`.
        facts: All names that the template has.

    Raises:
        jinja2.UndefinedError: If the template has a name that is not given.
    """
    import jinja2

    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= FILTERS
    source = (TEMPLATES / template).read_text(encoding="utf-8")
    text = environment.from_string(source).render(metadata=metadata.to_yaml(), **facts)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip("\n") + "\n"


def with_repository(card: str, repository: str) -> str:
    """Return a card whose code loads the model from this repository."""
    line = f"repository = {python_string(repository)}"
    return re.sub(r'^repository = ".*"$', lambda _: line, card, flags=re.MULTILINE)


def without_folders(value: Any) -> str:
    """Return a value as text; of a path on this machine only its last part, for the rest is nobody's business."""
    text = str(value)
    return Path(text).name if Path(text).is_absolute() else text


def python_string(text: str) -> str:
    """Write a string as Python does, in double quotes as in the rest of a card's code."""
    return json.dumps(text, ensure_ascii=False)


def _keyword(value: str | None, name: str) -> str:
    """Write a further keyword argument of a call, if there is a value."""
    return "" if value is None else f", {name}={python_string(value)}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _score(scores: Mapping[str, Any], metric: str) -> str:
    if metric not in scores:
        return "–"
    interval = scores.get(f"{metric}_interval")
    brackets = f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else ""
    return f"{scores[metric]:.2f}{brackets}"


def _cell(value: Any) -> str:
    """Make a value fit for one cell of a Markdown table."""
    return " ".join(without_folders(value).split()).replace("|", "\\|")


def _quoted(text: str) -> str:
    line = " ".join(text.split())
    return f'"{line}"' if line else "(nothing)"


# What templates write as `{{ value | count }}`.
FILTERS = {
    "cell": _cell,
    "count": "{:,}".format,
    "duration": _duration,
    "keyword": _keyword,
    "quoted": _quoted,
    "score": _score,
    "tojson_text": python_string,
}
