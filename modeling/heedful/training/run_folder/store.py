"""The checkpoints of a run: written and read by all ranks together, pruned, and chosen to be published."""

import logging
from pathlib import Path

from accelerate import Accelerator

from heedful.data.tokenization import TokenizerPair
from heedful.files import leftovers, remove
from heedful.training.loop.engine import TrainingEngine
from heedful.training.processes.collectives import Watch, any_rank, broadcast, full_weights
from heedful.training.recipe import CheckpointRecipe, Recipe
from heedful.training.recipe_file import to_yaml
from heedful.training.run_folder.checkpoints import (
    CHECKPOINTS,
    PREFIX,
    TrainingState,
    checkpoint_path,
    find_damage,
    list_checkpoints,
    load_state,
    newest_whole_checkpoint,
    save_checkpoint,
)
from heedful.training.run_folder.progress import Progress

logger = logging.getLogger(__name__)


def checkpoint_to_resume(recipe: Recipe, accelerator: Accelerator) -> Path | None:
    """Return the newest whole checkpoint of the run, as the main process sees it; `None` for none."""
    is_reader = recipe.resume and accelerator.is_main_process
    return broadcast(accelerator, newest_whole_checkpoint(recipe.folder / CHECKPOINTS) if is_reader else None)


class CheckpointStore:
    """Saves and loads what a run needs to go on; the watch is paused while files are written."""

    def __init__(self, recipe: Recipe, tokenizers: TokenizerPair, engine: TrainingEngine, watch: Watch):
        self.recipe, self.settings, self.tokenizers = recipe, recipe.checkpoints, tokenizers
        self.engine, self.accelerator, self.watch = engine, engine.accelerator, watch
        self.folder = recipe.folder / CHECKPOINTS
        self.saved_update: int | None = None  # whose checkpoint was written or read last

    def load(self, path: Path, now: Progress) -> Progress:
        """Load a checkpoint but for the weights, and return how far the run was; `now` has its processes and data."""
        state = load_state(path)
        progress, average, scaler = state.progress, self.engine.moving_average, self.accelerator.scaler
        if progress.data != now.data and not self.recipe.allow_changes:
            must = f"must be those of the run that is resumed ({path}), but their rows have changed"
            raise ValueError(f"The data {must}; allow_changes=true resumes all the same.")
        self.engine.load(state.optimizer)
        if average is not None and state.moving_average is not None:
            average.load(state.moving_average)
        if scaler is not None and state.scaler is not None:
            scaler.load_state_dict(state.scaler)
        if now.processes != (then := progress.processes):
            logger.info("%s processes go on with a run of %s: the same updates, other dropout", now.processes, then)
        progress.processes, progress.data = now.processes, now.data
        del progress.best[self.settings.keep_best :]
        # A moving average that a changed recipe asks for begins here, and is still to be saved.
        is_whole = average is None or state.moving_average is not None
        self.saved_update = progress.update if is_whole else None
        logger.info("resuming after update %s", progress.update)
        return progress

    def save(self, progress: Progress, must: bool) -> None:
        """Write a checkpoint, unless this update has one, and prune; if it must and cannot, it is an `OSError`."""
        if self.saved_update == progress.update:
            return
        if any_rank(self.accelerator, not self.engine.weights_are_finite()):
            near = f"Training has diverged near update {progress.update}"
            raise FloatingPointError(f"{near}: a weight is not finite. The last checkpoint is unharmed.")
        failure, keep = None, self.accelerator.is_main_process
        average, scaler = self.engine.moving_average, self.accelerator.scaler
        state = TrainingState(  # which all ranks gather, and the main one keeps
            progress=progress,
            weights=self.engine.weights(keep),
            optimizer=self.engine.optimizer_state(keep),
            moving_average=None if average is None else full_weights(average.weights, keep),
            scaler=None if scaler is None else scaler.state_dict(),
        )
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
        """Delete all checkpoints but the last ones, the best ones and the present one, as the recipe says."""
        if self.accelerator.is_main_process:
            best = [update for _, update in progress.best]
            kept = {*_regular_updates(self.folder, self.settings, progress), *best, progress.update}
            prune_checkpoints(self.folder, kept)

    def clear(self, progress: Progress) -> None:
        """Remove what a killed run left half-written or damaged after this progress, and prune."""
        if self.accelerator.is_main_process:
            clear_leftovers(self.folder, progress.update)
        if self.saved_update is not None:
            self.prune(progress)  # a recipe that keeps fewer than before makes room


def clear_leftovers(folder: Path, update: int) -> None:
    """Delete half-written checkpoints, and rename those after an update, which are damaged, to `….damaged`."""
    for path, name in leftovers(folder).items():
        if name.startswith(PREFIX):
            remove(path)
    for saved, path in list_checkpoints(folder):
        if saved > update:
            renamed = path.with_name(path.name + ".damaged")
            remove(renamed)
            path.rename(renamed)


def prune_checkpoints(folder: Path, keep: set[int]) -> None:
    """Delete all checkpoints but those of the updates in `keep`; what cannot be deleted, a later call tries again."""
    for update, path in list_checkpoints(folder):
        if update not in keep:
            try:
                remove(path)
            except OSError as error:
                logger.warning("the checkpoint %s could not be deleted: %s", path, error)


def published_checkpoints(folder: Path, settings: CheckpointRecipe, progress: Progress) -> list[Path]:
    """Return the checkpoints whose averaged weights a recipe publishes; damaged ones are left out with a warning."""
    regular, best = _regular_updates(folder, settings, progress), [update for _, update in progress.best]
    updates = {"average": regular, "average_best": best, "best": best[:1]}.get(settings.publish, [progress.update])
    damages = {path: find_damage(path) for path in (checkpoint_path(folder, update) for update in updates)}
    for path, damage in damages.items():
        if damage is not None:
            logger.warning("the checkpoint %s is left out of what is published: %s", path, damage)
    # The last one was written a moment ago.
    return [path for path, damage in damages.items() if damage is None] or [checkpoint_path(folder, progress.update)]


def _regular_updates(folder: Path, settings: CheckpointRecipe, progress: Progress) -> list[int]:
    """List the newest checkpoints that the recipe's interval made, and the present one."""
    saved, now = [update for update, _ in list_checkpoints(folder)], progress.update
    return [update for update in saved if update % settings.every_updates == 0 or update == now][-settings.keep_last :]
