"""Checks before a run, shared with `heedful doctor`: faults that would end it or ruin its scores."""

import logging
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from accelerate.tracking import get_available_trackers
from transformers import PreTrainedConfig

from heedful.configuration_base_heed import position_limit
from heedful.data.data_recipe import DataRecipe
from heedful.data.epochs.corpus import Corpus, StoredRows
from heedful.data.epochs.encoding import EncodedPairs
from heedful.data.tokenization import TokenizerPair
from heedful.data.tokenizer_training import TokenizerRecipe
from heedful.decoding.search_settings import MOST_SOURCE_TOKENS
from heedful.evaluation.metrics import score_translations
from heedful.files import import_extra
from heedful.messages_heed import shortened, wrong
from heedful.training.recipe import DecodingRecipe, ModelRecipe, OptimizationRecipe, Recipe, ValidationRecipe

logger = logging.getLogger(__name__)

TRIED = 1000  # targets to encode and decode
SOME, HALF = 0.01, 0.5  # share of changed or cut-off targets: a warning, and an error
DROPPED = 0.02  # share of training rows: a warning


class Fault(NamedTuple):
    """A fault in a run; an error ruins the run."""

    check: str
    level: Literal["error", "warning"]
    key: str  # recipe key
    message: str  # a sentence or two, with the remedy
    rows: Sequence[int] = ()  # rows with the fault, the longest first


def check_installed(settings: OptimizationRecipe, bleu_tokenizer: str | None, trackers: Sequence[str]) -> None:
    """Raise a `ValueError` for an optimizer, BLEU tokenizer or tracker that is not installed."""
    if settings.optimizer == "schedule_free":
        try:
            import_extra("schedulefree", "optimizers")
        except ImportError as error:
            raise wrong("optimization.optimizer", f"be installed ({error})", "schedule_free") from error
    try:
        score_translations([""], [""], tokenize=bleu_tokenizer, metrics=("bleu",))
    except (ImportError, ValueError) as error:
        raise wrong("decoding.bleu_tokenizer", f"be usable here ({error})", bleu_tokenizer) from error
    installed = [str(tracker) for tracker in get_available_trackers()]
    for name in trackers:
        if name not in installed:  # Accelerate would skip it without an error
            ones = ", ".join(installed) or "there is none"
            raise wrong("logging.trackers", f"name installed ones ({ones})", name, verb="names")


def check_start(found: Iterable[Fault]) -> None:
    """Raise the first fault that ends a run or makes it worthless, and warn of the others."""
    for fault in found:
        if fault.level == "error" and fault.check in ("ends", "round_trip", "positions"):
            raise ValueError(fault.message)
        logger.warning("warning: %s", fault.message)


def faults(recipe: Recipe, corpus: Corpus, config: PreTrainedConfig) -> Iterator[Fault]:
    """Find faults in a run's tokenizers, lengths and limits; raise a `ValueError` if the model lacks room."""
    positions, key = position_limit(config), tokenizer_key(recipe.tokenizer, recipe.model)
    recipe.data.check_room(positions)
    targets = [pair["target"] for pair in corpus.validation_pairs]
    yield from faults_of_targets(key, corpus.tokenizers, targets)
    training = corpus.training
    splits = {"data.train": training.rows} if isinstance(training, StoredRows) else {}
    splits |= {"data.validation": corpus.validation, **corpus.tests}
    yield from _too_long(recipe.data, recipe.validation, positions, splits)
    yield from _cut_off(recipe.decoding, recipe.validation, corpus.validation.target_lengths)
    if isinstance(training, StoredRows):
        usual = np.median(training.rows.source_lengths + training.rows.target_lengths)
        if usual > recipe.optimization.tokens_per_update:
            message = f"`optimization.tokens_per_update` must be at least {usual:.0f}, a usual pair's tokens."
            yield Fault("updates", "warning", "optimization.tokens_per_update", message)
        dropped, total = training.rows.left_out, training.rows.left_out + training.pairs
        if dropped > DROPPED * total:
            message = f"`data.max_source_tokens` ({recipe.data.max_source_tokens}) and `data.max_target_tokens` "
            message += f"({recipe.data.max_target_tokens}) drop {dropped:,} of {total:,} training rows: raise them."
            yield Fault("lengths", _graded(dropped / total), "data.max_source_tokens", message)


