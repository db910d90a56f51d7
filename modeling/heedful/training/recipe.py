"""The recipe: everything that defines one training run, read from YAML and checked before anything is spent.

This is the one module that reads YAML. Each dataclass is a section of the file, each field a key; what a key means
stands beside it in `configuration/recipes/multi30k-de-en.yaml`, where every key is commented.
"""

from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from heedful.data.cleaning import CleaningRules
from heedful.evaluation.metrics import SMALLEST_BOOTSTRAP


@dataclass
class DataRecipe:
    """Where the pairs come from and which of them are kept."""

    train: str | list[str]
    validation: str | list[str]
    source: str
    target: str
    test: dict[str, str | list[str]] = field(default_factory=dict)
    folder: str | None = None
    both_directions: bool = False
    streaming: bool = False
    pool_size: int = 20000
    max_source_tokens: int | None = 256
    max_target_tokens: int | None = 256
    cleaning: CleaningRules = field(default_factory=CleaningRules)

    def __post_init__(self):
        """Check the numbers."""
        _at_least(1, "data", self, "pool_size", "max_source_tokens", "max_target_tokens")
        if "validation" in self.test:
            raise ValueError("`data.test` must not have a set called validation: its scores would hide validation's.")

    def location(self, where: str | list[str]) -> str | list[str]:
        """Return a source of pairs with `folder` in front of its file names."""
        if self.folder is None or "builtin:" in where:
            return where
        if isinstance(where, list):
            return [str(Path(self.folder) / name) for name in where]
        return str(Path(self.folder) / where)


@dataclass
class TokenizerRecipe:
    """The tokenizer: trained from the training pairs, or taken from a folder."""

    path: str | None = None
    algorithm: Literal["bpe", "unigram", "word"] = "bpe"
    vocab_size: int | None = 8000
    joint: bool = True
    target_vocab_size: int | None = None
    sentences: int | None = None

    def __post_init__(self):
        """Check the numbers."""
        _at_least(1, "tokenizer", self, "vocab_size", "target_vocab_size", "sentences")


@dataclass
class ModelRecipe:
    """The model: a config file and changes to it, or a trained model to go on from."""

    config: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    start_from: str | None = None
    attn_implementation: str | None = None
    gradient_checkpointing: bool = False

    def __post_init__(self):
        """Check that the model is described once."""
        if self.start_from is not None and (self.config is not None or self.options):
            raise ValueError(
                "`model.start_from` must be empty where `model.config` or `model.options` are given, "
                f"but is {self.start_from!r} instead."
            )


@dataclass
class OptimizationRecipe:
    """How the weights are changed, and for how long."""

    optimizer: Literal["adam", "adamw"] = "adam"
    learning_rate: float = 1.0
    schedule: Literal["paper", "inverse_sqrt", "cosine", "linear", "constant"] = "paper"
    warmup_updates: int = 4000
    beta1: float = 0.9
    beta2: float = 0.98
    epsilon: float = 1e-9
    weight_decay: float = 0.0
    max_grad_norm: float | None = None
    max_updates: int | None = None
    max_epochs: int | None = None
    max_minutes: float | None = None
    tokens_per_update: int = 50000
    buckets_per_update: int = 1
    token_budget: int | None = None
    shrink_token_budget: bool = False
    skip_nonfinite_updates: int = 0
    ema_decay: float | None = None
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    device: Literal["auto", "cpu", "cuda"] = "auto"

    def __post_init__(self):
        """Check the numbers, and that the run ends."""
        _at_least(0, "optimization", self, "warmup_updates", "weight_decay", "skip_nonfinite_updates")
        _at_least(1, "optimization", self, "max_updates", "max_epochs", "buckets_per_update", "token_budget")
        _at_least(self.buckets_per_update, "optimization", self, "tokens_per_update")
        _above(0, "optimization", self, "learning_rate", "epsilon", "max_grad_norm", "max_minutes")
        for name in ("beta1", "beta2", "ema_decay"):
            if getattr(self, name) is not None and not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"`optimization.{name}` must be at least 0 and below 1, but is {getattr(self, name)} instead."
                )
        if self.max_updates is None and self.max_epochs is None and self.max_minutes is None:
            raise ValueError(
                "One of `optimization.max_updates`, `max_epochs` and `max_minutes` must be given, but none is."
            )
        if self.schedule in ("cosine", "linear") and self.max_updates is None:
            raise ValueError(
                f"`optimization.max_updates` must be given for the {self.schedule} schedule, which ends there, "
                "but is empty instead."
            )
        if self.weight_decay and self.optimizer == "adam":
            raise ValueError(
                "`optimization.weight_decay` must be 0 with adam, which would mix it into the gradient "
                f"(choose adamw), but is {self.weight_decay} instead."
            )


