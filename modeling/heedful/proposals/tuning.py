"""Search for small models' settings with Optuna (Araabi and Monz, 2020). Each trial is a training run."""

import hashlib
import json
import logging
import math
import random
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import optuna
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from heedful.data.epochs.corpus import Corpus
from heedful.data.tokenizer_training import SUBWORDS, TokenizerRecipe
from heedful.figures import save_figure
from heedful.files import listed, write_text
from heedful.messages_heed import wrong
from heedful.training.loop.loop import TrainingLoop
from heedful.training.loop.monitoring import read_curves
from heedful.training.model_of_recipe import check_model, config_of
from heedful.training.preparation import prepare_corpus
from heedful.training.processes.devices import float32_products, make_accelerator
from heedful.training.recipe import ModelRecipe, OptimizationRecipe, Recipe
from heedful.training.recipe_file import make_recipe, to_yaml
from heedful.training.run_folder.checkpoints import load_progress, newest_whole_checkpoint
from heedful.training.run_folder.folder import folder_of_run
from heedful.training.start_checks import check_installed

logger = logging.getLogger(__name__)

TRIALS_FILE, TUNED_RECIPE, PICTURE = "trials.log", "tuned.yaml", "trials.svg"
LOSS = "validation/loss"
FAILED, VALIDATION = "failed", "validation"  # attributes of trials and the search
ASKED_AT_MOST = 50  # attempts for new values
# Varied by default: multiples of the recipe's value, or values.
FACTORS = {"vocabulary": (0.25, 0.5, 1, 2), "width": (0.5, 1, 1.5, 2), "learning_rate": (0.3, 0.5, 1, 1.7, 3)}
VALUES = {"depth": (2, 3, 4, 6), "dropout": (0.0, 0.1, 0.2, 0.3, 0.4), "beta1": (0.9, 0.95, 0.98)}
KNOBS = ("vocabulary", "width", "depth", "dropout", "learning_rate", "embedding_learning_rate", "beta1")
KEYS = {name: f"optimization.{name}" for name in ("learning_rate", "embedding_learning_rate", "beta1")}
KEYS |= {"vocabulary": "tokenizer.vocab_size"}
KEYS |= {"width": "model.options.d_model", "depth": "model.options.encoder_layers", "dropout": "model.options.dropout"}
SMALLEST_VOCABULARY = 300  # the 256 bytes, special tokens, and some merges


@dataclass(frozen=True)
class Trial:
    """A trial's values and its result."""

    number: int
    values: dict[str, Any]  # by knob
    loss: float  # lowest validation loss, in nats per target byte
    updates: int
    is_pruned: bool


@dataclass(frozen=True)
class Search:
    """A search's results so far."""

    trials: list[Trial]  # best first
    recipe: Path  # with the best values
    has_unfinished: bool  # whether time ran out during a trial, which can be resumed


