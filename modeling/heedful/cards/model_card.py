"""Model cards, rendered from `CardFacts` by templates; `model_card.md` of the repository is the quickstart's."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCardData

from heedful.configuration_base_heed import TASK, TEXT_TASK
from heedful.data.languages import LANGUAGE_CODE, code_of
from heedful.data.tokenization import TokenizerPair
from heedful.decoding.loading import HUB_ID, load_model
from heedful.evaluation.error_rates import ERROR_RATES
from heedful.files import duration, first_line, private, read_object, write_text
from heedful.messages_heed import wrong
from heedful.pipeline_heed import pipelines_of_folder
from heedful.protocols import Seq2SeqModel
from heedful.training.publication import UNDETERMINED, is_translation
from heedful.training.run_folder.folder import leaves

TEMPLATES = Path(__file__).parent
CARD_FILE = "README.md"
REQUIRED_VERSIONS = ("heedful", "transformers", "torch")
METRIC_NAMES = {"bleu": "BLEU", "chrf": "chrF2", "chrf++": "chrF++", "ter": "TER", "exact_match": "Exact match"}
METRIC_NAMES |= {name: name.replace("_", " ").capitalize() for name in ERROR_RATES}
NO_CODE = {ord("`"): "'", ord("|"): "\\|"}  # these would end code, or its table cell
OTHER_TASK = "text-generation"  # the Hub's class for other tasks
HUB_DATASET = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+){0,2}")
# The Hub's identifiers; any other license is "other" with its name.
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
    """The facts on a trained or fine-tuned model's card; a `ValueError` names an empty or impossible fact."""

    name: str  # such as "heed-small-ko-en"
    source_language: str  # code, such as "ko"
    target_language: str
    license: str  # SPDX or Hub identifier, such as "apache-2.0"
    datasets: Sequence[str]  # as in recipes: a Hub id, a file, "builtin:train:100000"
    parameters: int  # shared parameters count once
    architecture: str  # a sentence or paragraph
    vocabulary: str  # such as "8,000 byte-level BPE pieces for both languages"
    scores: Mapping[str, Mapping[str, Any]]  # from `score_translations`, per test set
    versions: Mapping[str, str]  # per package
    run: Mapping[str, Any] | None = None  # from `facts_of`
    base_model: str | None = None  # for fine-tuning: a Hub id or a folder
    task: str | None = None  # if not translation, such as "answering questions"

    @property
    def is_translation(self) -> bool:
        """Whether the model translates from one natural language into another."""
        return self.task is None and is_translation(self.source_language, self.target_language)

    @property
    def metrics(self) -> list[str]:
        """The metrics of any test set."""
        return [name for name in METRIC_NAMES if any(name in scores for scores in self.scores.values())]

    @property
    def base_on_the_hub(self) -> str | None:
        """The base model, if it is a Hub id and no local folder."""
        name = self.base_model or ""
        return name if HUB_ID.fullmatch(name) and not Path(name).exists() else None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            may_be_empty = field.default is None or (field.name == "scores" and self.run is None)
            if value == "" or (not may_be_empty and value in (None, (), [], {})):
                raise wrong(field.name, "not be empty", repr(value))
        for name in ("source_language", "target_language"):
            code = getattr(self, name)
            if not LANGUAGE_CODE.fullmatch(code):
                raise wrong(name, "be a language's code such as ko", repr(code))
        for test_set, scores in self.scores.items():
            try:
                [f"{scores['count']:,}", *(_score(scores, metric) for metric in METRIC_NAMES)]
                [f"{ours:,} {theirs:,}" for ours, theirs in dict(scores.get("faults", {})).values()]
            except (LookupError, TypeError, ValueError) as error:
                must = "must have `count` and numbers as in `heedful evaluate --json`, but does not"
                raise ValueError(f"`scores[{test_set!r}]` {must}: {first_line(error)}.") from None
        if self.run is None and not self.task and not self.is_translation:
            found = f"{self.source_language} and {self.target_language}"
            advice = "for other tasks than translation, describe the task in `task`"
            raise wrong("source_language` and `target_language", "be two languages", found, verb="are", advice=advice)


def write_model_card(folder: str | Path, facts: CardFacts) -> Path:
    """Write a model's card, README.md, into its folder, and return its path."""
    path = Path(folder) / CARD_FILE
    write_text(path, render_model_card(facts))
    return path


def render_model_card(facts: CardFacts) -> str:
    """Return a model's card: metadata between two lines of ---, then Markdown."""
    template = "finetuned_card_template.md" if facts.run is None else "model_card_template.md"
    metric_names = {name: METRIC_NAMES[name] for name in facts.metrics}
    return render(template, card_metadata(facts), facts=facts, run=facts.run, metric_names=metric_names)


def facts_of_model(model: Seq2SeqModel, tokenizers: TokenizerPair, tokens: Sequence[str], **facts: Any) -> CardFacts:
    """Add a model's and its tokenizers' facts to `facts`; `tokens` are each side's word for tokens."""
    source, target = (f"{len(each):,}" for each in (tokenizers.source, tokenizers.target))
    vocabulary = f"{source} {tokens[0]} for both sides"
    if not tokenizers.is_joint:
        target += "" if tokens[0] == tokens[1] else f" {tokens[1]}"
        vocabulary = f"{source} {tokens[0]} for the source, {target} for the target"
    return CardFacts(
        parameters=model.num_parameters(),
        architecture=render("architecture_template.md", None, config=model.config).strip(),
        vocabulary=vocabulary,
        versions={name: version(name) for name in REQUIRED_VERSIONS},
        **facts,
    )


