"""The model card: what a published model is, where it came from and how well it does, from the facts of its run.

The text is `model_card_template.md` beside this file; `model_card.md` at the top of the repository is what it becomes
for the quickstart's model. Every number in a card comes from `RunFacts`; nothing is left to be filled in by hand. The
cards of fine-tuned and of converted models have templates of their own, and the same renderer.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCardData

from heedful.evaluation.error_rates import ERROR_RATES
from heedful.files import duration
from heedful.training.publication import LANGUAGE_CODE, is_translation
from heedful.training.run_folder.folder import leaves

TEMPLATES = Path(__file__).parent
CARD_FILE = "README.md"
REQUIRED_VERSIONS = ("heedful", "transformers", "torch")
METRIC_NAMES = {"bleu": "BLEU", "chrf": "chrF2", "ter": "TER", "exact_match": "Exact match"}
METRIC_NAMES |= {name: name.replace("_", " ").capitalize() for name in ERROR_RATES}
NO_CODE = {ord("`"): "'", ord("|"): "\\|"}  # what would end code, or the cell of a table that it is in
BUILTIN = "builtin:"  # begins the location of a built-in corpus
OTHER_TASK = "text-generation"  # by which the Hub files what makes text of text and is no translation
HUB_DATASET = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+){0,2}")
# The identifiers that the Hub knows; any other license is published as "other" with its name.
_LICENSE_WORDS = """
afl-3.0 agpl-3.0 apache-2.0 apple-amlr apple-ascl artistic-2.0 bigcode-openrail-m bigscience-bloom-rail-1.0
bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5 cc-by-3.0
cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0
cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0 cdla-permissive-2.0 cdla-sharing-1.0
creativeml-openrail-m ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 gfdl gpl gpl-2.0 gpl-3.0 isc lgpl lgpl-2.1
lgpl-3.0 lppl-1.3c mit mpl-2.0 ms-pl ncsa odbl odc-by ofl-1.1 openrail openrail++ osl-3.0 pddl postgresql unknown
unlicense wtfpl zlib
"""
HUB_LICENSES = frozenset(_LICENSE_WORDS.split())


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """What every trained model's card tells; a value that is empty or impossible is refused by name."""

    name: str  # such as "heed-small-ko-en"
    source_language: str  # a code, such as "ko"
    target_language: str
    license: str  # SPDX or Hub identifier, such as "apache-2.0"
    datasets: Sequence[str]  # each as the recipe names it: a Hub id, a file, "builtin:train:100000"
    parameters: int  # shared ones counted once
    architecture: str  # a sentence or paragraph
    vocabulary: str  # such as "8,000 byte-level BPE pieces for both languages"
    scores: Mapping[str, Mapping[str, Any]]  # what `score_translations` gave, per name of a test set
    versions: Mapping[str, str]  # per package; of `REQUIRED_VERSIONS` at least

    @property
    def is_translation(self) -> bool:
        """Whether the model goes from a natural language into another one."""
        return is_translation(self.source_language, self.target_language)

    @property
    def has_intervals(self) -> bool:
        """Whether any score comes with the interval in which it lies."""
        return any(key.endswith("_interval") for scores in self.scores.values() for key in scores)

    def __post_init__(self):
        """Check every field."""
        for field in fields(self):
            value = getattr(self, field.name)
            # A model may translate its example into nothing.
            empty: list[Any] = [None] if field.name == "example_translation" else [None, "", (), [], {}]
            if field.default is MISSING and field.default_factory is MISSING and value in empty:
                raise ValueError(f"`{field.name}` must not be empty, but is {value!r} instead.")
        for name in ("source_language", "target_language"):
            code = getattr(self, name)
            if not LANGUAGE_CODE.fullmatch(code):
                raise ValueError(f"`{name}` must be a language's code such as ko, but is {code!r} instead.")
        for test_set, scores in self.scores.items():
            if "count" not in scores:
                raise ValueError(f"`scores[{test_set!r}]` must have `count`, but has only {sorted(scores)}.")


@dataclass(frozen=True, kw_only=True)
class RunFacts(CardFacts):
    """Everything a model card tells about a training run."""

    pairs: Mapping[str, int]  # as used, per split, such as {"train": 100000, "validation": 1000}
    cleaning: Mapping[str, Any]  # `CleaningReport.to_dict()` of the training split: "kept", and "dropped" per reason
    joint_vocabulary: bool  # whether source and target share one tokenizer
    recipe: Mapping[str, Any]  # the settings of the run; nested ones are shown as `outer.inner`
    updates: int  # optimizer steps
    target_tokens: int  # that were trained on, repetitions counted
    seconds: float  # of training
    hardware: str  # such as "1 × NVIDIA H200" or "2 CPU cores"
    validation_loss: float  # of the published weights, in nats per target token
    example_source: str  # a sentence to try, preferably from a test set
    example_translation: str  # what the model makes of it
    sides: tuple[str, str] = ("source", "target")  # in Markdown, of a task that is no translation
    example_language: str | None = None  # into which, where the model knows several and must be told
    intended_use: str = ""  # the template's general one if empty
    limits: Sequence[str] = ()  # put before the template's general ones
    learning_curve: str = ""  # the picture's file, beside the card

    @property
    def direction(self) -> tuple[str, str]:
        """What the model goes from and to: languages, or what the data call their sides."""
        return (self.source_language, self.target_language) if self.is_translation else self.sides


