"""The files of a recipe: its YAML, with a check of every key and type, and the model config that it names.

This is the one module that reads YAML.
"""

import json
from contextlib import suppress
from dataclasses import MISSING, asdict, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from heedful.training.recipe import Recipe

MODEL_TYPES = ("heed", "heed_rnn")
IN_WORDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    type(None): "empty",
    list: "a list",
    dict: "a mapping",
}


class _Loader(yaml.SafeLoader):
    """Reads YAML, and refuses a key that is there twice, of which `safe_load` takes the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Make a mapping of different keys."""
        lines: dict[str, int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            line = key.start_mark.line + 1
            if key.value in lines:
                raise ValueError(f"`{key.value}` must be there once, but is in lines {lines[key.value]} and {line}.")
            lines[key.value] = line
        return super().construct_mapping(node, deep)


def _read_yaml(text: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deeply.") from error


def read_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe from YAML, with overrides on top, such as `data.folder=corpora`, whose values are YAML too."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"The recipe {path} does not exist.")
    try:
        tree = _read_yaml(path.read_text(encoding="utf-8-sig"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"The recipe {path} must be YAML, but is not: {error}") from error
    if not isinstance(tree, dict):
        raise ValueError(f"The recipe {path} must be a mapping of keys to values, but is {tree!r} instead.")
    for override in overrides or []:
        _override(tree, override)
    return make_recipe(tree)


def make_recipe(tree: dict[str, Any]) -> Recipe:
    """Make a recipe of nested dictionaries, of which every key and type is checked."""
    return _section(Recipe, tree, "")


def to_yaml(recipe: Recipe) -> str:
    """Write a recipe with every key, defaults included."""
    return yaml.safe_dump(asdict(recipe), sort_keys=False, allow_unicode=True)


def read_config(path: str | Path) -> dict[str, Any]:
    """Read the config.json of a Heed model, or the one of a folder, as a dictionary of fields."""
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"The model config {path} (`model.config`) does not exist.")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"The model config {path} (`model.config`) must be JSON, but is not: {error}") from error
    kind = fields.get("model_type", "heed") if isinstance(fields, dict) else type(fields).__name__
    if kind not in MODEL_TYPES:
        raise ValueError(
            f"The model config {path} (`model.config`) must be of type {' or '.join(MODEL_TYPES)}, but is of {kind} "
            "instead."
        )
    return {name: value for name, value in fields.items() if name not in ("architectures", "transformers_version")}


def _override(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ValueError(f"An override must be written key=value, but is {override!r} instead.")
    *sections, last = key.split(".")
    for section in sections:
        if tree.get(section) is None:  # absent, or a section without a key
            tree[section] = {}
        tree = tree[section]
        if not isinstance(tree, dict):
            raise ValueError(f"`{section}` in the override {override!r} must be a section, but is {tree!r} instead.")
    try:
        tree[last] = _read_yaml(text)
    except yaml.YAMLError as error:
        raise ValueError(f"The value of the override {override!r} must be YAML, but is not.") from error


def _section(kind: type, tree: Any, prefix: str) -> Any:
    """Make the dataclass `kind` of a mapping, after checking its keys and the types of its values."""
    if not isinstance(tree, dict):
        raise ValueError(f"`{prefix.rstrip('.')}` must be a section with keys, but is {tree!r} instead.")
    hints = get_type_hints(kind)
    for key in tree:
        if key not in hints:
            nearest = get_close_matches(str(key), hints, n=1, cutoff=0)
            raise ValueError(f"`{prefix}{key}` is not a key of a recipe; did you mean `{prefix}{nearest[0]}`?")
    values = {}
    for name, value in tree.items():
        hint = hints[name]
        if isinstance(hint, type) and is_dataclass(hint):
            values[name] = _section(hint, {} if value is None else value, f"{prefix}{name}.")
        else:
            values[name] = _typed(hint, value, f"{prefix}{name}")
    for entry in fields(kind):
        if entry.name not in values and entry.default is MISSING and entry.default_factory is MISSING:
            raise ValueError(f"`{prefix}{entry.name}` must be given, but is missing.")
    return kind(**values)


def _typed(hint: Any, value: Any, name: str) -> Any:
    """Return the value if it fits the type; text that YAML should have read as a number (1e-3) becomes one."""
    choices = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is False and "no" in get_args(hint):
        value = "no"  # what YAML reads a bare no as
    if float in choices and isinstance(value, str):
        with suppress(ValueError):
            value = float(value)
    if float in choices and isinstance(value, int) and not isinstance(value, bool) and int not in choices:
        return float(value)
    if not _fits(hint, value):
        raise ValueError(f"`{name}` must be {' or '.join(map(_in_words, choices))}, but is {value!r} instead.")
    return value


def _fits(hint: Any, value: Any) -> bool:
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return any(_fits(choice, value) for choice in inner)
    if kind is Literal:
        return value in inner
    if kind is Any:
        return True
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        return False
    entries = value.values() if kind is dict else value
    return not inner or all(_fits(inner[-1], entry) for entry in entries)


def _in_words(choice: Any) -> str:
    if get_origin(choice) is Literal:
        return "one of " + ", ".join(get_args(choice))
    return IN_WORDS[get_origin(choice) or choice]
