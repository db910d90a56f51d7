"""The compiled step: a model from its embeddings to the loss, compiled if it pays."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedConfig
from transformers.modeling_outputs import Seq2SeqModelOutput

from heedful.fast_paths_heed import runs_known_code
from heedful.modeling_heed import HeedModel
from heedful.packed_rows_heed import PACKED_ENCODINGS
from heedful.protocols import TrainableModel
from heedful.training.recipe import OptimizationRecipe
from heedful.training.updates.model_size import operations_of_pairs, peak_operations

logger = logging.getLogger(__name__)

LONG_ENOUGH = 300.0  # seconds in a run: compiling takes a minute, and saves up to a third
# An update's least seconds, and its share of the card's peak.
LAUNCHES, UNCOMPILED_SHARE = 0.03, 0.15
UNKNOWN_PEAK = 1e14  # operations per second, for a card that the table lacks
GRAPHS_BELOW = 4e12  # operations in a micro-batch, 10 ms on a large card, which would wait for launches


class CompiledBody:
    """A compiled `HeedModel` for any number of rows and tokens, or with a CUDA graph for each shape."""

    def __init__(self, model: HeedModel, uses_graphs: bool = False):
        self._model, self.uses_graphs = model, uses_graphs
        self.first_calls = 3 if uses_graphs else 1  # a graph is computed, then recorded, then replayed
        # Deterministic: the compiler's benchmarks could choose other kernels in a resumed run.
        options: dict[str, Any] = {"deterministic": True, "triton.cudagraphs": uses_graphs}

        def compute(**inputs: Any) -> Any:
            return model.forward(**inputs)

        # Torch compiles each piece of code a few times at most, and a process may train many models.
        compute.__code__ = compute.__code__.replace()
        self._compute: Callable[..., Seq2SeqModelOutput] = torch.compile(compute, dynamic=True, options=options)

    def __call__(self, input_ids: torch.Tensor, decoder_input_ids: torch.Tensor, **kwargs: Any) -> Seq2SeqModelOutput:
        """Return the model's output for ids and other arguments of its `forward`."""
        # The compiled gradient of embeddings would be summed in no fixed order.
        kwargs["inputs_embeds"] = self._model.encoder.embed_tokens(input_ids)
        kwargs["decoder_inputs_embeds"] = self._model.decoder.embed_tokens(decoder_input_ids)
        if self.uses_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        return self._compute(**kwargs)


def body_of(
    model: TrainableModel, settings: OptimizationRecipe, accelerator: Accelerator, is_sharded: bool, packs: bool
) -> CompiledBody | None:
    """Return a recipe's compiled body, or log why it has none and return `None`."""
    is_checkpointed = model.config.model_type == "heed" and model.model.encoder.gradient_checkpointing
    foreign = None if runs_known_code(model) else "the model contains code from outside Heedful"
    obstacle = check_compile(settings, model.config, is_checkpointed, "weights are sharded" if is_sharded else foreign)
    padded = "rows are padded, and every mask width needs its own program"  # as on the CPU, too
    reason = obstacle or (_why_too_short(model, settings, accelerator) if packs else padded)
    if settings.compile == "auto" and reason is not None:
        logger.info("the step is not compiled: %s", reason)
        return None
    # Rows end to end have few shapes.
    is_small = operations_of_pairs(model, *[settings.micro_batch_tokens / 2] * 2) < GRAPHS_BELOW
    uses_graphs = packs and is_small and accelerator.num_processes == 1
    logger.info("the step is compiled%s, which takes about a minute", " into CUDA graphs" if uses_graphs else "")
    return CompiledBody(model.model, uses_graphs)


def check_compile(
    settings: OptimizationRecipe, config: PreTrainedConfig, is_checkpointed: bool, obstacle: str | None = None
) -> str | None:
    """Return why a model cannot be compiled; raise a `ValueError` if the recipe demands it anyway."""
    if config.model_type != "heed":
        obstacle = "the model is recurrent, so its program grows with the sentences' length"
    elif is_checkpointed:
        obstacle = "`model.activation_checkpointing` is true"
    elif config.position_encoding not in PACKED_ENCODINGS:
        obstacle = f"`model.options.position_encoding` is {config.position_encoding}, which looks up vectors inside"
    is_met = settings.compile is not True or obstacle is None
    settings.require(is_met, "compile", f"be auto or false if {obstacle}")
    return obstacle


def _why_too_short(model: TrainableModel, settings: OptimizationRecipe, accelerator: Accelerator) -> str | None:
    """Return why a run is too short for compiling; `None` if it is long or its end is unknown."""
    seconds = [settings.max_minutes * 60] if settings.max_minutes is not None else []
    if settings.max_updates is not None:
        speed = UNCOMPILED_SHARE * (peak_operations(accelerator.device) or UNKNOWN_PEAK) * accelerator.num_processes
        per_update = operations_of_pairs(model, *[settings.tokens_per_update / 2] * 2) / speed
        seconds.append(settings.max_updates * max(LAUNCHES, per_update))
    if not seconds or min(seconds) >= LONG_ENOUGH:
        return None
    return f"the run may take {min(seconds):,.0f} seconds, too few to repay a minute of compiling"
