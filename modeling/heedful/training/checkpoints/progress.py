"""How far a run is: everything that a resumed run must know, apart from weights and optimizer."""

import math
from dataclasses import dataclass, field

# Sums over updates: the loss in nats, tokens of targets, of both sides, and with padding, seconds, and so on.
SUMS = ("loss", "target_tokens", "tokens", "padded_tokens", "gradient_norm", "updates", "seconds", "waiting_seconds")


def new_window() -> dict[str, float]:
    """Return the sums over no update."""
    return dict.fromkeys(SUMS, 0.0)


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
    window: dict[str, float] = field(default_factory=new_window)
    awaits_validation: bool = False
    data: str | None = None

    def count(self, **values: float) -> None:
        """Add values to the sums of the window."""
        for name, value in values.items():
            self.window[name] += value

    def note_validation(self, value: float, higher_is_better: bool, keep_best: int, is_saved: bool) -> None:
        """Note a validation of the present update.

        Args:
            value: What the recipe selects by.
            higher_is_better: Whether a higher value is better, as of scores.
            keep_best: Number of best validations to remember.
            is_saved: Whether the update has a checkpoint, without which it cannot be one of the best.
        """
        sign = -1 if higher_is_better else 1
        improved = not self.best or sign * value < sign * self.best[0][0]
        self.validations_without_improvement = 0 if improved else self.validations_without_improvement + 1
        self.validated_update, self.awaits_validation = self.update, False
        if is_saved and math.isfinite(value):
            # Sorting is stable: of equals the first one counts as better.
            ranked = sorted([*self.best, (value, self.update)], key=lambda entry: sign * entry[0])
            self.best = ranked[:keep_best]
