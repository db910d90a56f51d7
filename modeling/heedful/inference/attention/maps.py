"""Attention maps: which tokens a model looks at, as numbers with readable labels.

Section 3.2.3 of the paper names the three kinds: in "cross" attention every target position looks at the source, in
"encoder" and "decoder" self-attention at its own sequence; the pictures of the paper's appendix are such maps.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from heedful.configuration_base_heed import position_limit
from heedful.data.tokenization import TokenizerPair
from heedful.inference.attention.labels import Words, shown_words, token_labels, token_words
from heedful.inference.attention.recording import (
    KINDS,
    HeadStates,
    Kind,
    check_number,
    record_attention,
    recorded_heads,
)
from heedful.inference.translation import Translator
from heedful.symbols_heed import trimmed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """Attention weights between labelled tokens.

    Attributes:
        source_tokens: Labels of the columns, the tokens that are looked at: the source's, or for "decoder" those that
            the decoder was fed, <s> first.
        target_tokens: Labels of the rows, the tokens that look: for "encoder" the source's, for "cross" and "decoder"
            the tokens that are *predicted* (row i holds the attention by which target token i was chosen).
        weights: float32 array (rows, columns); each row sums to 1.
        kind: "cross", "encoder" or "decoder".
    """

    source_tokens: list[str]
    target_tokens: list[str]
    weights: np.ndarray
    kind: Kind = "cross"


@dataclass(frozen=True, eq=False)
class AttentionSteps:
    """What one head computes for one pair, step by step (equation 1), as float32 arrays: softmax(QKᵀ/√d_k) V."""

    attention: AttentionMap  # its weights, with the labels of rows and columns
    query: np.ndarray  # (rows, d_k)
    key: np.ndarray  # (columns, d_k)
    value: np.ndarray  # (columns, d_v)
    scores: np.ndarray  # q·k, or vᵀ tanh(q + k), of each (rows, columns); −∞ where a mask hides the column
    scaling: float  # what scores are multiplied by before the softmax: 1/√d_k, or 1 in a model that does not scale

    @property
    def scaled(self) -> np.ndarray:
        """The scaled scores (rows, columns), which the softmax turns into the weights."""
        return self.scores * self.scaling

    @property
    def output(self) -> np.ndarray:
        """The sums of the values (rows, d_v), weighted: what the head gives to the output projection."""
        return self.attention.weights @ self.value


@dataclass(frozen=True, eq=False)
class AttentionMaps:
    """The attention weights of one pair: every kind that was asked for, every layer and head.

    Attributes:
        source_tokens: Labels of the source's tokens.
        target_tokens: Labels of the target's tokens, </s> included.
        fed_tokens: Labels of what the decoder was fed, the start token first; token i was chosen after fed token i.
        source_words: For each source token the number of its word, from 0, or None for control tokens and spaces.
        target_words: The same of the target tokens.
        weights: For each kind a float32 array (layers, heads, rows, columns), rows and columns as in `AttentionMap`.
        neighbourhoods: How many positions away a row may look, for the kinds that are restricted (section 4).
        source_shown: The words that pictures show in place of the source's tokens; None shows the tokens.
        target_shown: The same of the target.
        states: For each kind what the heads of each layer compute on the way to their weights. Models other than
            Heed's Transformer have none.
    """

    source_tokens: list[str]
    target_tokens: list[str]
    fed_tokens: list[str]
    source_words: list[int | None]
    target_words: list[int | None]
    weights: dict[Kind, np.ndarray]
    neighbourhoods: dict[Kind, int] = field(default_factory=dict)
    source_shown: Words | None = None
    target_shown: Words | None = None
    states: dict[Kind, list[HeadStates]] = field(default_factory=dict)

    @property
    def kinds(self) -> list[Kind]:
        """The kinds that are here."""
        return list(self.weights)

    def layers(self, kind: Kind) -> int:
        """Return the number of layers with this kind of attention; a `ValueError` if the kind is not here."""
        return len(self._of_kind(kind))

    def heads(self, kind: Kind) -> int:
        """Return the number of heads of each layer; a `ValueError` if the kind is not here."""
        return self._of_kind(kind).shape[1]

    def layer_number(self, kind: Kind, layer: int) -> int:
        """Return the number from 0 of a layer that may be counted from -1 for the last; a `ValueError` if none is."""
        check_number("layer", layer, self.layers(kind))
        return layer % self.layers(kind)

    def map(self, kind: Kind = "cross", layer: int = -1, head: int | None = None) -> AttentionMap:
        """Return one map.

        Args:
            kind: "cross", "encoder" or "decoder".
            layer: Number of the layer, from 0, or from -1 for the last.
            head: Number of the head, or None for the mean over all heads.

        Raises:
            ValueError: If there is no such kind, layer or head.
        """
        heads = self._of_kind(kind)[self.layer_number(kind, layer)]
        if head is not None:
            check_number("head", head, len(heads))
        return self.labelled(heads.mean(axis=0) if head is None else heads[head], kind)

    def scores(self, kind: Kind) -> np.ndarray:
        """Return the unscaled scores behind the weights of a kind, (layers, heads, rows, columns), −∞ where masked.

        A `ValueError` says if there is no such kind, or the model is no Heed Transformer.
        """
        return torch.stack([one.scores for one in self._states_of(kind)]).numpy()

    def steps(self, kind: Kind = "cross", layer: int = -1, head: int = 0) -> AttentionSteps:
        """Return what one head computes step by step; arguments are those of `map`, errors also those of `scores`."""
        attention = self.map(kind, layer, head)
        *parts, scaling = self._states_of(kind)[layer]
        query, key, value, scores = (part[head].numpy() for part in parts)
        return AttentionSteps(attention, query, key, value, scores, scaling)

    def labelled(self, weights: np.ndarray, kind: Kind) -> AttentionMap:
        """Return weights (rows, columns) with the labels of a kind."""
        rows = self.source_tokens if kind == "encoder" else self.target_tokens
        columns = self.fed_tokens if kind == "decoder" else self.source_tokens
        return AttentionMap(columns, rows, weights, kind)

    def shown(self, kind: Kind) -> tuple[Words, Words]:
        """Return the words in which pictures show the rows and the columns of a kind."""
        source = self.source_shown or Words(self.source_tokens, list(range(len(self.source_tokens))))
        target = self.target_shown or Words(self.target_tokens, list(range(len(self.target_tokens))))
        if kind != "decoder":
            return source if kind == "encoder" else target, source
        of_tokens = [0, *(number + 1 for number in target.of_tokens[:-1])]
        return target, Words([self.fed_tokens[0], *target.labels[: of_tokens[-1]]], of_tokens)

    def _states_of(self, kind: Kind) -> list[HeadStates]:
        self._of_kind(kind)
        if kind not in self.states:
            raise ValueError(
                "The model must be a Heed Transformer to show its scores, without relative positions (shaw or t5) and "
                "shared layers, but is another model instead."
            )
        return self.states[kind]

    def _of_kind(self, kind: Kind) -> np.ndarray:
        if kind not in self.weights:
            raise ValueError(f"`kind` must be one of {', '.join(self.weights)}, but is {kind!r} instead.")
        return self.weights[kind]


def attention_maps(
    model: "PreTrainedModel | Translator",
    tokenizers: TokenizerPair,
    source: str,
    target: str | None = None,
    *,
    kinds: Collection[Kind] | None = None,
    target_language: str | None = None,
) -> AttentionMaps:
    """Compute the attention of every layer and head for one pair.

    Args:
        model: Heed's Transformer or recurrent model, another encoder-decoder of transformers, or what translates with
            one, such as a `Translator`. It may use any attention function, or be prepared for inference.
        tokenizers: Its tokenizers.
        source: A sentence.
        target: A translation to follow (teacher forcing); None takes the model's own.
        kinds: Which of "cross", "encoder" and "decoder"; None takes those that the model has.
        target_language: Language to translate into, where the tokenizers know several.

    Raises:
        ValueError: If the source is empty, the model has no attention or none of these kinds, or a sentence is longer
            than the model's learned positions.
    """
    model, source_ids, target_ids = _pair_ids(model, tokenizers, source, target, target_language)
    return attention_maps_of_ids(model, tokenizers, source_ids, target_ids, kinds)


def attention_maps_of_ids(
    model: "PreTrainedModel | Translator",
    tokenizers: TokenizerPair,
    source_ids: Sequence[int],
    target_ids: Sequence[int],
    kinds: Collection[Kind] | None = None,
    layer: int | None = None,
) -> AttentionMaps:
    """Compute the attention of every layer and head, or of one layer, for token ids, as `attention_maps` does.

    The source's ids are those of `TokenizerPair.encode_source`, language tag included, and the target's those of
    `encode_target` or of a `Translation`: no <s>, but </s>.
    """
    plain = plain_model(model)
    asked = KINDS if kinds is None else _checked_kinds(kinds)
    _check_lengths(plain, source_ids, target_ids)
    if getattr(plain.config, "attention", None) == "none":
        raise ValueError("The model must attend to be looked into, but its config's `attention` is 'none' instead.")
    fed_ids = [plain.config.decoder_start_token_id, *target_ids[:-1]]
    with recorded_heads(plain, asked, layer) as states:
        found = record_attention(plain, source_ids, fed_ids, asked, layer)
    if not found and len(asked) == len(KINDS):
        raise ValueError("`model` must give its attention weights, but gives none.")
    for kind in kinds or ():
        if kind not in found:
            raise ValueError(
                f"`kind` must be one that the model has, but is {kind!r} instead: a {type(plain).__name__} of this "
                f"config gives no {kind} attention."
            )
    radii = {kind: getattr(plain.config, f"{kind}_neighbourhood", None) for kind in KINDS}
    return AttentionMaps(
        source_tokens=token_labels(tokenizers.source, source_ids),
        target_tokens=token_labels(tokenizers.target, target_ids),
        fed_tokens=token_labels(tokenizers.target, fed_ids),
        source_words=token_words(tokenizers.source, source_ids),
        target_words=token_words(tokenizers.target, target_ids),
        weights={kind: torch.stack(found[kind]).numpy() for kind in KINDS if kind in found},
        neighbourhoods={kind: radius for kind, radius in radii.items() if radius is not None},
        source_shown=shown_words(tokenizers.source, source_ids),
        target_shown=shown_words(tokenizers.target, target_ids),
        states=states,
    )


def attention_map(
    model: "PreTrainedModel | Translator",
    tokenizers: TokenizerPair,
    source: str,
    target: str | None = None,
    layer: int = -1,
    head: int | None = None,
    kind: Kind = "cross",
) -> AttentionMap:
    """Compute the attention of one layer for one sentence, and of no other.

    Arguments and errors are those of `attention_maps` and of `AttentionMaps.map`. For a model of several target
    languages, whose sources begin with a tag, use these.
    """
    _checked_kinds([kind])
    model, source_ids, target_ids = _pair_ids(model, tokenizers, source, target)
    return attention_maps_of_ids(model, tokenizers, source_ids, target_ids, [kind], layer).map(kind, head=head)


def _pair_ids(model: Any, tokenizers: TokenizerPair, source: str, target: str | None, target_language=None):
    """Return the model itself, and the token ids of a source and its target, which may be the model's own."""
    if not trimmed(source):
        raise ValueError(f"`source` must be a sentence, but is {source!r} instead.")
    plain = plain_model(model)
    source_ids = tokenizers.encode_source([source], target_language)[0]
    if target is not None:
        return plain, source_ids, tokenizers.encode_target([trimmed(target)])[0]
    translator = model if isinstance(model, Translator) else Translator(plain, tokenizers)
    return plain, source_ids, translator.translate([source], target_language=target_language)[0][0].token_ids


def plain_model(model: Any) -> Any:
    """Return a model of transformers, also the one behind what translates with it."""
    model = model.model if isinstance(model, Translator) else model
    if not isinstance(model, torch.nn.Module):
        raise ValueError(
            "The model must be one of transformers to be looked into, but was exported for another engine instead."
        )
    return model


def _checked_kinds(kinds: Collection[Kind]) -> list[Kind]:
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"`kind` must be cross, encoder or decoder, but is {kind!r} instead.")
    if not kinds:
        raise ValueError("`kinds` must name at least one of cross, encoder and decoder, but is empty instead.")
    return [kind for kind in KINDS if kind in kinds]


def _check_lengths(model: "PreTrainedModel", source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
    limit = position_limit(model.config)
    for name, ids in (("source", source_ids), ("target", target_ids)):
        if not ids:
            raise ValueError(f"The {name} must have at least one token, but has none.")
        if limit is not None and len(ids) > limit:
            raise ValueError(
                f"The {name} must have at most {limit} tokens, the model's number of positions,"
                f" but has {len(ids)} instead."
            )
