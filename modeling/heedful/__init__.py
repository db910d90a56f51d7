"""Heedful: encoder-decoder models for Hugging Face users.

`import heedful` is fast: it imports public names at first use, and transformers' Auto classes not at all.
"""

import importlib
import re
from pathlib import Path
from typing import Any

from heedful.registration import install

__version__ = "0.1.0"

# The public names with their modules; type checkers use the file too.
_HOMES = {name: home for home, name in re.findall(r"from (\S+) import (\w+)", Path(f"{__file__}i").read_text("utf-8"))}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'heedful' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted(__all__)


install()
