"""The model card: what a published model is, where it came from and how well it does, from the facts of its run.

The text is `model_card_template.md` beside this file; `model_card.md` at the top of the repository is what it becomes
for the quickstart's model. Every number in a card comes from `RunFacts`; nothing is left to be filled in by hand.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heedful.publishing.card_text import LANGUAGE_CODE, metadata_of_card, render, without_folders

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCardData

TEMPLATE = "model_card_template.md"
REQUIRED_VERSIONS = ("heedful", "transformers", "torch")
METRIC_NAMES = {"bleu": "BLEU", "chrf": "chrF2", "ter": "TER", "exact_match": "Exact match"}
BUILTIN = "builtin:"  # begins the location of a built-in corpus
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
INTENDED_USE = (
    "Translating single sentences of the kind it was trained on, for research, teaching, and as a starting point for"
    " fine-tuning. Measure it on your own sentences before you rely on it."
)
LIMITS = (
    "It translates sentence by sentence, and does not know what the previous sentence said.",
    "It can leave out, add or mistranslate words, names and numbers without any sign of doubt; the score of a"
    " translation does not measure its correctness.",
    "Sentences unlike its training data (other topics, styles, lengths or languages) come out worse, often by far.",
    "The model has the biases of its training data.",
)
BUILTIN_LIMIT = (
    "Its training data are Heed's built-in Korean-English sentences, which are generated from a small vocabulary and a"
    " set of patterns. It knows no other words and cannot translate real text; its scores cannot be compared with"
    " those of models that can."
)


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Everything a model card tells about a training run.

    Attributes:
        name: Name of the model, such as "heed-small-ko-en".
        source_language: Code of the source language, such as "ko".
        target_language: Code of the target language, such as "en".
        license: SPDX or Hub identifier of the model's license, such as "apache-2.0".
        datasets: Where the training data came from, each in the form that the recipe names it (a Hub id, a file,
            "builtin:train:100000").
        pairs: Number of sentence pairs per split, as used, such as {"train": 100000, "validation": 1000}.
        cleaning: `CleaningReport.to_dict()` of the training split: "kept", and "dropped" per reason.
        parameters: Number of parameters, shared ones counted once.
        architecture: One sentence or paragraph on the architecture.
        vocabulary: One line on the vocabularies, such as "8,000 byte-level BPE pieces for both languages".
        joint_vocabulary: Whether source and target share one tokenizer.
        recipe: The settings of the run; nested mappings are shown as `outer.inner`.
        updates: Number of updates (optimizer steps).
        target_tokens: Number of target tokens that were trained on, repetitions counted.
        seconds: Duration of the training.
        hardware: What it ran on, such as "1 × NVIDIA H200" or "2 CPU cores".
        scores: What `score_translations` gave, per name of a test set.
        validation_loss: Loss of the published weights on the validation split, in nats per target token.
        versions: Version per package; "heedful", "transformers" and "torch" at least.
        example_source: A sentence to try, preferably from a test set.
        example_translation: What the model makes of it.
        example_language: The target language of the example, where the model knows several and must be told.
        intended_use: What the model is for.
        limits: Further limits, put before the general ones.

    Raises:
        ValueError: If a value is empty or impossible; the message names the field.
    """

    name: str
    source_language: str
    target_language: str
    license: str
    datasets: Sequence[str]
    pairs: Mapping[str, int]
    cleaning: Mapping[str, Any]
    parameters: int
    architecture: str
    vocabulary: str
    joint_vocabulary: bool
    recipe: Mapping[str, Any]
    updates: int
    target_tokens: int
    seconds: float
    hardware: str
    scores: Mapping[str, Mapping[str, Any]]
    validation_loss: float
    versions: Mapping[str, str]
    example_source: str
    example_translation: str
    example_language: str | None = None
    intended_use: str = INTENDED_USE
    limits: Sequence[str] = ()

    def __post_init__(self):
        """Check every field."""
        for field in fields(self):
            value = getattr(self, field.name)
            # A model may translate its example into nothing.
            empty: list[Any] = [None] if field.name == "example_translation" else [None, "", (), [], {}]
            if field.default is MISSING and value in empty:
                raise ValueError(f"`{field.name}` must not be empty, but is {value!r} instead.")
        for name in ("source_language", "target_language"):
            code = getattr(self, name)
            if not LANGUAGE_CODE.fullmatch(code):
                raise ValueError(f"`{name}` must be a language's code such as ko, but is {code!r} instead.")
        for name in ("parameters", "updates", "target_tokens", "seconds", "validation_loss"):
            number = getattr(self, name)
            if not isinstance(number, int | float) or not 0 < number < math.inf:
                raise ValueError(f"`{name}` must be a number above 0, but is {number!r} instead.")
        _check_keys("cleaning", self.cleaning, ("kept",))
        _check_keys("versions", self.versions, REQUIRED_VERSIONS)
        for test_set, scores in self.scores.items():
            _check_keys(f"scores[{test_set!r}]", scores, ("count",))


