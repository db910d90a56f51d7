"""Each update's learning rate."""

import math

from heedful.training.recipe import OptimizationRecipe


def learning_rate(update: int, settings: OptimizationRecipe, d_model: int) -> float:
    """Return an update's learning rate; updates count from 1.

    `paper` is `learning_rate` · d_model^-0.5 · min(update^-0.5, update · warmup^-1.5) (section 5.3, equation 3). All
    others rise linearly to `learning_rate` over the warm-up; then `inverse_sqrt` falls with update^-0.5, `cosine` and
    `linear` fall to 0 at `max_updates`, and `constant` stays.
    """
    warmup, peak = settings.warmup_updates, settings.learning_rate
    schedule = settings.schedule_in_use
    if schedule == "paper":
        rising = update * warmup**-1.5 if warmup else math.inf
        return float(peak * d_model**-0.5 * min(update**-0.5, rising))
    if update < warmup:
        return peak * update / warmup
    if schedule == "constant":
        return peak
    if schedule == "inverse_sqrt":
        return peak * math.sqrt(max(warmup, 1) / update)
    assert settings.max_updates is not None  # the recipe refuses these schedules without it
    done = min(1.0, (update - warmup) / max(1, settings.max_updates - warmup))
    return peak * (1 - done) if schedule == "linear" else peak * 0.5 * (1 + math.cos(math.pi * done))
