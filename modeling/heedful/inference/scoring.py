"""What sequences are worth to a model: the log-probabilities of generated ones, and of given pairs."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from heedful.data.batching import BatchingSettings, TokenCounts, UpdateBatches
from heedful.data.micro_batches import collate
from heedful.inference.search_settings import device_of, end_tokens, length_penalty

# Logits held at once while scores are computed: 2**25 float32 numbers are 128 MiB.
LOGITS_BUDGET = 2**25


@dataclass(frozen=True)
class PairScore:
    """How probable a model finds the target of a given pair, token by token, in nats.

    Attributes:
        token_ids: The target as `TokenizerPair.encode_target` gives it, </s> included.
        tokens: Readable labels of these tokens, in which ▁ is a space.
        token_scores: The log-probability of each token, given the source and the target's tokens before it.
    """

    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]
    token_scores: tuple[float, ...]

    @property
    def log_probability(self) -> float:
        """The log-probability of the whole target: the sum of its tokens'."""
        return math.fsum(self.token_scores)

    @property
    def per_token(self) -> float:
        """The mean of the tokens' log-probabilities, which is the negative cross-entropy."""
        return self.log_probability / len(self.token_scores)


def dual_cross_entropy(forward: PairScore, backward: PairScore) -> float:
    """Return the dual conditional cross-entropy of a pair, in nats: the lower, the better a translation it is.

    That is |h1 - h2| + (h1 + h2) / 2, where h1 and h2 are the cross-entropies per token in both directions
    (Junczys-Dowmunt, 2018, arXiv 1809.00197, which filters by exp of its negative).

    Args:
        forward: What a model makes of the target, given the source.
        backward: What a model of the other direction makes of the source, given the target.
    """
    first, second = -forward.per_token, -backward.per_token
    return abs(first - second) + (first + second) / 2


def count_tokens(sequences: torch.Tensor, source_mask: torch.Tensor, config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many tokens were generated in each of `(rows, length)` sequences, and whether each ended in </s>.

    The decoder's start token, which is first in each, is not counted, and </s> is. The `(sentences, source_length)`
    mask is 0 at padding.
    """
    generated = sequences[:, 1:]
    ends = torch.isin(generated, torch.tensor(end_tokens(config), dtype=torch.long, device=generated.device))
    ended = ends.any(dim=1)
    # argmax finds the first </s>; a sequence without one is as long as the longest.
    counts = torch.where(ended, ends.int().argmax(dim=1) + 1, generated.shape[1])
    if config.forced_eos_token_id is not None:
        ended &= counts < config.max_new_tokens  # an </s> in the last possible position was forced
    beyond = getattr(config, "tokens_beyond_source", None)
    if beyond is not None:  # each sentence has a limit of its own, and padding follows it
        limits = source_mask.sum(dim=1) + beyond
        counts = torch.minimum(counts, limits.repeat_interleave(config.num_return_sequences))
    return counts, ended


def score_sequences(
    model: Any, inputs: dict[str, torch.Tensor], sequences: torch.Tensor, counts: torch.Tensor, config: Any
) -> torch.Tensor:
    """Return the log-probabilities, in nats, of `(rows, length)` sequences, divided by the length penalty: `(rows)`.

    One pass of the model computes them, from `counts` tokens of each row behind the decoder's start token, and from
    `(sentences, source_length)` inputs. `generate()` returns scores of beams only together with every step's scores of
    the whole vocabulary, which take more memory than the model does, and none at all for greedy search.
    """
    inputs = {name: tensor.repeat_interleave(config.num_return_sequences, dim=0) for name, tensor in inputs.items()}
    log_probabilities = token_log_probabilities(model, inputs, sequences[:, :-1], sequences[:, 1:])
    places = torch.arange(sequences.shape[1] - 1, device=sequences.device)
    totals = log_probabilities.masked_fill(places >= counts[:, None], 0.0).sum(dim=1)
    alpha = 1.0 if config.length_penalty is None else config.length_penalty
    return totals / length_penalty(counts, alpha, getattr(config, "length_penalty_form", None))


def token_log_probabilities(
    model: Any, inputs: dict[str, torch.Tensor], decoder_inputs: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Return the log-probability of each label in nats, `(rows, length)`; 0 where the label is -100."""
    score, parts = torch.nn.functional.cross_entropy, logits_in_parts(model, inputs, decoder_inputs)
    return torch.cat([-score(logits.transpose(1, 2), labels[part], reduction="none") for part, logits in parts])


def logits_in_parts(
    model: Any, inputs: dict[str, torch.Tensor], decoder_inputs: torch.Tensor
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield some rows of a batch at a time, and their float32 logits `(rows, length, V)`."""
    rows = max(1, LOGITS_BUDGET // (decoder_inputs.shape[1] * model.get_output_embeddings().weight.shape[0]))
    for start in range(0, len(decoder_inputs), rows):
        part = slice(start, start + rows)
        encoder_inputs = {name: tensor[part] for name, tensor in inputs.items()}
        yield part, model(**encoder_inputs, decoder_input_ids=decoder_inputs[part], use_cache=False).logits.float()


def score_rows(model: Any, rows: Sequence[Mapping[str, list[int]]], token_budget: int) -> list[list[float]]:
    """Return the log-probabilities of the `labels` of each row, given its `input_ids`.

    The padded tokens of a batch, sources and targets, keep within the budget. The model is one that is evaluating.
    """
    lengths = [len(row["input_ids"]) for row in rows], [len(row["labels"]) for row in rows]
    results: list[list[float]] = [[] for _ in rows]
    for numbers, inputs, decoder_inputs, labels in forced_batches(model, rows, lengths, token_budget):
        found = token_log_probabilities(model, inputs, decoder_inputs, labels).tolist()
        for number, scores in zip(numbers, found, strict=True):
            results[number] = scores[: lengths[1][number]]
    return results


def forced_batches(
    model: Any, rows: Any, lengths: tuple[TokenCounts, TokenCounts], token_budget: int
) -> Iterator[tuple[list[int], dict[str, torch.Tensor], torch.Tensor, torch.Tensor]]:
    """Yield the rows, of such sources and targets, in batches: numbers, the inputs of encoder and decoder, labels."""
    pad, start = model.config.pad_token_id, model.config.decoder_start_token_id
    for (numbers,) in UpdateBatches(*lengths, BatchingSettings(token_budget)).epoch(0):
        batch = collate([rows[number] for number in numbers], pad)
        inputs = {name: values.to(device_of(model)) for name, values in batch.items()}
        labels = inputs.pop("labels")
        decoder_inputs = torch.nn.functional.pad(labels[:, :-1], (1, 0), value=start)
        yield numbers, inputs, decoder_inputs.masked_fill(decoder_inputs < 0, pad), labels
