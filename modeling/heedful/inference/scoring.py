"""What generated sequences are worth: their lengths, whether they ended by themselves, and their log-probabilities."""

from typing import Any

import torch

from heedful.inference.strategies.beams import length_penalty
from heedful.inference.strategies.steps import end_tokens

# Logits held at once while scores are computed: 2**25 float32 numbers are 128 MiB.
LOGITS_BUDGET = 2**25


def count_tokens(sequences: torch.Tensor, source_mask: torch.Tensor, config: Any) -> tuple[torch.Tensor, list[bool]]:
    """Return how many tokens were generated in each of `(rows, length)` sequences, and whether each ended by itself.

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
    return counts, ended.tolist()


def score_sequences(
    model: Any, inputs: dict[str, torch.Tensor], sequences: torch.Tensor, counts: torch.Tensor, config: Any
) -> torch.Tensor:
    """Return the log-probabilities, in nats, of `(rows, length)` sequences, divided by the length penalty: `(rows)`.

    One pass of the model computes them, from `counts` tokens of each row behind the decoder's start token, and from
    `(sentences, source_length)` inputs. `generate()` returns scores of beams only together with every step's scores of
    the whole vocabulary, which take more memory than the model does, and none at all for greedy search.
    """
    inputs = {name: tensor.repeat_interleave(config.num_return_sequences, dim=0) for name, tensor in inputs.items()}
    decoder_inputs, labels = sequences[:, :-1], sequences[:, 1:]
    vocabulary = model.get_output_embeddings().weight.shape[0]
    rows = max(1, LOGITS_BUDGET // (labels.shape[1] * vocabulary))
    places = torch.arange(labels.shape[1], device=labels.device)
    totals = []
    for start in range(0, len(sequences), rows):
        part = slice(start, start + rows)
        encoder_inputs = {name: tensor[part] for name, tensor in inputs.items()}
        logits = model(**encoder_inputs, decoder_input_ids=decoder_inputs[part], use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), labels[part], reduction="none")
        totals.append(-losses.masked_fill(places >= counts[part, None], 0.0).sum(dim=1))
    alpha = 1.0 if config.length_penalty is None else config.length_penalty
    return torch.cat(totals) / length_penalty(counts, alpha, getattr(config, "length_penalty_form", None))
