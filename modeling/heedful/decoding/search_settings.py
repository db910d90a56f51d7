"""Search settings in a generation config, for all search methods."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from transformers import GenerationConfig

from heedful.evaluation.faults import USUAL_RATIOS
from heedful.protocols import Seq2SeqModel

# Settings in a recipe that only `BeamSearch` uses, with values that change nothing.
SEARCH_SETTINGS: dict[str, Any] = {"length_penalty_form": (None, "power"), "tokens_beyond_source": (None,)}
LONGEST_SOURCE = "longest_trained_source"  # longest source in training, in tokens
MOST_SOURCE_TOKENS = 8192  # unless training had longer ones: attention needs quadratic memory

UNSET: tuple[object, ...] = (None, False, 0, "", [], (), {})
# Settings for code on the Hub, which may find candidates for our strategies.
HUB_MODES = ("penalty_alpha", "diversity_penalty", "num_beam_groups")
# Settings that our strategies ignore.
OTHER_MODES = (
    "constraints", "dola_layers", "prompt_lookup_num_tokens", "assistant_early_exit", "low_memory", "use_mtp",
    "speculation_type", "continuous_batching_config",
)  # fmt: skip
BEAM_SETTINGS = ("num_beams", "length_penalty", "early_stopping")
GREEDY_SETTINGS = (
    "min_length", "min_new_tokens", "no_repeat_ngram_size", "repetition_penalty", "bad_words_ids", "suppress_tokens",
)  # fmt: skip
# Settings that do not change the tokens: ids and lengths, sampling, assistants, computing and output.
OTHER = re.compile(
    "_.*|(eos|pad|bos|decoder_start)_token_id|max_length|max_new_tokens|temperature|(top|min|typical)_[kph]|"
    "(epsilon|eta)_cutoff|is_assistant|(num_)?assistant_.*|max_matching_ngram_size|(assistant|target)_lookbehind|"
    "use_cache|cache_.*|max_cache_len|compile_config|disable_compile|continuous_batching_config|prefill_chunk_size|"
    f"low_memory|num_return_sequences|return_dict_in_generate|output_.*|transformers_version|{LONGEST_SOURCE}|{USUAL_RATIOS}"
)
# Values that change nothing, if not in `UNSET`.
IDLE: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "min_length", "guidance_scale"), (*UNSET, 1)),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty"), (*UNSET, 1)),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "min_new_tokens"), (None,)),
    **{"length_penalty": (None, 1), "max_time": (None,), "stop_strings": (None,), **SEARCH_SETTINGS},
}
ID_SETTING = re.compile(r"\w+_token_id|\w+_ids|(begin_)?suppress_tokens")

LengthPenaltyForm = Literal["power", "gnmt"] | None
Numbers = torch.Tensor | float
Inputs = dict[str, torch.Tensor]  # `input_ids` and `attention_mask`, `(batch, source_length)`


def asked_of(generation_config: GenerationConfig, names: Iterable[str] | None = None) -> dict[str, Any]:
    """Return the active settings in `names`, or all that change the tokens."""
    if names is None:
        # `min_new_tokens` replaces `min_length`.
        replaced = "min_length" if generation_config.min_new_tokens is not None else None
        names = [name for name in generation_config.to_dict() if name != replaced and not OTHER.fullmatch(name)]
    values = {name: getattr(generation_config, name, None) for name in names}
    return {name: value for name, value in values.items() if value not in IDLE.get(name, UNSET)}


def end_tokens(generation_config: GenerationConfig) -> list[int]:
    """Return the ids that end a sequence, if any."""
    ends = generation_config.eos_token_id
    if ends is None:
        return []
    return [int(end) for end in ends] if isinstance(ends, Sequence) else [int(ends)]


def filler(generation_config: GenerationConfig) -> int:
    """Return the token that follows finished sequences: padding, or else the end token."""
    padding = generation_config.pad_token_id
    return next(iter(end_tokens(generation_config)), 0) if padding is None else int(padding)


def check_ids(generation_config: GenerationConfig, limit: int) -> None:
    """Raise a `ValueError` for a setting with a token id outside the target vocabulary, `limit` or above."""
    for name, value in vars(generation_config).items():
        values = [value] if ID_SETTING.fullmatch(name) else []
        while values:
            each = values.pop()
            is_known = type(each) is int and 0 <= each < limit
            if isinstance(each, list | tuple):
                values += each
            elif not is_known and not isinstance(each, torch.Tensor | None):
                must = f"`{name}` of the generation config must be in the target vocabulary, from 0 to {limit - 1}"
                raise ValueError(f"{must}, but is {each!r} instead.")


def length_penalty(length: Numbers, alpha: float, form: LengthPenaltyForm) -> Numbers:
    """Return the divisor of a log-probability for `length` tokens, with the end token and without the prompt.

    It is length^α, or with `gnmt` the ((5 + length) / 6)^α of Wu et al. (2016, equation 14).
    """
    return ((5 + length) / 6) ** alpha if form == "gnmt" else length**alpha


def device_of(model: Seq2SeqModel) -> torch.device:
    """Return the device for a model's inputs: the CPU if its weights are loaded only when needed."""
    return torch.device("cpu") if model.device.type == "meta" else model.device
