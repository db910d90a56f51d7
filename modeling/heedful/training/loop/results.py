"""What updates gave. A GPU knows it later than Python, which reads it for several updates at once."""

import math
from collections import deque
from typing import NamedTuple

import torch
from accelerate import Accelerator


class Result(NamedTuple):
    """What an update gave, of all ranks together; losses are sums in nats."""

    update: int  # its number, from 1
    target_tokens: int
    tokens: int  # of both sides
    loss: float  # the cross-entropy,
    r_drop: float  # what R-Drop adds to it,
    distillation: float  # and what distillation does
    padded_tokens: float
    stopping_ranks: float  # that have received a signal
    late_ranks: float  # whose time is up
    gradient_norm: float

    @property
    def is_finite(self) -> bool:
        """Whether the gradient was finite, and so the weights have changed."""
        return math.isfinite(self.gradient_norm)


class Results:
    """Results that are not read yet, in order. Every rank must add and read at the same updates."""

    def __init__(self, accelerator: Accelerator):
        self._accelerator = accelerator
        self._waiting: deque[tuple[tuple[int, int, int], torch.Tensor]] = deque()

    def add(self, known: tuple[int, int, int], sums: torch.Tensor, own: tuple[float, ...], norm: torch.Tensor) -> None:
        """Add an update's number and its target tokens and tokens of both sides, and start to add up the rest.

        `sums` are what `Engine.accumulate` returned, `own` are this rank's padded tokens, whether it is to stop, and
        whether its time is up; the gradient's norm is that of all ranks.
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
        """Return the results of all updates but the last `keep`, which is where Python waits for the device."""
        ready = [self._waiting.popleft() for _ in range(len(self._waiting) - int(min(keep, len(self._waiting))))]
        if not ready:
            return []
        read = torch.stack([values for _, values in ready]).tolist()
        results = []
        for (known, _), (loss, r_drop, distillation, *rest) in zip(ready, read, strict=True):
            results.append(Result(*known, loss - r_drop - distillation, r_drop, distillation, *rest))
        return results
