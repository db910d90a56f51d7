"""Checkpoints that are whole or absent: written under another name, listed in a manifest, renamed when complete.

Each is a model folder for `from_pretrained`, with the state of training in `training_state/`.
"""

import json
import logging
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator

from heedful.checksums_heed import checksum
from heedful.data.tokenization import TokenizerPair
from heedful.files import check_name_inside, flush, leftovers, remove, written_folder
from heedful.protocols import TrainableModel
from heedful.training.processes.collectives import any_rank, broadcast
from heedful.training.processes.heartbeat import Watch
from heedful.training.recipe import CheckpointRecipe, DecodingRecipe, Recipe, ValidationRecipe
from heedful.training.recipe_file import read_recipe, to_yaml
from heedful.training.run_folder.progress import Progress
from heedful.training.updates.engine import TrainingEngine

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"  # in a run's folder
STATE_FOLDER = "training_state"  # in a checkpoint
RECIPE = f"{STATE_FOLDER}/recipe.yaml"
OPTIMIZER = "optimizer.pt"
SCALER = "scaler.json"
PROGRESS = "progress.json"
MANIFEST = "manifest.json"
PREFIX = "update-"
FORMAT = 3


@dataclass(frozen=True)
class TrainingState:
    """A checkpoint's contents, in whole tensors; tokenizers and recipe are not included."""

    progress: Progress
    weights: dict[str, torch.Tensor]  # the model's weights, tied ones once
    optimizer: dict[str, Any]
    scaler: dict[str, Any] | None = None  # scaler of fp16's gradients


def checkpoint_path(folder: Path, update: int) -> Path:
    """Return an update's checkpoint path."""
    return folder / f"{PREFIX}{update:08d}"


def list_checkpoints(folder: Path, prefix: str = PREFIX) -> list[tuple[int, Path]]:
    """List a run's checkpoints as (update, path), oldest first, whole or not."""
    matches = (re.fullmatch(prefix + r"(\d+)", path.name) for path in (folder.iterdir() if folder.is_dir() else ()))
    return sorted((int(match[1]), folder / match[0]) for match in matches if match)


def save_checkpoint(
    folder: Path, model: TrainableModel, state: TrainingState, tokenizers: TokenizerPair, recipe: str
) -> Path:
    """Write a whole checkpoint, or raise an `OSError`; only the config of `model` is used."""
    path = checkpoint_path(folder, state.progress.update)
    with written_folder(path) as partial:
        model.save_pretrained(partial, state_dict=state.weights)
        tokenizers.save_pretrained(partial)
        training = partial / STATE_FOLDER
        training.mkdir()
        torch.save(state.optimizer, training / OPTIMIZER)
        if state.scaler is not None:
            (training / SCALER).write_text(json.dumps(state.scaler))
        (training / PROGRESS).write_text(json.dumps({"format": FORMAT, **asdict(state.progress)}, indent=2))
        (partial / RECIPE).write_text(recipe, encoding="utf-8")
        write_manifest(partial)
    return path


def load_state(path: Path) -> TrainingState:
    """Load a checkpoint without model weights, which `from_pretrained` loads."""
    folder = path / STATE_FOLDER
    optimizer = torch.load(folder / OPTIMIZER, weights_only=True, map_location="cpu")
    scaler = json.loads((folder / SCALER).read_text()) if (folder / SCALER).is_file() else None
    return TrainingState(load_progress(path), {}, optimizer, scaler)


def load_progress(path: Path) -> Progress:
    """Load a checkpoint's progress; raise a `ValueError` if its format is not this version's."""
    state = json.loads((path / STATE_FOLDER / PROGRESS).read_text())
    if (written := state.pop("format")) != FORMAT:
        older = "resume with the version that wrote it, or continue from its weights with `model.start_from`"
        way = "upgrade Heedful" if written > FORMAT else older
        raise ValueError(f"The checkpoint {path} has format {written}; this Heedful loads {FORMAT}: {way}.")
    return Progress(**state | {"best": state["best"] and tuple(state["best"])})