def write_model_card(folder: str | Path, facts: RunFacts) -> Path:
    """Write a model's card, README.md, into its folder.

    Args:
        folder: The folder of the saved model.
        facts: The facts of its run.

    Returns:
        The path of the card.

    Raises:
        FileNotFoundError: If the folder does not exist.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} must be the folder of a model, but does not exist.")
    path = folder / "README.md"
    path.write_text(render_model_card(facts), encoding="utf-8")
    return path


def render_model_card(facts: RunFacts) -> str:
    """Return the card of a run: metadata between two lines of ---, then Markdown."""
    is_builtin = any(dataset.startswith(BUILTIN) for dataset in facts.datasets)
    return render(
        TEMPLATE,
        card_metadata(facts),
        facts=facts,
        limits=[*facts.limits, *([BUILTIN_LIMIT] if is_builtin else []), *LIMITS],
        recipe=_flat(facts.recipe),
        perplexity=f"{math.exp(min(facts.validation_loss, 700)):,.2f}",
        has_intervals=any(key.endswith("_interval") for scores in facts.scores.values() for key in scores),
        metric_names=METRIC_NAMES,
        datasets=[without_folders(dataset) for dataset in facts.datasets],
    )


def card_metadata(facts: RunFacts) -> "ModelCardData":
    """Make the metadata by which the Hub files a model, its scores (the model index) included."""
    license_id = facts.license.strip().lower()
    known = license_id in HUB_LICENSES
    hub_datasets = [dataset.split(":")[0] for dataset in facts.datasets if _is_on_the_hub(dataset)]
    metrics = [metric for metric in METRIC_NAMES if any(metric in scores for scores in facts.scores.values())]
    return metadata_of_card(
        facts.name,
        [facts.source_language, facts.target_language],
        [],
        license=license_id if known else "other",
        license_name=None if known else re.sub(r"[^a-z0-9.+-]+", "-", license_id),
        datasets=hub_datasets or None,
        metrics=metrics or None,
        eval_results=_evaluation_results(facts) or None,
    )


def _check_keys(field: str, mapping: Mapping[str, Any], keys: Sequence[str]) -> None:
    for key in keys:
        if key not in mapping:
            raise ValueError(f"`{field}` must have `{key}`, but has only {sorted(mapping)}.")


def _is_on_the_hub(dataset: str) -> bool:
    """Tell a dataset of the Hub from local files and the built-in corpus."""
    is_file = Path(dataset).suffix in (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt", ".gz")
    return bool(HUB_DATASET.fullmatch(dataset)) and not is_file and not dataset.startswith(BUILTIN)


def _evaluation_results(facts: RunFacts) -> "list[EvalResult]":
    from huggingface_hub import EvalResult

    return [
        EvalResult(
            task_type="translation",
            task_name=f"Translation {facts.source_language}-{facts.target_language}",
            # Not a dataset of the Hub, but the Hub demands an identifier.
            dataset_type=re.sub(r"[^A-Za-z0-9._/-]+", "-", test_set),
            dataset_name=test_set,
            metric_type=metric,
            metric_name=METRIC_NAMES[metric],
            metric_value=round(float(scores[metric]), 2),
            metric_args={"signature": scores[f"{metric}_signature"]} if f"{metric}_signature" in scores else None,
        )
        for test_set, scores in facts.scores.items()
        for metric in METRIC_NAMES
        if metric in scores
    ]


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one level, with names like `outer.inner`."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
