"""Sampling with random numbers per sentence, independent of the batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from heedful.files import check_at_least


@dataclass(frozen=True)
class SeededSampling:
    """Draw translations from the model's distribution, the same for a sentence in any batch.

    The n-th sentence has random numbers from `seed` and n. A setting out of range is a `ValueError`.
    """

    seed: int = 1
    temperature: float = 1.0  # divides the logits; lower prefers likely tokens
    top_k: int | None = None  # draws from the k likeliest tokens; None: all

    def __post_init__(self) -> None:
        check_at_least(0, seed=self.seed)
        check_at_least(1, top_k=self.top_k)
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"`temperature` must be above 0 and finite, but is {self.temperature} instead.")

    def prepare(self, config: GenerationConfig, split: bool) -> None:
        """Let greedy search find the drawn tokens."""
        if split or config.num_beams > 1 or config.num_return_sequences > 1:
            must = "one beam, one translation per line and no `split`"
            given = f"{config.num_beams}, {config.num_return_sequences} and {split}"
            raise ValueError(f"`sampling` must come with {must}, but comes with {given} instead.")
        config.do_sample, config.temperature, config.top_k, config.top_p = False, None, None, None

    def processors(self, numbers: Sequence[int]) -> LogitsProcessorList:
        """Return the draws for a batch with these sentence numbers."""
        return LogitsProcessorList([Draws(self, numbers)])


class Draws(LogitsProcessor):
    """Draws a token for each row of a batch; all others get -inf."""

    def __init__(self, sampling: SeededSampling, numbers: Sequence[int]):
        self.sampling = sampling
        self.generators = [np.random.PCG64(np.random.SeedSequence([sampling.seed, number])) for number in numbers]

    def keep(self, rows: torch.Tensor) -> None:
        """Forget all but some rows."""
        self.generators = [self.generators[row] for row in rows.tolist()]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return `(batch, vocabulary)` logits whose largest is a draw."""
        scores = scores.float() / self.sampling.temperature
        if self.sampling.top_k is not None:
            least = scores.topk(min(self.sampling.top_k, scores.shape[1])).values[:, -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        sums = scores.softmax(-1).cumsum(-1)
        drawn = [(int(each.random_raw()) >> 11) / 2**53 for each in self.generators]  # raw: numpy never changes it
        places = torch.tensor(drawn, device=sums.device)[:, None] * sums[:, -1:]
        places = places.minimum(sums[:, -1:].nextafter(places.new_zeros(())))  # a product may be rounded up
        return torch.full_like(scores, -torch.inf).scatter_(1, torch.searchsorted(sums, places, right=True), 0.0)
