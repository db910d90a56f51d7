"""Checkpoints that are whole or absent: written beside, checked by a manifest, renamed into place.

Each is an ordinary model folder that `from_pretrained` loads, with the state of training in `training_state/`.
"""

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from heedful.data.tokenization import TokenizerPair
from heedful.files import flush, written_whole
from heedful.training.recipe import CheckpointRecipe

logger = logging.getLogger(__name__)

STATE_FOLDER = "training_state"
OPTIMIZER = "optimizer.pt"
MOVING_AVERAGE = "moving_average.safetensors"
SCALER = "scaler.json"
PROGRESS = "progress.json"
MANIFEST = "manifest.json"
FORMAT = 2


@dataclass
class Progress:
    """How far a run is. What randomness, learning rate and data order need follows from these and the recipe.

    Attributes:
        update: Finished updates, skipped ones too.
        epoch: Epoch of the next update, from 0.
        update_in_epoch: Finished updates of that epoch.
        target_tokens: Target tokens of these updates, padding not counted.
        seconds: Seconds since the run began, interruptions not counted.
        processes: Number of processes that wrote this.
        token_budget: Padded tokens of a micro-batch after memory ran out; `None` for the recipe's.
        skipped_updates: Updates whose gradient was not finite.
        skipped_in_a_row: How many of them were the last ones.
        validated_update: The last update that was validated.
        best: The best validations, (value, update), best first.
        validations_without_improvement: How many there were since the best.
        window: Sums since the last line of the log.
        awaits_validation: Whether this update is to be validated and has not been.
        data: A fingerprint of validation and training rows, of the latter where they are known from the start.
    """

    update: int = 0
    epoch: int = 0
    update_in_epoch: int = 0
    target_tokens: int = 0
    seconds: float = 0.0
    processes: int = 1
    token_budget: int | None = None
    skipped_updates: int = 0
    skipped_in_a_row: int = 0
    validated_update: int = 0
    best: list[tuple[float, int]] = field(default_factory=list)
    validations_without_improvement: int = 0
    window: dict[str, float] = field(default_factory=dict)
    awaits_validation: bool = False
    data: str | None = None


@dataclass
class TrainingState:
    """All that a checkpoint holds beside the tokenizers and the recipe; whole tensors, sharded or not.

    Attributes:
        progress: How far the run is.
        weights: The model's weights by name, tied ones once.
        optimizer: What the optimizer knows.
        moving_average: Averaged weights, if the run keeps them.
        scaler: What fp16's gradient scaler knows.
    """

    progress: Progress
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    moving_average: dict[str, torch.Tensor] | None = None
    scaler: dict[str, Any] | None = None


def checkpoint_path(folder: Path, update: int) -> Path:
    """Return where the checkpoint of an update lies."""
    return folder / f"update-{update:08d}"


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """List the checkpoints of a run as (update, path), oldest first, whole or not."""
    found = (re.fullmatch(r"update-(\d+)", path.name) for path in (folder.iterdir() if folder.is_dir() else ()))
    return sorted((int(match[1]), folder / match[0]) for match in found if match)


def save_checkpoint(folder: Path, model, state: TrainingState, tokenizers: TokenizerPair, recipe: str) -> Path:
    """Write a checkpoint: beside its place first, and renamed when whole. For the main process.

    Args:
        folder: The run's checkpoint folder.
        model: Any model of the right config; the weights written are those of `state`.
        state: What to save.
        tokenizers: The model's tokenizers.
        recipe: The recipe as YAML.

    Returns:
        The checkpoint's path.

    Raises:
        OSError: If it could not be written, on a full disk say; nothing half-written is left.
    """
    path = checkpoint_path(folder, state.progress.update)
    with written_beside(path) as partial:
        _write(partial, model, state, tokenizers, recipe)
    return path


@contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """Yield a folder to write into, which takes the place of `path` when all is written.

    Raises:
        OSError: If not all could be written; nothing of it is left.
    """
    try:
        with written_whole(path) as partial:
            yield partial
    except Exception as error:  # on a full disk each library raises another type, tokenizers a bare Exception
        raise OSError(f"{path} could not be written: {error}") from error


