"""The recipe: everything that defines one training run, checked before anything is spent.

Each dataclass is a section of the file, each field a key; `configuration/recipes/multi30k-de-en.yaml` has a comment on
every key. `recipe_file.py` reads and writes the files.
"""

import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from heedful.data import mixture
from heedful.data.cleaning import CleaningRules
from heedful.data.epochs.batching import BatchingSettings
from heedful.data.languages import code_of
from heedful.data.mixture import DENOISE, OTHER_DIRECTION, AugmentationRules, DenoiseRules, MixturePart, check_mixture
from heedful.data.tokenizer_training import SPECIAL_TOKENS, TokenizerRecipe, check_size
from heedful.evaluation.metrics import check_scoring
from heedful.files import check_at_least

Location = str | list[str]
Criterion = Literal["loss", "bleu", "chrf", "chrf++", "exact_match", "token_error_rate", "character_error_rate"]


@dataclass
class DataRecipe:
    """Where the pairs come from and which of them are kept."""

    train: Location | None
    source: str
    target: str
    validation: Location | None = None
    test: dict[str, Location] = field(default_factory=dict)
    references: str | None = None
    held_out: dict[str, Location] = field(default_factory=dict)
    folder: str | None = None
    mixture: dict[str, MixturePart] = field(default_factory=dict)
    temperature: float = 1.0
    both_directions: bool = False
    streaming: bool = False
    pool_size: int = 20000
    max_source_tokens: int | None = 256
    max_target_tokens: int | None = 256
    cleaning: CleaningRules = field(default_factory=CleaningRules)
    augmentation: AugmentationRules = field(default_factory=AugmentationRules)
    denoise: DenoiseRules = field(default_factory=DenoiseRules)

    def __post_init__(self) -> None:
        _at_least(1, "data", self, "temperature", "pool_size", "max_source_tokens", "max_target_tokens")
        check_mixture(self.mixture, self.target, self.source if self.both_directions else None)
        if names := {"validation", "ended"} & self.test.keys():
            raise ValueError(f"`data.test` must not have a set called {names.pop()}, as `metrics.json` calls others.")
        for name in ("streaming", "mixture", "references", "denoise"):
            if self.validation is None and getattr(self, name):
                raise mistake("data.validation", f"given where `data.{name}` is", "empty")
        if self.streaming and (self.mixture or self.augmentation != AugmentationRules()):
            raise mistake("data.streaming", "false where `data.mixture` or `data.augmentation` is given", "true")
        if self.temperature != 1 and (self.streaming or not (self.mixture or self.denoise)):
            must = "1 in a stream" if self.streaming else "1 without a `data.mixture` or `data.denoise`"
            raise mistake("data.temperature", must, self.temperature)
        if self.train is None and (self.denoise.sides or not self.denoise.alone):
            raise mistake("data.train", "given, but for `data.denoise.text` with `alone: true`", "empty")
        for name in ("mixture", "both_directions", "augmentation") if self.denoise.alone else ():
            if getattr(self, name) not in ({}, False, AugmentationRules()):
                raise mistake(f"data.{name}", "left out where `data.denoise.alone` is true", getattr(self, name))

    @property
    def located(self) -> "DataRecipe":
        """The same with `folder` in front of file names, as `read_pairs` takes them."""
        train, validation = self._located(self.train), self._located(self.validation)
        test = {name: self._located(where) for name, where in self.test.items()}
        mixture = {name: replace(part, train=self._located(part.train)) for name, part in self.mixture.items()}
        denoise = replace(self.denoise, text=self._located(self.denoise.text))
        places: dict[str, Any] = {"train": train, "validation": validation, "test": test, "mixture": mixture}
        return replace(self, **places, denoise=denoise, folder=None)

    @property
    def parts(self) -> dict[str, MixturePart]:
        """The parts of the training data by their keys: `train`, its other direction, `mixture`, and `denoise`."""
        data, parts = self.located, {}
        train = data.train or ""
        if not self.denoise.alone:
            parts["data.train"] = MixturePart(train, self.source, self.target, self.target)
        if self.both_directions:
            parts[OTHER_DIRECTION] = MixturePart(train, self.target, self.source, self.source)
        for name, part in data.mixture.items():
            source, target, to = part.source or self.source, part.target or self.target, part.to or self.target
            parts[f"data.mixture.{name}"] = MixturePart(part.train, source, target, to, part.tag)
        for side in self.denoise.sides:  # a pair of one text
            name, is_one = getattr(self, side), isinstance(train, str) or len(train) != 2
            file = train if is_one else [train[side == "target"]] * 2
            parts[f"data.denoise.{side}"] = MixturePart(file, name, name, name, DENOISE)
        for number, text in enumerate(data.denoise.text, start=1):
            name = self.target
            parts[f"data.denoise.text.{number}"] = MixturePart([text, text], name, name, name, DENOISE)
        return parts

    @property
    def denoised(self) -> list[int]:
        """The numbers of the parts whose texts are damaged."""
        return [number for number, part in enumerate(self.parts.values()) if part.tag == DENOISE]

    def _located(self, where: Any) -> Any:
        if self.folder is None or where is None or "builtin:" in where:
            return where
        if isinstance(where, list):
            return [str(Path(self.folder) / name) for name in where]
        return str(Path(self.folder) / where)


