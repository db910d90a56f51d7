"""Checkpoints that are whole or absent: written under another name, listed in a manifest, renamed when complete.

Each is an ordinary model folder that `from_pretrained` loads, with the state of training in `training_state/`.
"""

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from heedful.checksums_heed import checksum
from heedful.data.tokenization import TokenizerPair
from heedful.files import check_name_inside, flush, written_whole
from heedful.training.run_folder.progress import Progress

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"  # in a run's folder
STATE_FOLDER = "training_state"  # in a checkpoint
RECIPE = f"{STATE_FOLDER}/recipe.yaml"
OPTIMIZER = "optimizer.pt"
MOVING_AVERAGE = "moving_average.safetensors"
SCALER = "scaler.json"
PROGRESS = "progress.json"
MANIFEST = "manifest.json"
PREFIX = "update-"
FORMAT = 2


@dataclass(frozen=True)
class TrainingState:
    """All that a checkpoint holds besides the tokenizers and the recipe, in whole tensors."""

    progress: Progress
    weights: dict[str, torch.Tensor]  # the model's, tied ones once
    optimizer: dict[str, Any]
    moving_average: dict[str, torch.Tensor] | None = None
    scaler: dict[str, Any] | None = None  # of fp16's gradients


def checkpoint_path(folder: Path, update: int) -> Path:
    """Return the path of an update's checkpoint."""
    return folder / f"{PREFIX}{update:08d}"


def list_checkpoints(folder: Path, prefix: str = PREFIX) -> list[tuple[int, Path]]:
    """List the checkpoints of a run as (update, path), oldest first, whole or not."""
    matches = (re.fullmatch(prefix + r"(\d+)", path.name) for path in (folder.iterdir() if folder.is_dir() else ()))
    return sorted((int(match[1]), folder / match[0]) for match in matches if match)


def save_checkpoint(folder: Path, model, state: TrainingState, tokenizers: TokenizerPair, recipe: str) -> Path:
    """Write a checkpoint, whole or not at all, which is an `OSError`; `model` may be any of the right config."""
    path = checkpoint_path(folder, state.progress.update)
    with written_folder(path) as partial:
        model.save_pretrained(partial, state_dict=state.weights)
        tokenizers.save_pretrained(partial)
        training = partial / STATE_FOLDER
        training.mkdir()
        torch.save(state.optimizer, training / OPTIMIZER)
        if state.moving_average is not None:
            save_file(state.moving_average, training / MOVING_AVERAGE)
        if state.scaler is not None:
            (training / SCALER).write_text(json.dumps(state.scaler))
        (training / PROGRESS).write_text(json.dumps({"format": FORMAT, **asdict(state.progress)}, indent=2))
        (partial / RECIPE).write_text(recipe, encoding="utf-8")
        write_manifest(partial)
    return path


@contextmanager
def written_folder(path: Path) -> Iterator[Path]:
    """Yield a folder to write into, which becomes `path` when all is written; else nothing of it is left."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as partial:
            yield partial
    except Exception as error:  # on a full disk each library raises another type, tokenizers a bare Exception
        raise OSError(f"{path} could not be written: {error}") from error


def load_state(path: Path) -> TrainingState:
    """Read what `save_checkpoint` wrote, but for the model's weights, which `from_pretrained` reads."""
    folder = path / STATE_FOLDER
    average, scaler = folder / MOVING_AVERAGE, folder / SCALER
    return TrainingState(
        progress=load_progress(path),
        weights={},
        optimizer=torch.load(folder / OPTIMIZER, weights_only=True, map_location="cpu"),
        moving_average=load_file(average) if average.is_file() else None,
        scaler=json.loads(scaler.read_text()) if scaler.is_file() else None,
    )


def load_progress(path: Path) -> Progress:
    """Read how far the run of a checkpoint was; another format than this version's is a `ValueError`."""
    state = json.loads((path / STATE_FOLDER / PROGRESS).read_text())
    written = state.pop("format")
    if written != FORMAT:
        older = "resume with the version that wrote it, or train on from its weights with `model.start_from`"
        way = "upgrade it" if written > FORMAT else older
        raise ValueError(f"The checkpoint {path} has format {written}; this Heedful reads {FORMAT}: {way}.")
    state["best"] = [(value, update) for value, update in state["best"]]
    return Progress(**state)


def newest_whole_checkpoint(
    folder: Path, prefix: str = PREFIX, setting: str = "resume", others: str = "overwrite=true or another `output`"
) -> Path | None:
    """Return the newest checkpoint whose files are all there and unchanged, warning of damaged ones.

    If all are damaged, it is a `ValueError`, which names the setting that asked for one and others to start again. A
    file that cannot be read is an `OSError`: it is no damage and may pass.
    """
    damages = []
    for _, path in reversed(list_checkpoints(folder, prefix)):
        damage = find_damage(path)
        if damage is None:
            return path
        damages.append(f"{path.name} ({damage})")
        logger.warning("the checkpoint %s is damaged (%s): looking for an older one", path, damage)
    if damages:
        found = f"but all are damaged: {', '.join(damages)}. To start again, set {others}."
        raise ValueError(f"`{setting}` must find a whole checkpoint in {folder}, {found}")
    return None


def find_damage(path: Path) -> str | None:
    """Return what is wrong with a checkpoint, or `None` if every file has the size and checksum of the manifest."""
    if not path.is_dir():
        return "it is no folder"
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        for name in manifest:
            check_name_inside(name, MANIFEST)
        entries = [(name, entry["size"], entry["sha256"]) for name, entry in manifest.items()]
    except (FileNotFoundError, IsADirectoryError, ValueError, KeyError, TypeError, AttributeError):
        entries = []  # whatever a flipped bit made of it
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
    """Write the sizes and checksums of all files of a folder, when the disk has them, into its manifest."""
    manifest = {}
    for file in sorted(file for file in folder.rglob("*") if file.is_file() and file.name != MANIFEST):
        flush(file)
        manifest[str(file.relative_to(folder))] = {"size": file.stat().st_size, "sha256": checksum(file)}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    flush(folder / MANIFEST)