def tune(
    recipe: Recipe, folder: Path, minutes: float, vary: Mapping[str, Sequence[Any] | None] | None = None
) -> Search:
    """Try values until the time is over, and write a recipe with the best ones.

    Trials are compared by validation loss per byte, because the loss per token depends on the vocabulary. `vary` maps
    a knob in `KNOBS` or a dotted key to the values to try, or to `None` for some around the recipe's value. The first
    trial is the recipe itself if its values are among these.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    end = time.monotonic() + 60 * minutes
    choices = knobs_of(recipe.tokenizer, recipe.model, recipe.optimization)
    if vary is not None:
        choices = {knob: choices.get(knob, ()) if values is None else tuple(values) for knob, values in vary.items()}
    tuning = Tuning(recipe, folder, choices)
    tuning.check()
    is_new = not folder.exists()
    try:
        with folder_of_run(folder):
            study = tuning.study()
            try:
                is_whole = tuning.search(study, end)
            finally:
                if trials := _trials(study):
                    write_text(folder / TUNED_RECIPE, tuning.tuned(trials))
                    save_figure([partial(_draw_knob, trials, knob) for knob in choices], folder / PICTURE)
    except (ValueError, OSError):  # the user will fix the recipe and try again
        if is_new and not [*folder.glob("trial-*/checkpoints/*"), *folder.glob(TUNED_RECIPE)]:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return Search(trials, folder / TUNED_RECIPE, not is_whole)


@dataclass(frozen=True)
class Tuning:
    """A recipe, its search folder, and the values to try for each knob."""

    recipe: Recipe
    folder: Path
    choices: Mapping[str, Sequence[Any]]

    def with_values(self, values: Mapping[str, Any]) -> Recipe:
        """Return the recipe with other values for its knobs."""
        tree, config = asdict(self.recipe), config_of(self.recipe.model, {}, self.recipe.tokenizer.joint)
        options = tree["model"]["options"]
        for knob, value in values.items():
            if knob == "width":
                options |= _widened(config, value)
            elif knob == "depth":
                decoder = round(value * config.decoder_layers / config.encoder_layers)
                options |= {"encoder_layers": value, "decoder_layers": max(1, decoder)}
            else:
                section, key = _place(tree, knob)
                section[key] = value
        return make_recipe(tree)

    def search(self, study: Any, end: float) -> bool:
        """Train trials, and return whether the last one is complete."""
        while time.monotonic() < end:
            if (found := _next_trial(study, self.choices)) is None:
                if not _ended(study):
                    raise ValueError("`--vary` must allow a model that can be trained, but none of its values does.")
                logger.info("all %s combinations were tried", math.prod(map(len, self.choices.values())))
                break
            trial, values = found
            logger.info("trying %s", ", ".join(f"{knob} {value}" for knob, value in values.items()))
            try:
                if not self._try(study, trial, values, end):
                    return False
            except (FloatingPointError, MemoryError) as error:
                logger.warning("%s This trial is skipped.", error)
                trial.set_user_attr(FAILED, str(error))
                study.tell(trial.number, state=TrialState.FAIL)
        return True

    def check(self) -> None:
        """Refuse knobs and values without a trainable model."""
        recipe, choices = self.recipe, self.choices
        if not choices:
            raise ValueError(f"`--vary` must name a setting ({', '.join(KNOBS)}, or a key), but names none.")
        for name in ("resume", "overwrite", "allow_changes"):
            if getattr(recipe, name):
                must = "false for a search, which always continues in its folder"
                raise ValueError(f"`{name}` must be {must}, but is true.")
        keys: dict[str, str] = {}
        for knob, values in choices.items():
            other = keys.setdefault(KEYS.get(knob, knob), knob)
            if other != knob:
                found = f"names {other} and {knob}, which are the same"
                raise ValueError(f"`--vary` must name each setting once, but {found}.")
            is_whole = knob in ("vocabulary", "width", "depth")
            for value in values:
                if not isinstance(value, int if is_whole else int | float | str | None):
                    must = "whole numbers" if is_whole else "numbers, texts, true, false or null"
                    raise ValueError(f"`--vary {knob}` must have {must}, but has {value!r}.")
            if len(set(values)) < 2:
                names = listed(list(map(str, values)))
                found = f"only {names}" if values else f"none here: pass {knob}=VALUE,VALUE"
                raise ValueError(f"`--vary {knob}` must have at least two values, but has {found}.")
            for value in values:
                tried = self.with_values({knob: value})
                check_installed(tried.optimization, tried.decoding.bleu_tokenizer, tried.logging.trackers)
                check_model(tried, None)

    def study(self) -> Any:
        """Open the folder's search, or begin one with the recipe's values."""
        # Optuna would wait forever for a lock with a broken link.
        file = (self.folder / TRIALS_FILE).absolute()
        lock = file.with_name(f"{file.name}.lock")
        if lock.is_symlink() and not lock.exists():
            lock.unlink()
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(file)))
        pruner = optuna.pruners.MedianPruner(n_startup_trials=3)
        study = optuna.create_study(storage=storage, study_name="search", load_if_exists=True, pruner=pruner)
        choices = {knob: list(values) for knob, values in self.choices.items()}
        subject = json.dumps([asdict(replace(self.recipe, output="")), choices])
        known = study.user_attrs.get("subject")
        if known is None:
            study.set_user_attr("subject", subject)
            own = self.own_values()
            study.enqueue_trial({knob: own[knob] for knob in choices if own[knob] in choices[knob]})
        elif known != subject:
            must = "a new folder or this search's folder"
            raise ValueError(f"`--output` must be {must}, but {self.folder} holds another search.")
        return study

    def own_values(self) -> dict[str, Any]:
        """Return the recipe's value for each knob."""
        recipe = self.recipe
        tree, config = asdict(recipe), config_of(recipe.model, {}, recipe.tokenizer.joint)
        own: dict[str, Any] = {"width": config.hidden_size, "depth": config.encoder_layers, "dropout": config.dropout}
        for knob in self.choices.keys() - own.keys():
            section, key = _place(tree, knob)
            own[knob] = section.get(key)
        if "embedding_learning_rate" in own and own["embedding_learning_rate"] is None:
            own["embedding_learning_rate"] = recipe.optimization.learning_rate
        return own

    def _try(self, study: Any, trial: Any, values: Mapping[str, Any], end: float) -> bool:
        """Train a trial, and return whether it ended in time."""
        left = end - time.monotonic()  # seconds
        if left <= 0:
            return False
        digest = hashlib.sha256(json.dumps(trial.params, sort_keys=True).encode()).hexdigest()
        place, recipe = self.folder / f"trial-{digest[:8]}", self.with_values(values)
        own_minutes = recipe.optimization.max_minutes or math.inf
        checkpoint = newest_whole_checkpoint(place / "checkpoints")
        trained = 0.0 if checkpoint is None else load_progress(checkpoint).seconds / 60
        minutes = trained + left / 60
        optimization = replace(recipe.optimization, max_minutes=min(own_minutes, minutes))
        recipe = replace(recipe, output=str(place), resume=place.exists(), overwrite=False, optimization=optimization)
        accelerator, is_pruned = make_accelerator(recipe.optimization, [], place / "trackers"), False
        with folder_of_run(place), float32_products(optimization.mixed_precision):
            corpus = prepare_corpus(recipe, place / "tokenizer", accelerator)
            _check_same_validation(study, corpus.validation_pairs)
            report = partial(_report, trial, corpus)
            loop = TrainingLoop(recipe, corpus, accelerator, lambda progress, loss: report(progress.update, loss))
            write_text(place / "recipe.yaml", to_yaml(recipe))
            try:
                for update, loss in read_curves(place).get(LOSS, []):
                    report(update, loss)
                loop.run()
            except optuna.TrialPruned:
                is_pruned = True
        if loop.time_is_up and minutes < own_minutes and not is_pruned:
            return False
        losses = study.trials[trial.number].intermediate_values
        if not losses:
            raise ValueError("`validation.every_updates` must let each trial be validated, but is too large for one.")
        best = None if is_pruned else min(losses.values())
        study.tell(trial.number, best, state=TrialState.PRUNED if is_pruned else TrialState.COMPLETE)
        shutil.rmtree(place / "checkpoints", ignore_errors=True)
        return True

    def tuned(self, trials: Sequence[Trial]) -> str:
        """Write the recipe with the best values, and their loss above it."""
        best, own = trials[0], self.own_values()
        text = f"# The best of {len(trials)} trials: validation loss {best.loss:.4f} nats per target byte"
        before = (each.loss for each in trials if each.values == own)
        text += "".join(f",\n# where the original recipe gave {loss:.4f}" for loss in before)
        values = "".join(f"#   {knob}: {value}\n" for knob, value in best.values.items())
        return f"{text}.\n{values}{to_yaml(self.with_values(best.values))}"


