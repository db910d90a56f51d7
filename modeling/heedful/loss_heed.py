"""The training loss (section 5.4 of *Attention Is All You Need*), for both families.

`smoothed_cross_entropy` is the formula. `OutputLoss`, which trains Transformers, computes the same, and its gradient,
without all logits in memory. If you change one, change the other: `tests/model/test_loss.py` compares them.

Letters in shape comments: N target tokens, D width of the states, V size of the target's vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .configuration_base_heed import IGNORED_LABEL
from .fast_paths_heed import computing_dtype, filled, is_eager, linear
from .messages_heed import wrong

# Tokens whose logits `OutputLoss` holds at once on the CPU, in float32 and bfloat16: the fastest numbers.
TOKENS_AT_ONCE, BFLOAT16_TOKENS_AT_ONCE = 256, 1024
LOGITS_ON_GPU = 2**27  # held at once on a GPU, where a small operation takes as long as a large one
MATRIX_ROWS_AT_ONCE = 8192  # of the pre-softmax matrix, whose gradients are added at once
LOGITS_AT_ONCE = 2**18  # whose softmax is computed at once on the CPU, to fit its cache


def smoothed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Return the summed cross-entropy of `(…, V)` logits and `(…)` labels, -100 at padding, in nats and float32.

    Label smoothing ε_ls (section 5.4): the target is 1 - ε_ls at the label, plus ε_ls spread evenly over all V tokens.
    """
    return F.cross_entropy(
        logits.flatten(0, -2).float(),
        labels.to(logits.device).flatten(),
        ignore_index=IGNORED_LABEL,
        label_smoothing=smoothing,
        reduction="sum",
    )


class OutputLoss(torch.autograd.Function):
    """`smoothed_cross_entropy` of the pre-softmax layer's logits, and gradients, for some target tokens at a time.

    Memory does not grow with tokens × vocabulary, and padding costs nothing.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        places: torch.Tensor,
        smoothing: float,
        objective: Any = None,
    ) -> torch.Tensor:
        """Return the summed loss in nats of the labels at these places, from states `(…, D)` and weight `(V, D)`.

        An objective replaces the cross-entropy; it may return several sums, whose first is the loss.
        """
        needs_states, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dtype = computing_dtype(states)
        matrix = weight.to(dtype)
        of_states = torch.zeros_like(states) if needs_states else None
        of_weight = torch.zeros_like(weight) if needs_weight else None
        of_bias = torch.zeros_like(bias) if bias is not None and needs_bias else None
        total = torch.zeros((), device=states.device)
        with torch.autocast(states.device.type, enabled=False):  # the dtypes are chosen here
            predicted = places.view(1 if objective is None else objective.passes, -1)
            at_once = BFLOAT16_TOKENS_AT_ONCE if dtype == torch.bfloat16 else TOKENS_AT_ONCE
            if states.device.type != "cpu":
                at_once = max(TOKENS_AT_ONCE, LOGITS_ON_GPU // len(weight))
            for rows in predicted.split(at_once // len(predicted), dim=1) if predicted.numel() else ():
                rows = rows.flatten()
                # Row 0 fills up the others, without a gradient.
                part = states[F.pad(rows, (0, filled(len(rows)) - len(rows)))].to(dtype)
                target = labels[rows][:, None]
                logits = linear(part, matrix, None if bias is None else bias.to(dtype))  # (filled(len(rows)), V)
                compute = replace_by_gradient if objective is None else objective.at(rows).replace_by_gradient
                total = total + compute(logits[: len(rows)], target, smoothing, of_bias)
                logits[len(rows) :] = 0
                if of_states is not None:
                    of_states[rows] = linear(logits, matrix.t(), None)[: len(rows)].to(states.dtype)
                if of_weight is not None:
                    # In parts: the whole matrix's product would double the memory.
                    parts = of_weight.split(MATRIX_ROWS_AT_ONCE), logits.split(MATRIX_ROWS_AT_ONCE, 1)
                    for known, columns in zip(*parts, strict=True):
                        known += linear(columns.t(), part.t(), None)
        ctx.save_for_backward(of_states, of_weight, of_bias)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Scale the gradients that `forward` has computed."""
        gradient = gradient.flatten()[0]
        return *(None if known is None else known * gradient for known in ctx.saved_tensors), *[None] * 4


def replace_by_gradient(
    logits: torch.Tensor, targets: torch.Tensor, smoothing: float, of_bias: torch.Tensor | None
) -> torch.Tensor:
    """Return the summed loss of `(N, V)` logits and `(N, 1)` targets, and overwrite the logits by its gradient.

    The gradient is the probability minus the target's: 1 - ε_ls + ε_ls/V at the label, ε_ls/V elsewhere. The bias's
    gradient is added to `of_bias`.
    """
    total = torch.zeros((), device=logits.device)
    size = max(1, LOGITS_AT_ONCE // logits.shape[-1]) if logits.device.type == "cpu" else len(logits)
    for part, target in zip(logits.split(size), targets.split(size), strict=True):
        scores = part.float()  # (size, V): float32 logits themselves, which are overwritten
        largest = scores.amax(-1, keepdim=True)
        losses = largest - (1 - smoothing) * scores.gather(1, target)
        if smoothing:
            losses -= smoothing * scores.mean(-1, keepdim=True)
        gradient = scores.sub_(largest).exp_()
        sums = gradient.sum(-1, keepdim=True)
        total += (losses + sums.log()).sum()
        gradient.div_(sums)  # the probabilities
        if smoothing:
            gradient -= smoothing / gradient.shape[-1]
        gradient.scatter_add_(1, target, gradient.new_full(target.shape, smoothing - 1))
        if of_bias is not None:
            of_bias += gradient.sum(0)
        part.copy_(gradient)
    return total


def check_label_shape(states: torch.Tensor, labels: torch.Tensor) -> None:
    """Raise a `ValueError` unless each state or logit has a label."""
    if states.shape[:-1] != labels.shape:
        must = f"have the shape of the logits, {tuple(states.shape[:-1])}"
        raise wrong("labels", must, tuple(labels.shape), verb="have")


def mean_per_label(total: torch.Tensor, labels: torch.Tensor, count: int | torch.Tensor | None) -> torch.Tensor:
    """Divide a summed loss by `count`, by default the number of these labels."""
    if count is None:
        count = (labels != IGNORED_LABEL).sum()
        if is_eager() and count == 0:
            raise ValueError("`labels` must hold at least one label other than -100, but all are -100.")
    return total / (count.to(total.device) if isinstance(count, torch.Tensor) else count)
