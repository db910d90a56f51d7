"""Checks on run length: updates, epochs and minutes."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from heedful.checking.findings import Level, RecipeFinding
from heedful.training.recipe import CheckpointRecipe, OptimizationRecipe, ValidationRecipe
from heedful.training.updates.schedule import learning_rate

MANY_EPOCHS = 200


class RunEnd(NamedTuple):
    """The limit that ends a run first. As text: its key, and the number's source."""

    key: str
    updates: float
    error: Level = "error"  # level of findings that ruin the run
    source: str = ""  # the number's, unless it is the recipe

    @property
    def last(self) -> int:
        """Last update's number."""
        return max(1, int(self.updates))

    def __str__(self) -> str:
        return f"`{self.key}`{self.source}"


def run_end(settings: OptimizationRecipe, per_epoch: float | None, seconds: float | None) -> RunEnd | None:
    """Return the limit that ends a run first. Unknown updates per epoch, or seconds per update, are `None`."""
    ends = []
    if settings.max_updates is not None:
        ends.append(RunEnd("optimization.max_updates", settings.max_updates))
    if settings.max_epochs is not None and per_epoch is not None:
        ends.append(RunEnd("optimization.max_epochs", settings.max_epochs * per_epoch))
    if settings.max_minutes is not None and seconds:
        updates = math.ceil(settings.max_minutes * 60 / seconds)
        # Another machine may be faster.
        ends.append(RunEnd("optimization.max_minutes", updates, "warning", ", by the speed measured here"))
    return min(ends, key=lambda end: end.updates, default=None)


def check_run_length(
    settings: OptimizationRecipe,
    validation: ValidationRecipe,
    checkpoints: CheckpointRecipe,
    d_model: int,
    updates_per_epoch: float | None = None,
    seconds_per_update: float | None = None,
) -> Iterator[RecipeFinding]:
    """Check schedule, epochs and intervals. The paper's schedule depends on `d_model`."""
    end = run_end(settings, updates_per_epoch, seconds_per_update)
    if updates_per_epoch is not None:
        yield from _check_epochs(settings.tokens_per_update, updates_per_epoch, end)
    if end is not None:
        yield from _check_schedule(settings, end, d_model)
        yield from _check_intervals(validation, checkpoints, end)


def _check_schedule(settings: OptimizationRecipe, end: RunEnd, d_model: int) -> Iterator[RecipeFinding]:
    warmup = settings.warmup_updates
    ended = f"the run ends after {end.last:,} updates ({end})"
    key, rises = "optimization.warmup_updates", f"The learning rate rises over {warmup:,} updates"
    tenth = f"Set it to a tenth of the run, about {max(1, end.last // 10):,}"
    last_rate = learning_rate(end.last, settings, d_model)
    if 1 < warmup >= end.last:
        peak = learning_rate(warmup, settings, d_model)
        message = f"{rises}, but {ended}, at {100 * last_rate / peak if peak else 0.0:.0f} % of its peak."
        yield RecipeFinding("schedule", end.error, message, key, f"{tenth}, or train longer.")
    elif warmup > 0.5 * end.last:
        yield RecipeFinding("schedule", "warning", f"{rises}, more than half of the run: {ended}.", key, f"{tenth}.")
    elif settings.schedule in ("linear", "cosine") and end.last < 0.95 * (settings.max_updates or 0):
        message = f"The {settings.schedule} schedule reaches 0 after {settings.max_updates:,} updates, but {ended}, "
        message += f"with the learning rate still at {100 * last_rate / settings.learning_rate:.0f} % of its peak."
        advice = f"Set `optimization.max_updates` to {end.last:,}, or raise `{end.key}`."
        yield RecipeFinding("schedule", "warning", message, "optimization.max_updates", advice)


def _check_epochs(size: int, per_epoch: float, end: RunEnd | None) -> Iterator[RecipeFinding]:
    if per_epoch <= 1:
        advice = "Lower it, so that an epoch has at least tens of updates."
        message = f"One update takes {size:,} padded tokens, all training pairs at once: all updates are alike."
        yield RecipeFinding("epochs", "warning", message, "optimization.tokens_per_update", advice)
    if end is not None and end.updates > MANY_EPOCHS * per_epoch:
        message = f"The run passes {end.updates / per_epoch:,.0f} times over the training pairs ({per_epoch:,.0f} "
        message += f"updates each{end.source}): it will memorize them."
        advice = "Shorten it, set `validation.patience` and `checkpoints.publish: best`, or find more pairs."
        yield RecipeFinding("epochs", "warning", message, end.key, advice)


def _check_intervals(
    validation: ValidationRecipe, checkpoints: CheckpointRecipe, end: RunEnd
) -> Iterator[RecipeFinding]:
    ended = f"the run ends after {end.last:,} ({end})"
    advice = f"Set it to about {max(1, end.last // 10):,}."
    if validation.every_updates > end.last:
        needed = checkpoints.publish == "best" or validation.patience is not None
        level = end.error if needed else "warning"
        message = f"The model is first validated after {validation.every_updates:,} updates, but {ended}"
        message += f": `checkpoints.publish: {checkpoints.publish}` and `patience` get no scores" * needed + "."
        yield RecipeFinding("intervals", level, message, "validation.every_updates", advice)
    if checkpoints.every_updates > end.last:
        averages = checkpoints.publish == "average" and checkpoints.keep_last > 1
        message = f"The run is first saved after {checkpoints.every_updates:,} updates, but {ended}: "
        message += "there is one checkpoint, so nothing is averaged." if averages else "a crash loses all of it."
        yield RecipeFinding("intervals", "warning", message, "checkpoints.every_updates", advice)
    validations = end.last // validation.every_updates
    if validation.patience is not None and 0 < validations <= validation.patience:
        message = f"Training stops early after {validation.patience} validations without improvement, but there are "
        message += f"only {validations}: {ended} updates."
        advice = "Lower it, or validate more often."
        yield RecipeFinding("intervals", "warning", message, "validation.patience", advice)
    if validation.patience is not None and checkpoints.publish == "last":
        message = f"The run ends after {validation.patience} validations without improvement, but publishes the last "
        yield RecipeFinding("intervals", "warning", f"{message}weights.", "checkpoints.publish", "Set it to best.")