def newest_whole_checkpoint(
    folder: Path, prefix: str = PREFIX, setting: str = "resume", others: str = "overwrite=true or another `output`"
) -> Path | None:
    """Return the newest undamaged checkpoint; if all are damaged, raise a `ValueError` that names `setting`."""
    damages = []
    for _, path in reversed(list_checkpoints(folder, prefix)):
        if (damage := find_damage(path)) is None:
            return path
        damages.append(f"{path.name} ({damage})")
        logger.warning("the checkpoint %s is damaged (%s): looking for an older one", path, damage)
    if damages:
        found = f"but all are damaged: {', '.join(damages)}. To start again, set {others}."
        raise ValueError(f"`{setting}` must find a whole checkpoint in {folder}, {found}")
    return None


def find_damage(path: Path) -> str | None:
    """Describe a checkpoint's damage; `None` if every file has the manifest's size and checksum."""
    if not path.is_dir():
        return "it is not a folder"
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        for name in manifest:
            check_name_inside(name, MANIFEST)
        entries = [(name, entry["size"], entry["sha256"]) for name, entry in manifest.items()]
    except (FileNotFoundError, IsADirectoryError, ValueError, KeyError, TypeError, AttributeError):
        entries = []  # all that a flipped bit can cause
    if not entries:
        return f"{MANIFEST} is missing or unreadable"
    for name, size, expected in entries:
        if not (path / name).is_file():
            return f"{name} is missing"
        if (found := (path / name).stat().st_size) != size:
            return f"{name} has {found} bytes instead of {size}"
        if checksum(path / name) != expected:
            return f"{name} has another checksum"
    return None


def write_manifest(folder: Path) -> None:
    """Flush all files in a folder to the disk, and write their sizes and checksums into its manifest."""
    manifest = {}
    for file in sorted(file for file in folder.rglob("*") if file.is_file() and file.name != MANIFEST):
        flush(file)
        manifest[str(file.relative_to(folder))] = {"size": file.stat().st_size, "sha256": checksum(file)}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    flush(folder / MANIFEST)


def checkpoint_to_resume(run: Path | None, accelerator: Accelerator) -> Path | None:
    """Return on every rank the newest whole checkpoint that the main process finds."""
    newest = newest_whole_checkpoint(run / CHECKPOINTS) if run is not None and accelerator.is_main_process else None
    return cast("Path | None", broadcast(accelerator, newest))