@dataclass
class ModelRecipe:
    """The model: a config file and changes to it, or a trained model to start from."""

    config: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    start_from: str | None = None
    attn_implementation: str | None = None
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        if self.start_from is not None and (self.config is not None or self.options):
            must = "empty where `model.config` or `model.options` are given"
            raise mistake("model.start_from", must, repr(self.start_from))


@dataclass
class OptimizationRecipe:
    """How the weights are changed, and for how long."""

    optimizer: Literal["adam", "adamw", "schedule_free", "muon"] = "adam"
    learning_rate: float = 1.0
    muon_learning_rate: float | None = None
    schedule: Literal["paper", "inverse_sqrt", "cosine", "linear", "constant"] | None = None
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
    r_drop: float | None = None
    distillation: str | None = None
    distillation_weight: float = 0.5
    mixed_precision: Literal["no", "tf32", "bf16", "fp16"] = "no"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compile: Literal["auto"] | bool = "auto"

    def __post_init__(self) -> None:
        _at_least(0, "optimization", self, "warmup_updates", "weight_decay", "skip_nonfinite_updates")
        _at_least(1, "optimization", self, "max_updates", "max_epochs", "buckets_per_update", "token_budget")
        _at_least(self.buckets_per_update, "optimization", self, "tokens_per_update")
        positive = ("learning_rate", "muon_learning_rate", "epsilon", "max_grad_norm", "max_minutes", "r_drop")
        for name in positive:
            if getattr(self, name) is not None and not 0 < getattr(self, name) < math.inf:
                raise mistake(f"optimization.{name}", "above 0 and finite", getattr(self, name))
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise mistake(f"optimization.{name}", "at least 0 and below 1", getattr(self, name))
        if self.max_updates is None and self.max_epochs is None and self.max_minutes is None:
            must = "One of `optimization.max_updates`, `max_epochs` and `max_minutes` must be given"
            raise ValueError(f"{must}, but none is.")
        if not 0 < self.distillation_weight <= 1:
            raise mistake("optimization.distillation_weight", "above 0 and at most 1", self.distillation_weight)
        if self.distillation is None and self.distillation_weight != 0.5:
            must = "0.5 where `optimization.distillation` is empty and there is no teacher"
            raise mistake("optimization.distillation_weight", must, self.distillation_weight)
        if self.schedule in ("cosine", "linear") and self.max_updates is None:
            must = f"given for the {self.schedule} schedule, which ends there"
            raise mistake("optimization.max_updates", must, "empty")
        if self.weight_decay and self.optimizer == "adam":
            must = "0 with adam, which would mix it into the gradient (choose adamw)"
            raise mistake("optimization.weight_decay", must, self.weight_decay)
        self._check_optimizer()

    def _check_optimizer(self) -> None:
        """Refuse what the optimizer would not read."""
        is_free = self.optimizer == "schedule_free"
        if is_free and self.schedule not in (None, "constant"):
            must = "constant or empty with schedule_free, which averages weights in place of a schedule"
            raise mistake("optimization.schedule", must, self.schedule)
        if is_free and not self.beta1:
            raise mistake("optimization.beta1", "above 0 with schedule_free, whose average it is of", self.beta1)
        if self.muon_learning_rate is not None and self.optimizer != "muon":
            must = f"empty with {self.optimizer}, which has one learning rate"
            raise mistake("optimization.muon_learning_rate", must, self.muon_learning_rate)
        if self.muon_learning_rate is not None and self.schedule_in_use == "paper":
            must = "empty with the paper's schedule, where `optimization.learning_rate` is a factor and no peak"
            raise mistake("optimization.muon_learning_rate", must, self.muon_learning_rate)

    @property
    def schedule_in_use(self) -> str:
        """The schedule, or the optimizer's own where none is given."""
        return self.schedule or ("constant" if self.optimizer == "schedule_free" else "paper")

    @property
    def micro_batch_tokens(self) -> int:
        """Padded tokens of one micro-batch: `token_budget`, or a whole bucket's; half where each row passes twice."""
        passes = 1 if self.r_drop is None else 2
        return max(1, (self.token_budget or self.tokens_per_update // self.buckets_per_update) // passes)


@dataclass
class ValidationRecipe:
    """How often the model is validated while it trains, and how."""

    every_updates: int = 1000
    sentences: int | None = None
    max_new_tokens: int = 128
    select: Criterion = "loss"
    patience: int | None = None

    def __post_init__(self) -> None:
        _at_least(1, "validation", self, "every_updates", "max_new_tokens", "patience")
        _at_least(0, "validation", self, "sentences")
        if self.sentences == 0 and self.select != "loss":
            must = "loss where `validation.sentences` is 0 and nothing is translated"
            raise mistake("validation.select", must, self.select)


@dataclass
class CheckpointRecipe:
    """Which checkpoints are written and kept, and which weights are published."""

    every_updates: int = 1000
    keep_last: int = 5
    publish: Literal["average", "best", "last"] = "average"

    def __post_init__(self) -> None:
        _at_least(1, "checkpoints", self, "every_updates", "keep_last")


@dataclass
class DecodingRecipe:
    """How the published model generates by default, and how it is tested."""

    num_beams: int = 4
    length_penalty: float = 1.0
    length_penalty_form: Literal["power", "gnmt"] = "power"
    max_length: int = 256
    tokens_beyond_source: int | None = None
    bootstrap: int = 1000
    bleu_tokenizer: str | None = None
    ignore: str | None = None

    def __post_init__(self) -> None:
        _at_least(1, "decoding", self, "num_beams", "tokens_beyond_source")
        _at_least(2, "decoding", self, "max_length")  # which counts the decoder's start token
        check_scoring(self.bootstrap, self.ignore, "decoding.")
        for name, default in (("length_penalty", 1), ("length_penalty_form", "power")):
            if self.num_beams == 1 and getattr(self, name) != default:
                must = f"{default} where `decoding.num_beams` is 1 and nothing is compared"
                raise mistake(f"decoding.{name}", must, getattr(self, name))


@dataclass
class LoggingRecipe:
    """What is logged while the run goes on, and where."""

    every_updates: int = 50
    trackers: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
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

    def __post_init__(self) -> None:
        for name in ("source_language", "target_language"):
            if getattr(self, name) is not None and code_of(getattr(self, name)) is None:
                raise mistake(f"card.{name}", "a language, such as ko or Korean", repr(getattr(self, name)))


@dataclass
class PublishRecipe:
    """In which further forms the model is written at the end of a run, each in a folder of its name."""

    also: list[Literal["transformers"]] = field(default_factory=list)


@dataclass
class Recipe:
    """One training run; values out of range, and those that exclude each other, are a `ValueError` naming the key."""

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
    publish: PublishRecipe = field(default_factory=PublishRecipe)

    def __post_init__(self) -> None:
        """Fill in the output folder and check what concerns several sections."""
        if not self.name.strip():
            raise mistake("name", "a word or more", repr(self.name))
        if self.output is None:
            self.output = f"runs/{self.name}"
        if not 0 <= self.seed < 2**32:
            raise mistake("seed", "at least 0 and below 2^32", self.seed)
        if self.resume and self.overwrite:
            raise ValueError("`resume` and `overwrite` must not both be true: one goes on, one moves the run aside.")
        if self.allow_changes and not self.resume:
            raise ValueError("`allow_changes` must be false where `resume` is: there is no run that could differ.")
        if (self.data.mixture or self.data.denoise) and self.tokenizer.sentences is not None:
            must = "empty where `data.mixture` or `data.denoise` needs every part in the tokenizer"
            raise mistake("tokenizer.sentences", must, self.tokenizer.sentences)
        if self.tokenizer.path is None and self.model.start_from is None:
            special = len(SPECIAL_TOKENS) + len(mixture.control_tokens(self.data))
            check_size("tokenizer.vocab_size", *self.tokenizer.sides[0], special)
        if self.optimization.distillation is not None:
            noise = {name: share for name, share in asdict(self.data.augmentation).items() if share}
            drawn: dict[str, Any] = {"data.streaming": self.data.streaming, "data.augmentation": noise}
            drawn |= {f"data.mixture.{name}.tag": part.tag for name, part in self.data.mixture.items()}
            for key, value in (drawn | {"data.denoise": self.data.denoise and "given"}).items():
                if value:
                    off = "false" if value is True else "empty"
                    must = f"{off} where `optimization.distillation` knows the tokens of all pairs beforehand"
                    raise mistake(key, must, value)
        if (self.data.both_directions or self.data.denoise) and not self.tokenizer.joint:
            raise mistake("tokenizer.joint", "true where `data.both_directions` or `data.denoise` is given", "false")

    @property
    def folder(self) -> Path:
        """The run's folder."""
        assert self.output is not None  # set in __post_init__
        return Path(self.output)

    @property
    def batching(self) -> BatchingSettings:
        """How rows become updates."""
        return BatchingSettings(self.optimization.tokens_per_update, self.optimization.buckets_per_update, self.seed)


def _at_least(minimum: int, section: str, values: Any, *names: str) -> None:
    check_at_least(minimum, **{f"{section}.{name}": getattr(values, name) for name in names})


def mistake(key: str, must: str, value: object, advice: str = "") -> ValueError:
    """Return the error of a key that must be something else, with what to do."""
    return ValueError(f"`{key}` must be {must}, but is {value} instead{f': {advice}' * bool(advice)}.")
