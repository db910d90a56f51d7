"""Attention recorded in one forward pass: weights, queries, keys, values and scores."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch

from heedful.attention_heed import HeedAttention
from heedful.configuration_base_heed import HEED_TYPES
from heedful.configuration_heed import RELATIVE_ENCODINGS
from heedful.decoding.engines import evaluation_mode
from heedful.decoding.scoring import eager_attention
from heedful.decoding.search_settings import device_of
from heedful.modeling_heed import HeedPreTrainedModel

Kind = Literal["cross", "encoder", "decoder"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SUM_ROUNDING = 0.02  # of a row's bfloat16 weights
ATTENTIONS: dict[Kind, tuple[str, str]] = {
    "encoder": ("encoder", "self_attn"),
    "decoder": ("decoder", "self_attn"),
    "cross": ("decoder", "cross_attn"),
}


class HeadStates(NamedTuple):
    """One layer's heads up to their weights (section 3.2.1), in float32 on the CPU, with copies of shared keys."""

    query: torch.Tensor  # (heads, rows, d_k), rotated if positions are rotary
    key: torch.Tensor  # (heads, columns, d_k), the same
    value: torch.Tensor  # (heads, columns, d_v)
    scores: torch.Tensor  # q·k, or vᵀ tanh(q + k), (heads, rows, columns); −∞ where masked
    scaling: float  # factor of the scores before the softmax: 1/√d_k, or 1


def record_weights(
    model: Any, source_ids: Sequence[int], fed_ids: Sequence[int], kinds: Collection[Kind], layer: int | None = None
) -> dict[Kind, list[torch.Tensor]]:
    """Return each kind's weights by layer, `(heads, rows, columns)` in float32 on the CPU.

    `layer` (numbered from 0; -1 is the last) limits them to one. If the model's attention function returns
    no weights, `eager` runs. Weights for windows, blocks or several streams are a `ValueError`.
    """
    with evaluation_mode(model), torch.no_grad():
        found = _checked_run(model, source_ids, fed_ids, kinds, layer)
        if len(found) < len(kinds) and getattr(model.config, "_attn_implementation", None) not in (None, "eager"):
            with eager_attention(model):
                found = _checked_run(model, source_ids, fed_ids, kinds, layer)
    return found


@contextmanager
def recorded_heads(
    model: Any, kinds: Collection[Kind], layer: int | None = None
) -> Iterator[dict[Kind, list[HeadStates]]]:
    """Yield a Heed Transformer's head states, which a run fills; none for relative positions or shared layers."""
    found: dict[Kind, list[HeadStates]] = {}
    is_relative = getattr(model.config, "position_encoding", None) in RELATIVE_ENCODINGS
    with ExitStack() as hooks:
        for kind, module in _attentions(model, kinds, layer) if not is_relative else ():
            keep = partial(_keep_heads, found.setdefault(kind, []))
            hooks.enter_context(module.register_forward_hook(keep))
        yield found


def check_number(field: str, number: int, count: int) -> None:
    """Raise a `ValueError` if there is no such `head`, or no such `layer`, which may be negative."""
    least = -count if field == "layer" else 0
    if not least <= number < count:
        raise ValueError(f"`{field}` must be between {least} and {count - 1}, but is {number} instead.")


def _checked_run(
    model: Any, source_ids: Sequence[int], fed_ids: Sequence[int], kinds: Collection[Kind], layer: int | None
) -> dict[Kind, list[torch.Tensor]]:
    """Return the weights from `_run`: matrices for all tokens, whose rows must sum to 1."""
    found = _run(model, source_ids, fed_ids, kinds, layer)
    runs = [(found, len(source_ids), len(fed_ids))]
    if model.config.model_type not in HEED_TYPES:  # a window, as in LED, may by chance have the source's length
        source_ids, fed_ids = (ids[:-1] or [*ids] * 2 for ids in (source_ids, fed_ids))
        runs.append((_run(model, source_ids, fed_ids, [*found], layer), len(source_ids), len(fed_ids)))
    for weights_of, source, fed in runs:
        sizes: dict[Kind, tuple[int, int]] = {"cross": (fed, source), "encoder": (source,) * 2, "decoder": (fed,) * 2}
        for kind, weights in ((kind, weights) for kind, layers in weights_of.items() for weights in layers):
            shape = tuple(weights.shape[1:]) if isinstance(weights, torch.Tensor) else type(weights).__name__
            sums = weights.sum(-1).aminmax() if shape == sizes[kind] else ()
            if not sums or not all(abs(each - 1) < SUM_ROUNDING for each in sums):
                must = f"be of {sizes[kind]} tokens, with rows that sum to 1, to be shown"
                but = f"sum to {sums[0]:.2f} and {sums[1]:.2f}" if sums else f"are of {shape}"
                hint = "the model attends in windows, blocks or streams. Choose other attention with `kinds`"
                whose = f"The {kind} attention weights of {type(model).__name__}"
                raise ValueError(f"{whose} must {must}, but {but} instead: {hint}.")
    return found


def _run(
    model: Any, source_ids: Sequence[int], fed_ids: Sequence[int], kinds: Collection[Kind], layer: int | None
) -> dict[Kind, list[torch.Tensor]]:
    asked = {"output_attentions": True, "return_dict": True}
    source, fed = (torch.tensor([list(ids)], device=device_of(model)) for ids in (source_ids, fed_ids))
    encoded = model.get_encoder()(input_ids=source, **(asked if "encoder" in kinds else {"return_dict": True}))
    weights: dict[Kind, Any] = {"encoder": encoded.get("attentions")} if "encoder" in kinds else {}
    if {*kinds} - {"encoder"}:
        outputs = model(encoder_outputs=encoded, decoder_input_ids=fed, use_cache=False, **asked)
        weights |= {kind: outputs.get(f"{kind}_attentions") for kind in kinds if kind != "encoder"}
    found: dict[Kind, list[torch.Tensor]] = {}
    for kind, tensors in weights.items():
        given = [each for each in tensors or () if each is not None]
        if given and layer is not None:
            check_number("layer", layer, len(given))
            given = [given[layer]]
        if given:
            found[kind] = [each[0].float().cpu() if isinstance(each, torch.Tensor) else each for each in given]
    return found


def _attentions(model: Any, kinds: Collection[Kind], layer: int | None) -> Iterator[tuple[Kind, HeedAttention]]:
    if not isinstance(model, HeedPreTrainedModel) or model.config.share_layers:
        return
    for kind in kinds:
        stack, name = ATTENTIONS[kind]
        layers = getattr(model, f"get_{stack}")().layers
        if layer is not None:
            check_number("layer", layer, len(layers))
        for part in layers if layer is None else [layers[layer]]:
            yield kind, getattr(part, name)


def _keep_heads(found: list[HeadStates], module: HeedAttention, arguments: tuple[Any, ...], _: Any) -> None:
    states, call = arguments
    call = call._replace(cache=None)
    query, key, value = module.project_source(states, call) if module.is_cross else module.project_own(states, call)
    mask = call.source_mask if module.is_cross else call.mask
    key, value = (part.repeat_interleave(module.num_key_value_groups, dim=1) for part in (key, value))
    additive = module.additive_score
    scores = query @ key.transpose(2, 3) if additive is None else additive(query, key)  # (1, heads, rows, columns)
    if mask is not None:  # 0 at visible columns, else the smallest number
        scores = scores.masked_fill(mask < 0, -torch.inf)
    query, key, value, scores = (part[0].float().cpu() for part in (query, key, value, scores))
    found.append(HeadStates(query, key, value, scores, module.scaling))
