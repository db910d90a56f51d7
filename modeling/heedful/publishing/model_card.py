"""The model card: what a published model is, where it came from and how well it does, from the facts of its run.

The text is `model_card_template.md` beside this file (the `model_card.md` at the top of the repository is the same).
Every number in a card comes from `RunFacts`; nothing is left to be filled in by hand.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCardData

TEMPLATE = Path(__file__).with_name("model_card_template.md")

REQUIRED_VERSIONS = ("heedful", "transformers", "torch")

METRIC_NAMES = {"bleu": "BLEU", "chrf": "chrF2", "ter": "TER", "exact_match": "Exact match"}

LANGUAGE_CODE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]+)*")

HUB_DATASET = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+){0,2}")

_LICENSE_WORDS = """
afl-3.0 agpl-3.0 apache-2.0 apple-amlr apple-ascl artistic-2.0 bigcode-openrail-m bigscience-bloom-rail-1.0
bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5 cc-by-3.0
cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0
cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0 cdla-permissive-2.0 cdla-sharing-1.0
creativeml-openrail-m ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 gfdl gpl gpl-2.0 gpl-3.0 isc lgpl lgpl-2.1
lgpl-3.0 lppl-1.3c mit mpl-2.0 ms-pl ncsa odbl odc-by ofl-1.1 openrail openrail++ osl-3.0 pddl postgresql unknown
unlicense wtfpl zlib
"""

# The identifiers that the Hub knows; any other license is published as "other" with its name.
HUB_LICENSES = frozenset(_LICENSE_WORDS.split())

INTENDED_USE = (
    "Translating single sentences of the kind it was trained on, for research, teaching, and as a starting point for"
    " fine-tuning. Measure it on your own sentences before you rely on it."
)

LIMITS = (
    "It translates sentence by sentence: what the sentence before said is unknown to it.",
    "It can leave out, add or mistranslate words, names and numbers without any sign of doubt; the score that comes"
    " with a translation is no measure of its correctness.",
    "Sentences unlike its training data (other topics, styles, lengths or languages) come out worse, often by far.",
    "Biases of the training data are in the model.",
)

BUILTIN_LIMIT = (
    "Its training data are Heed's built-in Korean-English sentences, which are generated from a small vocabulary and a"
    " set of patterns. It knows no words beyond them and is no translator of real text; its scores do not compare"
    " with those of models that are."
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
        validation_loss: Best loss on the validation split, in nats per target token.
        versions: Version per package; "heedful", "transformers" and "torch" at least.
        example_source: A sentence to try, preferably from a test set.
        example_translation: What the model makes of it.
        example_language: The target language of the example, where the model knows several and must be told.
        repository: Id on the Hub, such as "someone/heed-small-ko-en". Default: `name`, until `heedful push` knows it.
        description: First paragraph of the card. Default: one sentence from the languages.
        intended_use: Default: `INTENDED_USE`.
        limits: Further limits, put before the general ones.
        citation: Further text under "Citation", such as the training data's. Default: none.
        tags: Further tags for the Hub.

    Raises:
        ValueError: For an empty or impossible value; the message names the field.

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
    repository: str | None = None
    description: str | None = None
    intended_use: str = INTENDED_USE
    limits: Sequence[str] = ()
    citation: str = ""
    tags: Sequence[str] = ()

    def __post_init__(self):
        """Check every field."""
        self._check_presence()
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

    def _check_presence(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is not None:
                raise ValueError(f"`{field.name}` must be given, but is None instead.")
            # A model may well translate its example into nothing; False and 0 are values.
            may_be_empty = field.default is not MISSING or field.name == "example_translation"
            if not may_be_empty and value in ("", (), [], {}):
                raise ValueError(f"`{field.name}` must not be empty, but is {value!r} instead.")
        for name in ("datasets", "limits", "tags"):
            if isinstance(getattr(self, name), str):
                raise ValueError(f"`{name}` must be a list, but is the string {getattr(self, name)!r} instead.")

    @classmethod
    def from_mapping(cls, facts: Mapping[str, Any]) -> Self:
        """Make the facts from a mapping, for example one read from JSON.

        Args:
            facts: A value per field.

        Raises:
            ValueError: For a missing, unknown, empty or impossible field.

        """
        required = [field.name for field in fields(cls) if field.default is MISSING]
        missing = [name for name in required if name not in facts]
        if missing:
            raise ValueError(f"`facts` must have {', '.join(f'`{name}`' for name in missing)}, but has not.")
        unknown = sorted(set(facts) - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(f"`facts` must have no other fields than RunFacts, but has `{unknown[0]}`.")
        return cls(**facts)


def write_model_card(folder: str | Path, facts: RunFacts | Mapping[str, Any]) -> Path:
    """Write a model's card, README.md, into its folder.

    Args:
        folder: The folder of the saved model.
        facts: The facts of its run.

    Returns:
        The path of the card.

    Raises:
        FileNotFoundError: When the folder does not exist.
        ValueError: For a missing, unknown, empty or impossible fact.

    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} must be the folder of a model, but does not exist.")
    path = folder / "README.md"
    path.write_text(render_model_card(facts), encoding="utf-8")
    return path


