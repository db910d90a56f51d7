"""The optimizer of a run, and what the loop asks of any."""

from typing import Any

import torch

from heedful.training.recipe import OptimizationRecipe

AVERAGED = "training_weight"  # in a saved state of an optimizer that averages: the weight that gradients are of
# What such an optimizer counts in its groups, which no recipe sets.
COUNTED = ("k", "weight_sum", "lr_max")


def make_optimizer(model: torch.nn.Module, settings: OptimizationRecipe) -> torch.optim.Optimizer:
    """Return Adam with the paper's constants (section 5.3), AdamW, or another one; no vector is decayed."""

    def made(kind: Any, parameters: list[torch.nn.Parameter], **more: Any) -> torch.optim.Optimizer:
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": settings.weight_decay},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        constants = {"lr": 0.0, "betas": (settings.beta1, settings.beta2), "eps": settings.epsilon}
        return kind([group for group in groups if group["params"]], **constants, **more)

    if settings.optimizer not in ("adam", "adamw"):
        from heedful.training.objectives.optimizers import make_other_optimizer

        return make_other_optimizer(model, settings, made)
    kind = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
    return made(kind, [parameter for parameter in model.parameters() if parameter.requires_grad], fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all groups, times the factor of those that have one."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("factor", 1.0)
