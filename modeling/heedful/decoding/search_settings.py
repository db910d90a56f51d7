"""Settings of a search that a generation config holds, as every way of searching reads them."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from heedful.protocols import Seq2SeqModel

Settings = dict[str, tuple[object, ...]]  # names of generate()'s settings, with the values that change nothing
# Those that only `BeamSearch` reads; a recipe writes them into a generation config.
SEARCH_SETTINGS: Settings = {"length_penalty_form": (None, "power"), "tokens_beyond_source": (None,)}
LONGEST_SOURCE = "longest_trained_source"  # the tokens of the longest source that the model has learned from
# A source of more tokens is refused unless the model has learned from longer ones: attention takes the square of it.
MOST_SOURCE_TOKENS = 8192

ID_SETTING = re.compile(r"\w+_token_id|\w+_ids|(begin_)?suppress_tokens")

LengthPenaltyForm = Literal["power", "gnmt"] | None
Numbers = torch.Tensor | float
Inputs = dict[str, torch.Tensor]  # `input_ids` and `attention_mask`, `(batch, source_length)`


def active_settings(generation_config: "GenerationConfig", settings: Settings) -> dict[str, Any]:
    """Return those of some settings that change something, with their values in a generation config."""
    values = {name: getattr(generation_config, name, None) for name in settings}
    return {name: value for name, value in values.items() if value not in settings[name]}


def end_tokens(generation_config: "GenerationConfig") -> list[int]:
    """Return the ids that end a sequence, perhaps none."""
    ends = generation_config.eos_token_id
    if ends is None:
        return []
    return [int(end) for end in ends] if isinstance(ends, Sequence) else [int(ends)]


def check_ids(generation_config: "GenerationConfig", limit: int) -> None:
    """Raise a `ValueError` that names a setting with a token id outside of a target vocabulary of `limit` tokens."""
    for name, value in vars(generation_config).items():
        values = [value] if ID_SETTING.fullmatch(name) else []
        while values:
            each = values.pop()
            is_known = type(each) is int and 0 <= each < limit
            if isinstance(each, list | tuple):
                values += each
            elif not is_known and not isinstance(each, torch.Tensor | None):
                must = f"`{name}` of the generation config must be of the target's vocabulary, from 0 to {limit - 1}"
                raise ValueError(f"{must}, but is {each!r} instead.")


def length_penalty(length: Numbers, alpha: float, form: LengthPenaltyForm) -> Numbers:
    """Return what the log-probability of a hypothesis of `length` tokens, the end token included, is divided by.

    It is transformers' length^α, or with `gnmt` the ((5 + length) / 6)^α of Wu et al. (2016, equation 14), with which
    Vaswani et al. (2017, section 6.1) decode at α = 0.6. The prompt does not count.
    """
    return ((5 + length) / 6) ** alpha if form == "gnmt" else length**alpha


def device_of(model: "Seq2SeqModel") -> torch.device:
    """Return where a model takes its inputs: the CPU if its weights are loaded only while they are needed."""
    return torch.device("cpu") if model.device.type == "meta" else model.device
