"""What several processes do together: sums and decisions, a stream that is encoded in shares, parts made whole.

With one process, and weights that are not sharded, nothing is exchanged and nothing copied.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
import torch.distributed
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch.distributed.tensor import DTensor, distribute_tensor

from heedful.data.encoding import CHUNK, PairEncoder

# Gloo has no exception of its own: one of these stands in what it says of a process that is gone.
GONE = ("Connection closed by peer", "Connection reset by peer", "gloo/transport")


class ProcessLostError(RuntimeError):
    """Raised where another process of the run has ended, so that this one cannot go on."""


def is_sharded(model: torch.nn.Module) -> bool:
    """Return whether processes hold parts of the weights, as under FSDP2."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with all its parts; every process must ask at the same time."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this process holds; it shares the tensor's memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_weights(tensors: Mapping[str, torch.Tensor], keep: bool) -> dict[str, torch.Tensor]:
    """Return weights with all their parts, one after another to save memory.

    Args:
        tensors: Weights by name, sharded or not.
        keep: Whether this process wants them; sharded ones come to the CPU. Others get an empty dictionary.
    """
    found = {}
    for name, tensor in tensors.items():
        complete = whole(tensor.detach())
        if keep:
            found[name] = complete.cpu() if isinstance(tensor, DTensor) else complete
    return found


def shard_like(tensor: torch.Tensor, pattern: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor divided like another of its shape; each process keeps its own part."""
    if not isinstance(pattern, DTensor):
        return tensor
    return distribute_tensor(tensor.to(pattern.device), pattern.device_mesh, pattern.placements)


def in_total(accelerator: Accelerator, *values: float) -> list[float]:
    """Return the sum of each value over the processes, the same in all of them, as Python floats."""
    if accelerator.num_processes == 1:
        return [float(value) for value in values]
    kind = torch.float32 if accelerator.device.type == "mps" else torch.float64
    total = torch.tensor([float(value) for value in values], device=accelerator.device, dtype=kind)
    return accelerator.reduce(total, reduction="sum").tolist()


def any_of(accelerator: Accelerator, mine: bool) -> bool:
    """Return whether any process says yes, so that all do the same."""
    return in_total(accelerator, mine)[0] > 0


def told_by_main(accelerator: Accelerator, value: Any) -> Any:
    """Return what the main process passes, in every process."""
    if accelerator.num_processes == 1:
        return value
    return broadcast_object_list([value])[0]


def encode_together(
    encoder: PairEncoder, pairs: Iterable[Mapping[str, str]], accelerator: Accelerator
) -> Iterator[dict[str, list[int]]]:
    """Yield the rows of a stream, the same in every process, each of which encodes its share of them.

    Every process reads the stream, and must read the whole of it: none gets a row that another does not.

    Args:
        encoder: Encodes pairs; its count of long rows becomes that of all processes.
        pairs: The stream, the same in every process.
        accelerator: The processes.
    """
    rank, world = accelerator.process_index, accelerator.num_processes
    if world == 1:
        yield from encoder.rows(pairs)
        return
    stream, before = iter(pairs), encoder.too_long
    while chunk := list(islice(stream, CHUNK * world)):
        encoder.too_long = 0
        mine = list(encoder.rows(chunk[rank * CHUNK : (rank + 1) * CHUNK]))
        for rows, too_long in gather_object([(mine, encoder.too_long)]):
            before += too_long
            yield from rows
        encoder.too_long = before


def is_lost_process(error: BaseException) -> bool:
    """Return whether an error says that another process is gone."""
    if isinstance(error, torch.distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in GONE)


@contextmanager
def lost_processes_told(accelerator: Accelerator) -> Iterator[None]:
    """Turn the errors that the end of another process leaves behind into one that says so.

    Raises:
        ProcessLostError: If another process of the run has ended.
    """
    try:
        yield
    except RuntimeError as error:
        if accelerator.num_processes > 1 and is_lost_process(error):
            raise ProcessLostError(
                "Another process of this run has ended, so this one ends too: look for its message, and continue with "
                "resume=true."
            ) from error
        raise
