"""Memory for models, computations and processes."""

import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch.utils._python_dispatch import TorchDispatchMode

from heedful.protocols import Seq2SeqModel

MIB = 2**20  # bytes


class HeldBytes(TorchDispatchMode):
    """Counts the bytes of tensors made inside the context: `now` and their `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._held: set[int] = set()

    def __torch_dispatch__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count new storages in its results; views and changes in place add none."""
        result = function(*args, **(kwargs or {}))
        given = {storage.data_ptr() for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            address, size = storage.data_ptr(), storage.nbytes()
            if size and address not in given and address not in self._held:
                self._held.add(address)
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._let_go, address, size)
        return result

    def _let_go(self, address: int, size: int) -> None:
        self._held.discard(address)
        self.now -= size


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    if isinstance(tree, torch.Tensor):
        return [tree.untyped_storage()]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [storage for part in parts for storage in _storages(part)]


def count_parameters(model: Seq2SeqModel) -> dict[str, int]:
    """Count the parameters in embeddings and output layer, encoder, decoder and the rest; tied ones once."""
    tables = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    parts = {"embeddings": [*tables, model.get_output_embeddings()]}
    parts |= {"encoder": [model.get_encoder()], "decoder": [model.get_decoder()], "other": [model]}
    counts, counted = dict[str, int](), set[torch.nn.Parameter]()
    for name, modules in parts.items():
        new = {parameter for module in modules if module is not None for parameter in module.parameters()} - counted
        counts[name] = sum(parameter.numel() for parameter in new)
        counted |= new
    return {name: count for name, count in counts.items() if count} | {"together": sum(counts.values())}


MATRICES = {
    **{"q_proj": "W_Q", "k_proj": "W_K", "v_proj": "W_V, value down", "out_proj": "W_O, value up"},
    **{"fc": "feed-forward", "norm": "norms"},
}


def count_matrices(model: Seq2SeqModel) -> dict[str, dict[str, int]]:
    """Count parameters in a Transformer's encoder and decoder by the matrices in section 3, biases included."""
    tables = {module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    counts: dict[str, dict[str, int]] = {}
    for part, stack in (("encoder", model.get_encoder()), ("decoder", model.get_decoder())):
        counts[part] = dict.fromkeys(MATRICES.values(), 0)
        for name, parameter in stack.named_parameters():
            if parameter not in tables:
                matrix = next((title for key, title in MATRICES.items() if key in name), "other")
                counts[part][matrix] = counts[part].get(matrix, 0) + parameter.numel()
    return {part: own for part, own in counts.items() if own["W_V, value down"]}


def state_memory(parameters: int, processes: int, kind: DistributedType) -> dict[str, int]:
    """Return the bytes that a process always holds, in float32."""
    sizes = {"weights": 4, "gradients": 4, "the optimizer's state": 8}  # per parameter; Muon needs less
    if kind in (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):  # copies in DDP's buckets
        sizes["gradients in exchange"] = 4
    shares = processes if kind == DistributedType.FSDP else 1
    return {name: parameters * size // shares for name, size in sizes.items()}


def process_memory() -> int:
    """Return the peak bytes of this process, or 0 if the system does not report them."""
    with suppress(ImportError):
        import resource

        size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return size if sys.platform == "darwin" else size * 1024
    return 0
