"""Training with DeepSpeed's ZeRO, stage 2: every rank has all weights, and a share of gradients and optimizer.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020. DeepSpeed keeps the
weights of a group as one flat float32 tensor, of which each rank updates its part. The network computes with copies,
which are in bf16 where the recipe asks for it. Checkpoints have the ordinary format all the same: whole float32
weights, and one entry of the optimizer's state for each of them.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator

from heedful.training.loop.engine import Engine
from heedful.training.loop.feed import Feed
from heedful.training.processes.collectives import all_reduce

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOMENTS = ("exp_avg", "exp_avg_sq")


class ZeroEngine(Engine):
    """Takes the steps of a run under DeepSpeed, whose configuration clips as the recipe says.

    The optimizer is Adam or AdamW, and has not taken a step.
    """

    def __init__(
        self, accelerator: Accelerator, model: "PreTrainedModel", optimizer: torch.optim.Optimizer, feed: Feed
    ):
        from deepspeed.utils import safe_set_full_fp32_param

        # DeepSpeed replaces these by flat tensors, and rounds the weights before it copies them.
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        weights = [(parameter, parameter.detach().clone()) for group in self._groups for parameter in group]
        super().__init__(accelerator, model, optimizer, feed)
        self._zero = self.model.optimizer
        for parameter, value in weights:
            safe_set_full_fp32_param(parameter, value)

    def micro_batch(self, all_reduces: bool) -> AbstractContextManager:
        """Return the context of a forward and a backward pass, the last of an update or not.

        ZeRO-2 reduces after every backward pass, because no rank has room for the whole gradient.
        """
        self.model.set_gradient_accumulation_boundary(all_reduces)
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of this rank's part of the loss; the all-reduce makes the sum over the ranks of it."""
        # Not Accelerate's: it would take a step after every micro-batch.
        self.model.backward(loss * self.accelerator.num_processes, scale_wrt_gas=False)

    def gradient_norm(self, limit: float | None) -> torch.Tensor:
        """Return the norm of the gradient over all ranks; DeepSpeed clips to its own limit when the step is taken."""
        # DeepSpeed's own norm hides one that is not finite: as -1 in each group, and some versions add up its squares.
        shares = [gradient for group in self._zero.averaged_gradients.values() for gradient in group]
        norm = torch.nn.utils.get_total_norm(shares).item()
        return torch.tensor(all_reduce(self.accelerator, norm * norm)[0]).sqrt()

    def step(self, rate: float, norm: torch.Tensor) -> bool:
        """Clip the gradients, and change the weights by them at a learning rate; not where the norm is not finite."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if not math.isfinite(norm):
            self.discard()
            return False
        self.model.step()
        return True

    def discard(self) -> None:
        """Forget the gradients, as DeepSpeed itself does where it skips a step."""
        for gradients in (self._zero.averaged_gradients, self._zero.all_grad_tensors):
            for group in gradients:
                gradients[group] = None
        self._zero.zero_grad()

    def weights(self, keep: bool) -> dict[str, torch.Tensor]:
        """Return whole float32 weights by name, tied ones once, and saved buffers; every rank must ask."""
        from deepspeed.utils import safe_get_full_fp32_param

        found = super().weights(keep)
        for name, parameter in self.network.named_parameters():
            weight = safe_get_full_fp32_param(parameter)  # none where the optimizer does not change it
            if keep and weight is not None:
                found[name] = weight.cpu()
        return found

    def optimizer_state(self, keep: bool) -> dict[str, Any]:
        """Return the optimizer's state as one process with whole weights has it; every rank must ask."""
        from deepspeed.utils import safe_get_full_optimizer_state

        self._link_moments()
        state: dict[int, dict[str, torch.Tensor]] = {}
        groups: list[dict[str, Any]] = []
        number = 0
        for group, parameters in zip(self.optimizer.param_groups, self._groups, strict=True):
            share = self._zero.optimizer.state.get(group["params"][0])  # nothing before the first step
            numbers = list(range(number, number + len(parameters)))
            number += len(parameters)
            groups.append(group | {"params": numbers})
            if share is None:
                continue
            for key, parameter in zip(numbers, parameters, strict=True):
                moments = {name: safe_get_full_optimizer_state(parameter, name) for name in MOMENTS}
                if keep:
                    moments = {name: moment.cpu() for name, moment in moments.items()}
                    state[key] = {"step": share["step"].detach().clone().cpu(), **moments}
        return {"state": state, "param_groups": groups} if keep else {}

    def load(self, optimizer_state: dict[str, Any]) -> None:
        """Take over what `optimizer_state` returned, whatever the number of ranks and their sharding was then."""
        from deepspeed.utils import safe_set_full_optimizer_state

        state = optimizer_state["state"]
        pairs = list(zip(self.optimizer.param_groups, optimizer_state["param_groups"], strict=True))
        if not state:  # saved before the first step
            return
        for group, saved in pairs:
            share = group["params"][0]
            # One count for the whole group: each of its weights is changed in every step.
            step = max(state[number]["step"] for number in saved["params"])
            moments = {name: torch.zeros_like(share, requires_grad=False) for name in MOMENTS}
            self._zero.optimizer.state[share] = {"step": step.clone().to(share.device), **moments}
        self._link_moments()
        for parameters, (_, saved) in zip(self._groups, pairs, strict=True):
            for parameter, number in zip(parameters, saved["params"], strict=True):
                for name in MOMENTS:
                    safe_set_full_optimizer_state(parameter, state[number][name], name)

    def _link_moments(self) -> None:
        """Let DeepSpeed find the moments of each weight.

        By itself it looks for those of all groups after the first step of the first group, when the others have none.
        """
        from deepspeed.utils import lazy_init_hp_params_optimizer_state

        for group, parameters in zip(self.optimizer.param_groups, self._groups, strict=True):
            if group["params"][0] in self._zero.optimizer.state:
                lazy_init_hp_params_optimizer_state(parameters, group["params"][0], self._zero.optimizer.state)
