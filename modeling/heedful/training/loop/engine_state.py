"""What a run holds and saves of its model and optimizer, as Accelerate has prepared them."""

from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator

from heedful.training.processes.collectives import full_weights, local_shard, shard_like

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class EngineState:
    """A model and its optimizer; `parameters` is what the optimizer changes, or this rank's share of it.

    The model is given with the same weights on every rank. `model` and `optimizer` are as Accelerate wraps them.
    """

    def __init__(self, accelerator: Accelerator, model: "PreTrainedModel", optimizer: torch.optim.Optimizer):
        self.accelerator = accelerator
        self._kind, self._config, self._generation_config = type(model), model.config, model.generation_config
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
