"""The gates of recurrent cells at each token."""

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from heedful.cells_heed import Cell, GRUCell, LSTMCell, no_state
from heedful.decoding.engines import evaluation_mode
from heedful.decoding.search_settings import device_of


def record_gates(
    model: Any, source_ids: Sequence[int], fed_ids: Sequence[int] = ()
) -> dict[str, dict[str, torch.Tensor]]:
    """Return a recurrent model's gates at each token of source and target, `(length, hidden_size)` in float32.

    The result maps cells (`encoder.layers.0.first_cell`, `decoder.layers.0`) to gates: `forget`, `input` and `output`,
    or `reset` and `update`, from 0 (closed) to 1 (open), and the `candidate`, from -1 to 1. Tensors are on the CPU. A
    bidirectional layer has two cells of half the width. Without `fed_ids`, the decoder's inputs from the start token
    on, only the encoder runs. Cells without gates are a `ValueError`.
    """
    cell = getattr(model.config, "cell", "none")
    if cell not in ("lstm", "gru"):
        raise ValueError(f"`cell` must be lstm or gru, whose gates can be recorded, but is {cell} instead.")
    encoder, decoder = model.get_encoder(), model.get_decoder()
    found: dict[str, list[dict[str, torch.Tensor]]] = {}
    with evaluation_mode(model), torch.no_grad(), ExitStack() as hooks:
        for side, stack in {"encoder": encoder, "decoder": decoder}.items():
            for name, part in stack.named_modules():
                if isinstance(part, Cell):
                    kept = found.setdefault(f"{side}.{name}", [])
                    hooks.enter_context(part.register_forward_hook(partial(_keep_gates, kept), with_kwargs=True))
        source, fed = (torch.tensor([list(ids)], device=device_of(model)) for ids in (source_ids, fed_ids))
        encoded = encoder(input_ids=source, return_dict=True)
        if fed_ids:
            model(encoder_outputs=encoded, decoder_input_ids=fed, use_cache=False)
    return {
        cell: {name: torch.cat([one[name] for one in calls]).float().cpu() for name in calls[0]}
        for cell, calls in found.items()
        if calls
    }


def _keep_gates(
    kept: list[dict[str, torch.Tensor]], cell: LSTMCell | GRUCell, given: Any, named: dict[str, Any], result: Any
) -> None:
    """Compute the gates in one call of the cell, for one token or all."""
    bound = inspect.signature(cell.forward).bind(*given, **named)
    bound.apply_defaults()
    inputs, is_reversed = bound.arguments["inputs"], bound.arguments["is_reversed"]
    before = (bound.arguments["state"] or no_state(cell, inputs))[0]
    if inputs.dim() > 2:  # the state before a token is the previous output
        outputs, first = result[0], before[:, None]
        before = torch.cat([outputs[:, 1:], first] if is_reversed else [first, outputs[:, :-1]], dim=1)
    gates = cell.gates(cell.read(inputs), before)
    kept.append({name: gate.flatten(0, -2) for name, gate in gates.items()})  # one sequence: (length, hidden)
