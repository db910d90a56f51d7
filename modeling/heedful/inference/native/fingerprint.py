"""Whether a copy of a model's weights computes what the model does, and still does later."""

from typing import Any

import torch
from torch import nn

from heedful.fast_paths_heed import FILES_OF_MODULES, foreign_hooks, is_known, runs_known_functions
from heedful.modeling_heed import HeedForConditionalGeneration

# Numbers of each weight that are compared: a fused optimizer leaves no other trace.
COMPARED = 4


class Fingerprint:
    """What a model's weights and hooks were when a copy was made."""

    def __init__(self, model: nn.Module):
        self._model: Any = model
        self._traces = _traces(model)
        # Views of the weights, for what writes to `.data`, or is fused, changes no version.
        flat = [parameter.detach().flatten() for parameter in model.parameters()]
        self._samples = [numbers[:: max(1, len(numbers) // COMPARED)] for numbers in flat]
        self._values = _bits(self._samples)

    @property
    def is_current(self) -> bool:
        """Whether the model has the same weights, with the same numbers, and no other hooks of others."""
        # First where the weights lie: if elsewhere, the samples are of those before.
        return _traces(self._model) == self._traces and torch.equal(_bits(self._samples), self._values)


def obstacle_to_copies(model: Any, engine: str) -> str | None:
    """Return why weights copied into an engine would not compute what any model does, or `None` where they would.

    The model must be Heed's Transformer, without parts of others.
    """
    if not isinstance(model, HeedForConditionalGeneration):
        return f"The model must be a HeedForConditionalGeneration, but is a {type(model).__name__} instead."
    if model.config.attention_scoring == "additive":
        return f"`attention_scoring` must be scaled_dot or dot for {engine}, but is additive instead."
    if not runs_known_functions(model):
        return f"`F.linear` and the attention function must be torch's or transformers' for {engine}, but one is not."
    for name, module in model.named_modules():
        # Adapters and quantizers put modules of their own in the place of plain ones, or tensors of their own.
        kind: Any = type(module)
        has_weights = kind.__module__.startswith("torch.") and any(True for _ in module.parameters(recurse=False))
        is_plain = kind in (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm)
        if not FILES_OF_MODULES.match(kind.__module__) or (has_weights and not is_plain):
            return f"The model's modules must be Heed's for {engine}, but {name or 'it'} is a {kind} instead."
        if foreign_hooks(module) or not is_known(kind.forward):
            name = name or "the model itself"
            return f"The model must have no forward hooks and no other `forward` for {engine}, but {name} has one."
    for name, parameter in model.named_parameters():
        is_plain = type(parameter) is nn.Parameter and type(parameter.data) is torch.Tensor
        if not is_plain or parameter.is_meta or not parameter.is_floating_point():
            return (
                f"The model's weights must be floating-point numbers in memory for {engine}, but {name} is a "
                f"{type(parameter.data).__name__} of {parameter.dtype} on {parameter.device} instead."
            )
    return None


def _traces(model: Any) -> list[tuple[int, int]]:
    """Return what changes whenever a weight is replaced or written to, or code of others comes between modules."""
    found = [(0, int(runs_known_functions(model)))]
    kinds: list[Any] = list(dict.fromkeys(map(type, model.modules())))
    found += [(id(kind), id(kind.forward)) for kind in kinds]
    for module in model.modules():
        found += [(id(module), id(hook)) for hook in foreign_hooks(module)]
        for parameter in module._parameters.values():
            if parameter is not None:
                version = 0 if parameter.is_inference() else parameter._version
                found.append((parameter.data_ptr(), version))
    return found


def _bits(samples: list[torch.Tensor]) -> torch.Tensor:
    places = {(sample.dtype, sample.device) for sample in samples}
    if len(places) > 1:
        samples = [sample.float().cpu() for sample in samples]
    return torch.cat(samples).float().view(torch.int32)  # NaN equals itself so
