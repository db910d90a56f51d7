"""A run's progress: everything that a resumed run needs, except weights and optimizer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from heedful.training.recipe import OptimizationRecipe

# Sums over updates: losses in nats; tokens in targets, on both sides, and with padding; seconds.
SUMS: tuple[str, ...] = ("loss", "r_drop", "distillation", "gradient_norm", "target_tokens", "tokens", "padded_tokens")
SUMS += ("updates", "seconds", "waiting_seconds")


def new_window() -> dict[str, float]:
    """Return sums that are zero."""
    return dict.fromkeys(SUMS, 0.0)


@dataclass
class Progress:
    """A run's progress; with the recipe it decides randomness, learning rate and data order."""

    update: int = 0  # finished updates, also skipped ones
    epoch: int = 0  # the next update's, from 0
    update_in_epoch: int = 0  # finished updates in that epoch
    target_tokens: int = 0  # in all updates, without padding
    seconds: float = 0.0  # since the run began, without interruptions
    processes: int = 1
    token_budget: int | None = None  # padded tokens per micro-batch after memory ran out; `None`: the recipe's
    skipped_updates: int = 0  # because their gradient was not finite
    skipped_in_a_row: int = 0  # since the last update that counted
    validated_update: int = 0  # the last one
    best: tuple[float, int] | None = None  # the best validation's value and update
    validations_without_improvement: int = 0  # since the best
    window: dict[str, float] = field(default_factory=new_window)  # sums since the last log line
    awaits_validation: bool = False  # whether this update's validation is still to come
    machine: str = ""  # hardware and precision: they decide how sums round; "" in older checkpoints
    data: str | None = None  # fingerprint of validation rows, and of training rows unless streamed

    def count(self, **values: float) -> None:
        """Add values to the window's sums."""
        for name, value in values.items():
            self.window[name] = self.window.get(name, 0.0) + value  # an older checkpoint may lack one

    def note_validation(self, value: float, higher_is_better: bool, is_saved: bool) -> None:
        """Note a validation's value, and remember the best value of saved updates."""
        sign = -1 if higher_is_better else 1
        improved = self.best is None or sign * value < sign * self.best[0]
        self.validations_without_improvement = 0 if improved else self.validations_without_improvement + 1
        self.validated_update, self.awaits_validation = self.update, False
        if is_saved and improved and math.isfinite(value):
            self.best = value, self.update


def place_in_run(progress: Progress, settings: OptimizationRecipe) -> str:
    """Describe a run's progress, such as "after update 5 of 10, in epoch 1 of 2"."""
    of_updates = f" of {settings.max_updates:,}" if settings.max_updates else ""
    of_epochs = f", in epoch {progress.epoch + 1} of {settings.max_epochs}" if settings.max_epochs else ""
    return f"after update {progress.update:,}{of_updates}{of_epochs}"


def early_end(
    by: str | None, settings: OptimizationRecipe, patience: int | None, progress: Progress
) -> dict[str, Any]:
    """Return facts and message if the key `by` ended the run early; else nothing."""
    lengths = {name: length for name in ("max_updates", "max_epochs") if (length := getattr(settings, name))}
    if by is None or (by == "optimization.max_minutes" and not lengths):  # the only limit
        return {}
    resumed = f"continue with `resume=true {by}=…`"
    if by == "validation.patience":
        limit = f"no improvement in {patience} validations"
        advice = f"to train longer, {resumed}"
    else:
        limit = f"{settings.max_minutes:g} minutes"
        advice = f"{resumed}, or start a new run with fewer `{next(iter(lengths))}`, whose schedule ends in time"
    message = f"Training ended {place_in_run(progress, settings)}, by `{by}` ({limit}): {advice}."
    return {"by": by, "update": progress.update, **lengths, "message": message}


def unfinished(losses: Sequence[tuple[int, float]], by: str | None, settings: OptimizationRecipe) -> list[str]:
    """Advise a longer run if its last fifth lowered the validation loss by a twentieth."""
    if len(losses) < 5 or by == "validation.patience":
        return []
    last, loss = losses[-1]
    before = [value for update, value in losses if update <= 0.8 * last]
    if not before or loss > min(0.95 * before[-1], *(value for _, value in losses)):
        return []
    limits = [name for name in ("max_updates", "max_epochs", "max_minutes") if getattr(settings, name)]
    key = by or "` and `".join(f"optimization.{name}" for name in limits)
    fell = f"still fell at the end of the run, from {before[-1]:.2f} to {loss:.2f} in its last fifth"
    return [f"The validation loss {fell}: a longer run would learn more. Raise `{key}`."]