def _write(partial: Path, model, state: TrainingState, tokenizers: TokenizerPair, recipe: str) -> None:
    folder = partial / STATE_FOLDER
    folder.mkdir(parents=True)
    model.save_pretrained(partial, state_dict=state.weights)
    tokenizers.save_pretrained(partial)
    torch.save(state.optimizer, folder / OPTIMIZER)
    if state.moving_average is not None:
        save_file(state.moving_average, folder / MOVING_AVERAGE)
    if state.scaler is not None:
        (folder / SCALER).write_text(json.dumps(state.scaler))
    (folder / PROGRESS).write_text(json.dumps({"format": FORMAT, **asdict(state.progress)}, indent=2))
    (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
    _write_manifest(partial)


def load_state(path: Path) -> TrainingState:
    """Read what `save_checkpoint` wrote, but for the model's weights, which `from_pretrained` reads.

    Raises:
        ValueError: If another version of Heedful wrote it.
    """
    folder = path / STATE_FOLDER
    progress = load_progress(path)
    average, scaler = folder / MOVING_AVERAGE, folder / SCALER
    return TrainingState(
        progress=progress,
        weights={},
        optimizer=torch.load(folder / OPTIMIZER, weights_only=True, map_location="cpu"),
        moving_average=load_file(average) if average.is_file() else None,
        scaler=json.loads(scaler.read_text()) if scaler.is_file() else None,
    )


def load_progress(path: Path) -> Progress:
    """Read how far the run of a checkpoint was.

    Raises:
        ValueError: If another version of Heedful wrote it.
    """
    state = json.loads((path / STATE_FOLDER / PROGRESS).read_text())
    written = state.pop("format")
    if written > FORMAT:
        raise ValueError(f"The checkpoint {path} has format {written}; this Heedful reads {FORMAT}: upgrade it.")
    if written < FORMAT:
        raise ValueError(
            f"The checkpoint {path} has format {written}; this Heedful resumes only format {FORMAT}: resume with the "
            "version that wrote it, or train on from its weights with `model.start_from`."
        )
    state["best"] = [(value, update) for value, update in state["best"]]
    return Progress(**state)


def newest_whole_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint whose files are all there and unchanged, warning of damaged ones.

    Raises:
        ValueError: If there are checkpoints, but all are damaged.
        OSError: If a file is there but cannot be read, which is no damage and may pass.
    """
    damages = {}
    for _, path in reversed(list_checkpoints(folder)):
        damage = find_damage(path)
        if damage is None:
            return path
        damages[path.name] = damage
        logger.warning("the checkpoint %s is damaged (%s): looking for an older one", path, damage)
    if damages:
        told = ", ".join(f"{name} ({damage})" for name, damage in damages.items())
        raise ValueError(
            f"`resume` must find a whole checkpoint in {folder}, but all are damaged: {told}. To start again, set "
            "overwrite=true or another `output`."
        )
    return None


def find_damage(path: Path) -> str | None:
    """Return what is wrong with a checkpoint, or `None` if every file has the size and checksum of the manifest."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        entries = [(path / name, entry["size"], entry["sha256"]) for name, entry in manifest.items()]
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):  # whatever a flipped bit made of it
        return f"{MANIFEST} is missing or unreadable"
    for file, size, checksum in entries:
        name = file.relative_to(path)
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
        if _checksum(file) != checksum:
            return f"{name} has another checksum"
    return None


def clear_remains(folder: Path, update: int) -> None:
    """Delete half-written checkpoints; put those after an update, which are damaged, out of the resumed run's way."""
    for path in folder.glob("*.partial"):
        shutil.rmtree(path)
    for saved, path in list_checkpoints(folder):
        if saved > update:
            aside = path.with_name(path.name + ".damaged")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def prune_checkpoints(folder: Path, keep: set[int]) -> None:
    """Delete all checkpoints but those of the updates in `keep`; what cannot be deleted now, a later call tries."""
    for update, path in list_checkpoints(folder):
        if update not in keep:
            try:
                shutil.rmtree(path)
            except OSError as error:
                logger.warning("the checkpoint %s could not be deleted: %s", path, error)


def kept_updates(folder: Path, settings: CheckpointRecipe, progress: Progress) -> set[int]:
    """Return the updates whose checkpoints a recipe keeps: the last ones, the best ones, and the present one."""
    best = [update for _, update in progress.best]
    return {*_regular_updates(folder, settings, progress.update), *best, progress.update}


def published_checkpoints(folder: Path, settings: CheckpointRecipe, progress: Progress) -> list[Path]:
    """Return the checkpoints whose averaged weights a recipe publishes; damaged ones are left out with a warning."""
    updates = _regular_updates(folder, settings, progress.update)
    best = [update for _, update in progress.best]
    if settings.publish in ("last", "ema"):
        updates = [progress.update]
    elif settings.publish in ("best", "average_best"):
        if not best:
            logger.warning("nothing was validated, so that the last weights are published and not the best")
        updates = (best if settings.publish == "average_best" else best[:1]) or [progress.update]
    damages = {path: find_damage(path) for path in (checkpoint_path(folder, update) for update in updates)}
    for path, damage in damages.items():
        if damage is not None:
            logger.warning("the checkpoint %s is left out of what is published: %s", path, damage)
    whole = [path for path, damage in damages.items() if damage is None]
    # The last one was written a moment ago.
    return whole or [checkpoint_path(folder, progress.update)]


def _regular_updates(folder: Path, settings: CheckpointRecipe, now: int) -> list[int]:
    """List the newest checkpoints that the recipe's interval made, and the present one."""
    saved = [update for update, _ in list_checkpoints(folder)]
    return [update for update in saved if update % settings.every_updates == 0 or update == now][-settings.keep_last :]


def _write_manifest(folder: Path) -> None:
    manifest: dict[str, Any] = {}
    for file in sorted(file for file in folder.rglob("*") if file.is_file() and file.name != MANIFEST):
        flush(file)
        manifest[str(file.relative_to(folder))] = {"size": file.stat().st_size, "sha256": _checksum(file)}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    flush(folder / MANIFEST)


def _checksum(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
