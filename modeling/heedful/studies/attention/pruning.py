"""Which heads a model can do without: their importance by gradient, and copies without some of them.

Michel et al. (2019), "Are Sixteen Heads Really Better than One?": a head is multiplied by a mask ξ that is 1, and is
as important as the loss depends on it, E|∂L/∂ξ| over sentences (equation 2), divided by the norm of its layer's.
"""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from heedful.data.encoding import EncodedPairs
from heedful.data.micro_batches import collate
from heedful.inference.attention.recording import Kind

if TYPE_CHECKING:
    from heedful.attention_heed import HeedAttention
    from heedful.modeling_heed import HeedForConditionalGeneration


class Head(NamedTuple):
    """A head of a model.

    Attributes:
        kind: "encoder" or "decoder" self-attention, or "cross".
        layer: Number of the layer in its stack, from 0.
        number: Number of the head in its layer, from 0.
    """

    kind: Kind
    layer: int
    number: int

    def __str__(self) -> str:
        return f"{self.kind} {self.layer}.{self.number}"


def attention_modules(model: "HeedForConditionalGeneration") -> dict[tuple[Kind, int], "HeedAttention"]:
    """Return the attention modules by kind and layer."""
    modules: dict[tuple[Kind, int], HeedAttention] = {}
    for number, layer in enumerate(model.model.encoder.layers):
        modules["encoder", number] = layer.self_attn
    for number, layer in enumerate(model.model.decoder.layers):
        modules["decoder", number] = layer.self_attn
        modules["cross", number] = layer.cross_attn
    return modules


def heads_of(model: "HeedForConditionalGeneration") -> list[Head]:
    """Return all heads of a model."""
    return [
        Head(kind, layer, number)
        for (kind, layer), module in attention_modules(model).items()
        for number in range(_head_count(module))
    ]


def head_importance(model: "HeedForConditionalGeneration", rows: EncodedPairs) -> dict[Head, float]:
    """Return the importance of every head: the mean over sentences of |∂L/∂ξ|, the heads of a layer at norm 1.

    Args:
        model: The model; its weights and gradients stay as they are.
        rows: Pairs whose loss per target token is L.

    Raises:
        ValueError: If there is no pair.
    """
    if not len(rows):
        raise ValueError("`rows` must hold at least one pair, but is empty instead.")
    was_training, pad = model.training, model.config.pad_token_id or 0
    model.eval()
    with _masked(model) as masks:
        totals = {place: torch.zeros_like(mask) for place, mask in masks.items()}
        for index in range(len(rows)):
            batch = collate([rows[index]], pad)  # one sentence: no padding
            loss = model(**{name: values.to(model.device) for name, values in batch.items()}).loss
            gradients = torch.autograd.grad(loss, list(masks.values()))
            for place, gradient in zip(masks, gradients, strict=True):
                totals[place] += gradient.abs()
    model.train(was_training)
    smallest = torch.finfo(torch.float32).tiny  # for a layer that nothing depends on
    scaled = {place: (total / total.norm().clamp_min(smallest)).tolist() for place, total in totals.items()}
    return {head: scaled[head.kind, head.layer][head.number] for head in heads_of(model)}


def without_heads(model: "HeedForConditionalGeneration", heads: Iterable[Head]) -> "HeedForConditionalGeneration":
    """Return a copy that computes as if the heads were not there.

    The columns of `out_proj` that read a head become 0: its values no longer reach the output, and all others do
    exactly as before.

    Args:
        model: The model, which stays as it is.
        heads: Which to leave out.

    Raises:
        ValueError: If one does not exist.
    """
    pruned = copy.deepcopy(model)
    modules = attention_modules(pruned)
    known = set(heads_of(model))
    for head in heads:
        if head not in known:
            raise ValueError(f"`heads` must be heads of the model, but holds {head} instead.")
        module = modules[head.kind, head.layer]
        with torch.no_grad():
            module.out_proj.weight[:, head.number * module.d_v : (head.number + 1) * module.d_v] = 0
    return pruned


def _head_count(module: "HeedAttention") -> int:
    return module.out_proj.in_features // module.d_v


@contextmanager
def _masked(model: "HeedForConditionalGeneration") -> Iterator[dict[tuple[Kind, int], torch.Tensor]]:
    """Multiply the output of every head by a mask of ones, `(heads,)` for each module, and yield the masks."""
    masks, hooks = {}, []
    for place, module in attention_modules(model).items():
        mask = torch.ones(_head_count(module), device=model.device, requires_grad=True)
        masks[place] = mask
        hooks.append(module.out_proj.register_forward_pre_hook(partial(_multiplied, mask)))
    try:
        yield masks
    finally:
        for hook in hooks:
            hook.remove()


def _multiplied(mask: torch.Tensor, module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    heads = inputs[0].unflatten(-1, (len(mask), -1))  # (…, h, d_v)
    return ((heads * mask[:, None]).flatten(-2),)
