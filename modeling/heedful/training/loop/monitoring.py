"""The log of a run: what became of its updates since the last line, and of its validations."""

import json
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heedful.files import listed, write_text
from heedful.training.run_folder.progress import Progress, new_window

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)

LOG_FILE = "log.jsonl"
Curve = list[tuple[int, float]]  # update, value


def training_values(window: dict[str, float]) -> dict[str, float]:
    """Turn the sums of a window into means, shares from 0 to 1; of skipped updates alone there is no loss."""
    values = {
        "train/target_tokens_per_s": window["target_tokens"] / max(window["seconds"], 1e-9),
        "train/padding_share": 1 - window["tokens"] / max(1, window["padded_tokens"]),
        "train/waiting_share": min(1.0, window["waiting_seconds"] / max(window["seconds"], 1e-9)),
    }
    if not window["updates"]:
        return values
    loss = window["loss"] / window["target_tokens"]
    return {
        **{f"train/{k}": window[k] / window["target_tokens"] for k in ("r_drop", "distillation") if window.get(k)},
        "train/loss": loss,
        "train/perplexity": math.exp(min(loss, 100)),
        "train/gradient_norm": window["gradient_norm"] / window["updates"],
        **values,
    }


class RunLog:
    """The run's own log, a line of JSON for every event, whose values Accelerate's trackers get too."""

    def __init__(self, file: Path, accelerator: "Accelerator", model: Any):
        self.file, self.accelerator, self.device = file, accelerator, accelerator.device
        self._network = model
        self._is_broken = False

    def write_training(self, progress: Progress, rate: float) -> str:
        """Write what became of the updates since the last such line, begin a new window, and return a summary."""
        values = training_values(progress.window) | self._device_values(progress.window)
        values |= {"train/learning_rate": rate, "train/skipped_updates": progress.skipped_updates}
        progress.window = new_window()
        self.write(progress, values)
        loss = f"loss {values['train/loss']:.3f}, " if "train/loss" in values else ""
        summary = [f"{loss}{values['train/target_tokens_per_s']:,.0f} target tokens/s"]
        if "train/model_flops_utilization" in values:
            summary.append(f"{values['train/model_flops_utilization']:.0%} of the card's peak")
        if "train/peak_memory_gib" in values:
            summary.append(f"{values['train/peak_memory_gib']:.1f} GiB")
        return ", ".join([*summary, f"waits {values['train/waiting_share']:.0%}"])

    def _device_values(self, window: dict[str, float]) -> dict[str, float]:
        """Return a GPU's share of its peak in bfloat16, from 0 to 1, where that is known, and its peak of memory."""
        if self.device.type != "cuda":
            return {}
        from heedful.training.speed.throughput import operations_of_pairs, peak_memory, peak_operations

        values = {"train/peak_memory_gib": peak_memory(self.device)}
        if (peak := peak_operations(self.device)) is not None:
            tokens = window["tokens"] - window["target_tokens"], window["target_tokens"]
            able = peak * self.accelerator.num_processes * max(window["seconds"], 1e-9)
            values["train/model_flops_utilization"] = operations_of_pairs(self._network, *tokens) / able
        return values

    def write_validation(self, progress: Progress, values: dict[str, float]) -> None:
        """Write the results of a validation, and report them."""
        self.write(progress, {f"validation/{name}": value for name, value in values.items()})
        summary = ", ".join(f"{name} {value:.2f}" for name, value in values.items())
        logger.info("update %s (epoch %s): %s", progress.update, progress.epoch + 1, summary)

    def write(self, progress: Progress, values: dict[str, float]) -> None:
        """Add a line; if the disk is full it is lost with a warning, because no run should end for that."""
        self.accelerator.log(values, step=progress.update)
        if not self.accelerator.is_main_process:
            return
        line = json.dumps({"update": progress.update, "seconds": round(progress.seconds, 2), **values}) + "\n"
        try:
            with self.file.open("a", encoding="utf-8") as log:
                log.write("\n" + line if self._is_broken else line)
            self._is_broken = False
        except OSError as error:
            self._is_broken = True  # there may be half a line
            logger.warning("a line of the log is lost: %s", error)

    def rewind(self, progress: Progress) -> None:
        """Drop the lines that a resumed run will write again: of later updates, and of a validation not yet saved."""
        if not self.accelerator.is_main_process or not self.file.is_file():
            return
        kept, damaged = [], []
        for number, text in enumerate(self.file.read_bytes().splitlines(), start=1):
            try:
                line = json.loads(text)
                is_validation = any(name.startswith("validation/") for name in line)
                is_kept = line["update"] <= (progress.validated_update if is_validation else progress.update)
            except (ValueError, KeyError, TypeError, AttributeError):  # a kill in the middle of a line, or a bad disk
                damaged.append(str(number))
                continue
            if is_kept:
                kept.append(text.decode() + "\n")
        if damaged:
            logger.warning("lines of %s that cannot be read are dropped: %s", self.file, listed(damaged))
        write_text(self.file, "".join(kept))


def read_curves(run: Path) -> dict[str, Curve]:
    """Return all numbers that a run has logged, by their names; lines that a kill or a full disk cut are left out."""
    file = run / LOG_FILE
    curves: dict[str, Curve] = {}
    for text in file.read_bytes().splitlines() if file.is_file() else []:
        try:
            line = json.loads(text)
            update = line.pop("update")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
        for name, value in line.items():
            if name != "seconds" and isinstance(value, int | float) and math.isfinite(value):
                curves.setdefault(name, []).append((update, value))
    return curves
