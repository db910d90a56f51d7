"""What would end a run or ruin its scores, found before it begins; `heedful doctor` asks the same functions."""

import logging
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from heedful.configuration_base_heed import position_limit
from heedful.data.encoding import EncodedPairs
from heedful.data.mixture import check_room
from heedful.data.tokenization import TokenizerPair
from heedful.files import shortened
from heedful.inference.search_settings import MOST_SOURCE_TOKENS
from heedful.training.preparation import Corpus, StoredCorpus
from heedful.training.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)

TRIED = 1000  # targets that a tokenizer has to give back
SOME, HALF = 0.01, 0.5  # of the targets, changed or cut off: more than some are told, half are an error
DROPPED, UNKNOWN = 0.02, 0.1  # of the training rows, and of the tokens, likewise


class Fault(NamedTuple):
    """What is wrong with a run; an error ends or ruins it."""

    check: str
    level: Literal["error", "warning"]
    key: str  # of the recipe
    told: str  # a sentence or two, with what to do
    rows: Sequence[int] = ()  # that it concerns, the longest first


def check_start(recipe: Recipe, corpus: Corpus, config: "PreTrainedConfig") -> None:
    """Raise a `ValueError` for what would end a run or make it worthless, and warn of what costs much of it."""
    check_room(recipe.data, config)
    splits = {"data.train": corpus.rows} if isinstance(corpus, StoredCorpus) else {}
    splits |= {"data.validation": corpus.validation, **corpus.tests}
    targets = [pair["target"] for pair in corpus.validation_pairs]
    faults = [*faults_of_targets(recipe, corpus.tokenizers, targets), *faults_of_lengths(recipe, config, splits)]
    faults += faults_of_limits(recipe, corpus.encoder.too_long, corpus.pairs or 0)
    for fault in faults:
        if fault.level == "error" and fault.check in ("ends", "round_trip", "positions"):
            raise ValueError(fault.told)
        logger.warning("warning: %s", fault.told)


def faults_of_targets(recipe: Recipe, tokenizers: TokenizerPair, targets: Sequence[str]) -> Iterator[Fault]:
    """Find out whether targets end in the end token, and are given back when they are decoded.

    Unicode's form NFC and single spaces make no difference, and what has an unknown token is left out.
    """
    key = "tokenizer.algorithm" if recipe.tokenizer.path is None else "tokenizer.path"
    key = key if recipe.model.start_from is None else "model.start_from"
    tried = targets[:: max(1, len(targets) // TRIED)]
    ids, end, unknown = tokenizers.encode_target(tried), tokenizers.target.eos_token_id, tokenizers.target.unk_token_id
    endless = [text for text, row in zip(tried, ids, strict=True) if row[-1:] != [end]]
    if endless:
        told = f"The tokenizer (`{key}`) must end each target in its end token (id {end}), but does not end "
        told += f"{len(endless):,} of {len(tried):,}, such as {shortened(endless[0])}: the model would not learn to "
        yield Fault("ends", "error", key, f"{told}stop. Give it a post-processor that appends the token.")
    if unknown is not None and (share := np.mean(np.concatenate(ids) == unknown)) >= UNKNOWN:
        told = f"The tokenizer (`{key}`) does not know {100 * share:.0f} % of the tokens of targets."
        yield Fault("unknown_tokens", "warning", key, told)
    rows = zip(tried, tokenizers.decode_target(ids), ids, strict=True)
    changed = [(text, back) for text, back, row in rows if unknown not in row and _plain(text) != _plain(back)]
    if len(changed) > SOME * len(tried):
        told = f"The tokenizer (`{key}`) must give targets back when it decodes them, but changes {len(changed):,} of "
        told += f"{len(tried):,}, such as {shortened(changed[0][0])} to {shortened(changed[0][1])}: no output can be "
        told += "right there. Take another tokenizer, or write the targets as it gives them back."
        yield Fault("round_trip", _graded(len(changed) / len(tried)), key, told)


def faults_of_lengths(
    recipe: Recipe, config: "PreTrainedConfig", splits: Mapping[str, EncodedPairs]
) -> Iterator[Fault]:
    """Find rows that are too long for the model, for what may be generated, or for an update.

    `splits` are the rows of each by its key in the recipe; those of training are the ones that its limits keep.
    """
    data, positions, new_tokens = recipe.data, position_limit(config), recipe.validation.max_new_tokens
    if positions is not None and recipe.validation.sentences != 0 and new_tokens > positions:
        told = f"`validation.max_new_tokens` must be at most {positions}, the model's positions, but is {new_tokens}"
        yield Fault("positions", "error", "validation.max_new_tokens", f"{told} instead.")
    most = positions or MOST_SOURCE_TOKENS
    for key, rows in splits.items():
        is_train = key == "data.train"
        sides = ((rows.source_lengths, data.max_source_tokens), (rows.target_lengths, data.max_target_tokens))
        lengths = np.maximum(*(side * bool(positions or not is_train or limit is None) for side, limit in sides))
        if found := _longest(lengths, most):
            whose = "the model's positions" if positions else "of which attention takes the square"
            told = f"`{key}` must have at most {most} tokens in a row, {whose}, but {len(found):,} of {len(rows):,} "
            told += f"rows have more, up to {lengths[found[0]]:,}. "
            told += "Lower `data.max_source_tokens` and `data.max_target_tokens`" if is_train else "Shorten these"
            yield Fault("positions", "error", key, told + ", or give the model more." * bool(positions), found)
    validation = splits["data.validation"].target_lengths
    limits = {"decoding.max_length": (recipe.decoding.max_length, 1)}  # which counts the decoder's start token
    limits |= {} if recipe.validation.sentences == 0 else {"validation.max_new_tokens": (new_tokens, 0)}
    for key, (limit, more) in limits.items():
        found = _longest(validation, limit - more)
        if len(found) > SOME * len(validation):
            told = f"`{key}` must be at least {validation[found[0]] + more}, or what is generated for "
            told += f"{len(found):,} of {len(validation):,} validation references is cut off."
            yield Fault("decoding_lengths", _graded(len(found) / len(validation)), key, told, found)
    if "data.train" in splits:
        usual = np.median(splits["data.train"].source_lengths + splits["data.train"].target_lengths)
        if usual > recipe.optimization.tokens_per_update:
            told = f"`optimization.tokens_per_update` must be at least {usual:.0f}, the tokens of a usual pair."
            yield Fault("updates", "warning", "optimization.tokens_per_update", told)


def faults_of_limits(recipe: Recipe, dropped: int, kept: int) -> Iterator[Fault]:
    """Find limits of length that drop many training rows."""
    if dropped > DROPPED * (dropped + kept):
        told = f"`data.max_source_tokens` ({recipe.data.max_source_tokens}) and `data.max_target_tokens` "
        told += f"({recipe.data.max_target_tokens}) drop {dropped:,} of {dropped + kept:,} training rows: raise them."
        yield Fault("lengths", _graded(dropped / (dropped + kept)), "data.max_source_tokens", told)


def _longest(lengths: np.ndarray, limit: int) -> list[int]:
    """Return the numbers of what is longer than a limit, the longest first."""
    found = np.flatnonzero(lengths > limit)
    return found[np.argsort(-lengths[found], kind="stable")].tolist()


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())


def _graded(share: float) -> Literal["error", "warning"]:
    return "error" if share >= HALF else "warning"
