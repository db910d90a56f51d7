"""The optimizer of a run: Adam, AdamW, AdamW without a schedule, or Muon."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from heedful.files import import_extra
from heedful.messages_heed import wrong
from heedful.protocols import TrainableModel
from heedful.training.recipe import OptimizationRecipe

MOMENTUM = 0.95  # of Muon
AT_ONCE = 1 << 24  # numbers of matrices that are multiplied together, for which memory is needed five times
AVERAGED = "training_weight"  # in a saved state of an optimizer that averages: the weight that gradients are of
# What such an optimizer counts in its groups, which no recipe sets.
COUNTED = ("k", "weight_sum", "lr_max")
Kind = Callable[..., torch.optim.Optimizer]


def make_optimizer(model: TrainableModel, settings: OptimizationRecipe) -> torch.optim.Optimizer:
    """Return Adam with the paper's constants (section 5.3), AdamW, or another one; no vector is decayed."""

    def made(kind: Kind, parameters: list[torch.nn.Parameter], **more: Any) -> torch.optim.Optimizer:
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": settings.weight_decay},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        constants = {"lr": 0.0, "betas": (settings.beta1, settings.beta2), "eps": settings.epsilon}
        return kind([group for group in groups if group["params"]], **constants, **more)

    if settings.optimizer not in ("adam", "adamw"):
        return _make_other_optimizer(model, settings, made)
    kind = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
    return made(kind, [parameter for parameter in model.parameters() if parameter.requires_grad], fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all groups, times the factor of those that have one."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("factor", 1.0)


def _make_other_optimizer(model: TrainableModel, settings: OptimizationRecipe, made: Kind) -> torch.optim.Optimizer:
    """Return AdamW that averages its weights, or Muon; `made` makes a relative of Adam for a list of parameters.

    `schedule_free` is algorithm 1 of Defazio et al., 2024, "The Road Less Scheduled". `muon` makes the updates of the
    layers' matrices orthogonal (Jordan et al., 2024), of Adam's size (Liu et al., 2025, arXiv 2502.16982), and is
    AdamW for all else. A model without such a matrix is a `ValueError`.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if settings.optimizer == "schedule_free":
        optimizer = made(import_extra("schedulefree", "optimizers").AdamWScheduleFree, trained)
        cast("Any", optimizer).train()  # for good: the average is computed beside the weights that are trained
        return optimizer
    matrices = _matrices_of_layers(model)
    if not matrices:
        raise wrong("optimization.optimizer", "be another one for a model without trained matrices in layers", "muon")
    others = [parameter for parameter in trained if all(parameter is not matrix for matrix in matrices)]
    adamw = made(torch.optim.AdamW, others, fused=True)
    factor = (settings.muon_learning_rate or settings.learning_rate) / settings.learning_rate
    return MuonWithAdamW(matrices, adamw, settings.weight_decay, factor)


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for some matrices and AdamW for other parameters, as one optimizer with one state.

    torch's own Muon multiplies in bfloat16, which a CPU without such instructions does forty times as slowly.

    Args:
        matrices: What Muon changes.
        adamw: Changes the rest.
        weight_decay: Of the matrices.
        factor: How many times AdamW's learning rate Muon has.
    """

    def __init__(
        self, matrices: list[torch.nn.Parameter], adamw: torch.optim.Optimizer, weight_decay: float, factor: float
    ):
        self.adamw = adamw
        muon = {"params": matrices, "lr": 0.0, "weight_decay": weight_decay, "factor": factor}
        super().__init__([muon, *adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Change the weights by their gradients."""
        # Loading a state replaces it and the groups, so AdamW gets them anew.
        muon, *self.adamw.param_groups = self.param_groups
        self.adamw.state = self.state
        self.adamw.step()
        alike = defaultdict(list)  # those of one shape take all steps at once, a thread each
        for matrix in muon["params"]:
            if matrix.grad is not None:
                alike[matrix.shape].append(matrix)
        for shape, matrices in alike.items():
            count = max(1, AT_ONCE // shape.numel())
            for start in range(0, len(matrices), count):
                self._change(matrices[start : start + count], muon["lr"], muon["weight_decay"])

    def _change(self, matrices: list[torch.nn.Parameter], rate: float, weight_decay: float) -> None:
        """Change matrices of one shape."""
        updates = []
        for matrix in matrices:
            assert matrix.grad is not None
            momentum = self.state[matrix].setdefault("momentum_buffer", torch.zeros_like(matrix))
            momentum.lerp_(matrix.grad, 1 - MOMENTUM)
            updates.append(matrix.grad.lerp(momentum, MOMENTUM))  # Nesterov's
        # So large that the root mean square is that of Adam's updates (Liu et al., section 2.2).
        size = rate * 0.2 * max(matrices[0].shape) ** 0.5
        for matrix, update in zip(matrices, orthogonal(torch.stack(updates)), strict=True):
            matrix.mul_(1 - rate * weight_decay).sub_(update, alpha=size)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Return matrices `(count, rows, columns)` with their singular vectors and singular values near 1.

    By Newton and Schulz, with the constants of Jordan et al.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices if matrices.device.type == "cpu" else matrices.bfloat16()
    x = x.mT if x.shape[1] > x.shape[2] else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if matrices.shape[1] > matrices.shape[2] else x).to(matrices.dtype)


@torch.no_grad()
def averaged_weights(optimizer: torch.optim.Optimizer, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the averages x of weights y = (1 - β₁) z + β₁ x, by their names; what has no state yet is its own."""
    end = 1 - 1 / optimizer.param_groups[0]["betas"][0]
    states = ((name, weight, optimizer.state.get(weight, {})) for name, weight in weights.items())
    return {name: weight.lerp(state["z"], end) if "z" in state else weight for name, weight, state in states}


def _matrices_of_layers(model: TrainableModel) -> list[torch.nn.Parameter]:
    """Return the trained matrices that are neither tables, of embeddings or distances, nor the output matrix."""
    tables = [module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    output = getattr(model, "lm_head", None)
    tables += [] if output is None else [output.weight]
    named = model.named_parameters()
    matrices = (p for name, p in named if p.dim() == 2 and p.requires_grad and "relative" not in name)
    return [p for p in matrices if all(p is not table for table in tables)]
