"""A run's log: one line for some updates and for each validation."""

import json
import logging
import math
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heedful.files import listed, write_text
from heedful.protocols import Seq2SeqModel
from heedful.training.run_folder.progress import Progress, new_window

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)

LOG_FILE = "log.jsonl"
Curve = list[tuple[int, float]]  # update, value
SUMMARY = {
    "train/loss": "train loss {:.3f}",
    "train/target_tokens_per_s": "{:,.0f} target tokens/s",
    "train/model_flops_utilization": "{:.0%} of the card's peak",
    "train/peak_memory_gib": "{:.1f} GiB",
    "train/waiting_share": "{:.0%} waiting for data",
}


def training_values(window: dict[str, float]) -> dict[str, float]:
    """Turn a window's sums into means and shares; if no update counts, there is no loss."""
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
    """The run's log, one JSON line for every event; trackers get the same values."""

    def __init__(self, file: Path, accelerator: "Accelerator", model: Seq2SeqModel):
        self.file, self.accelerator, self._network = file, accelerator, model
        self._is_broken = False

    def write_training(self, progress: Progress, rate: float) -> str:
        """Write the window's means, begin a new window, and return a summary."""
        values = training_values(progress.window)
        if self.accelerator.device.type == "cuda":
            from heedful.training.updates.model_size import device_values

            values |= device_values(self._network, progress.window, self.accelerator)
        values |= {"train/learning_rate": rate, "train/skipped_updates": progress.skipped_updates}
        progress.window = new_window()
        self.write(progress, values)
        return ", ".join(form.format(values[name]) for name, form in SUMMARY.items() if name in values)

    def write_validation(self, progress: Progress, values: dict[str, float]) -> None:
        """Write and report validation results."""
        self.write(progress, {f"validation/{name}": value for name, value in values.items()})
        summary = "validation " + ", ".join(f"{name} {value:.2f}" for name, value in values.items())
        logger.info("update %s (epoch %s): %s", progress.update, progress.epoch + 1, summary)

    def start_trackers(self, name: str, progress: Progress) -> None:
        """Start the trackers; TensorBoard continues an earlier curve, and the others begin a new run."""
        try:
            with redirect_stdout(sys.stderr):  # trackio would print between the results
                self.accelerator.init_trackers(name, init_kwargs={"tensorboard": {"purge_step": progress.update}})
        except Exception as error:  # each tracker raises different types
            logger.warning("trackers cannot be started, so the run goes on without them: %s", error)
        for _, line in lines_of(self.file) if self.accelerator.trackers else ():
            if line.get("update") == progress.update:
                self.track({name: value for name, value in line.items() if "/" in name}, progress.update)

    def track(self, values: dict[str, float], update: int, is_last: bool = False) -> None:
        """Send values to the trackers; their errors become warnings."""
        for tracker in self.accelerator.trackers:
            try:
                with redirect_stdout(sys.stderr):
                    tracker.log(values, step=update)
                    if is_last:
                        tracker.finish()
            except Exception as error:
                logger.warning("the tracker %s lost values: %s", tracker.name, error)

    def write(self, progress: Progress, values: dict[str, float]) -> None:
        """Add a line; if the disk is full, warn that it is lost."""
        self.track(values, progress.update)
        if not self.accelerator.is_main_process:
            return
        line = json.dumps({"update": progress.update, "seconds": round(progress.seconds, 2), **values}) + "\n"
        try:
            with self.file.open("a", encoding="utf-8") as log:
                log.write("\n" + line if self._is_broken else line)
            self._is_broken = False
        except OSError as error:
            self._is_broken = True  # half a line may be there
            logger.warning("a log line is lost: %s", error)

    def rewind(self, progress: Progress) -> None:
        """Drop the lines that a resumed run will write again."""
        if not self.accelerator.is_main_process or not self.file.is_file():
            return
        kept, damaged = [], []
        for number, (text, line) in enumerate(lines_of(self.file), start=1):
            is_validation = any(name.startswith("validation/") for name in line)
            if not line:
                damaged.append(str(number))
            elif line["update"] <= (progress.validated_update if is_validation else progress.update):
                kept.append(text.decode() + "\n")
        if damaged:
            logger.warning("unreadable lines in %s are dropped: %s", self.file, listed(damaged))
        write_text(self.file, "".join(kept))


def lines_of(file: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield each log line as bytes and as values; a damaged line has no values."""
    for text in file.read_bytes().splitlines() if file.is_file() else []:
        try:
            line = json.loads(text)
            yield text, line if isinstance(line["update"], int) else {}
        except (ValueError, KeyError, TypeError, RecursionError):
            yield text, {}


def read_curves(run: Path) -> dict[str, Curve]:
    """Return all logged numbers by name."""
    curves: dict[str, Curve] = {}
    for _, line in lines_of(run / LOG_FILE):
        for name, value in line.items():
            if name not in ("update", "seconds") and isinstance(value, int | float) and math.isfinite(value):
                curves.setdefault(name, []).append((line["update"], value))
    return curves
