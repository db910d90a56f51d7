"""R-Drop and distillation, from all logits or, as in `loss_heed.py`, from a few tokens' logits at once."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedConfig

from heedful.configuration_base_heed import IGNORED_LABEL
from heedful.data.epochs.teacher import TEACHER_COLUMNS
from heedful.loss_heed import LOGITS_AT_ONCE, replace_by_gradient, smoothed_cross_entropy
from heedful.training.recipe import OptimizationRecipe


@dataclass(frozen=True)
class Objective:
    """R-Drop, token-level distillation, or both; it returns `(3)` sums: the loss, and the share of each.

    *R-Drop* (Liang et al., 2021, equation 4): the same rows pass twice with different dropout and predictions p and q:
    CE(p) + CE(q) + α/2 [KL(p‖q) + KL(q‖p)], summed over target tokens. Here it is half of that, so that a learning
    rate means the same as with one pass. The paper's α for translation is 5.

    *Distillation* (Kim and Rush, 2016, section 3.1, whose α is w): (1 - w) CE(label) + w CE(teacher), where CE(label)
    is smoothed, and CE(teacher) = -Σ q log p with the student's probabilities p and the teacher's q. With R-Drop it is
    the mean over both passes.
    """

    alpha: float | None = None  # for R-Drop
    weight: float | None = None  # for distillation, in batches with a teacher's tokens
    # The teacher's tokens at each label and their probabilities, which sum to 1: `(…, k)` each.
    teacher: tuple[torch.Tensor, ...] = ()

    @classmethod
    def of(cls, settings: OptimizationRecipe, config: PreTrainedConfig) -> "Objective | None":
        """Return the settings' objective, `None` for cross-entropy; R-Drop without dropout raises a `ValueError`."""
        if settings.r_drop is None and settings.distillation is None:
            return None
        rates = (getattr(config, name) for name in type(config).__dataclass_fields__ if name.endswith("dropout"))
        must = "be empty for a model without `dropout`, whose two passes are the same"
        settings.require(settings.r_drop is None or any(rates), "r_drop", must)
        return cls(settings.r_drop, None if settings.distillation is None else settings.distillation_weight)

    @property
    def passes(self) -> int:
        """The number of passes over a batch's rows, one after the other."""
        return 1 if self.alpha is None else 2

    def of_batch(self, batch: Mapping[str, Any]) -> "tuple[dict[str, Any], Objective]":
        """Return a batch without the teacher's columns, and its objective with them."""
        others = {name: values for name, values in batch.items() if name not in TEACHER_COLUMNS}
        teacher = tuple(batch[name] for name in TEACHER_COLUMNS if name in batch)
        return others, replace(self, teacher=teacher)

    def at(self, places: torch.Tensor) -> "Objective":
        """Return the objective for the labels at `(N)` places."""
        return replace(self, teacher=tuple(values.flatten(0, -2)[places] for values in self.teacher))

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, smoothing: float) -> torch.Tensor:
        """Return sums from `(passes · batch, length, V)` logits and their labels, which may be -100."""
        places = (labels.flatten() != IGNORED_LABEL).nonzero()[:, 0]
        log_p = logits.flatten(0, -2)[places].float().log_softmax(-1)  # (passes · N, V)
        r_drop = distillation = torch.zeros((), device=logits.device)
        if self.alpha is None:
            cross_entropy = smoothed_cross_entropy(logits, labels, smoothing)
        else:
            p, q = log_p.chunk(2)
            cross_entropy = smoothed_cross_entropy(logits, labels, smoothing) / 2
            r_drop = self.alpha / 4 * ((p.exp() - q.exp()) * (p - q)).sum()
        if self.weight is not None and self.teacher:
            tokens, probabilities = self.at(places).teacher  # (passes · N, k)
            of_teacher = -(probabilities * log_p.gather(1, tokens)).sum() / self.passes
            distillation = self.weight * (of_teacher - cross_entropy)
        return torch.stack([cross_entropy + r_drop + distillation, r_drop.detach(), distillation.detach()])

    def replace_by_gradient(
        self, logits: torch.Tensor, targets: torch.Tensor, smoothing: float, of_bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return sums from `(passes · N, V)` logits and targets, and overwrite the logits by the loss's gradient.

        With logits z, y at the label, and smoothing by (1 - w) ε_ls in place of ε_ls, distillation adds w (y - Σ q z)
        to the loss: log Σ exp(z) is in both cross-entropies. The bias gradient is added to `of_bias`.
        """
        if self.weight is None or not self.teacher:
            return self._without_teacher(logits, targets, smoothing, of_bias)
        share, (tokens, probabilities) = self.weight / self.passes, self.teacher
        places = torch.cat([targets, tokens], 1)  # (passes · N, 1 + k)
        slopes = share * torch.cat([torch.ones_like(probabilities[:, :1]), -probabilities], 1)
        found = (slopes * logits.gather(1, places)).sum()
        smoothed = share * smoothing * (logits.gather(1, targets).float() - logits.mean(-1, True, dtype=torch.float32))
        sums = self._without_teacher(logits, targets, (1 - self.weight) * smoothing, of_bias)
        logits.scatter_add_(1, places, slopes.to(logits.dtype))
        if of_bias is not None:
            of_bias.scatter_add_(0, places.flatten(), slopes.flatten().to(of_bias.dtype))
        return sums + torch.stack([found, torch.zeros_like(found), found - smoothed.sum()])

    def _without_teacher(
        self, logits: torch.Tensor, targets: torch.Tensor, smoothing: float, of_bias: torch.Tensor | None
    ) -> torch.Tensor:
        # With r = log p - log q, the gradient of KL(p‖q) is p (r - Σ p r) for the logits of p, q - p for those of q.
        total, r_drop = torch.zeros(2, device=logits.device)
        if self.alpha is None:
            total = replace_by_gradient(logits, targets, smoothing, of_bias)
            return torch.stack([total, r_drop, r_drop])
        both, all_targets = logits.view(2, -1, logits.shape[-1]), targets.view(2, -1, 1)
        weight = self.alpha / 4  # of KL(p‖q) and KL(q‖p)
        size = max(1, LOGITS_AT_ONCE // logits.shape[-1]) if logits.device.type == "cpu" else both.shape[1]
        for part, target in zip(both.split(size, 1), all_targets.split(size, 1), strict=True):
            p = part.softmax(-1, dtype=torch.float32)  # each pass's, (2, size, V)
            # log Σ exp(logits): the largest logit minus the logarithm of its probability, which cannot underflow
            normaliser = part.amax(-1).float() - p.amax(-1).log()  # (2, size)
            ratio = (part[0].float() - part[1]).sub_((normaliser[0] - normaliser[1])[:, None])  # log p - log q
            divergences = torch.linalg.vecdot(p[0], ratio), -torch.linalg.vecdot(p[1], ratio)  # (size) each
            r_drop += (added := weight * (divergences[0].sum() + divergences[1].sum()))
            losses = normaliser - (1 - smoothing) * part.gather(2, target)[..., 0].float()
            if smoothing:
                losses -= smoothing * part.mean(-1, dtype=torch.float32)
            total += added + losses.sum() / 2
            for one, other, sign in ((0, 1, 1), (1, 0, -1)):
                gradient = (ratio * (sign * weight)).add_((0.5 + weight - weight * divergences[one])[:, None])
                gradient.mul_(p[one]).sub_(p[other], alpha=weight)
                if smoothing:
                    gradient -= smoothing / 2 / gradient.shape[-1]
                gradient.scatter_add_(1, target[one], gradient.new_full(target[one].shape, (smoothing - 1) / 2))
                if of_bias is not None:
                    of_bias += gradient.sum(0)
                part[one].copy_(gradient)
        return torch.stack([total, r_drop, torch.zeros_like(total)])
