"""A run's steps with whole (DDP) or sharded (FSDP2) weights, and their results."""

import logging
import math
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed
from accelerate import Accelerator
from accelerate.utils.memory import should_reduce_batch_size
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from heedful.data.epochs.batching import Row
from heedful.data.epochs.micro_batches import MicroBatch
from heedful.files import first_line
from heedful.protocols import TrainableModel
from heedful.training.loop.feed import Feed
from heedful.training.processes.collectives import full_tensor, full_weights, local_shard, shard_like
from heedful.training.updates.compilation import CompiledBody
from heedful.training.updates.optimizers import AVERAGED, COUNTED, averaged_weights, set_learning_rate

logger = logging.getLogger(__name__)


class Learner(torch.nn.Module):
    """A module that returns a network's loss, because DDP and FSDP2 only wrap calls of modules."""

    def __init__(self, network: TrainableModel):
        super().__init__()
        self.network = network

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # Accelerate looks for a model's layers and embeddings
            return getattr(super().__getattr__("network"), name)

    def forward(self, *arguments: Any) -> torch.Tensor:
        """Return the network's `loss_of`."""
        return self.network.loss_of(*arguments)


class TrainingEngine:
    """Takes a run's steps: `accumulate`, `gradient_norm` and `step` together are one update.

    Every rank gives a model with the same weights. Accelerate wraps the attributes `model` and `optimizer`;
    `parameters` are this rank's share. `body` replaces the model's own stacks. With `decides_on_device`, Python does
    not wait for the check whether a gradient is finite.
    """

    def __init__(
        self,
        model: TrainableModel,
        optimizer: torch.optim.Optimizer,
        feed: Feed,
        body: CompiledBody | None = None,
        decides_on_device: bool = False,
    ):
        self.accelerator, self.feed, self.body = feed.accelerator, feed, body
        self.decides_on_device = decides_on_device
        self._kind, self._config, self._generation_config = type(model), model.config, model.generation_config
        self.model, self.optimizer = self.accelerator.prepare(Learner(model), optimizer)
        self.parameters = list(self.model.parameters())
        if body is not None and body.uses_graphs:
            # Otherwise a graph would overwrite the first gradients' memory.
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter)

    @property
    def network(self) -> TrainableModel:
        """The model without wrapping."""
        learner: Learner = self.accelerator.unwrap_model(self.model)
        return learner.network

    def plain_network(self, device: torch.device | str) -> TrainableModel:
        """Return a model with the same config, neither wrapped nor sharded, with random weights."""
        with torch.device(device):
            plain = self._kind(self._config)
        plain.generation_config = self._generation_config
        return plain

    def warm_up(self, row: Row) -> None:
        """Compile the step and let DDP build its buckets from a row that is the same in every run.

        Both depend on the first micro-batch and change the last bit of sums, so a resumed run would differ from one
        that never stopped. The gradient is discarded.
        """
        try:
            if self.body is not None:  # not all-reduced: a single rank may lack memory or a compiler
                micro_batches = [self.feed.full_of(row)] * self.body.first_calls
                self.accumulate(micro_batches, tokens=1, all_reduce=False)
        except Exception as error:
            is_too_large = isinstance(error, RuntimeError) and should_reduce_batch_size(error)
            if not is_too_large:  # otherwise the first update fails too, and may be divided
                self.body = None
                logger.warning("training goes on uncompiled: the step cannot be compiled here: %s", first_line(error))
        if isinstance(self.model, DistributedDataParallel):
            # Two rows, because torch compiles size 1 separately.
            self.accumulate([MicroBatch(self.feed.tensors([row, row]))], tokens=1)
        self.discard()

    def accumulate(self, micro_batches: Sequence[MicroBatch], tokens: int, all_reduce: bool = True) -> torch.Tensor:
        """Add up this rank's micro-batch gradients, and all-reduce them with the last one.

        Every rank must have equally many micro-batches; `tokens` are the whole update's target tokens, on all ranks.
        Returns this rank's sums in nats, `(3)`: the loss, and the shares of R-Drop and distillation.
        """
        device = self.accelerator.device
        sums = torch.zeros(3, device=device)
        # Here, autocast rounds each weight once for all micro-batches; FSDP2 rounds its shards itself.
        with nullcontext() if isinstance(self.model, FSDPModule) else self.accelerator.autocast():
            for number, micro_batch in enumerate(micro_batches, start=1):
                batch, objective = self.feed.inputs(micro_batch)
                syncs = all_reduce and number == len(micro_batches)
                with nullcontext() if syncs else self.accelerator.no_sync(self.model):
                    losses = self.model(batch, tokens, objective, self.body).reshape(-1)
                    if not micro_batch.counts:
                        losses = losses * 0
                    with torch.autocast(device.type, enabled=False):
                        self.backward(losses[0])
                sums[: len(losses)] += losses.detach() * tokens
        return sums

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of this rank's part of the loss."""
        # The all-reduce of DDP and FSDP2 is a mean, but the gradient is a sum over the ranks.
        self.accelerator.backward(loss * self.accelerator.num_processes)

    @property
    def _gradients(self) -> list[torch.Tensor]:
        # From the same parameters on every rank, because each has had a micro-batch.
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def all_reduce(self) -> None:
        """All-reduce the gradients after backward passes without it."""
        if not torch.distributed.is_initialized():
            return
        for handle in [torch.distributed.all_reduce(gradient, async_op=True) for gradient in self._gradients]:
            handle.wait()
        for gradient in self._gradients:
            gradient.div_(torch.distributed.get_world_size())

    def gradient_norm(self, limit: float | None) -> torch.Tensor:
        """Return the gradient norm over all ranks, and clip the gradient to a limit."""
        if limit is not None:
            return full_tensor(self.accelerator.clip_grad_norm_(self.parameters, limit))
        self.accelerator.unscale_gradients()
        return full_tensor(torch.nn.utils.get_total_norm(self._gradients))

    def step(self, rate: float, norm: torch.Tensor) -> None:
        """Change the weights with a learning rate, if the norm is finite."""
        set_learning_rate(self.optimizer, rate)
        if self.decides_on_device:
            # If this is 1, torch's fused optimizers change nothing.
            self.optimizer.optimizer.found_inf = (~norm.isfinite()).float()
            self.optimizer.step()
        elif math.isfinite(norm.item()):
            self.optimizer.step()
        elif (scaler := self.accelerator.scaler) is not None:  # the scale of fp16's gradients was too high
            scaler.update(scaler.get_scale() * scaler.get_backoff_factor())
        self.discard()

    def discard(self) -> None:
        """Discard the gradients."""
        self.optimizer.zero_grad(set_to_none=self.body is None or not self.body.uses_graphs)

    def weights_are_finite(self) -> bool:
        """Return whether all weights on this rank are finite."""
        return all(bool(local_shard(weight).isfinite().all()) for weight in self.parameters)

    def weights(self, keep: bool) -> dict[str, torch.Tensor]:
        """Return whole weights (or their averages), tied ones once, and buffers; all ranks call it."""
        saved = self.network.state_dict()
        parameters: dict[str, torch.Tensor] = dict(self.network.named_parameters())
        if self.averages:
            parameters = averaged_weights(self.optimizer, parameters)
        buffers = {name: buffer for name, buffer in self.network.named_buffers() if name in saved}
        return full_weights(parameters | buffers, keep)

    def optimizer_state(self, keep: bool) -> dict[str, Any]:
        """Return the optimizer's state with whole tensors; all ranks call it."""
        state = self.optimizer.state_dict()
        if self.averages:
            for number, weight in enumerate(self._optimized):
                state["state"][number] = state["state"].get(number, {}) | {AVERAGED: weight.detach()}
        complete = {
            number: full_weights({k: v for k, v in values.items() if isinstance(v, torch.Tensor)}, keep)
            for number, values in state["state"].items()
        }
        return {"state": complete, "param_groups": state["param_groups"]} if keep else {}

    def load(self, optimizer_state: dict[str, Any]) -> None:
        """Load an `optimizer_state`, from any number of ranks and any sharding."""
        parameters = self._optimized
        for number, values in optimizer_state["state"].items():
            whole = {name: value for name, value in values.items() if value.shape == parameters[number].shape}
            values |= {name: shard_like(value, parameters[number]) for name, value in whole.items()}
            if AVERAGED in values:
                parameters[number].data.copy_(values.pop(AVERAGED))
        # The recipe may change betas and the like.
        groups = self.optimizer.state_dict()["param_groups"]
        for group, saved in zip(groups, optimizer_state["param_groups"], strict=True):
            group |= {name: saved[name] for name in COUNTED if name in saved}
        self.optimizer.load_state_dict(optimizer_state | {"param_groups": groups})

    @property
    def averages(self) -> bool:
        """Whether the optimizer averages weights, which are then validated and kept."""
        return "weight_lr_power" in self.optimizer.param_groups[0]  # only schedule-free ones have it

    @property
    def _optimized(self) -> list[torch.Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]


