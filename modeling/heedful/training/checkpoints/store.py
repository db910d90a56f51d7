"""The checkpoints of a run as it goes on: written and read by all ranks together, and pruned."""

import logging
from pathlib import Path

from accelerate import Accelerator

from heedful.data.tokenization import TokenizerPair
from heedful.training.checkpoints.checkpoints import (
    TrainingState,
    load_state,
    newest_whole_checkpoint,
    save_checkpoint,
)
from heedful.training.checkpoints.progress import Progress
from heedful.training.checkpoints.retention import clear_leftovers, kept_updates, prune_checkpoints
from heedful.training.loop.averaging import MovingAverage
from heedful.training.loop.engine import Engine
from heedful.training.processes.collectives import any_rank, broadcast, full_weights
from heedful.training.processes.heartbeat import Heartbeat
from heedful.training.recipe import Recipe
from heedful.training.recipe_file import to_yaml

logger = logging.getLogger(__name__)

FOLDER = "checkpoints"


def checkpoint_to_resume(recipe: Recipe, accelerator: Accelerator) -> Path | None:
    """Return the newest whole checkpoint of the run, as the main process sees it; `None` for none.

    Raises:
        ValueError: If there are checkpoints, but all are damaged.
        OSError: If a file is there but cannot be read.
    """
    is_reader = recipe.resume and accelerator.is_main_process
    return broadcast(accelerator, newest_whole_checkpoint(recipe.folder / FOLDER) if is_reader else None)


class CheckpointStore:
    """Saves and loads what a run needs to go on.

    Args:
        recipe: The run, which every checkpoint holds.
        tokenizers: The model's tokenizers, likewise.
        engine: The model and its optimizer.
        moving_average: The moving average of the weights, if there is one.
        heartbeat: Is paused while files are written.

    Attributes:
        folder: The run's checkpoint folder.
        saved_update: The update whose checkpoint was written or read last; `None` if none was.
    """

    def __init__(
        self,
        recipe: Recipe,
        tokenizers: TokenizerPair,
        engine: Engine,
        moving_average: MovingAverage | None,
        heartbeat: Heartbeat,
    ):
        self.recipe, self.settings, self.tokenizers = recipe, recipe.checkpoints, tokenizers
        self.engine, self.moving_average, self.heartbeat = engine, moving_average, heartbeat
        self.accelerator = engine.accelerator
        self.folder = recipe.folder / FOLDER
        self.saved_update: int | None = None

    def load(self, path: Path, now: Progress) -> Progress:
        """Load optimizer and averages of a checkpoint, whatever the number of processes that wrote it.

        Args:
            path: The checkpoint, whose weights the engine was made with.
            now: Processes and data of the run that goes on.

        Returns:
            How far the run was.

        Raises:
            ValueError: If the data have changed and may not, or another version of Heedful wrote the checkpoint.
        """
        state = load_state(path)
        progress = state.progress
        if progress.data != now.data and not self.recipe.allow_changes:
            raise ValueError(
                f"The data must be those of the run that is resumed ({path}), but their rows have changed; "
                "allow_changes=true resumes all the same."
            )
        self.engine.load(state.optimizer)
        if self.moving_average is not None and state.moving_average is not None:
            self.moving_average.load(state.moving_average)
        if self.accelerator.scaler is not None and state.scaler is not None:
            self.accelerator.scaler.load_state_dict(state.scaler)
        if now.processes != progress.processes:
            then = progress.processes
            logger.info("%s processes go on with a run of %s: the same updates, other dropout", now.processes, then)
        progress.processes, progress.data = now.processes, now.data
        del progress.best[self.settings.keep_best :]
        # A moving average that a changed recipe asks for begins here, and is still to be saved.
        lacks_average = self.moving_average is not None and state.moving_average is None
        self.saved_update = None if lacks_average else progress.update
        logger.info("resuming after update %s", progress.update)
        return progress

    def save(self, progress: Progress, must: bool) -> None:
        """Write a checkpoint, unless this update has one, and delete those that the recipe does not keep.

        Args:
            progress: How far the run is.
            must: Whether to stop if it cannot be written; otherwise the run goes on, and tries again later.

        Raises:
            FloatingPointError: If a weight is not finite.
            OSError: If the checkpoint cannot be written, but must.
        """
        if self.saved_update == progress.update:
            return
        if any_rank(self.accelerator, not self.engine.weights_are_finite()):
            raise FloatingPointError(
                f"Training has diverged near update {progress.update}: a weight is not finite. "
                "The last checkpoint is unharmed."
            )
        state, failure = self._state(progress), None
        if self.accelerator.is_main_process:
            try:
                with self.heartbeat.paused():
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
        """Delete the checkpoints that the recipe does not keep."""
        if self.accelerator.is_main_process:
            prune_checkpoints(self.folder, kept_updates(self.folder, self.settings, progress))

    def clear(self, progress: Progress) -> None:
        """Remove what a killed run left half-written or damaged after this progress, and prune."""
        if self.accelerator.is_main_process:
            clear_leftovers(self.folder, progress.update)
            if self.saved_update is not None:
                self.prune(progress)  # a recipe that keeps fewer than before makes room

    def _state(self, progress: Progress) -> TrainingState:
        """Collect what a checkpoint holds; every rank takes part, and the main one gets it."""
        keep = self.accelerator.is_main_process
        average, scaler = self.moving_average, self.accelerator.scaler
        return TrainingState(
            progress=progress,
            weights=self.engine.weights(keep),
            optimizer=self.engine.optimizer_state(keep),
            moving_average=None if average is None else full_weights(average.weights, keep),
            scaler=None if scaler is None else scaler.state_dict(),
        )
