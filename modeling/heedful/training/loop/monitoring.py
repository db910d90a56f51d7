"""What a run tells of itself: sums over the updates since the last line, and the log they are written to."""

import json
import logging
import math
from pathlib import Path
from typing import Any

from heedful.files import write_text

logger = logging.getLogger(__name__)

NAMES = ("loss", "target_tokens", "tokens", "padded_tokens", "gradient_norm", "updates", "seconds", "waiting_seconds")


def new_window() -> dict[str, float]:
    """Return the sums of no update at all."""
    return dict.fromkeys(NAMES, 0.0)


def training_values(window: dict[str, float]) -> dict[str, float]:
    """Turn sums over updates into what people look at.

    Args:
        window: The sums: loss in nats, tokens without and with padding, seconds, and seconds in which data were
            waited for.

    Returns:
        Loss per target token, perplexity, mean norm of the gradient (these not, if all updates were skipped), target
        tokens a second, and the parts, from 0 to 1, of padding in the tokens and of waiting in the time.
    """
    values = {
        "train/target_tokens_per_s": window["target_tokens"] / max(window["seconds"], 1e-9),
        "train/padding_share": 1 - window["tokens"] / max(1, window["padded_tokens"]),
        "train/waiting_share": min(1.0, window["waiting_seconds"] / max(window["seconds"], 1e-9)),
    }
    if not window["updates"]:
        return values
    loss = window["loss"] / window["target_tokens"]
    return {
        "train/loss": loss,
        "train/perplexity": math.exp(min(loss, 100)),
        "train/gradient_norm": window["gradient_norm"] / window["updates"],
        **values,
    }


class RunLog:
    """The run's own log, a line of JSON for every event; for the main process.

    Args:
        file: Where it lies.
    """

    def __init__(self, file: Path):
        self.file = file
        self._is_broken = False

    def write(self, update: int, seconds: float, values: dict[str, Any]) -> None:
        """Add a line; where the disk is full it is lost with a warning, for no run should end of that."""
        line = json.dumps({"update": update, "seconds": round(seconds, 2), **values}) + "\n"
        try:
            with self.file.open("a", encoding="utf-8") as log:
                log.write("\n" + line if self._is_broken else line)
            self._is_broken = False
        except OSError as error:
            self._is_broken = True  # half a line may stand there
            logger.warning("a line of the log is lost: %s", error)

    def rewind(self, update: int, validated_update: int) -> None:
        """Drop the lines that a resumed run will write again: after an update, or of a validation not yet saved."""
        if not self.file.is_file():
            return
        kept = []
        for text in self.file.read_text(encoding="utf-8").splitlines():
            try:
                line = json.loads(text)
            except ValueError:  # a kill in the middle of a line
                continue
            if not isinstance(line, dict):
                continue
            is_validation = any(name.startswith("validation/") for name in line)
            if line["update"] <= (validated_update if is_validation else update):
                kept.append(text + "\n")
        write_text(self.file, "".join(kept))
