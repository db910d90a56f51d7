"""Checks of what a GPU would compute with: slow choices, where a fast one gives the same model."""

from collections.abc import Iterator
from typing import Any

import torch

from heedful.diagnosis.findings import RecipeFinding
from heedful.packed_rows_heed import why_padded
from heedful.training.processes.devices import runs_on_cpu
from heedful.training.recipe import Recipe


def check_speed(recipe: Recipe, config: Any) -> Iterator[RecipeFinding]:
    """Run all checks of this file; the figures are those of the base model on one H200 (docs/benchmarks.md)."""
    settings, kernel = recipe.optimization, recipe.model.attn_implementation or "sdpa"
    if not torch.cuda.is_available() or runs_on_cpu(settings.device) or config.model_type != "heed":
        return
    reason = why_padded(config, kernel)
    if kernel == "eager":
        message = "On a GPU `eager` attention takes a quarter more time for an update than `sdpa`, and more memory."
        yield RecipeFinding("speed", "warning", message, "model.attn_implementation", "Leave it empty.")
    elif reason is not None and settings.mixed_precision == "bf16":
        message = f"Rows are padded to one length, because {reason}: a GPU computes padding too."
        yield RecipeFinding("speed", "note", message, "model.options")
    if settings.mixed_precision == "no":
        message = "On a GPU products in float32 take four times as long as in bf16."
        advice = "Set it to bf16, or to tf32, whose products keep three digits and all else float32."
        yield RecipeFinding("speed", "warning", message, "optimization.mixed_precision", advice)
