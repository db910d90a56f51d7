"""What training minimises beside the cross-entropy: R-Drop, and the distance to a teacher.

An objective computes the summed loss of a batch, in two forms as `loss_heed.py` does: from all logits, and with its
gradient from those of a few tokens. `tests/training/test_objective.py` compares them.
"""

from typing import TYPE_CHECKING, Any

import torch

from heedful.configuration_base_heed import IGNORED_LABEL
from heedful.inference.teaching.distillation import TeacherTokens
from heedful.loss_heed import LOGITS_AT_ONCE, replace_by_gradient, smoothed_cross_entropy
from heedful.training.loop.feed import repeated

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from heedful.training.recipe import OptimizationRecipe


def set_objective(model: Any, settings: "OptimizationRecipe") -> None:
    """Let a model train with R-Drop, or a teacher, or both, where the settings say so."""
    model.objective = RDrop.of(settings.r_drop, model.config)
    if settings.distillation is not None:
        teacher = TeacherTokens(settings.distillation)
        model.objective = Distillation(teacher, settings.distillation_weight, model.objective)


class RDrop:
    """R-Drop: the same rows pass twice under other dropout, and the two predictions are to be alike.

    Liang et al., "R-Drop: Regularized Dropout for Neural Networks", 2021, equation 4: with the predictions p and q of
    the two passes the loss is CE(p) + CE(q) + α/2 [KL(p‖q) + KL(q‖p)], summed over target tokens. Here it is half of
    that, so that it stays comparable with the loss of one pass, and a learning rate means the same. The paper's α for
    translation is 5. What is drawn once for a whole batch, as layers are dropped, is the same in both passes.
    """

    passes, reads_rows = 2, False

    def __init__(self, alpha: float):
        self.weight = alpha / 4
        self._added: torch.Tensor | float = 0.0

    @classmethod
    def of(cls, alpha: float | None, config: "PretrainedConfig") -> "RDrop | None":
        """Return a recipe's objective; `None` has none. A model whose two passes are the same is a `ValueError`."""
        rates = (getattr(config, name) for name in type(config).__dataclass_fields__ if name.endswith("dropout"))
        if alpha is not None and not any(rates):
            raise ValueError(
                "`optimization.r_drop` must be empty for a model without `dropout`, whose two passes are the same, "
                f"but is {alpha} instead."
            )
        return None if alpha is None else cls(alpha)

    def repeated(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a batch of which all rows come once, and then once more."""
        self._added = 0.0  # of a batch that did not fit in memory
        return repeated(batch, self.passes)

    def take_added(self) -> tuple[torch.Tensor | float, ...]:
        """Return α/4 [KL(p‖q) + KL(q‖p)] of the last batch, in nats."""
        added, self._added = self._added, 0.0
        return (added,)

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, smoothing: float) -> torch.Tensor:
        """Return the summed loss of `(2 · batch, length, V)` logits and their labels, -100 where there is none."""
        predicted = labels.chunk(2)[0] != IGNORED_LABEL
        log_p, log_q = (half[predicted].float().log_softmax(-1) for half in logits.chunk(2))
        added = self.weight * ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum()
        self._added += added.detach()
        return smoothed_cross_entropy(logits, labels, smoothing) / 2 + added

    def replace_by_gradient(
        self, logits: torch.Tensor, targets: torch.Tensor, smoothing: float, of_bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the summed loss of `(2N, V)` logits and `(2N, 1)` targets, and overwrite the logits by its gradient.

        With r = log p - log q the gradient of KL(p‖q) + KL(q‖p) is p (r - Σ p r) + p - q for the logits of p, and the
        same with p and q exchanged for those of q. The gradient of the bias is added to `of_bias`.
        """
        weight, (first, second) = self.weight, logits.chunk(2)
        total = torch.zeros((), device=logits.device)
        size = max(1, LOGITS_AT_ONCE // logits.shape[-1]) if logits.device.type == "cpu" else len(first)
        parts = first.split(size), second.split(size), targets[: len(first)].split(size)
        for a, b, target in zip(*parts, strict=True):
            p, q = (part.softmax(-1, dtype=torch.float32) for part in (a, b))  # (size, V)
            # log Σ exp(logits), as `replace_by_gradient` of `loss_heed.py` has it
            of_a, of_b = (part.amax(-1).float() - made.amax(-1).log() for part, made in ((a, p), (b, q)))  # (size)
            ratio = (a.float() - b).sub_((of_a - of_b)[:, None])  # log p - log q
            p_ratio, q_ratio = torch.linalg.vecdot(p, ratio), torch.linalg.vecdot(q, ratio)  # KL(p‖q) and -KL(q‖p)
            added = weight * (p_ratio - q_ratio).sum()
            self._added += added
            labelled = a.gather(1, target).float() + b.gather(1, target)
            total += added + (of_a + of_b - (1 - smoothing) * labelled[:, 0]).sum() / 2
            if smoothing:
                total -= smoothing / 2 * (a.mean(-1, dtype=torch.float32) + b.mean(-1, dtype=torch.float32)).sum()
            ratio *= weight
            of_second = (-ratio).add_((0.5 + weight * (1 + q_ratio))[:, None]).mul_(q).sub_(p, alpha=weight)
            of_first = ratio.add_((0.5 + weight * (1 - p_ratio))[:, None]).mul_(p).sub_(q, alpha=weight)
            for part, gradient in ((a, of_first), (b, of_second)):
                if smoothing:
                    gradient -= smoothing / 2 / gradient.shape[-1]
                gradient.scatter_add_(1, target, gradient.new_full(target.shape, (smoothing - 1) / 2))
                if of_bias is not None:
                    of_bias += gradient.sum(0)
                part.copy_(gradient)
        return total


class Distillation:
    """Token-level distillation: the student's prediction is to be near a teacher's, and not only near the label.

    With the weight w the loss is (1 - w) CE(label) + w CE(teacher), where CE(label) is the smoothed cross-entropy and
    CE(teacher) = -Σ q log p with the student's probabilities p and the teacher's q (Kim and Rush, 2016, section 3.1,
    whose α is w). The teacher is known by its k most probable tokens, brought to sum 1. With R-Drop, whose term comes
    on top, it is the mean over both passes.
    """

    reads_rows = True  # which the teacher knows its tokens by

    def __init__(self, teacher: TeacherTokens, weight: float, r_drop: RDrop | None = None):
        self._teacher, self.weight, self._r_drop = teacher, weight, r_drop
        self.passes = 1 if r_drop is None else r_drop.passes
        self._added: torch.Tensor | float = 0.0

    def repeated(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Look up what the teacher says of a batch on the CPU, and return it as often as the rows pass."""
        self._tokens, self._probabilities = self._teacher.of(batch)
        self._added, self._done = 0.0, 0  # target tokens of the batch whose loss is known
        return batch if self._r_drop is None else self._r_drop.repeated(batch)

    def take_added(self) -> tuple[torch.Tensor | float, ...]:
        """Return of the last batch, in nats, what R-Drop adds, and w [CE(teacher) - CE(label)]."""
        added, self._added = self._added, 0.0
        return *((0.0,) if self._r_drop is None else self._r_drop.take_added()), added

    def _next(self, logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the teacher's tokens and probabilities for the next target tokens, once for each pass."""
        place = slice(self._done, self._done + count)
        self._done = place.stop
        known = self._tokens[place], self._probabilities[place]
        tokens, probabilities = (each.to(logits.device).repeat(self.passes, 1) for each in known)
        return tokens, probabilities

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, smoothing: float) -> torch.Tensor:
        """Return the summed loss of `(passes · batch, length, V)` logits and their labels, -100 for none."""
        predicted = logits[labels != IGNORED_LABEL].float()  # (passes · N, V)
        tokens, probabilities = self._next(logits, len(predicted) // self.passes)
        of_teacher = -(probabilities * predicted.log_softmax(-1).gather(1, tokens)).sum() / self.passes
        cross_entropy = smoothed_cross_entropy(logits, labels, smoothing) / self.passes
        added = self.weight * (of_teacher - cross_entropy)
        self._added += added.detach()
        return added + (cross_entropy if self._r_drop is None else self._r_drop(logits, labels, smoothing))

    def replace_by_gradient(
        self, logits: torch.Tensor, targets: torch.Tensor, smoothing: float, of_bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the summed loss of `(passes · N, V)` logits and targets, and overwrite the logits by its gradient.

        With logits z, y at the label, and smoothing by (1 - w) ε_ls in place of ε_ls, what the loss has beside the
        label's own is w (y - Σ q z): log Σ exp(z) is in both cross-entropies. The gradient of the bias is added to
        `of_bias`.
        """
        tokens, probabilities = self._next(logits, len(targets) // self.passes)
        share = self.weight / self.passes
        places = torch.cat([targets, tokens], 1)  # (passes · N, 1 + k)
        slopes = share * torch.cat([torch.ones_like(probabilities[:, :1]), -probabilities], 1)
        found = (slopes * logits.gather(1, places)).sum()
        smoothed = share * smoothing * (logits.gather(1, targets).float() - logits.mean(-1, True, dtype=torch.float32))
        self._added += found - smoothed.sum()
        compute = replace_by_gradient if self._r_drop is None else self._r_drop.replace_by_gradient
        total = compute(logits, targets, (1 - self.weight) * smoothing, of_bias) + found
        logits.scatter_add_(1, places, slopes.to(logits.dtype))
        if of_bias is not None:
            of_bias.scatter_add_(0, places.flatten(), slopes.flatten().to(of_bias.dtype))
        return total