def knobs_of(
    tokenizer: TokenizerRecipe, model: ModelRecipe, settings: OptimizationRecipe
) -> dict[str, tuple[Any, ...]]:
    """Choose values around a recipe's own, by knob, if it has room for them."""
    config = config_of(model, {}, tokenizer.joint)
    size, width, rate = tokenizer.vocab_size, config.hidden_size, settings.learning_rate
    choices: dict[str, list[Any]] = {}
    if tokenizer.path is None and size is not None and tokenizer.algorithm in SUBWORDS:
        choices["vocabulary"] = [int(max(SMALLEST_VOCABULARY, size * factor)) for factor in FACTORS["vocabulary"]]
    if model.start_from is None:
        choices["width"] = [max(32, round(width * factor / 32) * 32) for factor in FACTORS["width"]]
        choices["depth"] = [*VALUES["depth"], config.encoder_layers]
        choices["dropout"] = [*VALUES["dropout"], float(config.dropout)]
    rates = {"learning_rate": rate}
    if settings.optimizer == "muon":
        rates["embedding_learning_rate"] = settings.embedding_learning_rate or rate
    for knob, rate in rates.items():
        choices[knob] = [float(f"{rate * factor:.2g}") for factor in FACTORS["learning_rate"]]
    if settings.optimizer == "schedule_free":  # its average
        choices["beta1"] = [*VALUES["beta1"], settings.beta1]
    return {knob: tuple(sorted({*values})) for knob, values in choices.items()}


