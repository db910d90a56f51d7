"""What is divided by or added to the log-probability of a finished hypothesis (Wu et al., 2016, section 7)."""

from typing import Literal, TypeVar

import torch

LengthPenaltyForm = Literal["power", "gnmt"]
Length = TypeVar("Length", int, torch.Tensor)


def length_penalty(length: Length, alpha: float, form: LengthPenaltyForm) -> Length:
    """Return what the log-probability of a hypothesis of `length` tokens, the end token included, is divided by.

    Args:
        length: Number of generated tokens, the prompt not counted.
        alpha: 0 for no penalty on long hypotheses; larger ones favour them.
        form: `power` is transformers' length^alpha; `gnmt` is ((5 + length) / 6)^alpha of Wu et al. (2016,
            equation 14), with which Vaswani et al. (2017, section 6.1) decode at alpha 0.6.
    """
    if form == "gnmt":
        return ((5 + length) / 6) ** alpha
    return length**alpha


def coverage_penalty(coverage: torch.Tensor, source_mask: torch.Tensor, beta: float) -> torch.Tensor:
    """Return cp(X; Y) = β Σ_i log(min(Σ_j p_ij, 1)) (Wu et al., 2016, equation 14), 0 where all was attended to.

    Args:
        coverage: `(…, source_length)`, the attention weights on each source token summed over the target's tokens.
        source_mask: Of a shape that broadcasts to that of `coverage`, 0 at padding.
        beta: Weight of the penalty.

    Returns:
        `(…)`, to be added to the normalised log-probability.
    """
    smallest = torch.finfo(coverage.dtype).tiny
    return beta * (coverage.clamp(min=smallest, max=1.0).log() * source_mask).sum(-1)