@dataclass
class ValidationRecipe:
    """How often and how the model is looked at while it trains."""

    every_updates: int = 1000
    sentences: int | None = None
    num_beams: int = 1
    max_new_tokens: int = 128
    select: Literal["loss", "bleu", "chrf", "exact_match"] = "loss"
    patience: int | None = None

    def __post_init__(self):
        """Check the numbers."""
        _at_least(1, "validation", self, "every_updates", "num_beams", "max_new_tokens", "patience")
        _at_least(0, "validation", self, "sentences")
        if self.sentences == 0 and self.select != "loss":
            raise ValueError(
                "`validation.select` must be loss where `validation.sentences` is 0 and nothing is translated, "
                f"but is {self.select} instead."
            )


@dataclass
class CheckpointRecipe:
    """What is kept of the run while it goes on, and which weights are published."""

    every_updates: int = 1000
    keep_last: int = 5
    keep_best: int = 1
    publish: Literal["average", "average_best", "best", "last", "ema"] = "average"

    def __post_init__(self):
        """Check the numbers."""
        _at_least(1, "checkpoints", self, "every_updates", "keep_last", "keep_best")


@dataclass
class DecodingRecipe:
    """How the published model generates by default, and how it is tested."""

    num_beams: int = 4
    length_penalty: float = 1.0
    length_penalty_form: Literal["power", "gnmt"] = "power"
    max_length: int = 256
    tokens_beyond_source: int | None = None
    bootstrap: int = 1000
    bleu_tokenizer: str = "13a"

    def __post_init__(self):
        """Check the numbers."""
        _at_least(1, "decoding", self, "num_beams", "max_length", "tokens_beyond_source")
        if self.bootstrap != 0 and self.bootstrap < SMALLEST_BOOTSTRAP:
            raise ValueError(
                f"`decoding.bootstrap` must be 0 or at least {SMALLEST_BOOTSTRAP}, but is {self.bootstrap} instead."
            )
        if self.num_beams == 1 and self.length_penalty != 1:
            raise ValueError(
                "`decoding.length_penalty` must be 1 where `decoding.num_beams` is 1 and nothing is compared, "
                f"but is {self.length_penalty} instead."
            )
        if self.num_beams == 1 and self.length_penalty_form != "power":
            raise ValueError(
                "`decoding.length_penalty_form` must be power where `decoding.num_beams` is 1 and compares nothing, "
                f"but is {self.length_penalty_form} instead."
            )


@dataclass
class LoggingRecipe:
    """What is told while the run goes on, and where."""

    every_updates: int = 50
    trackers: list[str] = field(default_factory=list)

    def __post_init__(self):
        """Check the numbers."""
        _at_least(1, "logging", self, "every_updates")


@dataclass
class CardRecipe:
    """What the model card says that no program can know."""

    license: str | None = None
    source_language: str | None = None
    target_language: str | None = None
    dataset: str | None = None
    intended_use: str | None = None
    limits: str | None = None


@dataclass
class Recipe:
    """One training run.

    Raises:
        ValueError: If a value is out of range or two exclude each other; the message names the key.
    """

    name: str
    data: DataRecipe
    optimization: OptimizationRecipe
    output: str | None = None
    seed: int = 1
    resume: bool = False
    overwrite: bool = False
    allow_changes: bool = False
    tokenizer: TokenizerRecipe = field(default_factory=TokenizerRecipe)
    model: ModelRecipe = field(default_factory=ModelRecipe)
    validation: ValidationRecipe = field(default_factory=ValidationRecipe)
    checkpoints: CheckpointRecipe = field(default_factory=CheckpointRecipe)
    decoding: DecodingRecipe = field(default_factory=DecodingRecipe)
    logging: LoggingRecipe = field(default_factory=LoggingRecipe)
    card: CardRecipe = field(default_factory=CardRecipe)

    def __post_init__(self):
        """Fill in the output folder and check what concerns several sections."""
        if self.output is None:
            self.output = f"runs/{self.name}"
        if self.seed < 0:
            raise ValueError(f"`seed` must be at least 0, but is {self.seed} instead.")
        if self.resume and self.overwrite:
            raise ValueError("`resume` and `overwrite` must not both be true: one keeps the run, one deletes it.")
        if self.allow_changes and not self.resume:
            raise ValueError("`allow_changes` must be false where `resume` is: there is no run that could differ.")
        if (self.optimization.ema_decay is not None) != (self.checkpoints.publish == "ema"):
            raise ValueError(
                "`optimization.ema_decay` must be given where `checkpoints.publish` is ema, and only there, "
                f"but is {self.optimization.ema_decay} with {self.checkpoints.publish} instead."
            )
        if self.data.both_directions and not self.tokenizer.joint:
            raise ValueError("`tokenizer.joint` must be true where `data.both_directions` is, but is false instead.")

    @property
    def folder(self) -> Path:
        """The run's folder."""
        assert self.output is not None  # set in __post_init__
        return Path(self.output)

    @property
    def token_budget(self) -> int:
        """Padded tokens of one micro-batch: as given, or a whole bucket."""
        optimization = self.optimization
        return optimization.token_budget or optimization.tokens_per_update // optimization.buckets_per_update

    def to_yaml(self) -> str:
        """Write the recipe with every key, defaults included."""
        return yaml.safe_dump(asdict(self), sort_keys=False, allow_unicode=True)


