"""Attention maps, as in the paper's appendix: weights of the three kinds of section 3.2.3, with readable labels."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from heedful.attention.recording import KINDS, HeadStates, Kind, check_number, record_weights, recorded_heads
from heedful.configuration_base_heed import position_limit, special_token
from heedful.data.labels import Words, shown_words, token_labels, token_words
from heedful.data.tokenization import TokenizerPair
from heedful.decoding.translation import Translator
from heedful.messages_heed import wrong
from heedful.protocols import Seq2SeqModel
from heedful.symbols_heed import trimmed


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """Attention weights between labelled tokens.

    Rows are queries: the *predicted* target tokens ("cross", "decoder") or the source tokens ("encoder"). Columns are
    keys: the source tokens, or for "decoder" its input tokens, <s> first.
    """

    source_tokens: list[str]  # labels of the columns
    target_tokens: list[str]  # labels of the rows
    weights: np.ndarray  # float32 (rows, columns); each row sums to 1
    kind: Kind = "cross"


@dataclass(frozen=True, eq=False)
class AttentionSteps:
    """One head's computation for one pair (equation 1), as float32 arrays: softmax(QKᵀ/√d_k) V."""

    attention: AttentionMap  # the weights, with labels
    query: np.ndarray  # (rows, d_k)
    key: np.ndarray  # (columns, d_k)
    value: np.ndarray  # (columns, d_v)
    scores: np.ndarray  # q·k, or vᵀ tanh(q + k), (rows, columns); −∞ where masked
    scaling: float  # factor of the scores before the softmax: 1/√d_k, or 1

    @property
    def scaled(self) -> np.ndarray:
        """The scaled scores (rows, columns), the softmax's input."""
        return self.scores * self.scaling

    @property
    def output(self) -> np.ndarray:
        """The weighted sums of the values (rows, d_v), before the output projection."""
        return np.asarray(self.attention.weights @ self.value)


@dataclass(frozen=True, eq=False)
class AttentionMaps:
    """One pair's attention weights, by kind, layer and head."""

    source_tokens: list[str]  # labels
    target_tokens: list[str]  # the same, </s> included
    fed_tokens: list[str]  # the decoder's input, the start token first; fed token i predicts target token i
    source_words: list[int | None]  # each token's word, from 0; None for control tokens and spaces
    target_words: list[int | None]
    weights: dict[Kind, np.ndarray]  # float32 (layers, heads, rows, columns)
    neighbourhoods: dict[Kind, int] = field(default_factory=dict)  # radii of restricted kinds (section 4)
    source_shown: Words | None = None  # words instead of tokens, for pictures
    target_shown: Words | None = None
    states: dict[Kind, list[HeadStates]] = field(default_factory=dict)  # by layer; only Heed's Transformer

    @property
    def kinds(self) -> list[Kind]:
        """The kinds with weights."""
        return list(self.weights)

    def layers(self, kind: Kind) -> int:
        """Return the number of layers; a missing kind is a `ValueError`."""
        return len(self._of_kind(kind))

    def heads(self, kind: Kind) -> int:
        """Return the number of heads per layer; a missing kind is a `ValueError`."""
        return int(self._of_kind(kind).shape[1])

    def layer_number(self, kind: Kind, layer: int | None) -> int:
        """Return a layer's number from 0; None is the last layer, a missing layer a `ValueError`."""
        layer = -1 if layer is None else layer
        check_number("layer", layer, self.layers(kind))
        return layer % self.layers(kind)

    def map(self, kind: Kind = "cross", layer: int | None = -1, head: int | None = None) -> AttentionMap:
        """Return one head's map in a layer (0 is the first, -1 the last), or the mean over all heads."""
        heads = self._of_kind(kind)[self.layer_number(kind, layer)]
        if head is not None:
            check_number("head", head, len(heads))
        return self.labelled(heads.mean(axis=0) if head is None else heads[head], kind)

    def scores(self, kind: Kind) -> np.ndarray:
        """Return a Heed Transformer's unscaled scores, (layers, heads, rows, columns), −∞ where masked."""
        return torch.stack([one.scores for one in self._states_of(kind)]).numpy()

    def steps(self, kind: Kind = "cross", layer: int | None = -1, head: int = 0) -> AttentionSteps:
        """Return one head's computation, with the arguments of `map` and the errors of `map` and `scores`."""
        attention = self.map(kind, layer, head)
        *parts, scaling = self._states_of(kind)[self.layer_number(kind, layer)]
        query, key, value, scores = (part[head].numpy() for part in parts)
        return AttentionSteps(attention, query, key, value, scores, scaling)

    def labelled(self, weights: np.ndarray, kind: Kind) -> AttentionMap:
        """Label the weights (rows, columns)."""
        rows = self.source_tokens if kind == "encoder" else self.target_tokens
        columns = self.fed_tokens if kind == "decoder" else self.source_tokens
        return AttentionMap(columns, rows, weights, kind)

    def shown(self, kind: Kind) -> tuple[Words, Words]:
        """Return the words for rows and columns, for pictures."""
        source = self.source_shown or Words(self.source_tokens, list(range(len(self.source_tokens))))
        target = self.target_shown or Words(self.target_tokens, list(range(len(self.target_tokens))))
        if kind != "decoder":
            return source if kind == "encoder" else target, source
        of_tokens = [0, *(number + 1 for number in target.of_tokens[:-1])]
        return target, Words([self.fed_tokens[0], *target.labels[: of_tokens[-1]]], of_tokens)

    def _states_of(self, kind: Kind) -> list[HeadStates]:
        self._of_kind(kind)
        if kind not in self.states:
            must = "be a Heed Transformer, loaded after `import heedful`, to show its scores"
            but = "is another model, or has relative positions (shaw or t5) or shared layers"
            raise ValueError(f"The model must {must}, but {but} instead.")
        return self.states[kind]

    def _of_kind(self, kind: Kind) -> np.ndarray:
        if kind not in self.weights:
            raise ValueError(f"`kind` must be one of {', '.join(self.weights)}, but is {kind!r} instead.")
        return self.weights[kind]


