"""Collective operations; with one process and whole weights, nothing is sent or copied."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch.distributed.tensor import DTensor, distribute_tensor


def is_sharded(model: torch.nn.Module) -> bool:
    """Return whether each rank holds a shard of the weights, as under FSDP2."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with all its shards; every rank must call this at the same time."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard, which shares the tensor's memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_weights(tensors: Mapping[str, torch.Tensor], keep: bool) -> dict[str, torch.Tensor]:
    """Gather sharded weights on the CPU, one by one; ranks with `keep=False` get an empty dict."""
    weights = {}
    for name, tensor in tensors.items():
        complete = full_tensor(tensor.detach())
        if keep:
            weights[name] = complete.cpu() if isinstance(tensor, DTensor) else complete
    return weights


def shard_like(tensor: torch.Tensor, pattern: torch.Tensor) -> torch.Tensor:
    """Shard a whole tensor like another tensor with its shape."""
    if not isinstance(pattern, DTensor):
        return tensor
    return distribute_tensor(tensor.to(pattern.device), pattern.device_mesh, pattern.placements)


def all_reduce(accelerator: Accelerator, *values: float) -> list[float]:
    """Return each value's sum over the ranks."""
    if accelerator.num_processes == 1:
        return [float(value) for value in values]
    kind = torch.float32 if accelerator.device.type == "mps" else torch.float64
    total = torch.tensor([float(value) for value in values], device=accelerator.device, dtype=kind)
    return [float(value) for value in accelerator.reduce(total, reduction="sum").tolist()]


def any_rank(accelerator: Accelerator, condition: bool) -> bool:
    """Return True on every rank if the condition holds on any rank."""
    return all_reduce(accelerator, condition)[0] > 0


def broadcast(accelerator: Accelerator, value: object) -> Any:
    """Return the main process's value on every rank."""
    return value if accelerator.num_processes == 1 else broadcast_object_list([value])[0]
