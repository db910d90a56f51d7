"""Which checkpoints of a run are kept, which are published, and which are out of the way of a resumed run."""

import logging
import shutil
from pathlib import Path

from heedful.training.checkpoints.checkpoints import checkpoint_path, find_damage, list_checkpoints
from heedful.training.checkpoints.progress import Progress
from heedful.training.recipe import CheckpointRecipe

logger = logging.getLogger(__name__)


def clear_leftovers(folder: Path, update: int) -> None:
    """Delete half-written checkpoints, and rename those after an update, which are damaged, to `….damaged`.

    Args:
        folder: The run's checkpoint folder.
        update: The update that the run goes on from.
    """
    for path in folder.glob("*.partial"):
        shutil.rmtree(path)
    for saved, path in list_checkpoints(folder):
        if saved > update:
            renamed = path.with_name(path.name + ".damaged")
            shutil.rmtree(renamed, ignore_errors=True)
            path.rename(renamed)


def prune_checkpoints(folder: Path, keep: set[int]) -> None:
    """Delete all checkpoints but those of the updates in `keep`; what cannot be deleted, a later call tries again."""
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
    regular, best = _regular_updates(folder, settings, progress.update), [update for _, update in progress.best]
    choices = {"average": regular, "average_best": best, "best": best[:1]}
    updates = choices.get(settings.publish, [progress.update])
    if not updates:
        logger.warning("nothing was validated, so that the last weights are published and not the best")
        updates = [progress.update]
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
