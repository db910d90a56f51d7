"""Checkpoints that are whole or absent: written beside, checked by a manifest, renamed into place.

Each is an ordinary model folder that `from_pretrained` loads, with the state of training in `training_state/`.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from heed.data.tokenization import TokenizerPair

logger = logging.getLogger(__name__)

STATE_FOLDER = "training_state"
MANIFEST = "manifest.json"
FORMAT = 1


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        update: Finished updates.
        epoch: Epoch of the next update, from 0.
        update_in_epoch: Finished updates of that epoch.
        target_tokens: Target tokens trained on, padding not counted.
        seconds: Seconds since the run began, interruptions not counted.
        best: Best value of the selected metric so far.
        best_update: The update it was seen at.
        validations_without_improvement: How many there were since.
    """

    update: int = 0
    epoch: int = 0
    update_in_epoch: int = 0
    target_tokens: int = 0
    seconds: float = 0.0
    best: float | None = None
    best_update: int | None = None
    validations_without_improvement: int = 0


def checkpoint_path(folder: Path, update: int) -> Path:
    """Return where the checkpoint of an update lies."""
    return folder / f"update-{update:08d}"


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """List the checkpoints of a run as (update, path), oldest first, whole or not."""
    found = (re.fullmatch(r"update-(\d+)", path.name) for path in (folder.iterdir() if folder.is_dir() else ()))
    return sorted((int(match[1]), folder / match[0]) for match in found if match)


def save_checkpoint(
    folder: Path, model, optimizer, tokenizers: TokenizerPair, progress: Progress, recipe: str
) -> Path:
    """Write a checkpoint of the main process; `save_random_state` must have written beside it already.

    Args:
        folder: The run's checkpoint folder.
        model: The model itself, not wrapped.
        optimizer: Its optimizer.
        tokenizers: Its tokenizers.
        progress: How far the run is.
        recipe: The recipe as YAML.

    Returns:
        The checkpoint's path.
    """
    path = checkpoint_path(folder, progress.update)
    partial = partial_path(folder, progress.update)
    model.save_pretrained(partial)
    tokenizers.save_pretrained(partial)
    state = partial / STATE_FOLDER
    state.mkdir(exist_ok=True)
    torch.save(optimizer.state_dict(), state / "optimizer.pt")
    (state / "progress.json").write_text(json.dumps({"format": FORMAT, **asdict(progress)}, indent=2))
    (state / "recipe.yaml").write_text(recipe, encoding="utf-8")
    _write_manifest(partial)
    if path.exists():
        shutil.rmtree(path)
    partial.rename(path)
    _flush(folder)
    return path


def partial_path(folder: Path, update: int) -> Path:
    """Return where a checkpoint is written before it is renamed."""
    return folder / f"update-{update:08d}.partial"


def save_random_state(folder: Path, update: int, rank: int) -> None:
    """Write one process's random state into the checkpoint that is being written."""
    state = partial_path(folder, update) / STATE_FOLDER
    state.mkdir(parents=True, exist_ok=True)
    random = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        random["cuda"] = torch.cuda.get_rng_state()
    torch.save(random, state / f"random-{rank}.pt")


def load_random_state(path: Path, rank: int) -> None:
    """Restore what `save_random_state` wrote.

    Raises:
        ValueError: If the checkpoint was written by fewer processes.
    """
    file = path / STATE_FOLDER / f"random-{rank}.pt"
    if not file.is_file():
        raise ValueError(f"The checkpoint {path} was written by fewer processes: it has no random state {rank}.")
    random = torch.load(file, weights_only=True)
    torch.set_rng_state(random["cpu"])
    if "cuda" in random and torch.cuda.is_available():
        torch.cuda.set_rng_state(random["cuda"])


def load_progress(path: Path) -> Progress:
    """Read how far the run of a checkpoint was.

    Raises:
        ValueError: If a newer Heed wrote it.
    """
    state = json.loads((path / STATE_FOLDER / "progress.json").read_text())
    written = state.pop("format")
    if written > FORMAT:
        raise ValueError(f"The checkpoint {path} has format {written}; this Heed reads up to {FORMAT}: upgrade it.")
    return Progress(**state)


def newest_whole_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint whose files are all there and unchanged, warning of damaged ones."""
    for _, path in reversed(list_checkpoints(folder)):
        damage = find_damage(path)
        if damage is None:
            return path
        logger.warning("the checkpoint %s is damaged (%s): looking for an older one", path, damage)
    return None


def find_damage(path: Path) -> str | None:
    """Return what is wrong with a checkpoint, or `None` if every file has the size and checksum of the manifest."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError):
        return f"{MANIFEST} is missing or unreadable"
    for name, expected in manifest.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != expected["size"]:
            return f"{name} has {file.stat().st_size} bytes instead of {expected['size']}"
        if _checksum(file) != expected["sha256"]:
            return f"{name} has another checksum"
    return None


def delete_unfinished(folder: Path, update: int) -> None:
    """Delete half-written checkpoints, and those after an update: damaged ones, where a run resumes from it."""
    for path in folder.glob("*.partial"):
        shutil.rmtree(path)
    prune_checkpoints(folder, {saved for saved, _ in list_checkpoints(folder) if saved <= update})


def prune_checkpoints(folder: Path, keep: set[int]) -> None:
    """Delete all checkpoints but those of the updates in `keep`."""
    for update, path in list_checkpoints(folder):
        if update not in keep:
            shutil.rmtree(path)


def average_weights(paths: list[Path]) -> dict[str, torch.Tensor]:
    """Average the weights of checkpoints (section 6.1), summed in float64.

    Raises:
        ValueError: If there are none, or they are not of one model.
    """
    if not paths:
        raise ValueError("`paths` must name at least one checkpoint, but is empty.")
    total: dict[str, torch.Tensor] = {}
    for path in paths:
        weights: dict[str, torch.Tensor] = {}
        for file in sorted(path.glob("*.safetensors")):
            weights |= load_file(file)
        if total and _shapes(weights) != _shapes(total):
            raise ValueError(f"The checkpoint {path} is of another model than {paths[0]}: their weights differ.")
        for name, weight in weights.items():
            total[name] = total.get(name, 0) + weight.double()
    return {name: (weight / len(paths)).float() for name, weight in total.items()}


def _shapes(weights: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in weights.items()}


def _write_manifest(folder: Path) -> None:
    manifest: dict[str, Any] = {}
    for file in sorted(file for file in folder.rglob("*") if file.is_file() and file.name != MANIFEST):
        _flush(file)
        manifest[str(file.relative_to(folder))] = {"size": file.stat().st_size, "sha256": _checksum(file)}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    _flush(folder / MANIFEST)


def _checksum(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Wait until the disk has what was written."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