def read_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe from YAML, with `section.key=value` overrides on top.

    Args:
        path: The YAML file.
        overrides: Such as `["optimization.max_updates=500", "data.folder=corpora/multi30k"]`; values are YAML.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If it is not YAML, or a key is unknown (the nearest is named), missing, or of another type.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"The recipe {path} does not exist.")
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"The recipe {path} must be YAML, but is not: {error}") from error
    if not isinstance(tree, dict):
        raise ValueError(f"The recipe {path} must be a mapping of keys to values, but is {tree!r} instead.")
    for override in overrides or []:
        _override(tree, override)
    return make_recipe(tree)


def make_recipe(tree: dict[str, Any]) -> Recipe:
    """Make a recipe of nested dictionaries.

    Raises:
        ValueError: If a key is unknown (the nearest is named), missing, or of another type.
    """
    return _section(Recipe, tree, "")


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
        tree[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"The value of the override {override!r} must be YAML, but is not.") from error


def _section(kind: type, tree: Any, prefix: str) -> Any:
    """Make the dataclass `kind` of a mapping, after checking its keys and the types of its values."""
    if not isinstance(tree, dict):
        raise ValueError(f"`{prefix.rstrip('.')}` must be a section with keys, but is {tree!r} instead.")
    hints = get_type_hints(kind)
    names = [entry.name for entry in fields(kind)]
    for key in tree:
        if key not in names:
            nearest = get_close_matches(str(key), names, n=1, cutoff=0)
            raise ValueError(f"`{prefix}{key}` is not a key of a recipe; did you mean `{prefix}{nearest[0]}`?")
    values = {}
    for name, value in tree.items():
        hint = hints[name]
        if isinstance(hint, type) and is_dataclass(hint):
            values[name] = _section(hint, {} if value is None else value, f"{prefix}{name}.")
        else:
            values[name] = _typed(hint, value, f"{prefix}{name}")
    required = [entry.name for entry in fields(kind) if entry.default is MISSING and entry.default_factory is MISSING]
    missing = [name for name in required if name not in values]
    if missing:
        raise ValueError(f"`{prefix}{missing[0]}` must be given, but is missing.")
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
    if not any(_fits(choice, value) for choice in choices):
        raise ValueError(f"`{name}` must be {_in_words(choices)}, but is {value!r} instead.")
    return value


def _fits(choice: Any, value: Any) -> bool:
    origin = get_origin(choice)
    if origin is Literal:
        return value in get_args(choice)
    if origin is list:
        return isinstance(value, list) and all(_fits(get_args(choice)[0], entry) for entry in value)
    if origin is dict:
        inner = get_args(choice)[1]
        options = get_args(inner) if get_origin(inner) is UnionType else (inner,)
        return isinstance(value, dict) and all(any(_fits(o, entry) for o in options) for entry in value.values())
    if choice is Any:
        return True
    if choice is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, choice)


def _in_words(choices: tuple[Any, ...]) -> str:
    words = {str: "text", int: "a whole number", float: "a number", bool: "true or false", type(None): "empty"}
    names = []
    for choice in choices:
        if get_origin(choice) is Literal:
            names.append("one of " + ", ".join(get_args(choice)))
        elif get_origin(choice) is list:
            names.append("a list")
        elif get_origin(choice) is dict:
            names.append("a mapping")
        else:
            names.append(words[choice])
    return " or ".join(names)


def _at_least(minimum: int, section: str, values: Any, *names: str) -> None:
    for name in names:
        value = getattr(values, name)
        if value is not None and not value >= minimum:
            raise ValueError(f"`{section}.{name}` must be at least {minimum}, but is {value} instead.")


def _above(minimum: int, section: str, values: Any, *names: str) -> None:
    for name in names:
        value = getattr(values, name)
        if value is not None and not value > minimum:
            raise ValueError(f"`{section}.{name}` must be above {minimum}, but is {value} instead.")
