"""Single heads: their attention, their importance by gradient, and the model without some.

Importance is E|∂L/∂ξ| of a mask ξ = 1, divided by its layer's norm (Michel et al., 2019, equation 2).
"""

import copy
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, cast

import torch

from heedful.attention.recording import Kind
from heedful.data.epochs.encoding import EncodedPairs
from heedful.data.epochs.micro_batches import collate
from heedful.decoding.engines import evaluation_mode
from heedful.decoding.translation import Translator
from heedful.protocols import Seq2SeqModel
from heedful_lab.studies.measures import Head, attention_by_head
from heedful_lab.studies.pairs import Pair

if TYPE_CHECKING:
    from heedful.attention_heed import HeedAttention
    from heedful.modeling_heed import HeedForConditionalGeneration

# Mean weight on each possible place of `PLACES`, mean "largest weight", and "entropy" in nats.
Look = dict[str, float]
PLACES = ("previous", "same", "next", "first", "</s>")
# Impossible or meaningless places: source tokens have no neighbouring target token.
NOT_THERE = {"encoder": (), "decoder": ("next", "</s>"), "cross": ("previous", "same", "next")}


def looks_of_heads(translator: Translator, pairs: Sequence[Pair]) -> dict[Head, Look]:
    """Measure each head's attention; in the decoder "same" is the last input token and "first" is <s>."""
    found: dict[Head, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for weights_by_head in attention_by_head(translator, pairs):
        for head, weights in weights_by_head.items():
            for name, measured in look_of(weights).items():
                found[head][name] += measured.tolist()
    return {
        head: {name: fmean(one or [0.0]) for name, one in values.items() if name not in NOT_THERE[head.kind]}
        for head, values in found.items()
    }


def look_of(weights: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a head's weights `(rows, columns)` on each place, by row."""
    return {
        "previous": weights.diagonal(-1),
        "same": weights.diagonal(),
        "next": weights.diagonal(1),
        "first": weights[:, 0],
        "</s>": weights[:, -1],
        "largest weight": weights.amax(dim=1),
        "entropy": torch.special.entr(weights).sum(dim=1),
    }


def most_positional(looks: dict[Head, Look], kind: str) -> tuple[float, str, Head]:
    """Return the largest share of weight on the same or a neighbouring place, the place, and the head."""
    places = [(head, place) for head in looks if head.kind == kind for place in PLACES[:3] if place in looks[head]]
    return max((looks[head][place], place, head) for head, place in places)


def sharpest(looks: dict[Head, Look], kind: str) -> Head:
    """Return the head of one kind with the largest mean "largest weight"."""
    return max((head for head in looks if head.kind == kind), key=lambda head: looks[head]["largest weight"])


def attention_modules(model: Seq2SeqModel) -> dict[tuple[Kind, int], "HeedAttention"]:
    """Return the attention modules by kind and layer."""
    stacks = cast("HeedForConditionalGeneration", model).model
    encoder, decoder = enumerate(stacks.encoder.layers), enumerate(stacks.decoder.layers)
    modules: dict[tuple[Kind, int], HeedAttention] = {("encoder", number): one.self_attn for number, one in encoder}
    for number, layer in decoder:
        modules |= {("decoder", number): layer.self_attn, ("cross", number): layer.cross_attn}
    return modules


def heads_of(model: Seq2SeqModel) -> list[Head]:
    """Return all heads."""
    places = attention_modules(model).items()
    return [Head(*place, number) for place, module in places for number in range(_head_count(module))]


def head_importance(model: Seq2SeqModel, rows: EncodedPairs) -> dict[Head, float]:
    """Return each head's importance: mean |∂L/∂ξ| of sentences' loss per token, scaled to norm 1 in each layer."""
    pad, modules = model.config.pad_token_id or 0, attention_modules(model)
    masks = [torch.ones(_head_count(one), device=model.device, requires_grad=True) for one in modules.values()]
    totals = [torch.zeros_like(mask) for mask in masks]
    with evaluation_mode(model), ExitStack() as hooks:
        for mask, module in zip(masks, modules.values(), strict=True):
            hooks.enter_context(module.out_proj.register_forward_pre_hook(partial(_masked, mask)))
        for index in range(len(rows)):
            batch = collate([rows[index]], pad)  # one sentence: no padding
            loss = model(**{name: values.to(model.device) for name, values in batch.items()}).loss
            for total, gradient in zip(totals, torch.autograd.grad(loss, masks), strict=True):
                total += gradient.abs()
    smallest = torch.finfo(torch.float32).tiny  # for a layer without effect
    scaled = [value for total in totals for value in (total / total.norm().clamp_min(smallest)).tolist()]
    return dict(zip(heads_of(model), scaled, strict=True))


def without_heads(model: Seq2SeqModel, heads: Iterable[Head]) -> Seq2SeqModel:
    """Return a copy of the model without the heads: `out_proj` ignores their outputs."""
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
    """Multiply each head's output by its number in the mask `(heads,)`."""
    heads = inputs[0].unflatten(-1, (len(mask), -1))  # (…, h, d_v)
    return ((heads * mask[:, None]).flatten(-2),)
