"""The optimizers: Adam and AdamW, AdamW without a schedule, and Muon for the matrices of the layers."""

from collections.abc import Mapping
from typing import Any

import torch

from heedful.files import import_extra
from heedful.training.recipe import OptimizationRecipe, mistake

AVERAGED = "training_weight"  # in a saved state of an optimizer that averages: the weight that gradients are of
# What such an optimizer counts in its groups, which no recipe sets.
COUNTED = ("k", "weight_sum", "lr_max")


def make_optimizer(model: torch.nn.Module, settings: OptimizationRecipe) -> torch.optim.Optimizer:
    """Return the optimizer of a recipe; weight decay is for matrices, not for vectors.

    `adam` has the paper's constants (section 5.3); `schedule_free` is AdamW that averages its weights as it goes
    (Defazio et al., 2024, "The Road Less Scheduled", algorithm 1); `muon` orthogonalizes the updates of the layers'
    matrices (Jordan et al., 2024), scaled to the size of Adam's (Liu et al., 2025, equation 4, arXiv 2502.16982), and
    is AdamW for all else. A model without such a matrix is a `ValueError`.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = _matrices_of_layers(model) if settings.optimizer == "muon" else []
    if settings.optimizer == "muon" and not matrices:
        raise mistake("optimization.optimizer", "another one for a model without trained matrices in layers", "muon")
    others = [parameter for parameter in trained if all(parameter is not matrix for matrix in matrices)]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in others if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in others if p.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    shared: dict[str, Any] = {"betas": (settings.beta1, settings.beta2), "eps": settings.epsilon, "lr": 0.0}
    if settings.optimizer == "schedule_free":
        optimizer = import_extra("schedulefree", "optimizers").AdamWScheduleFree(groups, **shared)
        optimizer.train()  # for good: the average is computed beside the weights that are trained
        return optimizer
    kind = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
    adam = kind(groups, fused=True, **shared)
    if not matrices:
        return adam
    factor = (settings.muon_learning_rate or settings.learning_rate) / settings.learning_rate
    return MuonWithAdamW(matrices, adam, settings.weight_decay, factor)


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for some matrices and AdamW for other parameters, as one optimizer with one state.

    Args:
        matrices: What Muon changes.
        adamw: Changes the rest.
        weight_decay: Of the matrices.
        factor: How many times AdamW's learning rate Muon has.
    """

    def __init__(
        self, matrices: list[torch.nn.Parameter], adamw: torch.optim.Optimizer, weight_decay: float, factor: float
    ):
        muon = torch.optim.Muon(matrices, lr=0.0, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        self.parts = (muon, adamw)
        muon.param_groups[0]["factor"] = factor
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Let both parts read and change this optimizer's groups and state."""
        muon, adamw = self.parts
        muon.param_groups, adamw.param_groups = self.param_groups[:1], self.param_groups[1:]
        muon.state = adamw.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, as any optimizer does."""
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Change the weights by their gradients."""
        for part in self.parts:
            part.step()


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all groups, times the factor of those that have one."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("factor", 1.0)


def averages_weights(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the weights to validate and keep are not those that gradients are computed of."""
    return "weight_lr_power" in optimizer.param_groups[0]


@torch.no_grad()
def averaged_weights(optimizer: torch.optim.Optimizer, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the averages x of weights y = (1 - β₁) z + β₁ x, by their names; what has no state yet is its own."""
    end = 1 - 1 / optimizer.param_groups[0]["betas"][0]
    states = ((name, weight, optimizer.state.get(weight, {})) for name, weight in weights.items())
    return {name: weight.lerp(state["z"], end) if "z" in state else weight for name, weight, state in states}


def _matrices_of_layers(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the trained matrices that are neither tables of embeddings nor the output matrix."""
    tables = [module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    output = getattr(model, "lm_head", None)
    tables += [] if output is None else [output.weight]
    matrices = (p for p in model.parameters() if p.dim() == 2 and p.requires_grad)
    return [p for p in matrices if all(p is not table for table in tables)]
