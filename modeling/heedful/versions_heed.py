"""What versions of transformers name or do differently, each asked of what is installed, never of a version number.

The keys and values of earlier steps are called `past_key_values` up to transformers 5.23 and `cache` from 5.24 on,
which takes the old name in calls until 5.40 and has it in outputs until 6.0. Heed's own code says `cache`. It takes
either name from everybody, in every version, and hands on the one that the installed version knows (`CACHE`).
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from transformers.modeling_outputs import Seq2SeqLMOutput

# The newest transformers with which this code was tested.
NEWEST_TRANSFORMERS = "5.24.0"

CACHE_NAMES = ("cache", "past_key_values")
CACHE = "cache" if "cache" in Seq2SeqLMOutput.__dataclass_fields__ else "past_key_values"


def rename_cache(arguments: dict[str, Any], name: str = CACHE) -> dict[str, Any]:
    """Give the cache among the keyword arguments of a call one of its two names, and return the arguments.

    Raises:
        ValueError: If two caches are given, one by each name.
    """
    (other,) = (known for known in CACHE_NAMES if known != name)
    if other not in arguments:
        return arguments
    cache, own = arguments.pop(other), arguments.get(name)
    if cache is not None and own is not None and own is not cache:
        raise ValueError("`cache` and `past_key_values` must be one, for they are names of the same, but are two.")
    arguments[name] = cache if own is None else own
    return arguments


def takes_cache_by_either_name(method: Callable) -> Callable:
    """Let a method whose parameter is `cache` take `past_key_values` too.

    Its signature is that of a peer's under the installed version. It is kept, so that it need not be found out again:
    `generate()` asks for it at each token, and to read it off a decorated function takes as long as an attention or a
    recurrent cell of a small model.
    """

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "past_key_values" in kwargs:
            rename_cache(kwargs, "cache")
        return method(*args, **kwargs)

    signature = inspect.signature(method)
    parameters = [each.replace(name=CACHE) if each.name == "cache" else each for each in signature.parameters.values()]
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return call


def cache_of(outputs: Any) -> Any:
    """Return the cache in what a model or `generate()` returned; `None` where there is none, or tokens alone."""
    return getattr(outputs, CACHE, None)
