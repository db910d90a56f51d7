"""Recipe files: YAML, with a check of every key and type."""

import glob
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, asdict, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path, PureWindowsPath
from textwrap import wrap
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import yaml

from heedful.data.data_recipe import MixturePart
from heedful.data.tables import name_of
from heedful.files import ENDLESS, is_plain_file, private
from heedful.messages_heed import shortened, wrong
from heedful.recipe_keys import in_words, keys_of
from heedful.training.recipe import Recipe

# In the wheel, and at the checkout's top.
_PLACES = (Path(__file__).parents[1] / "configuration", Path(__file__).parents[3] / "configuration")
CONFIGURATION = next((place for place in _PLACES if place.is_dir()), _PLACES[0])
RECIPES, MODELS = CONFIGURATION / "recipes", CONFIGURATION / "models"
RECIPE_FILE = "recipe.yaml"
# Paths that may be relative to the recipe's file; data paths only without `data.folder`.
PATHS = re.compile(r"model\.(config|start_from)|tokenizer\.path|.+\.distillation|data\.(folder|held_out\..+)")
PATHS_OF_DATA = re.compile(r"data\.(train|validation|test\..+|mixture\..+\.train|denoise)")


class _Loader(yaml.SafeLoader):
    """Loads YAML, and refuses aliases and repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a repeated key: `safe_load` would take the last one."""
        lines: dict[str, int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            line = key.start_mark.line + 1
            if key.value in lines:
                raise wrong(key.value, "occur once", f"in lines {lines[key.value]} and {line}")
            lines[key.value] = line
        return super().construct_mapping(node, deep)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Refuse an alias, which could repeat others without end."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias (*NAME): write the value again.")
        return super().compose_node(parent, index)


def read_yaml(text: str) -> tuple[Any, str]:
    """Parse YAML; return its value and the text after it."""
    loader = _Loader(text)
    try:
        node: Any = loader.get_single_node()
        return (None, text) if node is None else (loader.construct_document(node), text[node.end_mark.index :])
    except (RecursionError, OverflowError, AttributeError, LookupError, TypeError) as error:  # PyYAML checks no values
        raise yaml.YAMLError("it is nested too deeply, or a value does not fit its type.") from error


def read_recipe(
    path: str | Path,
    overrides: list[str] | None = None,
    complete: Callable[[dict[str, Any], str], dict[str, Any]] | None = None,
) -> Recipe:
    """Load a recipe from a YAML file, with changes; missing keys get their defaults.

    Paths in the file are relative to the file, or else to the working directory; `output`, paths in `overrides`, and
    paths in the package's recipes are always relative to the working directory.

    Args:
        path: The file, or the name of a recipe in the package, such as "quickstart"; a file wins.
        overrides: Changes such as "data.folder=corpora", whose values are YAML too.
        complete: Completes a file without `optimization`, given its tree and name, like `proposals.proposal.complete`.

    Raises:
        FileNotFoundError: If there is no such file or name.
        ValueError: If the file is not YAML, or a key is unknown or has a wrong value; the message names the key.
    """
    path = find_recipe(path)
    tree = _read_tree(path)
    is_open = tree.get("optimization") is None and not section_of(tree, "model").get("start_from")
    overridden = [override.partition("=")[0] for override in overrides or []]
    is_other = any(map(re.compile(r"data(\.train|\.denoise|\.mixture.*)?").fullmatch, overridden))
    if is_other and (card := section_of(tree, "card")):
        # The card's license and texts are about the file's data.
        tree["card"] = {key: value for key, value in card.items() if key.endswith("_language")}
    for override in overrides or []:
        _override(tree, override)
    if path.parent not in (RECIPES, Path()):
        _resolve_paths(path.parent, tree, overridden, _relative_to)
    if is_open and complete is None and section_of(tree, "data"):
        how = "`heedful train` and `read_recipe(…, complete=heedful.proposals.proposal.complete)` complete such a file"
        raise ValueError(f"`optimization` of {path} must be given, but is missing: {how}.")
    return make_recipe(complete(tree, path.stem) if is_open and complete is not None else tree)


def recipe_of(folder: Path) -> Recipe:
    """Load the recipe in a model's folder, perhaps a stranger's: no path leaves the folder."""
    path = folder.resolve() / RECIPE_FILE
    if not is_plain_file(path, path.parent):
        raise FileNotFoundError(f"{folder} has no {RECIPE_FILE}.")
    tree = _read_tree(path)
    section_of(tree, "data").pop("folder", None)
    _resolve_paths(path.parent, tree, [], _file_in)
    if ENDLESS.search(str(section_of(tree, "decoding").get("ignore"))):
        raise ValueError(f"`decoding.ignore` of {path} must be a simple pattern, without repeated groups.")
    return make_recipe(tree)


