"""The model and its optimizer as Accelerate has prepared them: how gradients are made, measured, applied and saved.

One process, several with whole weights (DDP), and several with a share of them each (FSDP2).
"""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from heedful.training.processes import local, shard_like, whole, whole_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Engine:
    """Takes the steps of a run.

    Args:
        accelerator: The processes and devices.
        model: The model, with the same weights in every process.
        optimizer: Its optimizer.

    Attributes:
        model: The model as Accelerate wraps it.
        optimizer: The optimizer, likewise.
        parameters: What the optimizer changes, or this process's share of it.
    """

    def __init__(self, accelerator: Accelerator, model: "PreTrainedModel", optimizer: torch.optim.Optimizer):
        self.accelerator = accelerator
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.parameters = list(self.model.parameters())

    @property
    def network(self) -> "PreTrainedModel":
        """The model without its wrapping."""
        return self.accelerator.unwrap_model(self.model)

    def shards_weights(self) -> bool:
        """Return whether the launcher has asked for weights or optimizer in parts."""
        return self.accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)

    def settle(self, batch: dict[str, torch.Tensor]) -> None:
        """Let DDP decide in which pieces it exchanges gradients, which it does after its first backward pass.

        Sums over three and more processes depend on these pieces in their last bit, so that without this the first
        update of a resumed run would be another than that of a run which was never stopped.

        Args:
            batch: Any one; its gradient is thrown away.
        """
        if isinstance(self.model, DistributedDataParallel):
            self.backward(self.model(**batch).loss)
            self.discard()

    def micro_batch(self, exchanges: bool) -> AbstractContextManager:
        """Return the context of a forward and a backward pass.

        Args:
            exchanges: Whether the processes exchange their gradients with it: once an update, with its last one.
        """
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(exchanges)
            return nullcontext()
        return nullcontext() if exchanges else self.accelerator.no_sync(self.model)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of this process's part of the loss; the exchange makes the sum over the processes of it."""
        # The exchange is a mean.
        self.accelerator.backward(loss * self.accelerator.num_processes)

    def exchange(self) -> None:
        """Exchange the gradients where no backward pass has done it."""
        if not torch.distributed.is_initialized():
            return
        # All processes have the same ones: each has had a pair, if only one that does not count.
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        for handle in [torch.distributed.all_reduce(gradient, async_op=True) for gradient in gradients]:
            handle.wait()
        torch._foreach_div_(gradients, torch.distributed.get_world_size())

    def gradient_norm(self, limit: float | None) -> float:
        """Return the norm of the gradient over all processes, the same in each.

        Args:
            limit: The gradient is scaled down to this norm where it is longer; `None` leaves it.
        """
        if limit is not None:
            norm = self.accelerator.clip_grad_norm_(self.parameters, limit)
        else:
            self.accelerator.unscale_gradients()
            gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
        return whole(norm).item()

    def step(self, rate: float) -> None:
        """Change the weights by their gradients.

        Args:
            rate: The learning rate.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()

    def discard(self) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad()

    def lower_scale(self) -> None:
        """Lower the scale of fp16's gradients after one was not finite."""
        scaler = self.accelerator.scaler
        if scaler is not None:
            scaler.update(scaler.get_scale() * scaler.get_backoff_factor())

    def weights_are_finite(self) -> bool:
        """Return whether every weight of this process is a number."""
        return all(bool(local(weight).isfinite().all()) for weight in self.parameters)

    def weights(self, keep: bool) -> dict[str, torch.Tensor]:
        """Return whole weights by name, tied ones once, and saved buffers; every process must ask.

        Args:
            keep: Whether this process wants them.
        """
        saved = self.network.state_dict()
        buffers = {name: buffer for name, buffer in self.network.named_buffers() if name in saved}
        return whole_weights(dict(self.network.named_parameters()) | buffers, keep)

    def optimizer_state(self, keep: bool) -> dict[str, Any]:
        """Return the optimizer's state as one process with whole weights has it; every process must ask."""
        state = self.optimizer.state_dict()
        complete = {
            number: whole_weights({k: v for k, v in values.items() if isinstance(v, torch.Tensor)}, keep)
            for number, values in state["state"].items()
        }
        return {"state": complete, "param_groups": state["param_groups"]} if keep else {}

    def load(self, weights: dict[str, torch.Tensor], optimizer_state: dict[str, Any]) -> None:
        """Take over what `optimizer_state` returned, whatever the number of processes and their sharding was then.

        Args:
            weights: The whole weights, which the model was prepared with.
            optimizer_state: The optimizer's state.
        """
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        optimizer_state["state"] = {
            number: {
                name: shard_like(value, parameters[number]) if value.shape == parameters[number].shape else value
                for name, value in values.items()
            }
            for number, values in optimizer_state["state"].items()
        }
        # Betas and the like stay those of the recipe, which is allowed to change them.
        optimizer_state["param_groups"] = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict(optimizer_state)
