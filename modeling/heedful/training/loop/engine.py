"""The model and its optimizer as Accelerate has prepared them: how gradients are made, measured, applied and saved.

One process, several with whole weights (DDP), and several with a share of them each (FSDP2).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from accelerate import Accelerator
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from heedful.data.micro_batches import MicroBatch
from heedful.training.processes.collectives import full_tensor, full_weights, local_shard, shard_like

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Engine:
    """Takes the steps of a run: `accumulate`, `gradient_norm` and `step` together are one update.

    The model is given with the same weights on every rank. `model` and `optimizer` are as Accelerate wraps them, and
    `parameters` is what the optimizer changes, or this rank's share of it.
    """

    def __init__(self, accelerator: Accelerator, model: "PreTrainedModel", optimizer: torch.optim.Optimizer):
        self.accelerator = accelerator
        self._kind, self._config, self._generation_config = type(model), model.config, model.generation_config
        self._skips_logits = model.trains_on_loss_alone
        self._objective: Any = model.objective
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.parameters = list(self.model.parameters())

    @property
    def network(self) -> "PreTrainedModel":
        """The model without its wrapping."""
        return self.accelerator.unwrap_model(self.model)

    def plain_network(self, device: torch.device | str) -> "PreTrainedModel":
        """Return a model of the same config that is neither wrapped nor sharded, with random weights."""
        with torch.device(device):
            plain = self._kind(self._config)
        plain.generation_config = self._generation_config
        return plain

    def build_buckets(self, micro_batch: MicroBatch) -> None:
        """Let DDP build the buckets in which it all-reduces gradients, which it does after its first backward pass.

        Sums over three and more ranks depend on these buckets in their last bit. Without this, the first update of a
        resumed run would differ from that of a run which was never stopped. Any micro-batch will do: its gradient is
        thrown away.
        """
        if isinstance(self.model, DistributedDataParallel):
            self.accumulate([micro_batch], tokens=1)
            self.discard()

    def accumulate(self, micro_batches: Sequence[MicroBatch], tokens: int, all_reduce: bool = True) -> torch.Tensor:
        """Add up the gradients of this rank's micro-batches, and with `all_reduce` all-reduce them with the last one.

        Every rank must have equally many micro-batches. The summed loss is divided by `tokens`, the target tokens of
        the whole update, on all ranks. Returns sums of this rank in nats, `(3)`: the loss, and of it what R-Drop and
        what distillation add to the cross-entropy.
        """
        sums = torch.zeros(3, device=self.accelerator.device)
        for number, micro_batch in enumerate(micro_batches, start=1):
            batch = micro_batch.tensors if self._objective is None else self._objective.repeated(micro_batch.tensors)
            batch = {name: values.to(self.accelerator.device) for name, values in batch.items()}
            with self.micro_batch(all_reduces=all_reduce and number == len(micro_batches)):
                loss = self.model(**batch, num_items_in_batch=tokens, skip_logits=self._skips_logits).loss
                if not micro_batch.counts:
                    loss = loss * 0
                self.backward(loss)
            sums[0] += loss.detach() * tokens
            for part, added in enumerate(self._objective.take_added() if self._objective is not None else (), start=1):
                sums[part] += added * micro_batch.counts
        return sums

    def micro_batch(self, all_reduces: bool) -> AbstractContextManager:
        """Return the context of a forward and a backward pass; the last one of an update all-reduces the gradients."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(all_reduces)
            return nullcontext()
        return nullcontext() if all_reduces else self.accelerator.no_sync(self.model)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of this rank's part of the loss; the all-reduce makes the sum over the ranks of it."""
        # The all-reduce of DDP and FSDP2 is a mean.
        self.accelerator.backward(loss * self.accelerator.num_processes)

    def all_reduce(self) -> None:
        """All-reduce the gradients where no backward pass has done it."""
        if not torch.distributed.is_initialized():
            return
        # Every rank has the same ones, because each has had a micro-batch, if only one that does not count.
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        for handle in [torch.distributed.all_reduce(gradient, async_op=True) for gradient in gradients]:
            handle.wait()
        for gradient in gradients:
            gradient.div_(torch.distributed.get_world_size())

    def gradient_norm(self, limit: float | None) -> float:
        """Return the norm of the gradient over all ranks, which is scaled down to a limit where it is longer."""
        if limit is not None:
            norm = self.accelerator.clip_grad_norm_(self.parameters, limit)
        else:
            self.accelerator.unscale_gradients()
            gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
        return full_tensor(norm).item()

    def step(self, rate: float) -> None:
        """Change the weights by their gradients, at a learning rate."""
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
        """Return whether every weight of this rank is a number."""
        return all(bool(local_shard(weight).isfinite().all()) for weight in self.parameters)

    def weights(self, keep: bool) -> dict[str, torch.Tensor]:
        """Return whole weights by name, tied ones once, and saved buffers, to ranks that keep them; all must ask."""
        saved = self.network.state_dict()
        buffers = {name: buffer for name, buffer in self.network.named_buffers() if name in saved}
        return full_weights(dict(self.network.named_parameters()) | buffers, keep)

    def optimizer_state(self, keep: bool) -> dict[str, Any]:
        """Return the optimizer's state as one process with whole weights has it; every rank must ask."""
        state = self.optimizer.state_dict()
        complete = {
            number: full_weights({k: v for k, v in values.items() if isinstance(v, torch.Tensor)}, keep)
            for number, values in state["state"].items()
        }
        return {"state": complete, "param_groups": state["param_groups"]} if keep else {}

    def load(self, optimizer_state: dict[str, Any]) -> None:
        """Take over what `optimizer_state` returned, whatever the number of ranks and their sharding was then."""
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