def _read_tree(path: Path) -> dict[str, Any]:
    try:
        tree, _ = read_yaml(path.read_text(encoding="utf-8-sig"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"The recipe {path} must be YAML, but is not: {error}") from error
    if not isinstance(tree, dict):
        raise ValueError(f"The recipe {path} must be a mapping of keys to values, but is {shortened(tree)} instead.")
    return tree


def read_values(text: str) -> list[Any]:
    """Parse several values for a key, such as "0.1,0.2"."""
    values = None
    with suppress(yaml.YAMLError):
        values, _ = read_yaml(f"[{text}]")
    if not isinstance(values, list):
        raise ValueError(f"Values must be YAML, separated by commas, but are {text!r} instead.")
    return values


def recipes() -> dict[str, str]:
    """Return the first line of each recipe in the package, by name."""
    files = sorted(RECIPES.glob("*.yaml"))
    return {path.stem: path.read_text(encoding="utf-8").split("\n")[0].strip("# ") for path in files}


def sizes() -> dict[str, str]:
    """Return a sentence on each model size in the package, by name."""
    table = (MODELS / "README.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| `([^`]+)` \| (.*?) \|$", table, flags=re.MULTILINE))


def known_text(name: str) -> str:
    """Return the text of a recipe or size in the package; for `keys`, the listing of all keys."""
    if name == "keys":
        return listing()
    files = {entry: RECIPES / f"{entry}.yaml" for entry in recipes()}
    files |= {entry: MODELS / entry / "config.json" for entry in sizes()}
    if name.removesuffix(".yaml") not in files:
        raise wrong("NAME", "be one that `heedful recipes` lists", f"{name!r}{suggestion(Path(name), files)}")
    return files[name.removesuffix(".yaml")].read_text(encoding="utf-8")


def find_recipe(path: str | Path) -> Path:
    """Return a recipe's file, given its path or the name of a recipe in the package."""
    path = Path(path)
    named = RECIPES / f"{path.name.removesuffix('.yaml')}.yaml"
    for file in (path, named) if path.name == str(path) else (path,):
        if file.is_file():
            return file
    if path.is_dir():
        raise FileNotFoundError(f"The recipe must be a YAML file, but {path} is a folder.")
    found = f"does not exist{suggestion(path, recipes())}"
    raise FileNotFoundError(f"The recipe {path} {found}: `heedful recipes` lists the included ones.")


def make_recipe(tree: dict[str, Any]) -> Recipe:
    """Make a recipe from nested dictionaries; missing keys get their defaults.

    Args:
        tree: A dictionary for each section: `{"name": "mine", "data": {"train": "pairs.tsv", …}, …}`; paths are
            relative to the working directory.

    Raises:
        ValueError: If a key is unknown or missing, or has a wrong value; the message names it.
    """
    return cast("Recipe", make_section(Recipe, tree, ""))


def to_yaml(recipe: Recipe, is_private: bool = False) -> str:
    """Write a recipe with every key; if private, without this machine's paths."""
    tree = asdict(recipe)
    if is_private:
        tree = private(tree)
        tree["decoding"]["ignore"] = recipe.decoding.ignore  # a regular expression may look like a path
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def yaml_text(text: str | None) -> str:
    """Quote any text on one line, as a value or in a comment."""
    written = yaml.safe_dump(text, allow_unicode=True, default_style='"', width=math.inf)
    return "null" if text is None else written.rstrip("\n")


def commented(tree: Mapping[str, Any], notes: Mapping[str, str], prefix: str = "") -> list[str]:
    """Write settings as YAML lines with notes; long notes go above."""
    lines = []
    for name, value in tree.items():
        key, indent = f"{prefix}{name}", "  " * prefix.count(".")
        is_section, note = isinstance(value, dict) and bool(value), notes.get(f"{prefix}{name}", "")
        text = f"{indent}{name}:" + ("" if is_section else f" {_yaml_value(value)}")
        is_short, comment = len(f"{text}  # {note}") <= 119, f"{indent}# "
        above = [] if is_short else wrap(note, 119, initial_indent=comment, subsequent_indent=comment)
        lines += [*[""] * (not prefix and is_section), *above, f"{text}  # {note}" if note and is_short else text]
        lines += commented(value, notes, f"{key}.") if is_section else []
    return lines


def _yaml_value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(yaml_text, value))}]"
    if not isinstance(value, str):
        return json.dumps(value)
    is_read = re.fullmatch("[a-z]{3,}", value) and read_values(value) == [value]  # not so `yes`, `off`, `null`
    return value if is_read else yaml_text(value)


def meanings() -> dict[str, str]:
    """Return the meaning of each recipe section and key, by name."""
    return {each.name: each.meaning for each in keys_of(Recipe)}


def listing() -> str:
    """Return a recipe with every key, its default and its meaning."""
    data = {"train": "pairs.tsv", "source": "1", "target": "2"}
    recipe = make_recipe({"name": "mine", "data": data, "optimization": {"max_updates": 10_000}})
    tree = sorted(asdict(recipe).items(), key=lambda item: isinstance(item[1], dict))  # sections last
    return "\n".join(commented(dict(tree), meanings())) + "\n"


def suggestion(path: Path, names: Iterable[str]) -> str:
    """Return the names most like a path's, as a question; "" for none."""
    nearest = get_close_matches(path.name.removesuffix(".yaml"), names, n=3)
    return f" (did you mean {' or '.join(nearest)}?)" * bool(nearest)


