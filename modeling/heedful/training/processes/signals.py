"""Ctrl-C and SIGTERM: a run stops after its update, with everything saved."""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)


class TrainingInterrupted(Exception):
    """Raised after a signal stopped the run and its state was saved."""

    exit_code = 130  # the command's exit code


class StopSignals:
    """A context that notes Ctrl-C and SIGTERM; a second Ctrl-C ends the process, a second SIGTERM does not."""

    def __init__(self) -> None:
        self.received: int | None = None  # the last signal's number
        self._interruption: TrainingInterrupted | None = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        self._handlers = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    @contextmanager
    def interrupting(self, interruption: TrainingInterrupted) -> Iterator[None]:
        """Let a signal raise this at once within the context, because nothing would be lost."""
        self._interruption = interruption
        try:
            yield
        finally:
            self._interruption = None

    def _note(self, number: int, frame: object) -> None:
        if self._interruption is not None:
            raise self._interruption
        if number == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number
        logger.warning("stopping after this update and saving; a second Ctrl-C stops at once")