class CheckpointStore:
    """Saves, loads and deletes a run's checkpoints; all ranks call it together."""

    def __init__(self, recipe: Recipe, tokenizers: TokenizerPair, engine: TrainingEngine, watch: Watch):
        self.recipe, self.settings, self.tokenizers = recipe, recipe.checkpoints, tokenizers
        self.engine, self.accelerator, self.watch = engine, engine.accelerator, watch
        self.folder = recipe.folder / CHECKPOINTS
        self.saved_update: int | None = None  # in the last checkpoint that was written or loaded

    def load(self, path: Path, now: Progress) -> Progress:
        """Load a checkpoint without weights, and return its progress with `now`'s processes and data."""
        state = load_state(path)
        progress, scaler = state.progress, self.accelerator.scaler
        if progress.data != now.data and not self.recipe.allow_changes:
            must = f"must be the resumed run's ({path}), but their rows have changed"
            raise ValueError(f"The data {must}; allow_changes=true resumes anyway.")
        self.engine.load(state.optimizer)
        if scaler is not None and state.scaler is not None:
            scaler.load_state_dict(state.scaler)
        if now.processes != (then := progress.processes):
            logger.info("%s processes resume a run of %s: the same updates, other dropout", now.processes, then)
        if progress.machine not in ("", now.machine):
            differ = "results may differ from an uninterrupted run by rounding"
            logger.warning("the hardware or precision was %s and is now %s: %s", progress.machine, now.machine, differ)
        recipe, before = self.recipe, read_recipe(path / RECIPE)
        measured = _measured(recipe.validation, recipe.decoding, recipe.data.references, now)
        if measured != _measured(before.validation, before.decoding, before.data.references, progress):
            # Values from two measures cannot be compared: measure the resumed weights again.
            progress.best, progress.validations_without_improvement, progress.awaits_validation = None, 0, True
            progress.validated_update = min(progress.validated_update, progress.update - 1)
            logger.info("validation has changed: the earlier best checkpoint no longer counts")
        progress.processes, progress.data, progress.machine = now.processes, now.data, now.machine
        self.saved_update = progress.update
        logger.info("resuming after update %s", progress.update)
        return progress

    def save(self, progress: Progress, must: bool) -> None:
        """Write this update's checkpoint, and prune; a failure raises an `OSError` if `must`, else it is logged."""
        if self.saved_update == progress.update:
            return
        if any_rank(self.accelerator, not self.engine.weights_are_finite()):
            near = f"Training has diverged near update {progress.update}"
            raise FloatingPointError(f"{near}: a weight is not finite. The last checkpoint is unharmed.")
        failure, keep, scaler = None, self.accelerator.is_main_process, self.accelerator.scaler
        scale = None if scaler is None else scaler.state_dict()
        # All ranks gather it, and the main rank keeps it.
        state = TrainingState(progress, self.engine.weights(keep), self.engine.optimizer_state(keep), scale)
        if keep:
            try:
                with self.watch.paused():
                    blank = self.engine.plain_network("meta")
                    save_checkpoint(self.folder, blank, state, self.tokenizers, to_yaml(self.recipe))
            except OSError as error:
                failure = str(error)
        failure = broadcast(self.accelerator, failure)
        if failure is None:
            self.saved_update = progress.update
            self.prune(progress)
        elif must:
            raise OSError(failure)
        else:
            logger.warning("%s. Earlier checkpoints are unharmed, and training goes on.", failure)

    def prune(self, progress: Progress) -> None:
        """Delete all checkpoints except the recipe's last ones, the best and the present one."""
        if self.accelerator.is_main_process:
            kept = {progress.update, *_regular_updates(self.folder, self.settings, progress)}
            prune_checkpoints(self.folder, kept if progress.best is None else kept | {progress.best[1]})

    def clear(self, progress: Progress) -> None:
        """Clear a killed run's leftovers after this progress, and prune."""
        if self.accelerator.is_main_process:
            clear_leftovers(self.folder, progress.update)
        if self.saved_update is not None:
            self.prune(progress)  # the recipe may keep fewer than before


def _measured(
    asked: ValidationRecipe, scored: DecodingRecipe, references: str | None, progress: Progress
) -> tuple[Any, ...]:
    """Return the settings and data that validation values depend on."""
    scores = asked.sentences, asked.max_new_tokens, scored.bleu_tokenizer, scored.ignore, references
    return asked.select, (progress.data or "")[:64], asked.select != "loss" and scores


def clear_leftovers(folder: Path, update: int) -> None:
    """Delete half-written checkpoints, and rename the damaged ones after an update to `….damaged`."""
    for path, name in leftovers(folder).items():
        if name.startswith(PREFIX):
            remove(path)
    for saved, path in list_checkpoints(folder):
        if saved > update:
            renamed = path.with_name(path.name + ".damaged")
            remove(renamed)
            path.rename(renamed)


def prune_checkpoints(folder: Path, keep: set[int]) -> None:
    """Delete all checkpoints except those with updates in `keep`."""
    for update, path in list_checkpoints(folder):
        if update not in keep:
            try:
                remove(path)
            except OSError as error:
                logger.warning("the checkpoint %s could not be deleted: %s", path, error)


def published_checkpoints(folder: Path, settings: CheckpointRecipe, progress: Progress) -> list[Path]:
    """Return the undamaged checkpoints whose averaged weights a recipe publishes."""
    updates = [progress.update]
    if settings.publish == "average":
        updates = _regular_updates(folder, settings, progress)
    elif settings.publish == "best" and progress.best is not None:
        updates = [progress.best[1]]
    damages = {path: find_damage(path) for path in (checkpoint_path(folder, update) for update in updates)}
    for path, damage in damages.items():
        if damage is not None:
            logger.warning("the checkpoint %s is left out of the published weights: %s", path, damage)
    # The last one was just written.
    return [path for path, damage in damages.items() if damage is None] or [checkpoint_path(folder, progress.update)]


def _regular_updates(folder: Path, settings: CheckpointRecipe, progress: Progress) -> list[int]:
    saved, now = [update for update, _ in list_checkpoints(folder)], progress.update
    return [update for update in saved if update % settings.every_updates == 0 or update == now][-settings.keep_last :]
