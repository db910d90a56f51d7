"""The recipe: everything that defines one training run, checked before anything slow.

Each dataclass is a section of the file, each field a key; `heedful recipes keys` lists them.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from heedful.data.data_recipe import DataRecipe
from heedful.data.epochs.batching import BatchingSettings
from heedful.data.languages import code_of
from heedful.data.tokenizer_training import SPECIAL_TOKENS, TokenizerRecipe, check_size
from heedful.evaluation.error_rates import ErrorRate
from heedful.evaluation.metrics import check_scoring
from heedful.messages_heed import wrong
from heedful.recipe_keys import Section, in_yaml, key

Criterion = Literal["loss", "bleu", "chrf", "chrf++", "exact_match", ErrorRate]


@dataclass
class ModelRecipe(Section, section="model"):
    """The model: a config file and changes to it, or a trained model to start from."""

    config: str | None = key("size (`heedful recipes`), config.json or its folder; empty: the paper's base", None)
    options: dict[str, Any] = key(
        "changes to the config: any HeedConfig field that the tokenizer does not set. Against overfitting, "
        "shares from 0: dropout, attention_dropout, activation_dropout, source_word_dropout and target_word_dropout "
        "(whole embeddings), label_smoothing; depth_scaled_init lets small models begin to learn in half the updates",
        dict,
    )
    start_from: str | None = key("trained model to continue from, instead of `config` and `options`", None)
    attn_implementation: str | None = key("eager, sdpa, flash_attention_2, flex_attention; empty: the default", None)
    activation_checkpointing: bool = key("true saves memory and costs time", False)

    def check(self) -> None:
        """Refuse two sources for one model."""
        is_met = self.start_from is None or (self.config is None and not self.options)
        self.require(is_met, "start_from", "be empty if `model.config` or `model.options` are given")


@dataclass
class OptimizationRecipe(Section, section="optimization"):
    """How to change the weights, and for how long."""

    optimizer: Literal["adam", "adamw", "schedule_free", "muon"] = key(
        "adam, adamw with weight decay, schedule_free (Defazio et al., 2024) with averaged weights, also without a "
        "fixed end, or muon for the layers' matrices, with adamw for the rest",
        "adam",
    )
    learning_rate: float = key("the schedule's peak; for the paper's schedule a factor, published as 1", 1.0, above=0)
    embedding_learning_rate: float | None = key(
        "`learning_rate` of embeddings and output; empty: the same", None, above=0
    )
    schedule: Literal["paper", "inverse_sqrt", "cosine", "linear", "constant"] | None = key(
        "paper (section 5.3), inverse_sqrt, cosine, linear, constant; empty: paper, schedule_free: constant", None
    )
    warmup_updates: int = key("updates with a linear rise to the peak", 4000, least=0)
    beta1: float = key("decay of Adam's first moment (section 5.3)", 0.9, least=0, below=1)
    beta2: float = key("decay of Adam's second moment", 0.98, least=0, below=1)
    epsilon: float = key("added to the denominator of Adam's step", 1e-9, above=0)
    weight_decay: float = key("weight decay of matrices, for all optimizers but adam", 0.0, least=0)
    max_grad_norm: float | None = key("largest gradient norm; empty: no clipping", None, above=0)
    max_updates: int | None = key("most updates; the first limit reached ends the run", None, least=1, resumes=True)
    max_epochs: int | None = key("most passes over the training pairs", None, least=1, resumes=True)
    max_minutes: float | None = key("most minutes of training, without interruptions", None, above=0, resumes=True)
    tokens_per_update: int = key("padded source and target tokens per optimizer step", 50000)
    buckets_per_update: int = key("groups of similar lengths per update; several mix all lengths", 1, least=1)
    token_budget: int | None = key("padded tokens per micro-batch; empty: a whole bucket", None, least=1, resumes=True)
    shrink_token_budget: bool = key("true halves `token_budget` if memory runs out", False, resumes=True)
    skip_nonfinite_updates: int = key("NaN updates in a row to skip before the run stops", 0, least=0, resumes=True)
    r_drop: float | None = key(
        "weight of R-Drop (Liang et al., 2021, with 5): each pair passes twice with different dropout, and both "
        "predictions should agree; takes twice the time; empty: no R-Drop",
        None,
        above=0,
    )
    distillation: str | None = key(
        "folder of `heedful distill-tokens`: the loss includes the cross-entropy with a teacher's tokens (Kim and "
        "Rush, 2016); `tokenizer.path` must be the teacher's tokenizer",
        None,
    )
    distillation_weight: float = key("weight of the cross-entropy with the teacher's tokens", 0.5, above=0, most=1)
    mixed_precision: Literal["no", "tf32", "bf16", "fp16"] = key("no, bf16; GPU only: tf32 (10 bits), fp16", "no")
    device: Literal["auto", "cpu", "cuda"] = key("auto, cpu, cuda", "auto", resumes=True)
    compile: Literal["auto"] | bool = key("true, false; auto: GPU runs above five minutes", "auto", resumes=True)

    def check(self) -> None:
        """Refuse keys that exclude each other or that the optimizer would ignore."""
        must = f"be at least {self.buckets_per_update}"
        self.require(self.tokens_per_update >= self.buckets_per_update, "tokens_per_update", must)
        if self.max_updates is None and self.max_epochs is None and self.max_minutes is None:
            must = "One of `optimization.max_updates`, `max_epochs` and `max_minutes` must be given"
            raise ValueError(f"{must}, but none is.")
        must = "be 0.5 if `optimization.distillation` is empty, because there is no teacher"
        self.require(self.distillation is not None or self.distillation_weight == 0.5, "distillation_weight", must)
        has_end = self.max_updates is not None or self.schedule not in ("cosine", "linear")
        self.require(has_end, "max_updates", f"be given for the {self.schedule} schedule, which ends there")
        must = "be 0 with adam, which would mix it into the gradient (choose adamw)"
        self.require(not self.weight_decay or self.optimizer != "adam", "weight_decay", must)
        is_free = self.optimizer == "schedule_free"
        must = "be constant or empty with schedule_free, which averages weights in place of a schedule"
        self.require(not is_free or self.schedule in (None, "constant"), "schedule", must)
        self.require(not is_free or self.beta1, "beta1", "be above 0 with schedule_free, whose averages need it")

    @property
    def schedule_in_use(self) -> str:
        """The schedule; its default depends on the optimizer."""
        return self.schedule or ("constant" if self.optimizer == "schedule_free" else "paper")

    @property
    def micro_batch_tokens(self) -> int:
        """Padded tokens per micro-batch; half the budget with R-Drop, because each row passes twice."""
        passes = 1 if self.r_drop is None else 2
        return max(1, (self.token_budget or self.tokens_per_update // self.buckets_per_update) // passes)


@dataclass
class ValidationRecipe(Section, section="validation"):
    """How often and how training validates the model."""

    every_updates: int = key("updates between validations", 1000, least=1, resumes=True)
    sentences: int | None = key("validation pairs to translate greedily; 0: none, empty: all", None, least=0)
    max_new_tokens: int = key("longest validation translation, in tokens", 128, least=1)
    select: Criterion = key(f"selects the best checkpoint: {', '.join(get_args(Criterion))}", "loss")
    patience: int | None = key("validations without improvement that end the run", None, least=1, resumes=True)

    def check(self) -> None:
        """Refuse to select by a score without translations."""
        must = "be loss if `validation.sentences` is 0, because nothing is translated"
        self.require(self.sentences != 0 or self.select == "loss", "select", must)


@dataclass
class CheckpointRecipe(Section, section="checkpoints", resumes=True):
    """Which checkpoints are written and kept, and which weights are published."""

    every_updates: int = key("updates between checkpoints", 1000, least=1)
    keep_last: int = key("number of latest checkpoints to keep, in addition to the best one", 5, least=1)
    publish: Literal["average", "best", "last"] = key(
        "published weights: average of the kept last ones (section 6.1), best (validated), or last", "average"
    )


@dataclass
class DecodingRecipe(Section, section="decoding", resumes=True):
    """How the published model generates by default, and how it is tested."""

    num_beams: int = key("beam width; 1 is greedy", 4, least=1)
    length_penalty: float = key("exponent of the length that divides scores; above 1 favours longer outputs", 1.0)
    length_penalty_form: Literal["power", "gnmt"] = key(
        "power: length^exponent; gnmt: ((5 + length) / 6)^exponent, the paper's (section 6.1)", "power"
    )
    max_length: int = key("longest translation in tokens, with the decoder's start token", 256, least=2)
    tokens_beyond_source: int | None = key("most tokens beyond the source's length, 50 in the paper", None, least=1)
    bootstrap: int = key("resamples for confidence intervals; 0: none", 1000)
    bleu_tokenizer: str | None = key("sacreBLEU's 13a, char, zh, ko-mecab, ja-mecab, …; empty: fits the targets", None)
    ignore: str | None = key('regular expression for text that scores ignore, such as "[0-9]"', None)

    def check(self) -> None:
        """Refuse wrong patterns, wrong numbers of resamples, and settings that greedy search would ignore."""
        check_scoring(self.bootstrap, self.ignore, "decoding.")
        for name, default in (("length_penalty", 1), ("length_penalty_form", "power")):
            must = f"be {default} if `decoding.num_beams` is 1, because nothing is compared"
            self.require(self.num_beams > 1 or getattr(self, name) == default, name, must)


@dataclass
class LoggingRecipe(Section, section="logging", resumes=True):
    """Which training losses to log, and where."""

    every_updates: int = key("updates between logged training losses", 50, least=1)
    trackers: list[str] = key("Accelerate's trackers: trackio, tensorboard, wandb, mlflow, …", list)


@dataclass
class CardRecipe(Section, section="card", resumes=True):
    """Facts for the model card that no program can find."""

    license: str | None = key("name of the license on the Hub; empty: unknown (built-in corpus: apache-2.0)", None)
    source_language: str | None = key("code or name; empty: `data.source` if it is one, or found in the texts", None)
    target_language: str | None = key("code or name; empty: `data.target` if it is one, or found in the texts", None)
    dataset: str | None = key("name of the training data; empty: `data.train`", None)
    intended_use: str | None = key("tasks that the model is for", None)
    limits: str | None = key("tasks that the model is not for", None)

    def check(self) -> None:
        """Refuse values that are not languages."""
        for name in ("source_language", "target_language"):
            if getattr(self, name) is not None and code_of(getattr(self, name)) is None:
                raise wrong(f"card.{name}", "be a language, such as ko or Korean", repr(getattr(self, name)))


@dataclass
class PublishRecipe(Section, section="publish", resumes=True):
    """More forms of the published model, each in a folder with its name."""

    also: list[Literal["transformers"]] = key("transformers: its own class, without Heedful's code", list)


@dataclass
class Recipe(Section):
    """One training run; a wrong or contradictory value raises a `ValueError` that names the key."""

    name: str = key("name of the run and the model card")
    data: DataRecipe = key("pairs to train on")
    optimization: OptimizationRecipe = key("optimizer, schedule and length of the run")
    output: str | None = key("the run's folder; empty: runs/NAME", None, resumes=True, on_card=False)
    seed: int = key("seed of weights, dropout and data order", 1, least=0, below=2**32)
    resume: bool = key("true continues from the newest checkpoint, if any", False, resumes=True, on_card=False)
    overwrite: bool = key("true moves an earlier run to ….1", False, resumes=True, on_card=False)
    allow_changes: bool = key("true resumes even if recipe or data changed", False, resumes=True, on_card=False)
    tokenizer: TokenizerRecipe = key("how texts become tokens", TokenizerRecipe)
    model: ModelRecipe = key("the model to train", ModelRecipe)
    validation: ValidationRecipe = key("measurements during training", ValidationRecipe)
    checkpoints: CheckpointRecipe = key("saved and published weights", CheckpointRecipe)
    decoding: DecodingRecipe = key("how the published model generates", DecodingRecipe)
    logging: LoggingRecipe = key("logs of the run", LoggingRecipe)
    card: CardRecipe = key("facts for the model card", CardRecipe, on_card=False)
    publish: PublishRecipe = key("more forms of the model, each in a folder with its name", PublishRecipe)

    def check(self) -> None:
        """Fill in the output folder and check the sections against each other."""
        if not self.name.strip():
            raise wrong("name", "not be empty", repr(self.name))
        self.output = self.output or f"runs/{self.name}"
        if self.resume and self.overwrite:
            raise ValueError("`resume` and `overwrite` must not both be true: one continues a run, one moves it.")
        if self.allow_changes and not self.resume:
            raise ValueError("`allow_changes` must be false unless `resume` is true: only a resumed run can change.")
        data, tokenizer = self.data, self.tokenizer
        has_parts = (data.mixture and not data.streaming) or data.denoise  # in a stream, parts take turns
        must = "be empty if `data.mixture` or `data.denoise` needs every part in the tokenizer"
        tokenizer.require(not has_parts or tokenizer.sentences is None, "sentences", must)
        if self.given_tokenizer is None:
            check_size("tokenizer.vocab_size", *tokenizer.sides[0], len(SPECIAL_TOKENS) + len(data.control_tokens))
        tokenizer.require(tokenizer.joint or not data.denoise, "joint", "be true if `data.denoise` is given")
        if self.optimization.distillation is not None:
            noise = {name: share for name, share in asdict(data.augmentation).items() if share}
            drawn: dict[str, Any] = {"data.streaming": data.streaming, "data.augmentation": noise}
            drawn |= {"data.denoise": data.denoise, "data.documents.sentences": data.documents.sentences}
            drawn |= {f"data.mixture.{name}.tag": part.tag for name, part in data.mixture.items()}
            for name, value in drawn.items():
                if value:
                    off = "false" if value is True else "empty"
                    must = f"be {off} with `optimization.distillation`, which needs all tokens beforehand"
                    raise wrong(name, must, in_yaml(value))

    @property
    def folder(self) -> Path:
        """The run's folder."""
        assert self.output is not None  # set in check
        return Path(self.output)

    @property
    def given_tokenizer(self) -> str | None:
        """The folder of given tokenizers, if none are trained."""
        return self.tokenizer.path or self.model.start_from

    @property
    def batching(self) -> BatchingSettings:
        """How to divide rows into updates."""
        return BatchingSettings(self.optimization.tokens_per_update, self.optimization.buckets_per_update, self.seed)
