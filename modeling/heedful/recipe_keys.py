"""Recipe keys: each section is a dataclass, and each field a key with its meaning and range.

Range checks, `heedful recipes keys`, the table in docs/recipe.md, the rules for resuming and the model card all use
these fields, so a new key is one field.
"""

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, field, fields, is_dataclass
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from heedful.messages_heed import wrong

BOUNDS = {"least": ("at least", operator.ge), "above": ("above", operator.gt)}
BOUNDS |= {"below": ("below", operator.lt), "most": ("at most", operator.le)}
# Names of types in messages and the table.
IN_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
IN_WORDS |= {type(None): "empty", list: "a list", dict: "a mapping"}


def key(meaning: str, default: Any = MISSING, *, resumes: bool = False, on_card: bool = True, **bounds: float) -> Any:
    """Declare a key as a section's field.

    Args:
        meaning: Its effect and values.
        default: Its default, or a class that makes it; without a default the key must be given.
        resumes: Whether a resumed run may have another value.
        on_card: Whether the model card shows it.
        bounds: The range for numbers: `least` or `above`, `most` or `below`.
    """
    metadata = {"meaning": meaning, "resumes": resumes, "on_card": on_card, "bounds": bounds}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


class Section:
    """A recipe section; its constructor checks each key's range, and then the keys against each other."""

    section, resumes = "", False  # its name in recipes, with a dot; whether all its keys may change at resume

    def __init_subclass__(cls, section: str = "", resumes: bool = False):
        cls.section, cls.resumes = f"{section}." * bool(section), resumes

    def __post_init__(self) -> None:
        for entry in fields(self):  # type: ignore[arg-type]
            value, bounds = getattr(self, entry.name), entry.metadata["bounds"]
            within = (BOUNDS[bound][1](value, limit) and value < math.inf for bound, limit in bounds.items())
            if value is not None and not all(within):
                raise wrong(f"{self.section}{entry.name}", f"be {range_in_words(bounds)}", value)
        self.check()

    def check(self) -> None:
        """Check the keys against each other."""

    def require(self, is_met: Any, name: str, must: str) -> None:
        """Raise a `ValueError` that names a key, unless its rule is met."""
        if not is_met:
            raise wrong(f"{self.section}{name}", must, in_yaml(getattr(self, name)))


def range_in_words(bounds: Mapping[str, float]) -> str:
    """Return a key's range, such as "at least 0 and below 1", or "" for no range."""
    return " and ".join(f"{BOUNDS[bound][0]} {limit}" for bound, limit in bounds.items())


def in_yaml(value: Any) -> Any:
    """Return the YAML word for None, True and False, and other values unchanged."""
    return {"None": "empty", "True": "true", "False": "false"}.get(str(value), value)


class Key(NamedTuple):
    """A recipe's key or section, with its value's type."""

    name: str  # with dots
    hint: Any
    meaning: str
    bounds: Mapping[str, float]
    resumes: bool
    on_card: bool

    @property
    def is_section(self) -> bool:
        """Whether it is a section."""
        return is_dataclass(self.hint)

    @property
    def values(self) -> str:
        """The values it takes, in words."""
        words, empty, _ = f"{in_words(self.hint)};".partition(" or empty;")
        return f"{words.rstrip(';')} {range_in_words(self.bounds)}".strip() + empty.rstrip(";")


def keys_of(kind: Any, prefix: str = "") -> Iterator[Key]:
    """Yield a recipe's sections and keys in order, each section before its keys."""
    hints = get_type_hints(kind)
    for entry in fields(kind):
        found = Key(f"{prefix}{entry.name}", hints[entry.name], **entry.metadata)
        yield found._replace(resumes=found.resumes or kind.resumes)
        if found.is_section:
            yield from keys_of(found.hint, f"{found.name}.")


def in_words(hint: Any) -> str:
    """Return a type in words, such as "one of no, bf16 or empty"."""
    choices = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return " or ".join(
        f"one of {', '.join(get_args(choice))}"
        if get_origin(choice) is Literal
        else IN_WORDS[get_origin(choice) or choice]
        for choice in choices
    )