def write_finetuned_card(
    folder: str | Path,
    *,
    overwrite: bool = False,
    source_language: str | None = None,
    target_language: str | None = None,
    scores: Sequence[str | Path] = (),
    **facts: Any,
) -> Path:
    """Write a Trainer's model card, README.md, into the model's folder, for `heedful push`.

    The folder's config.json then names the model's pipeline. `scores` are files from `heedful evaluate --json`, named
    after the test sets. `facts` are the fields of `CardFacts` that you must give: `license`, `datasets`, `base_model`
    and, unless there are two languages, `task`; the default of `name` is the folder's name. An empty or impossible
    fact, or a model of another family, is a `ValueError`. Only `overwrite` replaces a README.md.
    """
    folder = Path(folder)
    if (folder / CARD_FILE).exists() and not overwrite:
        raise FileExistsError(f"{folder} must not have a card yet, but has {CARD_FILE}; `--overwrite` replaces it.")
    for file in scores:
        if not Path(file).is_file():
            raise FileNotFoundError(f"`scores` must be files from `heedful evaluate --json`, but {file} is no file.")
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


def card_metadata(facts: CardFacts) -> ModelCardData:
    """Return the metadata for the Hub, with scores (the model index)."""
    license_id = facts.license.strip().lower()
    known = license_id in HUB_LICENSES
    datasets = [dataset.split(":")[0] for dataset in facts.datasets if is_on_the_hub(dataset)]
    return metadata_of_card(
        facts.name,
        [facts.source_language, facts.target_language],
        is_translation=facts.is_translation,
        base_model=facts.base_on_the_hub,
        license=license_id if known else "other",
        license_name=None if known else re.sub(r"[^a-z0-9.+-]+", "-", license_id),
        datasets=datasets or None,
        metrics=facts.metrics or None,
        eval_results=_evaluation_results(facts) or None,
    )


def is_on_the_hub(dataset: str) -> bool:
    """Return whether a dataset is on the Hub, not local or built in."""
    is_file = Path(dataset).suffix in (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt", ".gz")
    is_here = is_file or dataset.startswith("builtin:") or Path(dataset).exists()
    return bool(HUB_DATASET.fullmatch(dataset)) and not is_here


def _evaluation_results(facts: CardFacts) -> list[EvalResult]:
    task: dict[str, Any] = {"task_type": OTHER_TASK}
    if facts.is_translation:
        direction = f"Translation {facts.source_language}-{facts.target_language}"
        task = {"task_type": "translation", "task_name": direction}
    found = []
    for test_set, scores in facts.scores.items():
        identifier = re.sub(r"[^A-Za-z0-9._/-]+", "-", test_set)  # the Hub requires one
        for metric in filter(scores.__contains__, METRIC_NAMES):
            arguments = {"signature": scores.get(f"{metric}_signature"), "ignore": scores.get("ignore")}
            value = round(float(scores[metric]), 2)
            measured: Any = {"metric_type": metric, "metric_name": METRIC_NAMES[metric], "metric_value": value}
            measured["metric_args"] = {name: one for name, one in arguments.items() if one is not None} or None
            found.append(EvalResult(dataset_type=identifier, dataset_name=_line(test_set), **task, **measured))
    return found


def metadata_of_card(
    name: str, languages: Sequence[str], tags: Sequence[str] = (), is_translation: bool = True, **others: Any
) -> ModelCardData:
    """Return a card's metadata; `tags` are added to those of all Heed models, and `None` leaves a field out."""
    task = "translation" if is_translation else OTHER_TASK
    return ModelCardData(
        language=list(dict.fromkeys(languages)),
        library_name="transformers",
        pipeline_tag=task,
        tags=["heed", task, "encoder-decoder", *tags],
        model_name=_line(name),
        **others,
    )


def render(template: str, metadata: ModelCardData | None, **facts: Any) -> str:
    """Fill in a template from this folder: its names, and the metadata, if any, between two `---`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: value if isinstance(value, Markdown) else _cell(value),  # if a template uses no filter
    )
    environment.filters |= FILTERS
    names = {"metadata": metadata and Markdown(metadata.to_yaml()), **facts}
    text = environment.get_template(template).render(names)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip("\n") + "\n"


def with_repository(card: str, repository: str) -> str:
    """Return a card whose code loads the model from this repository."""
    line = f"repository = {python_string(repository)}"
    return re.sub(r'^repository = ".*"$', lambda _: line, card, flags=re.MULTILINE)


class Markdown(str):
    """A text that templates write unchanged; other values become plain text on one line."""


def python_string(text: str) -> Markdown:
    """Write a string as Python does, in double quotes."""
    return Markdown(json.dumps(text, ensure_ascii=False))


def _score(scores: Mapping[str, Any], metric: str) -> str:
    if metric not in scores:
        return "–"
    interval = scores.get(f"{metric}_interval")
    return f"{scores[metric]:.2f}" + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")


def _line(value: Any) -> str:
    return " ".join(str(private(value)).split())


def _cell(value: Any) -> Markdown:
    text = re.sub(r"([\\`|])", r"\\\1", _line(value))
    return Markdown(text.replace("](", "]\\(").replace("<", "&lt;"))


def code(value: Any) -> Markdown:
    """Write a value between backticks, on one line."""
    return Markdown(f"`{_line(value).translate(NO_CODE)}`")


# Filters, such as `{{ value | count }}`.
FILTERS = {
    "code": code,
    "count": "{:,}".format,
    "duration": duration,
    "leaves": leaves,
    "markdown": Markdown,
    "perplexity": lambda loss: f"{math.exp(min(loss, 700)):,.2f}",
    "score": _score,
    "tojson_text": python_string,
}
