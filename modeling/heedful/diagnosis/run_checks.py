"""Checks on the length of a run: what its updates, its data and its clock make of each other."""

import math
from dataclasses import dataclass

from heedful.diagnosis.findings import Finding, Severity
from heedful.training.loop.schedule import learning_rate
from heedful.training.recipe import Recipe

MANY_EPOCHS = 200


@dataclass(frozen=True)
class RunPlan:
    """How long a run is; what is not known is `None`.

    Attributes:
        updates_per_epoch: Updates of one pass over the training pairs.
        seconds_per_update: Measured on this machine.
    """

    updates_per_epoch: float | None = None
    seconds_per_update: float | None = None

    def ends(self, recipe: Recipe) -> dict[str, float]:
        """Return after how many updates each of the recipe's limits ends the run, as far as is known."""
        settings = recipe.optimization
        limits: dict[str, float] = {}
        if settings.max_updates is not None:
            limits["optimization.max_updates"] = settings.max_updates
        if settings.max_epochs is not None and self.updates_per_epoch is not None:
            limits["optimization.max_epochs"] = settings.max_epochs * self.updates_per_epoch
        if settings.max_minutes is not None and self.seconds_per_update:
            limits["optimization.max_minutes"] = math.ceil(settings.max_minutes * 60 / self.seconds_per_update)
        return limits

    def end(self, recipe: Recipe) -> tuple[str, float] | None:
        """Return the limit that ends the run first and the updates until then, `None` where that is not known."""
        limits = self.ends(recipe)
        return min(limits.items(), key=lambda limit: limit[1]) if limits else None


def check_schedule(recipe: Recipe, plan: RunPlan, d_model: int) -> list[Finding]:
    """Find learning rates that never reach their peak, or never come down, before the run ends."""
    settings = recipe.optimization
    end = plan.end(recipe)
    if end is None:
        return []
    key, updates = end
    last = max(1, int(updates))
    ended = f"the run ends after {last:,} updates (`{key}`{_estimated(key)})"
    findings = []
    if settings.warmup_updates >= last and settings.warmup_updates > 1:
        peak = learning_rate(settings.warmup_updates, settings, d_model)
        share = learning_rate(last, settings, d_model) / peak if peak else 0.0
        findings.append(
            Finding(
                _severity(key, "error"),
                "schedule",
                "optimization.warmup_updates",
                f"The learning rate rises over {settings.warmup_updates:,} updates, but {ended}, at "
                f"{100 * share:.0f} % of its peak.",
                f"Set it to a tenth of the run, about {max(1, last // 10):,}, or train longer.",
            )
        )
    elif settings.warmup_updates > 0.5 * last:
        findings.append(
            Finding(
                "warning",
                "schedule",
                "optimization.warmup_updates",
                f"The learning rate rises over {settings.warmup_updates:,} updates, more than half of the run: "
                f"{ended}.",
                f"Set it to a tenth of the run, about {max(1, last // 10):,}.",
            )
        )
    if settings.schedule in ("linear", "cosine") and settings.max_updates is not None and not findings:
        rate = learning_rate(last, settings, d_model) / settings.learning_rate
        if key != "optimization.max_updates" and last < 0.95 * settings.max_updates:
            findings.append(
                Finding(
                    "warning",
                    "schedule",
                    "optimization.max_updates",
                    f"The {settings.schedule} schedule reaches 0 after {settings.max_updates:,} updates, but {ended}, "
                    f"with the learning rate still at {100 * rate:.0f} % of its peak.",
                    f"Set `optimization.max_updates` to {last:,}, or raise `{key}`.",
                )
            )
    return findings


def check_epochs(recipe: Recipe, plan: RunPlan) -> list[Finding]:
    """Find updates larger than the data, and runs that repeat the data hundreds of times."""
    if plan.updates_per_epoch is None:
        return []
    findings = []
    tokens = recipe.optimization.tokens_per_update
    if plan.updates_per_epoch <= 1:
        findings.append(
            Finding(
                "warning",
                "epochs",
                "optimization.tokens_per_update",
                f"One update takes {tokens:,} padded tokens, which is all training pairs at once: every update sees "
                "the same pairs.",
                "Lower it so that an epoch has tens of updates at least.",
            )
        )
    end = plan.end(recipe)
    epochs = end[1] / plan.updates_per_epoch if end else 0.0
    if end and epochs > MANY_EPOCHS:
        findings.append(
            Finding(
                "warning",
                "epochs",
                end[0],
                f"The run passes {epochs:,.0f} times over the training pairs ({plan.updates_per_epoch:,.0f} updates "
                f"each{_estimated(end[0])}): it will know them by heart.",
                "Shorten it, set `validation.patience`, or find more pairs.",
            )
        )
    return findings


def check_intervals(recipe: Recipe, plan: RunPlan) -> list[Finding]:
    """Find validations, checkpoints and early stopping that never happen before the run ends."""
    end = plan.end(recipe)
    if end is None:
        return []
    key, updates = end
    last = max(1, int(updates))
    ended = f"the run ends after {last:,} (`{key}`{_estimated(key)})"
    findings = []

    def add(severity, where, told, advice):
        findings.append(Finding(severity, "intervals", where, told, advice))

    validation, checkpoints = recipe.validation, recipe.checkpoints
    never_validated = validation.every_updates > last
    if never_validated:
        needed = checkpoints.publish in ("best", "average_best") or validation.patience is not None
        severity = _severity(key, "error") if needed else "warning"
        told = f"The model is first validated after {validation.every_updates:,} updates, but {ended}"
        told += (
            f": `checkpoints.publish: {checkpoints.publish}` and patience have nothing to go by." if needed else "."
        )
        add(severity, "validation.every_updates", told, f"Set it to {max(1, last // 10):,} or so.")
    if checkpoints.every_updates > last:
        averaging = checkpoints.publish == "average" and checkpoints.keep_last > 1
        told = f"The run is first saved after {checkpoints.every_updates:,} updates, but {ended}: "
        told += "there is one checkpoint, so nothing is averaged" if averaging else "a crash loses all of it"
        add("warning", "checkpoints.every_updates", told + ".", f"Set it to {max(1, last // 10):,} or so.")
    if validation.patience is not None and not never_validated:
        validations = last // validation.every_updates
        if validations <= validation.patience:
            told = f"Training stops early after {validation.patience} validations without improvement, but there are "
            told += f"only {validations} in all: {ended} updates."
            add("warning", "validation.patience", told, "Lower it, or validate more often.")
    return findings


def _estimated(key: str) -> str:
    return ", by the speed measured here" if key == "optimization.max_minutes" else ""


def _severity(key: str, certain: Severity) -> Severity:
    """Return a severity, a warning at most where the speed of this machine decides."""
    return "warning" if key == "optimization.max_minutes" else certain
