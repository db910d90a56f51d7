"""The steps of a run, one process or several: how gradients are made, measured and applied.

One process, several with whole weights (DDP), and several with a share of them each (FSDP2).
"""

import logging
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed
from accelerate import Accelerator
from accelerate.utils.memory import should_reduce_batch_size
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from heedful.data.batching import Row
from heedful.data.micro_batches import MicroBatch
from heedful.files import first_line
from heedful.training.loop.compilation import CompiledBody
from heedful.training.loop.engine_state import EngineState
from heedful.training.loop.feed import Feed
from heedful.training.processes.collectives import full_tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


class Engine(EngineState):
    """Takes the steps of a run: `accumulate`, `gradient_norm` and `step` together are one update.

    `feed` makes its micro-batches; `body` computes the states of both stacks in place of the model's own, compiled.
    Where the device decides whether a gradient is finite, nothing waits for it.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: "PreTrainedModel",
        optimizer: torch.optim.Optimizer,
        feed: Feed,
        body: CompiledBody | None = None,
        decides_on_device: bool = False,
    ):
        super().__init__(accelerator, model, optimizer)
        self.feed, self.body, self.decides_on_device = feed, body, decides_on_device
        # Recurrent models, whose steps take most of the time, train on all logits.
        self._skips_logits = model.config.model_type == "heed"
        if body is not None and body.uses_graphs:
            # Or the first gradients would be kept in memory that a graph writes to again.
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter)

    def warm_up(self, row: Row) -> None:
        """Compile the step, and let DDP build the buckets in which it all-reduces gradients, before the first update.

        Else a resumed run would compile for another first micro-batch than a run that was never stopped, and its first
        update would be all-reduced in other buckets than DDP builds after its first backward pass: either changes sums
        in their last bit. Any row will do, the same in every run: its gradient is thrown away.
        """
        try:
            if self.body is not None:  # not all-reduced, because memory may run out, or a compiler lack, on one rank
                micro_batches = [self.feed.full_of(row)] * self.body.first_calls
                self.accumulate(micro_batches, tokens=1, all_reduce=False)
        except Exception as error:
            is_too_large = isinstance(error, RuntimeError) and should_reduce_batch_size(error)
            if not is_too_large:  # else the first update fails too, and may be divided further
                self.body = None
                logger.warning("training goes on uncompiled: its step cannot be compiled here: %s", first_line(error))
        if isinstance(self.model, DistributedDataParallel):
            # Two, for a single one would be compiled on its own.
            self.accumulate([MicroBatch(self.feed.tensors([row, row]))], tokens=1)
        self.discard()

    def accumulate(self, micro_batches: Sequence[MicroBatch], tokens: int, all_reduce: bool = True) -> torch.Tensor:
        """Add up the gradients of this rank's micro-batches, and with `all_reduce` all-reduce them with the last one.

        Every rank must have equally many micro-batches. The summed loss is divided by `tokens`, the target tokens of
        the whole update, on all ranks. Returns sums of this rank in nats, `(3)`: the loss, and of it what R-Drop and
        what distillation add to the cross-entropy.
        """
        device = self.accelerator.device
        sums = torch.zeros(3, device=device)
        # Entered here, autocast rounds each weight once for all micro-batches. Shards come and go by themselves.
        with nullcontext() if isinstance(self.model, FSDPModule) else self.accelerator.autocast():
            for number, micro_batch in enumerate(micro_batches, start=1):
                batch = self.feed.inputs(micro_batch) | {"skip_logits": self._skips_logits, "body": self.body}
                with self.micro_batch(all_reduces=all_reduce and number == len(micro_batches)):
                    losses = self.model(**batch, num_items_in_batch=tokens).loss.reshape(-1)
                    if not micro_batch.counts:
                        losses = losses * 0
                    with torch.autocast(device.type, enabled=False):
                        self.backward(losses[0])
                sums[: len(losses)] += losses.detach() * tokens
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

    def gradient_norm(self, limit: float | None) -> torch.Tensor:
        """Return the norm of the gradient over all ranks, which is scaled down to a limit where it is longer."""
        if limit is not None:
            norm = self.accelerator.clip_grad_norm_(self.parameters, limit)
        else:
            self.accelerator.unscale_gradients()
            gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
        return full_tensor(norm)

    def step(self, rate: float, norm: torch.Tensor) -> bool | None:
        """Change the weights by their gradients, at a learning rate, unless the gradient's norm is not finite.

        Returns whether they changed, or `None` where only the device knows that.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        is_finite = None if self.decides_on_device else math.isfinite(norm.item())
        if is_finite is None:
            # Where this is 1, torch's fused optimizers leave weights, moments and their count of steps as they are.
            self.optimizer.optimizer.found_inf = (~norm.isfinite()).float()
        scaler = self.accelerator.scaler
        if is_finite is not False:
            self.optimizer.step()
        elif scaler is not None:  # the scale of fp16's gradients was too high
            scaler.update(scaler.get_scale() * scaler.get_backoff_factor())
        self.discard()
        return is_finite

    def discard(self) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad(set_to_none=self.body is None or not self.body.uses_graphs)
