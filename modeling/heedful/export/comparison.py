"""Shared by all exports: model checks, the new folder, and the comparison with `generate()`.

`model` is a folder or Hub id with a Heed model or an adapter; `target` must not exist.
"""

import copy
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig

from heedful.cards.model_card import CARD_FILE
from heedful.conversion.families import SIDES, Choices, field_faults
from heedful.conversion.model_conversion import relative_difference
from heedful.data.sources import builtin_corpus, read_pairs, sample
from heedful.data.tokenization import TokenizerPair
from heedful.decoding.engines import GenerateEngine, token_batches
from heedful.decoding.loading import STOCK, load_model, model_folder, tokenizer_folder
from heedful.decoding.native.conditions import obstacle_to_copies
from heedful.decoding.search_settings import BEAM_SETTINGS, GREEDY_SETTINGS, SEARCH_SETTINGS, asked_of
from heedful.files import check_at_least, check_is_new, new_folder, read_lines
from heedful.messages_heed import wrong
from heedful.modeling_heed import HeedForConditionalGeneration
from heedful.symbols_heed import UnknownSymbol, trimmed
from heedful.training.publication import MODEL_FOLDER
from heedful.training.recipe_file import recipe_of

MORE_THAN_SOURCE = 50  # tokens beyond the batch's longest source that a translation may have
TOKEN_BUDGET = 4096
DRAWN_FROM = 100_000  # first pairs in a file
LEAST_LIKENESS = 0.5  # below it, quantization has ruined the model
# Settings that each form applies like `generate()`.
TOKENS = (*GREEDY_SETTINGS, "forced_bos_token_id", "forced_eos_token_id", "begin_suppress_tokens")
_ALL = frozenset(name for name in vars(GenerationConfig()) if name[0] != "_")
SETTINGS = {
    **dict.fromkeys(("transformers", "ONNX"), _ALL),
    "a page": frozenset((*TOKENS, *BEAM_SETTINGS, *SEARCH_SETTINGS)),
    "CTranslate2": frozenset((*GREEDY_SETTINGS, *BEAM_SETTINGS)),
}
# Forms that run without our code, with one tokenizer without languages.
COPIES = ("transformers", "a page")

Searches = dict[str, GenerationConfig]  # by names in messages
Outputs = dict[str, list[tuple[int, ...]]]  # each sentence's tokens, by search


class Difference(NamedTuple):
    """A sentence with other tokens than from `generate()`, and its number, counted from 0."""

    number: int
    sentence: str
    expected: Sequence[int]
    found: Sequence[int]


@dataclass(frozen=True)
class Comparison:
    """An engine's tokens, compared with those of `generate()`."""

    sentences: int
    differences: tuple[Difference, ...]

    @property
    def likeness(self) -> float:
        """Share of tokens that the outputs have in common, averaged over the sentences."""
        matchers = (SequenceMatcher(None, each.expected, each.found, autojunk=False) for each in self.differences)
        return 1 - sum(1 - matcher.ratio() for matcher in matchers) / self.sentences


@dataclass(frozen=True)
class Export:
    """An exported model and its comparison."""

    folder: Path
    quantization: str  # weight type
    size: int  # bytes of the weight files
    comparisons: dict[str, Comparison]  # by search name
    difference: float | None = None  # largest logit difference, relative if above 1