def attention_maps(
    model: Seq2SeqModel | Translator,
    tokenizers: TokenizerPair,
    source: str,
    target: str | None = None,
    *,
    kinds: Collection[Kind] | None = None,
    target_language: str | None = None,
    layer: int | None = None,
) -> AttentionMaps:
    """Compute the attention of all heads for one pair, in all layers or in one.

    Args:
        model: Any encoder-decoder of transformers, Heed's included, or a `Translator` with one.
        tokenizers: Its tokenizers.
        source: The sentence.
        target: A translation to follow (teacher forcing); None takes the model's own.
        kinds: Some of "cross", "encoder" and "decoder"; None takes the model's.
        target_language: Target language, if the tokenizers have several.
        layer: The only layer to keep, numbered from 0 (-1 is the last); None keeps all.

    Raises:
        ValueError: If a sentence is empty or too long, or the model has no such attention.
    """
    if not trimmed(source):
        raise ValueError(f"`source` must be a sentence, but is {source!r} instead.")
    plain = plain_model(model)
    source_ids = tokenizers.encode_source([source], target_language)[0]
    if target is not None:
        target_ids: Sequence[int] = tokenizers.encode_target([trimmed(target)])[0]
    else:
        translator = model if isinstance(model, Translator) else Translator(plain, tokenizers)
        found = translator.translate_lines([source], split=False, target_language=target_language)
        target_ids = next(found)[0].token_ids
    return attention_maps_of_ids(plain, tokenizers, source_ids, target_ids, kinds, layer)


def attention_maps_of_ids(
    model: Seq2SeqModel | Translator,
    tokenizers: TokenizerPair,
    source_ids: Sequence[int],
    target_ids: Sequence[int],
    kinds: Collection[Kind] | None = None,
    layer: int | None = None,
) -> AttentionMaps:
    """Compute `attention_maps` from the ids that `TokenizerPair.encode_source` and `encode_target` return."""
    plain = plain_model(model)
    for kind in {*(kinds or ())} - {*KINDS}:
        raise ValueError(f"`kind` must be cross, encoder or decoder, but is {kind!r} instead.")
    asked = [kind for kind in KINDS if kinds is None or kind in kinds]
    if not asked:
        raise ValueError("`kinds` must name at least one of cross, encoder and decoder, but is empty instead.")
    limit = position_limit(plain.config)
    for name, length in {"source": len(source_ids), "target": len(target_ids)}.items():
        if not length:
            raise ValueError(f"The {name} must have at least one token, but has none.")
        if limit is not None and length > limit:
            must = f"The {name} must have at most {limit} tokens, the model's number of positions"
            raise ValueError(f"{must}, but has {length} instead.")
    if getattr(plain.config, "attention", None) == "none":
        raise ValueError("The model must have attention, but its config's `attention` is 'none' instead.")
    fed_ids = [special_token(plain, "decoder_start_token_id"), *target_ids[:-1]]
    with recorded_heads(plain, asked, layer) as states:
        found = record_weights(plain, source_ids, fed_ids, asked, layer)
    if not found and len(asked) == len(KINDS):
        raise ValueError("`model` must return attention weights, but returns none.")
    for kind in kinds or ():
        if kind not in found:
            hint = f"a {type(plain).__name__} with this config has no {kind} attention"
            raise wrong("kind", "be one that the model has", repr(kind), advice=hint)
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
    model: Seq2SeqModel | Translator,
    tokenizers: TokenizerPair,
    source: str,
    target: str | None = None,
    layer: int = -1,
    head: int | None = None,
    kind: Kind = "cross",
) -> AttentionMap:
    """Compute one layer's attention: `attention_maps` and `AttentionMaps.map` together."""
    return attention_maps(model, tokenizers, source, target, kinds=[kind], layer=layer).map(kind, head=head)


def plain_model(model: Any) -> Any:
    """Return the transformers model, or the one in a translator."""
    model = model if isinstance(model, torch.nn.Module) else getattr(model, "model", None)
    if not isinstance(model, torch.nn.Module):
        raise ValueError("The model must be one of transformers, but was exported for another engine instead.")
    return model
