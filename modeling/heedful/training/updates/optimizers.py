"""A run's optimizer: Adam, AdamW, schedule-free AdamW, or Muon."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, cast

import torch

from heedful import processor_heed
from heedful.files import import_extra
from heedful.protocols import TrainableModel
from heedful.training.recipe import OptimizationRecipe

MOMENTUM = 0.95  # Muon's momentum
AT_ONCE = 1 << 24  # numbers in matrices that are multiplied together; they need five times that memory
AVERAGED = "training_weight"  # the trained weight, in the saved state of averaging optimizers
COUNTED = ("k", "weight_sum", "lr_max")  # counted by averaging optimizers, in their groups


def make_optimizer(model: TrainableModel, settings: OptimizationRecipe) -> torch.optim.Optimizer:
    """Return Adam with the paper's constants (section 5.3), AdamW, schedule-free AdamW, or Muon; no vector is decayed.

    `schedule_free` averages its weights (algorithm 1 of Defazio et al., 2024, "The Road Less Scheduled"). `muon` makes
    updates of layer matrices orthogonal (Jordan et al., 2024), with the size of Adam's (Liu et al., 2025, arXiv
    2502.16982), and is AdamW for all else. Raises a `ValueError` for a model without such matrices.
    """
    tables, matrices, vectors = _trained(model)
    must = "be empty for a model without trained embeddings"
    settings.require(tables or settings.embedding_learning_rate is None, "embedding_learning_rate", must)
    factor = (settings.embedding_learning_rate or settings.learning_rate) / settings.learning_rate
    groups = [
        {"params": tables, "weight_decay": settings.weight_decay, "factor": factor},
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if settings.optimizer == "muon":
        settings.require(matrices, "optimizer", "be another one for a model without trained matrices in layers")
        adamw = torch.optim.AdamW(_filled(groups[0], groups[2]), fused=True, **_constants(settings))
        return MuonWithAdamW(matrices, adamw, settings.weight_decay, settings.mixed_precision == "bf16")
    if settings.optimizer == "schedule_free":
        kind = import_extra("schedulefree", "optimizers").AdamWScheduleFree
        optimizer: torch.optim.Optimizer = kind(_filled(*groups), **_constants(settings))
        cast("Any", optimizer).train()  # permanently: the average is computed apart from the trained weights
        return optimizer
    fused = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
    return fused(_filled(*groups), fused=True, **_constants(settings))


def _filled(*groups: dict[str, Any]) -> list[dict[str, Any]]:
    return [group for group in groups if group["params"]]


def _constants(settings: OptimizationRecipe) -> dict[str, Any]:
    return {"lr": 0.0, "betas": (settings.beta1, settings.beta2), "eps": settings.epsilon}


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set all groups' learning rate, times their factor if any."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("factor", 1.0)


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for some matrices and AdamW for other parameters, as one optimizer with one state.

    torch's own Muon always multiplies in bfloat16, which is forty times slower on a CPU without such instructions.
    `weight_decay` is for the matrices. If `is_rounded`, their products are in bfloat16 where the processor has it.
    """

    def __init__(
        self,
        matrices: list[torch.nn.Parameter],
        adamw: torch.optim.Optimizer,
        weight_decay: float,
        is_rounded: bool,
    ):
        self.adamw, self.is_rounded = adamw, is_rounded
        muon = {"params": matrices, "lr": 0.0, "weight_decay": weight_decay}
        super().__init__([muon, *adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Change the weights by their gradients."""
        # Loading replaces state and groups, so AdamW gets them again.
        muon, *self.adamw.param_groups = self.param_groups
        self.adamw.state = self.state
        self.adamw.step()
        alike = defaultdict(list)  # equally shaped matrices take their steps together, a thread each
        for matrix in muon["params"]:
            if matrix.grad is not None:
                alike[matrix.shape].append(matrix)
        for shape, matrices in alike.items():
            count = max(1, AT_ONCE // shape.numel())
            for start in range(0, len(matrices), count):
                self._change(matrices[start : start + count], muon["lr"], muon["weight_decay"])

    def _change(self, matrices: list[torch.nn.Parameter], rate: float, weight_decay: float) -> None:
        updates = []
        for matrix in matrices:
            assert matrix.grad is not None
            momentum = self.state[matrix].setdefault("momentum_buffer", torch.zeros_like(matrix))
            momentum.lerp_(matrix.grad, 1 - MOMENTUM)
            updates.append(matrix.grad.lerp(momentum, MOMENTUM))  # Nesterov momentum
        # The root mean square equals that of Adam's updates (Liu et al., section 2.2).
        size = rate * 0.2 * max(matrices[0].shape) ** 0.5
        for matrix, update in zip(matrices, orthogonal(torch.stack(updates), self.is_rounded), strict=True):
            matrix.mul_(1 - rate * weight_decay).sub_(update, alpha=size)


def orthogonal(matrices: torch.Tensor, is_rounded: bool) -> torch.Tensor:
    """Bring the singular values of `(count, rows, columns)` matrices near 1, by Newton-Schulz as in Jordan et al."""
    a, b, c = 3.4445, -4.7750, 2.0315
    is_rounded &= matrices.device.type != "cpu" or processor_heed.has_bfloat16()
    x = matrices.bfloat16() if is_rounded else matrices
    x = x.mT if x.shape[1] > x.shape[2] else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if matrices.shape[1] > matrices.shape[2] else x).to(matrices.dtype)


@torch.no_grad()
def averaged_weights(optimizer: torch.optim.Optimizer, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return averages x of weights y = (1 - β₁) z + β₁ x, by name; a weight without optimizer state is unchanged."""
    end = 1 - 1 / optimizer.param_groups[0]["betas"][0]
    states = ((name, weight, optimizer.state.get(weight, {})) for name, weight in weights.items())
    return {name: weight.lerp(state["z"], end) if "z" in state else weight for name, weight, state in states}


def _trained(model: TrainableModel) -> tuple[list[torch.nn.Parameter], ...]:
    """Return the trained tables (embeddings, distances, the output matrix), the layers' matrices, and vectors."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    output = getattr(model, "lm_head", None)
    tables |= set() if output is None else {id(output.weight)}
    kinds: tuple[list[torch.nn.Parameter], ...] = [], [], []
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            kinds[2 if weight.dim() != 2 else 0 if id(weight) in tables or "relative" in name else 1].append(weight)
    return kinds