def render_model_card(facts: RunFacts | Mapping[str, Any]) -> str:
    """Fill in the template.

    Args:
        facts: The facts of a run.

    Returns:
        The card: metadata between two lines of ---, then Markdown.

    Raises:
        ValueError: For a missing, unknown, empty or impossible fact.

    """
    import jinja2

    if not isinstance(facts, RunFacts):
        facts = RunFacts.from_mapping(facts)
    # Strict: a name that the template has and we don't give is an error, not an empty place.
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {
        **{"count": _count, "duration": _duration, "score": _score, "cell": _cell},
        **{"tojson_text": _python_string, "quoted": _quoted},
    }
    text = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        facts=facts,
        metadata=card_metadata(facts).to_yaml(),
        repository=facts.repository or facts.name,
        tgt_lang=_keyword("tgt_lang", facts.example_language),
        target_language=_keyword("target_language", facts.example_language),
        description=facts.description or _default_description(facts),
        limits=_limits(facts),
        dropped=facts.cleaning.get("dropped", {}),
        recipe=dict(_flat(facts.recipe)),
        perplexity=f"{math.exp(min(facts.validation_loss, 700)):,.2f}",
        has_intervals=any(key.endswith("_interval") for scores in facts.scores.values() for key in scores),
        signatures=_signatures(facts),
        datasets=[_public(dataset) for dataset in facts.datasets],
    )
    return re.sub(r"\n{3,}", "\n\n", text).rstrip("\n") + "\n"


def with_repository(card: str, repository: str) -> str:
    """Return a card whose code loads the model from this repository."""
    line = f"repository = {_python_string(repository)}"
    return re.sub(r'^repository = ".*"$', lambda _: line, card, flags=re.MULTILINE)


def card_metadata(facts: RunFacts) -> "ModelCardData":
    """Make the metadata by which the Hub files a model, its scores (the model index) included.

    Args:
        facts: The facts of a run.

    """
    from huggingface_hub import ModelCardData

    license_id = facts.license.strip().lower()
    known = license_id in HUB_LICENSES
    hub_datasets = [dataset.split(":")[0] for dataset in facts.datasets if _is_on_the_hub(dataset)]
    metrics = [metric for metric in METRIC_NAMES if any(metric in scores for scores in facts.scores.values())]
    return ModelCardData(
        language=list(dict.fromkeys([facts.source_language, facts.target_language])),
        license=license_id if known else "other",
        license_name=None if known else re.sub(r"[^a-z0-9.+-]+", "-", license_id),
        library_name="transformers",
        pipeline_tag="translation",
        tags=["heed", "translation", "encoder-decoder", *facts.tags],
        datasets=hub_datasets or None,
        metrics=metrics or None,
        model_name=facts.name,
        eval_results=_evaluation_results(facts) or None,
    )


def _check_keys(field: str, mapping: Mapping[str, Any], keys: Sequence[str]) -> None:
    for key in keys:
        if key not in mapping:
            raise ValueError(f"`{field}` must have `{key}`, but has only {sorted(mapping)}.")


def _is_on_the_hub(dataset: str) -> bool:
    """Tell a dataset of the Hub from local files and the built-in corpus."""
    is_file = Path(dataset).suffix in (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt", ".gz")
    return bool(HUB_DATASET.fullmatch(dataset)) and not is_file and not dataset.startswith("builtin:")


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


def _default_description(facts: RunFacts) -> str:
    return (
        f"An encoder-decoder that translates {facts.source_language} into {facts.target_language}, trained from raw"
        " sentence pairs with Heedful."
    )


def _limits(facts: RunFacts) -> list[str]:
    is_builtin = any(dataset.startswith("builtin:") for dataset in facts.datasets)
    return [*facts.limits, *([BUILTIN_LIMIT] if is_builtin else []), *LIMITS]


def _signatures(facts: RunFacts) -> list[tuple[str, str, str]]:
    return [
        (test_set, METRIC_NAMES[metric], scores[f"{metric}_signature"])
        for test_set, scores in facts.scores.items()
        for metric in METRIC_NAMES
        if f"{metric}_signature" in scores
    ]


def _flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for key, value in settings.items():
        flat += _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]
    return flat


def _count(number: float) -> str:
    return f"{number:,}"


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
    return " ".join(_public(value).split()).replace("|", "\\|")


def _public(value: Any) -> str:
    """Take the folders off a path of this machine, which are nobody's business."""
    text = str(value)
    return Path(text).name if Path(text).is_absolute() else text


def _python_string(text: str) -> str:
    # JSON's strings are Python's too, and its double quotes are how the card's code is written.
    return json.dumps(text, ensure_ascii=False)


def _keyword(name: str, value: str | None) -> str:
    """Write a further keyword argument of a call, if there is one."""
    return "" if value is None else f", {name}={_python_string(value)}"


def _quoted(text: str) -> str:
    line = " ".join(text.split())
    return f'"{line}"' if line else "(nothing)"
