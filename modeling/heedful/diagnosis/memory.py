"""How much memory a computation, a process and a device have."""

import os
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class HeldBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that are made while it is entered and not freed yet.

    The count does not depend on the machine, and does not see what an operator needs for itself.

    Attributes:
        now: Bytes held at present.
        peak: Most bytes held at once.
    """

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._held: set[int] = set()

    def __torch_dispatch__(self, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count what is new among its results: views and what is changed in place are not."""
        result = function(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            if storage._cdata not in given and storage._cdata not in self._held:
                self._hold(storage._cdata, storage)
        return result

    def _hold(self, address: int, storage: torch.UntypedStorage) -> None:
        self._held.add(address)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._let_go, address, storage.nbytes())

    def _let_go(self, address: int, size: int) -> None:
        self._held.discard(address)
        self.now -= size


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [each.untyped_storage() for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


def process_memory() -> int:
    """Return the most bytes of memory that this process has had so far, 0 where the system does not tell."""
    with suppress(ImportError):
        import resource

        size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return size if sys.platform == "darwin" else size * 1024
    return 0


def available_memory(device: torch.device) -> int | None:
    """Return the bytes of memory that a device has in all, None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    with suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None
