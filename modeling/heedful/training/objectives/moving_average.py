"""The average of a model's weights over the updates of a run."""

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from heedful.training.processes.collectives import local_shard, shard_like


class MovingAverage:
    """An exponential moving average of a model's weights, in float32, sharded where they are.

    The first updates count less than `decay` would let them, so that the random weights of the start are soon
    forgotten: after t updates the decay, which is how much of the average an update leaves, is at most
    (1 + t) / (10 + t). The model must not be wrapped; `weights` are the averages by its parameters' names.
    """

    def __init__(self, model: torch.nn.Module, decay: float):
        self.decay = decay
        self._parameters = dict(model.named_parameters())
        self.weights = {name: weight.detach().clone().float() for name, weight in self._parameters.items()}

    @torch.no_grad()
    def update(self, number: int) -> None:
        """Take in the weights after an update, whose number counts from 1."""
        averages = [local_shard(weight) for weight in self.weights.values()]
        current = [local_shard(weight.detach()).float() for weight in self._parameters.values()]
        decay = min(self.decay, (1 + number) / (10 + number))
        get_ema_multi_avg_fn(decay)(averages, current, None)

    @torch.no_grad()
    def load(self, weights: dict[str, torch.Tensor]) -> None:
        """Take over whole averages by name."""
        for name, average in self.weights.items():
            average.copy_(shard_like(weights[name].to(average.device), average))