def tokenizer_key(tokenizer: TokenizerRecipe, model: ModelRecipe) -> str:
    """Return the recipe key that decides the tokenizers."""
    given = {"tokenizer.path": tokenizer.path, "model.start_from": model.start_from}
    return next((key for key, value in given.items() if value is not None), "tokenizer.vocab_size")


def faults_of_targets(key: str, tokenizers: TokenizerPair, targets: Sequence[str]) -> Iterator[Fault]:
    """Check that targets end in the end token, have known tokens, and come back from decoding except for spaces."""
    tried = targets[:: max(1, len(targets) // TRIED)]
    ids, end, unknown = tokenizers.encode_target(tried), tokenizers.target.eos_token_id, tokenizers.target.unk_token_id
    endless = [text for text, row in zip(tried, ids, strict=True) if row[-1:] != [end]]
    if endless:
        message = f"The tokenizer (`{key}`) must end each target in its end token (id {end}), but does not end "
        message += f"{len(endless):,} of {len(tried):,}, such as {shortened(endless[0])}: the model would not learn "
        yield Fault("ends", "error", key, f"{message}to stop. Give it a post-processor that appends the token.")
    if unknown is not None and (share := np.mean(np.concatenate(ids) == unknown)):
        message = f"The tokenizer (`{key}`) lacks {100 * share:.2g} % of the tokens in targets: the model "
        message += f"would write {tokenizers.target.unk_token} for them. Use a larger vocabulary, or subwords."
        yield Fault("unknown_tokens", "warning", key, message)
    rows = zip(tried, tokenizers.decode_target(ids), ids, strict=True)
    changed = [(text, back) for text, back, row in rows if unknown not in row and _plain(text) != _plain(back)]
    if len(changed) > SOME * len(tried):
        message = f"The tokenizer (`{key}`) must restore targets when it decodes them, but changes {len(changed):,} "
        message += f"of {len(tried):,}, such as {shortened(changed[0][0])} to {shortened(changed[0][1])}: no output "
        message += "can be right there. Use another tokenizer, or write the targets as it decodes them."
        yield Fault("round_trip", _graded(len(changed) / len(tried)), key, message)


def _too_long(
    data: DataRecipe, validation: ValidationRecipe, positions: int | None, splits: Mapping[str, EncodedPairs]
) -> Iterator[Fault]:
    new_tokens = validation.max_new_tokens
    if positions is not None and validation.sentences != 0 and new_tokens > positions:
        message = f"`validation.max_new_tokens` must be at most {positions}, the model's positions, but is "
        yield Fault("positions", "error", "validation.max_new_tokens", f"{message}{new_tokens} instead.")
    most = positions or MOST_SOURCE_TOKENS
    for key, rows in splits.items():
        is_train = key == "data.train"
        # Without positions, a limit in the recipe is deliberate.
        limits = (data.max_source_tokens, data.max_target_tokens) if is_train and positions is None else (None, None)
        lengths = np.maximum(rows.source_lengths * (limits[0] is None), rows.target_lengths * (limits[1] is None))
        if found := _longest(lengths, most):
            message = f"`{key}` must have at most {most} tokens in a row, "
            message += "the model's positions" if positions else "because attention grows quadratically"
            message += f", but {len(found):,} of {len(rows):,} rows have more, up to {lengths[found[0]]:,}. "
            message += "Lower `data.max_source_tokens` and `data.max_target_tokens`" if is_train else "Shorten these"
            yield Fault("positions", "error", key, message + ", or give the model more." * bool(positions), found)


def _cut_off(decoding: DecodingRecipe, validation: ValidationRecipe, lengths: np.ndarray) -> Iterator[Fault]:
    limits = {"decoding.max_length": (decoding.max_length, 1)}  # includes the decoder's start token
    if validation.sentences != 0:
        limits["validation.max_new_tokens"] = validation.max_new_tokens, 0
    for key, (limit, more) in limits.items():
        found = _longest(lengths, limit - more)
        if len(found) > SOME * len(lengths):
            message = f"`{key}` must be at least {lengths[found[0]] + more}, or outputs for "
            message += f"{len(found):,} of {len(lengths):,} validation references are cut off."
            yield Fault("decoding_lengths", _graded(len(found) / len(lengths)), key, message, found)


def _longest(lengths: np.ndarray, limit: int) -> list[int]:
    found = np.flatnonzero(lengths > limit)
    return [*found[np.argsort(-lengths[found], kind="stable")].tolist()]


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())


def _graded(share: float) -> Literal["error", "warning"]:
    return "error" if share >= HALF else "warning"
