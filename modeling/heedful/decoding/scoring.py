"""A model's probabilities and attention for given pairs, token by token."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from heedful.configuration_base_heed import special_token
from heedful.data.epochs.batching import BatchingSettings, Row, TokenCounts, UpdateBatches
from heedful.data.epochs.encoding import EncodedPairs
from heedful.data.epochs.micro_batches import collate
from heedful.data.labels import token_labels
from heedful.decoding.engines import evaluation_mode, token_log_probabilities
from heedful.decoding.search_settings import Inputs, device_of
from heedful.protocols import Seq2SeqModel
from heedful.symbols_heed import checked_texts, naming_the_line, trimmed


@dataclass(frozen=True)
class PairScore:
    """A model's log-probability for a pair's target, token by token, in nats.

    Attributes:
        token_ids: The target's ids from `TokenizerPair.encode_target`, </s> included.
        tokens: Readable labels of these tokens; ▁ is a space.
        token_scores: Each token's log-probability, given the source and the earlier tokens.
    """

    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]
    token_scores: tuple[float, ...]

    @property
    def log_probability(self) -> float:
        """The whole target's log-probability."""
        return math.fsum(self.token_scores)

    @property
    def per_token(self) -> float:
        """The mean of the tokens' log-probabilities, the negative cross-entropy."""
        return self.log_probability / len(self.token_scores)


def dual_cross_entropy(forward: PairScore, backward: PairScore) -> float:
    """Return |h1 - h2| + (h1 + h2) / 2 in nats, for both directions' cross-entropies per token.

    Lower means a better translation (Junczys-Dowmunt, 2018, arXiv 1809.00197, who filters by exp of its negative).
    """
    first, second = -forward.per_token, -backward.per_token
    return abs(first - second) + (first + second) / 2


def forced_batches(
    model: Seq2SeqModel, rows: Sequence[Row] | EncodedPairs, lengths: tuple[TokenCounts, TokenCounts], budget: int
) -> Iterator[tuple[list[int], Inputs, torch.Tensor, torch.Tensor]]:
    """Yield rows in batches: numbers, encoder and decoder inputs, labels."""
    pad, start = (special_token(model, name) for name in ("pad_token_id", "decoder_start_token_id"))
    for (numbers,) in UpdateBatches(*lengths, BatchingSettings(budget)).epoch(0):
        batch = collate([rows[number] for number in numbers], pad)
        inputs = {name: values.to(device_of(model)) for name, values in batch.items()}
        labels = inputs.pop("labels")
        decoder_inputs = torch.nn.functional.pad(labels[:, :-1], (1, 0), value=start)
        yield numbers, inputs, decoder_inputs.masked_fill(decoder_inputs < 0, pad), labels


def cross_attention(model: Seq2SeqModel, rows: Sequence[Row], token_budget: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each row's number and the last layer's mean over heads, `(target tokens, source tokens)`, in batches."""
    sizes = [len(row["input_ids"]) for row in rows], [len(row["labels"]) for row in rows]
    with evaluation_mode(model), torch.no_grad(), eager_attention(model):
        for numbers, inputs, decoder_inputs, _ in forced_batches(model, rows, sizes, token_budget) if rows else ():
            given: dict[str, Any] = {**inputs, "decoder_input_ids": decoder_inputs, "output_attentions": True}
            weights = model(**given, use_cache=False).cross_attentions[-1].float().mean(dim=1).cpu().numpy()
            for number, one in zip(numbers, weights, strict=True):
                yield number, one[: sizes[1][number], : sizes[0][number]]


@contextmanager
def eager_attention(model: Any) -> Iterator[None]:
    """Run a model's `eager` attention, which gives its weights."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    former = [(config, config._attn_implementation) for config in configs.values()]
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        for config, name in former:  # the whole model first: it also sets its parts
            config._attn_implementation = name


def score_stream(
    translator: Any, pairs: Iterable[tuple[str, str]], chunk_size: int, tally: Any
) -> Iterator[PairScore | None]:
    """Score like `Translator.score_pairs`, after its checks."""
    model, tokenizers, search = translator.model, translator.tokenizers, tally.search
    stream, first_number = iter(pairs), 1
    while chunk := list(islice(stream, chunk_size)):
        for number, pair in enumerate(chunk, start=first_number):
            is_pair = isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2
            if not is_pair or not all(isinstance(text, str) for text in pair):
                raise ValueError(f"Pair {number} must be a source and a target text, but is {pair!r} instead.")
            checked_texts(pair, f"pairs[{number - 1}]")
        with naming_the_line(range(first_number, first_number + len(chunk))):
            sources = tokenizers.encode_source([source for source, _ in chunk], search.target_language)
            targets = tokenizers.encode_target([trimmed(target) for _, target in chunk])
        sides = enumerate(zip(sources, targets, strict=True))
        kept = [index for index, both in sides if tally.keeps(first_number + index, *both)]
        rows = [{"input_ids": sources[index], "labels": targets[index]} for index in kept]
        lengths = [len(sources[index]) for index in kept], [len(targets[index]) for index in kept]
        found: dict[int, list[float]] = {}
        with evaluation_mode(model), torch.no_grad():
            for numbers, inputs, decoder_inputs, labels in forced_batches(model, rows, lengths, search.token_budget):
                scores = token_log_probabilities(model, inputs, decoder_inputs, labels).tolist()
                found |= zip([kept[number] for number in numbers], scores, strict=True)
        for index, ids in enumerate(targets):
            tokens = tuple(token_labels(tokenizers.target, ids))
            yield PairScore(tuple(ids), tokens, tuple(found[index][: len(ids)])) if index in found else None
        first_number += len(chunk)
    tally.warn("scored")