class Result(NamedTuple):
    """An update's result on all ranks; losses are sums in nats."""

    update: int  # its number, from 1
    target_tokens: int
    tokens: int  # on both sides
    loss: float  # the cross-entropy
    r_drop: float  # added to it
    distillation: float  # added to it
    padded_tokens: float
    stopping_ranks: float  # ranks that have received a signal
    late_ranks: float  # ranks whose time is up
    gradient_norm: float  # if it is not finite, the weights have not changed


class Results:
    """A queue of results, fetched in batches because a GPU has them late."""

    def __init__(self, accelerator: Accelerator):
        self._accelerator = accelerator
        self._waiting: deque[tuple[tuple[int, int, int], torch.Tensor]] = deque()

    def add(self, known: tuple[int, int, int], sums: torch.Tensor, own: tuple[float, ...], norm: torch.Tensor) -> None:
        """Add an update's `Result` up to `tokens`, and start to sum its losses and `own` over the ranks.

        `own` is this rank's part of `padded_tokens`, `stopping_ranks` and `late_ranks`.
        """
        device = self._accelerator.device
        kind = torch.float32 if device.type == "mps" else torch.float64
        given = torch.tensor(own, dtype=kind)
        given = given.pin_memory() if device.type == "cuda" else given
        values = torch.cat([sums.to(kind), given.to(device, non_blocking=True)])
        if self._accelerator.num_processes > 1:
            values = self._accelerator.reduce(values, reduction="sum")
        self._waiting.append((known, torch.cat([values, norm.detach().to(device, kind).reshape(1)])))

    def read(self, keep: float = 0) -> list[Result]:
        """Return all results except the last `keep`; here Python waits for the device."""
        ready = [self._waiting.popleft() for _ in range(len(self._waiting) - int(min(keep, len(self._waiting))))]
        read = torch.stack([values for _, values in ready]).tolist() if ready else []
        results = []
        for (known, _), (loss, r_drop, distillation, *rest) in zip(ready, read, strict=True):
            results.append(Result(*known, loss - r_drop - distillation, r_drop, distillation, *rest))
        return results