def _resolve_paths(
    folder: Path, tree: dict[str, Any], overridden: list[str], resolved: Callable[[Path, str], str]
) -> None:
    """Resolve the paths in a recipe's file, but not the overridden ones."""
    has_folder = bool(section_of(tree, "data").get("folder"))

    def resolve(section: dict[str, Any], prefix: str) -> None:
        for name, value in section.items():
            key = f"{prefix}{name}"
            is_path = PATHS.fullmatch(key) or (PATHS_OF_DATA.fullmatch(key) and not has_folder)
            if isinstance(value, dict):
                resolve(value, f"{key}.")
            elif is_path and not any(f"{key}.".startswith(f"{other}.") for other in overridden):
                places = value if isinstance(value, list) else [value]
                found = [resolved(folder, place) if isinstance(place, str) else place for place in places]
                section[name] = found if isinstance(value, list) else found[0]

    resolve(tree, "")


def _relative_to(folder: Path, value: str) -> str:
    if not value or value.startswith("~") or Path(value).is_absolute():
        return value
    is_there = (folder / value).exists() or any(folder.glob(value))
    return str(folder / value) if is_there else value


def _file_in(folder: Path, value: str) -> str:
    """Return the file with that name in a folder, even if it is missing; built-in data stay."""
    if value.startswith("builtin:"):
        return value
    path = folder / PureWindowsPath(value).name  # accepts all systems' separators
    return glob.escape(str(path if is_plain_file(path, folder) else folder / f"{path.name} in the model's folder"))


def section_of(tree: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a tree's section, empty if there is none."""
    section = tree.get(name)
    return section if isinstance(section, dict) else {}


def _override(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ValueError(f"An override must be written key=value, but is {override!r} instead.")
    *sections, last = key.split(".")
    for section in sections:
        if tree.get(section) is None:
            tree[section] = {}
        tree = tree[section]
        if not isinstance(tree, dict):
            raise ValueError(f"`{section}` in the override {override!r} must be a section, but is {tree!r} instead.")
    hints = {each.name: each.hint for each in keys_of(Recipe) if not each.is_section}
    tree[last] = _value(text, hints.get(key))


def _value(text: str, hint: Any) -> Any:
    """Parse an override's value: YAML, or text if the key takes text or YAML would cut it."""
    try:
        value, rest = read_yaml(text)
        is_cut = bool(rest.strip())
    except yaml.YAMLError as error:
        if hint is None:
            raise ValueError(f"The value of an override must be YAML, but {shortened(text)} is not.") from error
        value, is_cut = None, True
    is_text = hint is not None and _fits(hint, text) and not _fits(hint, value)
    return text.strip() if is_cut or is_text else value


def make_section(kind: type, tree: Any, prefix: str) -> Any:
    """Make the dataclass `kind` from a mapping, with a check of keys and types."""
    hints, values = get_type_hints(kind), {}
    for name, value in _typed(dict, tree, prefix.rstrip("."), "a section with keys").items():
        key = f"{prefix}{name}"
        if name not in hints:
            text = str(name)
            meant = [entry.name for entry in fields(kind) if text.replace("_", " ") in entry.metadata["meaning"]]
            nearest = [*get_close_matches(text, hints), *meant, *get_close_matches(text, hints, cutoff=0)]
            unknown = shortened(key).strip("'")
            raise ValueError(f"`{unknown}` is not a key of a recipe; did you mean `{prefix}{nearest[0]}`?")
        hint = hints[name]
        if isinstance(hint, type) and is_dataclass(hint):
            values[name] = make_section(hint, {} if value is None else value, f"{key}.")
        elif hint == dict[str, MixturePart]:
            parts = _typed(dict, {} if value is None else value, key)
            values[name] = {str(k): make_section(MixturePart, v, f"{key}.{k}.") for k, v in parts.items()}
        else:
            values[name] = _typed(hint, value, key)
    for entry in fields(kind):
        if entry.name not in values and entry.default is MISSING and entry.default_factory is MISSING:
            raise ValueError(f"`{prefix}{entry.name}` must be given, but is missing.")
    return kind(**values)


def _typed(hint: Any, value: Any, name: str, must: str = "") -> Any:
    """Return the value if it fits the type; text such as 1e-3 becomes a number."""
    choices = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    is_of_language = str in choices and name.endswith((".source", ".target", ".to", "_language"))
    if value is False and (is_of_language or "no" in get_args(hint)):
        value = "no"  # YAML turns a bare no, Norwegian's code, into false
    if name.startswith("data.") and name.endswith((".source", ".target")) and type(value) in (int, list):
        value = name_of([*map(str, value if isinstance(value, list) else [value])])  # column names or numbers
    if float in choices and (isinstance(value, str) or type(value) is int):
        with suppress(ValueError, OverflowError):
            value = float(value)
    if not _fits(hint, value):
        advice = "put quotes around text that YAML takes for something else" * (str in choices and value is not None)
        raise wrong(name, f"be {must or in_words(hint)}", shortened(value), advice=advice)
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
