"""Differences between transformers versions, found in the installed package, not by version numbers.

Keys and values of earlier steps are `past_key_values` up to transformers 5.23 and `cache` from 5.24 on. Calls may use
the old name until 5.40, and outputs have it until 6.0. Heed's code uses `cache` and takes either name in all versions,
with transformers' warning for the old one. It passes on the installed version's name (`CACHE`).
"""

import functools
import inspect
import warnings
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions, Seq2SeqLMOutput
from transformers.modeling_utils import PreTrainedModel

# The newest tested version of transformers.
NEWEST_TRANSFORMERS = "5.24.0"

CACHE_NAMES = ("cache", "past_key_values")
CACHE = "cache" if "cache" in Seq2SeqLMOutput.__dataclass_fields__ else "past_key_values"

# How names of methods and Trainer options begin; different up to transformers 5.22.
CHECKPOINTING = "activation_checkpointing"
if f"{CHECKPOINTING}_enable" not in vars(PreTrainedModel):
    CHECKPOINTING = "gradient_checkpointing"


def rename_cache(arguments: dict[str, Any], name: str = CACHE) -> dict[str, Any]:
    """Rename the cache in a call's keyword arguments, and return them."""
    other = CACHE_NAMES[CACHE_NAMES.index(name) - 1]
    if other not in arguments:
        return arguments
    if other != CACHE and other == "past_key_values" and not torch.compiler.is_compiling():
        # transformers' own models warn so; Heed's still take the name.
        message = "`past_key_values` is deprecated in transformers: use `cache` instead."
        warnings.warn(message, FutureWarning, stacklevel=4)
    given = [cache for cache in (arguments.get(name), arguments.pop(other)) if cache is not None]
    if len(given) == 2 and given[0] is not given[1]:
        raise ValueError(
            "`cache` and `past_key_values` must be one cache, which has two names, but are two. (A peft that is too "
            "old for transformers does this: `pip install 'heedful[adapters]'` brings two that go together.)"
        )
    arguments[name] = given[0] if given else None
    return arguments


def either_cache_name(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method take its parameter `cache` by either name; its signature has the installed version's name."""
    # Made once: `generate()` uses it at every token, and making it takes as long as a small model's attention.
    signature = inspect.signature(method)
    parameters = [each.replace(name=CACHE) if each.name == "cache" else each for each in signature.parameters.values()]

    @functools.wraps(method)
    def renaming(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **(rename_cache(kwargs, "cache") if "past_key_values" in kwargs else kwargs))

    renaming.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return renaming


def decoder_output(states: torch.Tensor, cache: Any, **recorded: Any) -> BaseModelOutputWithPastAndCrossAttentions:
    """Return a decoder's output, with the installed version's name for the cache."""
    return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=states, **{CACHE: cache}, **recorded)


def cache_of(outputs: Any) -> Any:
    """Return the cache in a model's or `generate()`'s outputs, or `None`."""
    return getattr(outputs, CACHE, None)


def check_peft() -> None:
    """Raise an `ImportError` with the required version if transformers refuses the installed peft."""
    from transformers.integrations.peft import MIN_PEFT_VERSION
    from transformers.utils.peft_utils import check_peft_version

    try:
        check_peft_version(MIN_PEFT_VERSION)
    except ValueError as error:
        found = "no peft" if find_spec("peft") is None else f"peft {version('peft')}"
        must = f"transformers {transformers.__version__} goes with peft {MIN_PEFT_VERSION} or newer"
        cure = "`pip install 'heedful[adapters]'` brings the newest two that go together"
        raise ImportError(f"{must}, but {found} is installed: {cure}.") from error