def write_model_card(folder: str | Path, facts: RunFacts) -> Path:
    """Write a model's card, README.md, into its folder, and return its path."""
    path = Path(folder) / CARD_FILE
    path.write_text(render_model_card(facts), encoding="utf-8")
    return path


def render_model_card(facts: RunFacts) -> str:
    """Return the card of a run: metadata between two lines of ---, then Markdown."""
    return render(
        "model_card_template.md",
        card_metadata(facts),
        facts=facts,
        is_builtin=any(dataset.startswith(BUILTIN) for dataset in facts.datasets),
        recipe=leaves(facts.recipe),
        perplexity=f"{math.exp(min(facts.validation_loss, 700)):,.2f}",
    )


def card_metadata(facts: CardFacts, base_model: str | None = None) -> ModelCardData:
    """Make the metadata by which the Hub files a model, its scores (the model index) included."""
    license_id = facts.license.strip().lower()
    known = license_id in HUB_LICENSES
    hub_datasets = [dataset.split(":")[0] for dataset in facts.datasets if _is_on_the_hub(dataset)]
    metrics = [metric for metric in METRIC_NAMES if any(metric in scores for scores in facts.scores.values())]
    return metadata_of_card(
        facts.name,
        [facts.source_language, facts.target_language],
        [],
        facts.is_translation,
        base_model=base_model,
        license=license_id if known else "other",
        license_name=None if known else re.sub(r"[^a-z0-9.+-]+", "-", license_id),
        datasets=hub_datasets or None,
        metrics=metrics or None,
        eval_results=_evaluation_results(facts) or None,
    )


def _is_on_the_hub(dataset: str) -> bool:
    """Tell a dataset of the Hub from local files and the built-in corpus."""
    is_file = Path(dataset).suffix in (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt", ".gz")
    return bool(HUB_DATASET.fullmatch(dataset)) and not is_file and not dataset.startswith(BUILTIN)


def _evaluation_results(facts: CardFacts) -> list[EvalResult]:
    direction = f"Translation {facts.source_language}-{facts.target_language}"
    return [
        EvalResult(
            task_type="translation" if facts.is_translation else OTHER_TASK,
            task_name=direction if facts.is_translation else None,
            # Not a dataset of the Hub, but the Hub demands an identifier.
            dataset_type=re.sub(r"[^A-Za-z0-9._/-]+", "-", test_set),
            dataset_name=test_set,
            metric_type=metric,
            metric_name=METRIC_NAMES[metric],
            metric_value=round(float(scores[metric]), 2),
            metric_args=_arguments(scores, metric),
        )
        for test_set, scores in facts.scores.items()
        for metric in METRIC_NAMES
        if metric in scores
    ]


def _arguments(scores: Mapping[str, Any], metric: str) -> dict[str, Any] | None:
    """Return how a metric was computed, as far as its value does not say so."""
    told = {"signature": scores.get(f"{metric}_signature"), "ignore": scores.get("ignore")}
    return {name: value for name, value in told.items() if value is not None} or None


def metadata_of_card(
    name: str, languages: Sequence[str], tags: Sequence[str], is_translation: bool = True, **others: Any
) -> ModelCardData:
    """Make the metadata by which the Hub files a model, with tags besides those of every Heed model.

    Of further fields, such as `license`, None leaves one out.
    """
    task = "translation" if is_translation else OTHER_TASK
    return ModelCardData(
        language=list(dict.fromkeys(languages)),
        library_name="transformers",
        pipeline_tag=task,
        tags=["heed", task, "encoder-decoder", *tags],
        model_name=name,
        **others,
    )


def render(template: str, metadata: ModelCardData, **facts: Any) -> str:
    """Fill in a template beside this file: the metadata between the two `---`, and all names that it has."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= FILTERS
    text = environment.get_template(template).render(metadata=metadata.to_yaml(), metric_names=METRIC_NAMES, **facts)
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


def _score(scores: Mapping[str, Any], metric: str) -> str:
    if metric not in scores:
        return "–"
    interval = scores.get(f"{metric}_interval")
    brackets = f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else ""
    return f"{scores[metric]:.2f}{brackets}"


def _cell(value: Any) -> str:
    """Write a value as plain text in Markdown, on one line: for a heading, a sentence or a cell of a table."""
    line = re.sub(r"([\\`<|])", r"\\\1", " ".join(without_folders(value).split()))
    return line.replace("](", "]\\(")


def code(value: Any) -> str:
    """Write a value between backticks, on one line."""
    return f"`{' '.join(without_folders(value).split()).translate(NO_CODE)}`"


def _quoted(text: str) -> str:
    line = " ".join(text.split())
    return f'"{line}"' if line else "(nothing)"


# What templates write as `{{ value | count }}`.
FILTERS = {
    "cell": _cell,
    "code": code,
    "count": "{:,}".format,
    "duration": duration,
    "keyword": _keyword,
    "quoted": _quoted,
    "score": _score,
    "tojson_text": python_string,
    "without_folders": without_folders,
}
