"""Single heads of a model: what they look at, how important they are by gradient, and the model without some of them.

Michel et al. (2019), "Are Sixteen Heads Really Better than One?": a head is multiplied by a mask ξ that is 1, and is
as important as the loss depends on it, E|∂L/∂ξ| over sentences (equation 2), divided by the norm of its layer's.
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

# The mean weight on each of `PLACES` where a head can look, its mean "largest weight", and its "entropy" in nats.
Look = dict[str, float]
PLACES = ("previous", "same", "next", "first", "</s>")
# Places that a head cannot look at, or that mean nothing: a source token has no target token beside it.
NOT_THERE = {"encoder": (), "decoder": ("next", "</s>"), "cross": ("previous", "same", "next")}


def looks_of_heads(translator: Translator, pairs: Sequence[Pair]) -> dict[Head, Look]:
    """Measure what every head of a model looks at, along the given translations.

    In the decoder "same" is the token that was read last and "first" is <s>; the last source token is </s>.
    """
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
    """Return what the weights of a head, `(rows, columns)`, say of each row: its weight on every place that it has."""
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
    """Return the largest share of weight on the token's own or a neighbouring place, the place, and the head."""
    places = [(head, place) for head in looks if head.kind == kind for place in PLACES[:3] if place in looks[head]]
    return max((looks[head][place], place, head) for head, place in places)


def sharpest(looks: dict[Head, Look], kind: str) -> Head:
    """Return the head of a kind whose largest weight is largest on average."""
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
    """Return all heads of a model."""
    places = attention_modules(model).items()
    return [Head(*place, number) for place, module in places for number in range(_head_count(module))]


def head_importance(model: Seq2SeqModel, rows: EncodedPairs) -> dict[Head, float]:
    """Return the importance of every head, |∂L/∂ξ| of the loss per token, mean of sentences; a layer's at norm 1."""
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
    smallest = torch.finfo(torch.float32).tiny  # for a layer that nothing depends on
    scaled = [value for total in totals for value in (total / total.norm().clamp_min(smallest)).tolist()]
    return dict(zip(heads_of(model), scaled, strict=True))


def without_heads(model: Seq2SeqModel, heads: Iterable[Head]) -> Seq2SeqModel:
    """Return a copy of the model that computes as if the heads were not there: `out_proj` reads zeros from them."""
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
