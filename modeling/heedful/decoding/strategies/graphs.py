"""`generate()` on a GPU with CUDA graphs, if they change no token and pay off."""

import copy
import logging
import math
import warnings
from typing import cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from transformers import CompileConfig, GenerationConfig

from heedful.configuration_base_heed import position_limit
from heedful.decoding.search_settings import BEAM_SETTINGS, GREEDY_SETTINGS, Inputs, asked_of
from heedful.fast_paths_heed import is_eager, runs_known_code
from heedful.files import first_line
from heedful.modeling_heed import HeedForConditionalGeneration
from heedful.protocols import Seq2SeqModel

logger = logging.getLogger(__name__)
# On an H200, compiling the base model's step took 9 to 13 s and saved 2 to 3 ms per step: this many steps pay for
# compiling.
STEPS_THAT_PAY = 5_000
MOST_POSITIONS = 2**17  # positions in a static cache before padding: 1.6 GB in the base model and bfloat16
OWN_CHOICES = ("cache_implementation", "compile_config", "disable_compile", "prefill_chunk_size")
COMPILING = CompileConfig(mode="reduce-overhead", fullgraph=True, dynamic=True)
# Each model's plain steps; minus infinity after graphs have failed.
_STEPS: "WeakKeyDictionary[Seq2SeqModel, float]" = WeakKeyDictionary()


def may_use_graphs(model: Seq2SeqModel, inputs: Inputs, settings: GenerationConfig) -> bool:
    """Return whether graphs give the tokens of `generate()`: for an unchanged Heed Transformer, without sampling."""
    known = {*BEAM_SETTINGS, *GREEDY_SETTINGS, "forced_bos_token_id", "forced_eos_token_id"}  # for each row alone
    sentences, longest = inputs["input_ids"].shape
    steps = settings.max_new_tokens or settings.max_length
    return (
        model.config.model_type == "heed"
        and cast("HeedForConditionalGeneration", model).prepared is None
        and model.config._attn_implementation in ("eager", "sdpa")
        and asked_of(settings).keys() <= known
        and not any(getattr(settings, name) for name in OWN_CHOICES)
        and sentences * (settings.num_beams * steps + longest) <= MOST_POSITIONS
        and is_eager()
        and runs_known_code(model)
        # Not quantized, and on one device.
        and all(type(weight) is torch.nn.Parameter and weight.device == model.device for weight in model.parameters())
    )


def generate(model: Seq2SeqModel, inputs: Inputs, settings: GenerationConfig) -> torch.Tensor:
    """Return the tokens of `generate()` for a batch that may use graphs, by graphs once they pay off."""
    taken, failure = _STEPS.get(model, 0.0), None
    if taken >= STEPS_THAT_PAY:
        try:
            return _generate_by_graphs(model, inputs, settings)
        except Exception as error:  # from a compiler, a driver or full memory
            failure = first_line(error)
    # Mistakes in the call raise here.
    sequences: torch.Tensor = model.generate(**inputs, generation_config=settings)
    _STEPS[model] = taken + sequences.shape[1] if failure is None else -math.inf
    if failure is not None:
        warnings.warn(f"CUDA graphs failed, so decoding continues without them ({failure}).", stacklevel=2)
    elif _STEPS[model] >= STEPS_THAT_PAY:
        logger.info("after %s decoding steps, further steps are compiled into CUDA graphs", STEPS_THAT_PAY)
    return sequences


def _generate_by_graphs(model: Seq2SeqModel, inputs: Inputs, settings: GenerationConfig) -> torch.Tensor:
    """Pad the batch to one of a few shapes, with repeated rows, which end with the original rows."""
    sentences, longest = inputs["input_ids"].shape
    rows = max(2, 1 << (sentences - 1).bit_length())
    # Torch compiles once for all sizes above 1, but unites equal sizes, so no length is a power of two above 8.
    length = math.ceil((longest - 8) / 32) * 32 + 8
    behind, repeated = min(length, position_limit(model.config) or length) - longest, torch.arange(rows) % sentences
    fill = {"input_ids": model.config.pad_token_id, "attention_mask": 0}
    padded = {name: F.pad(inputs[name][repeated], (0, behind), value=value) for name, value in fill.items()}
    own = copy.copy(settings)
    own.cache_implementation, own.compile_config = "static", COMPILING
    # On a copy, because `generate()` leaves a closure on the model, which prevents copying and pickling.
    sequences: torch.Tensor = copy.copy(model).generate(**padded, generation_config=own)
    return sequences[: sentences * settings.num_return_sequences]