def _place(tree: dict[str, Any], knob: str) -> tuple[dict[str, Any], str]:
    section: Any = tree
    *sections, key = KEYS.get(knob, knob).split(".")
    for name in sections:
        section = section.get(name) if isinstance(section, dict) else None
    if not isinstance(section, dict) or (key not in section and section is not tree["model"]["options"]):
        raise wrong("--vary", f"name one of {', '.join(KNOBS)}, or a key of the recipe", knob, verb="names")
    return section, key


def _widened(config: Any, width: int) -> dict[str, int]:
    """Return options for another width, with the same head width and proportional inner layers."""
    if config.model_type == "heed_rnn":
        return {"hidden_size": width, "embedding_size": width}
    options, before = {"d_model": width}, config.hidden_size
    for side in ("encoder", "decoder"):
        heads = max(1, width * getattr(config, f"{side}_attention_heads") // before)
        options[f"{side}_attention_heads"] = 1 if width % heads else heads
        options[f"{side}_ffn_dim"] = getattr(config, f"{side}_ffn_dim") * width // before
    return options


def _next_trial(study: Any, choices: Mapping[str, Sequence[Any]]) -> tuple[Any, dict[str, Any]] | None:
    """Return an interrupted or new trial with its values; `None` if nothing is left to try."""
    for stopped in study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
        study.tell(stopped.number, state=TrialState.FAIL)
        study.enqueue_trial(stopped.params)
    failed = [trial for trial in study.get_trials(deepcopy=False) if FAILED in trial.user_attrs]
    tried = [trial.params for trial in (*_ended(study), *failed)]
    if len(tried) == math.prod(map(len, choices.values())):
        return None
    # A sampler per trial, so that interruptions change nothing.
    seed = hashlib.sha256(f"{study.user_attrs['subject']} {len(tried)}".encode()).hexdigest()[:8]
    study.sampler = optuna.samplers.TPESampler(seed=int(seed, 16), n_startup_trials=5)
    generator = random.Random(seed)
    for asked in count():
        if asked >= ASKED_AT_MOST:  # the sampler repeats itself
            study.enqueue_trial({knob: generator.choice(list(choices[knob])) for knob in choices})
        trial = study.ask()
        values = {knob: trial.suggest_categorical(knob, list(choices[knob])) for knob in choices}
        if values not in tried:
            break
        study.tell(trial.number, state=TrialState.FAIL)
    return trial, values


def _ended(study: Any) -> list[Any]:
    return list(study.get_trials(deepcopy=False, states=[TrialState.COMPLETE, TrialState.PRUNED]))


def _check_same_validation(study: Any, pairs: Sequence[Mapping[str, Any]]) -> None:
    checksum = hashlib.sha256(json.dumps([*pairs]).encode()).hexdigest()
    if study.user_attrs.get(VALIDATION, checksum) != checksum:
        raise ValueError("`data.validation` must be the same pairs as in earlier trials, but they have changed.")
    study.set_user_attr(VALIDATION, checksum)


def _report(trial: Any, corpus: Corpus, update: int, loss: float) -> None:
    """Report a loss per token to Optuna as loss per byte, and stop bad trials."""
    size = sum(len(pair["target"].encode()) for pair in corpus.validation_pairs)
    trial.report(loss * float(corpus.validation.target_lengths.sum()) / max(1, size), update)
    if trial.should_prune():
        raise optuna.TrialPruned


def _trials(study: Any) -> list[Trial]:
    """Return the ended trials, best first, stopped ones last."""
    trials = []
    for number, trial in enumerate(_ended(study), start=1):
        losses, is_pruned = trial.intermediate_values, trial.state.name == "PRUNED"
        trials.append(Trial(number, dict(trial.params), min(losses.values()), max(losses), is_pruned))
    return sorted(trials, key=lambda trial: (trial.is_pruned, trial.loss))


def _draw_knob(trials: Sequence[Trial], knob: str, axes: Any) -> None:
    """Draw the loss over a knob's values; hollow circles are stopped trials."""

    def place(trial: Trial) -> tuple[bool, float, str]:
        value = trial.values[knob]
        return (False, value, "") if isinstance(value, int | float) else (True, 0, str(value))

    for trial in sorted(trials, key=place):
        fill = "none" if trial.is_pruned else "tab:blue"
        axes.plot(str(trial.values[knob]), trial.loss, "o", markerfacecolor=fill, markeredgecolor="tab:blue")
    axes.set(xlabel=knob, ylabel="nats per byte")
    axes.grid(alpha=0.3)