class UnscoredEngine(GenerateEngine):
    """`generate()` without scores, which comparisons do not need."""

    def generate(self, inputs: Any, settings: Any, processor: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a batch's `(batch, length)` tokens, and zeros as scores."""
        sequences = self.model.generate(**inputs, generation_config=settings, logits_processor=processor)
        return sequences, torch.zeros(len(sequences))


@dataclass(frozen=True)
class Draft:
    """A model during export, with the sentences to compare on."""

    model: HeedForConditionalGeneration  # on the CPU, in float32, its adapter merged
    tokenizers: TokenizerPair
    sentences: list[str]  # without blank ones
    folder: Path  # with the tokenizers
    dtype: torch.dtype = torch.float32  # saved model

    def outputs(self, engine: Any, searches: Searches, limit: int | None) -> Outputs:
        """Return an engine's outputs. Its model keeps the last search as generation config."""
        sources = encode(self.tokenizers, self.sentences, limit)
        found: Outputs = {}
        for name, search in searches.items():
            engine.model.generation_config = search  # not its own config, which would fill in missing settings
            found[name] = [()] * len(sources)
            for numbers in batches(sources, search, limit):
                hypotheses = engine.search([sources[number] for number in numbers], search, TOKEN_BUDGET)
                for number, (best,) in zip(numbers, hypotheses, strict=True):
                    found[name][number] = best.token_ids
        return found

    def compare(
        self, found: Outputs, searches: Searches, limit: int | None, engine: str, quantization: str
    ) -> dict[str, Comparison]:
        """Compare an engine's outputs with those of `generate()`, and `refuse` large differences."""
        expected = self.outputs(UnscoredEngine(self.model), searches, limit)
        comparisons = {name: compare(self.sentences, expected[name], found[name]) for name in searches}
        refuse(comparisons, engine, quantization)
        return comparisons


@contextmanager
def begun_export(model: str | Path, target: str | Path, sentences: Sequence[str], form: str) -> Iterator[Draft]:
    """Check and load a model, and yield it with a folder that becomes `target`, or is removed after an error."""
    check_is_new(Path(target))
    sentences = list(filter(None, map(trimmed, sentences)))
    if not sentences:
        raise ValueError("`sentences` must hold a sentence to compare on, but hold none.")
    loaded, tokenizers = load_for(form, model)
    with new_folder(target) as folder:
        tokenizers.save_pretrained(folder)
        dtype = loaded.dtype  # engines round half precision differently
        yield Draft(torch.nn.Module.float(loaded), tokenizers, sentences, folder, dtype)


def load_for(form: str, model: str | Path) -> tuple[Any, TokenizerPair]:
    """Load a model or adapter with its tokenizers; a `ValueError` if the form cannot hold them."""
    folder = model_folder(model)
    loaded: Any = load_model(folder)
    check_kind(loaded.config, form)  # before its tokenizers, which Heedful may not support
    tokenizers = TokenizerPair.from_pretrained(tokenizer_folder(folder))
    tokenizers.check_config(loaded.config)
    check_settings(loaded.generation_config, form)
    if form != "ONNX" and loaded.config.model_type == "heed" and (reason := obstacle_to_copies(loaded, form)):
        raise ValueError(reason)
    if form in COPIES and not tokenizers.is_joint:
        raise wrong("share_encoder_decoder_embeddings", f"be True for {form}, which has one tokenizer", False)
    if form in COPIES and len(tokenizers.languages) > 1:
        found = ", ".join(tokenizers.languages)
        raise ValueError(f"The model must have one target language for {form}, but has {found}.")
    return loaded, tokenizers


def model_name(model: str | Path) -> str:
    """Return a model's name: its Hub id, its card's heading, or its run or folder."""
    place = Path(model).resolve()
    if not place.is_dir():
        return str(model)
    heading = re.search(r"^# (.+)$", card_of(place), re.MULTILINE)
    return heading[1] if heading else (place.parent if place.name == MODEL_FOLDER else place).name


def card_of(folder: Path) -> str:
    """Return the model card's text, empty without a card."""
    return (folder / CARD_FILE).read_text(encoding="utf-8") if (folder / CARD_FILE).is_file() else ""


def check_kind(config: Any, form: str) -> None:
    """Raise a `ValueError` unless the form supports this model type."""
    hint = f"`heedful convert` turns {', '.join(STOCK)} models into Heed models"
    if config.model_type == "heed_rnn":
        if form == "a page" and config.attention == "none":
            raise wrong("attention", "be one of dot, scaled_dot, general, additive for a page", "none")
        hint = f"the engines have no recurrent decoder, such as this one with {config.cell} cells"
    if config.model_type != "heed" and (config.model_type, form) != ("heed_rnn", "a page"):
        raise wrong("model_type", "be heed to be exported", config.model_type, advice=hint)


def check_fields(config: Any, choices: Choices, form: str) -> None:
    """Raise one `ValueError` for all config fields that a form does not support."""
    faults = list(field_faults(config, choices))
    widths = (config.d_model // getattr(config, f"{side}_attention_heads") for side in SIDES)
    if any((config.d_k or width) != (config.d_v or width) for width in widths):
        faults.append(str(wrong("d_v", f"be the same as `d_k`, {config.d_k}", config.d_v)))
    if faults:
        raise ValueError(f"{form} cannot hold the model: {' '.join(faults)}")


def check_settings(config: GenerationConfig, form: str, where: str = "The model's generation_config.json") -> None:
    """Raise one `ValueError` for all settings that a form does not support."""
    asked = asked_of(config).items()
    faults = [f"`{name}` must not be set, but is {value!r}" for name, value in asked if name not in SETTINGS[form]]
    if faults:
        without = "Without them the model can be exported, but may generate other tokens"
        raise ValueError(f"{where} has settings that {form} does not support: {'; '.join(faults)}. {without}.")


def searches_of(config: GenerationConfig, beams: int, **others: Any) -> Searches:
    """Return a model's own settings with `others`, for greedy and beam search, without sampling."""
    found = {name: copy.deepcopy(config) for name in ("greedy", f"{beams} beams")}
    for number, search in zip((1, beams), found.values(), strict=True):
        search.update(num_beams=number, max_length=None, do_sample=False, num_return_sequences=1, **others)
    return found


def encode(tokenizers: TokenizerPair, sentences: list[str], limit: int | None) -> list[list[int]]:
    """Encode sentences for each target language in turn, with at most `limit` tokens."""
    languages = tokenizers.languages if len(tokenizers.languages) > 1 else (None,)
    sources: list[list[int]] = [[] for _ in sentences]
    for first, language in enumerate(languages):
        try:
            sources[first :: len(languages)] = tokenizers.encode_source(sentences[first :: len(languages)], language)
        except UnknownSymbol as error:
            number = first + error.index * len(languages) + 1
            raise error.at(f"Comparison sentence {number} (choose others with `--sentences`)") from None
    for number, source in enumerate(sources, start=1):
        if limit is not None and len(source) > limit:
            most = f"at most {limit} tokens, the model's number of positions"
            raise ValueError(f"Sentence {number} must have {most}, but has {len(source)} instead.")
    return sources


def batches(sources: list[list[int]], search: Any, limit: int | None) -> Iterator[list[int]]:
    """Yield the numbers of similarly long sources; `search` gets a suitable length for each batch."""
    costs = {number: len(source) * search.num_beams for number, source in enumerate(sources)}
    for numbers in token_batches(costs, TOKEN_BUDGET):
        longest = max(len(sources[number]) for number in numbers) + MORE_THAN_SOURCE
        search.max_new_tokens = min(longest, limit or longest)
        yield numbers


def compare(sentences: Sequence[str], expected: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> Comparison:
    """Compare `generate()` and an engine token by token, with `</s>` and without padding."""
    rows = enumerate(zip(sentences, expected, found, strict=True))
    differences = (Difference(number, *row) for number, row in rows if list(row[1]) != list(row[2]))
    return Comparison(len(sentences), tuple(differences))


def logits_difference(expected: torch.Tensor, found: torch.Tensor, tolerance: float) -> float:
    """Return the largest relative logit difference; a `ValueError` if it exceeds the tolerance."""
    difference = relative_difference(expected, found)
    if not difference <= tolerance:  # also refuses not-a-number
        raise ValueError(f"The exported model's logits differ by {difference:.1e}, so no folder is written.")
    return difference


def refuse(comparisons: dict[str, Comparison], engine: str, quantization: str) -> None:
    """Raise a `ValueError` if float32 gives other tokens, or another type has less than `LEAST_LIKENESS`."""
    for search, comparison in comparisons.items():
        if quantization == "float32" and comparison.differences:
            number, sentence, expected, found = comparison.differences[0]
            raise ValueError(
                f"The exported model's output differs from generate()'s for {len(comparison.differences)} of "
                f"{comparison.sentences} sentences, so no folder is written. The first is sentence {number + 1}, "
                f"{sentence!r}: generate() gives tokens {list(expected)}, {engine} ({search}) tokens {list(found)}."
            )
        if comparison.likeness < LEAST_LIKENESS:
            likeness = f"({search}) have {100 * comparison.likeness:.0f} % of their tokens in common with generate()'s"
            lost = f"`quantization` {quantization} ruins the model, so no folder is written"
            raise ValueError(f"{lost}: its translations {likeness}.")


def sentences_to_compare(model: str | Path, path: str | Path | None = None, count: int = 500) -> list[str]:
    """Draw sentences from a text file, the model's validation data, or (with a warning) built-in ones."""
    check_at_least(1, count=count)
    if path is not None:
        if sentences := [line.strip() for line in read_lines(path, "sentences") if line.strip()]:
            return sample(sentences, count)
        raise ValueError(f"`sentences` must hold a sentence to compare on, but {path} has none.")
    with suppress(OSError, ValueError):  # no recipe, or one from another version
        data = recipe_of(Path(model)).data
        split = "train" if data.located.validation is None else "validation"
        pairs = read_pairs(getattr(data.located, split), data.source, data.target, split=split, streaming=True)
        return sample([pair["source"] for pair in islice(pairs, DRAWN_FROM)], count)
    message = "The export is compared on built-in Korean and English sentences. Choose others with `--sentences`."
    warnings.warn(message, stacklevel=2)
    builtin = builtin_corpus().draw("test", (count + 1) // 2)
    return list(chain.from_iterable(pair.values() for pair in builtin))[:count]
