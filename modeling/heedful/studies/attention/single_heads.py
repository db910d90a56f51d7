"""Single heads of a model: what they look at, how important they are by gradient, and the model without some of them.

Michel et al. (2019), "Are Sixteen Heads Really Better than One?": a head is multiplied by a mask ξ that is 1, and is
as important as the loss depends on it, E|∂L/∂ξ| over sentences (equation 2), divided by the norm of its layer's.
"""

import copy
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from heedful.data.encoding import EncodedPairs
from heedful.data.micro_batches import collate
from heedful.inference.attention.recording import Kind
from heedful.inference.engines import evaluation_mode
from heedful.inference.translation import Translator
from heedful.studies.measures import attention_along

if TYPE_CHECKING:
    from heedful.attention_heed import HeedAttention
    from heedful.modeling_heed import HeedForConditionalGeneration

PLACES = ("previous", "same", "next", "first", "</s>")
# Places that a head cannot look at, or that mean nothing: a source token has no target token beside it.
NOT_THERE = {"encoder": (), "decoder": ("next", "</s>"), "cross": ("previous", "same", "next")}


class Head(NamedTuple):
    """A head of a model."""

    kind: Kind  # "encoder" or "decoder" self-attention, or "cross"
    layer: int  # its number in its stack, from 0
    number: int  # in its layer, from 0

    def __str__(self) -> str:
        return f"{self.kind} {self.layer}.{self.number}"


class Look:
    """What a head looks at, averaged over the tokens that look.

    In the decoder "same" is the token that was read last and "first" is <s>; the last source token is </s>.
    """

    def __init__(self):
        self._totals: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()

    def add(self, weights: torch.Tensor) -> None:
        """Add the weights of a sentence, `(tokens that look, tokens that are looked at)`."""
        measured = {
            "previous": weights.diagonal(-1),
            "same": weights.diagonal(),
            "next": weights.diagonal(1),
            "first": weights[:, 0],
            "</s>": weights[:, -1],
            "largest weight": weights.amax(dim=1),
            "entropy": torch.special.entr(weights),
        }
        for name, values in measured.items():
            self._totals[name] += values.sum().item()
            self._counts[name] += len(values)

    def mean(self, name: str) -> float:
        """Return the mean "largest weight", "entropy" in nats, or weight on one of `PLACES` where a token has it."""
        return self._totals[name] / max(self._counts[name], 1)

    def shares(self, kind: str) -> dict[str, float]:
        """Return the mean weight on each place that a head of a kind can look at."""
        return {place: self.mean(place) for place in PLACES if place not in NOT_THERE[kind]}


def looks_of_heads(translator: Translator, rows: EncodedPairs) -> dict[Head, Look]:
    """Measure what every head of a model looks at, along the given translations."""
    looks = {head: Look() for head in heads_of(translator.model)}
    for index in range(len(rows)):
        weights = attention_along(translator, rows[index])
        for head, look in looks.items():
            look.add(weights[head.kind][head.layer][head.number])
    return looks


def most_positional(looks: dict[Head, Look], kind: str) -> tuple[float, str, Head]:
    """Return the largest share of weight on one's own or a neighbouring place, the place, and the head."""
    shares = {head: look.shares(kind) for head, look in looks.items() if head.kind == kind}
    return max((own[place], place, head) for head, own in shares.items() for place in PLACES[:3] if place in own)


def sharpest(looks: dict[Head, Look], kind: str) -> Head:
    """Return the head of a kind whose largest weight is largest on average."""
    return max((head for head in looks if head.kind == kind), key=lambda head: looks[head].mean("largest weight"))


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
    places = attention_modules(model).items()
    return [Head(*place, number) for place, module in places for number in range(_head_count(module))]


def head_importance(model: "HeedForConditionalGeneration", rows: EncodedPairs) -> dict[Head, float]:
    """Return the importance of every head: the mean over sentences of |∂L/∂ξ|, the heads of a layer at norm 1.

    L is the loss per target token of a pair. The model's weights and gradients stay as they are.
    """
    pad, modules = model.config.pad_token_id or 0, attention_modules(model)
    masks = {
        place: torch.ones(_head_count(module), device=model.device, requires_grad=True)
        for place, module in modules.items()
    }
    totals = {place: torch.zeros_like(mask) for place, mask in masks.items()}
    with evaluation_mode(model), ExitStack() as hooks:
        for place, module in modules.items():
            hooks.enter_context(module.out_proj.register_forward_pre_hook(partial(_masked, masks[place])))
        for index in range(len(rows)):
            batch = collate([rows[index]], pad)  # one sentence: no padding
            loss = model(**{name: values.to(model.device) for name, values in batch.items()}).loss
            gradients = torch.autograd.grad(loss, list(masks.values()))
            for place, gradient in zip(masks, gradients, strict=True):
                totals[place] += gradient.abs()
    smallest = torch.finfo(torch.float32).tiny  # for a layer that nothing depends on
    scaled = {place: (total / total.norm().clamp_min(smallest)).tolist() for place, total in totals.items()}
    return {head: scaled[head.kind, head.layer][head.number] for head in heads_of(model)}


def without_heads(model: "HeedForConditionalGeneration", heads: Iterable[Head]) -> "HeedForConditionalGeneration":
    """Return a copy of the model that computes as if the heads were not there.

    The columns of `out_proj` that read a head become 0: its values no longer reach the output, and all others do
    exactly as before.
    """
    pruned = copy.deepcopy(model)
    modules = attention_modules(pruned)
    for head in heads:
        module = modules[head.kind, head.layer]
        with torch.no_grad():
            module.out_proj.weight[:, head.number * module.d_v : (head.number + 1) * module.d_v] = 0
    return pruned


def _head_count(module: "HeedAttention") -> int:
    return module.out_proj.in_features // module.d_v


def _masked(mask: torch.Tensor, module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """Multiply the output of every head by its place in the mask, `(heads,)`."""
    heads = inputs[0].unflatten(-1, (len(mask), -1))  # (…, h, d_v)
    return ((heads * mask[:, None]).flatten(-2),)
