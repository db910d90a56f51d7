"""Ends a process when another one of its run no longer answers, which would otherwise leave it waiting for hours.

Gloo tells of a connection that was closed; a machine that is gone, or a process that hangs, closes none, and NCCL
waits for both. So every process tells a small store every few seconds that it lives, and looks whether the others do.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

from accelerate import Accelerator
from torch.distributed import TCPStore

from heedful.training.processes.collectives import broadcast

PERIOD = 5.0
PATIENCE = 30.0


class Heartbeat:
    """A context in which the processes of a run look after each other; nothing, where there is but one.

    The main process looks at all, the others at it: where one is lost, the main one ends, and with it the rest.

    Args:
        accelerator: The processes; all must enter the context.
        period: Seconds from one sign of life to the next.
        patience: Seconds without any after which a process counts as lost.
    """

    def __init__(self, accelerator: Accelerator, period: float = PERIOD, patience: float = PATIENCE):
        self.accelerator = accelerator
        self.period, self.patience = period, patience
        self._stopped = threading.Event()
        self._is_busy = False
        self._telling = threading.Lock()  # a word is made and sent before another one is
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> "Heartbeat":
        if self.accelerator.num_processes > 1:
            self._store = self._connect()
            self._tell(0)
            self.accelerator.wait_for_everyone()
            watched = range(1, self.accelerator.num_processes) if self.accelerator.is_main_process else [0]
            self._heard = dict.fromkeys(watched, time.monotonic())
            self._threads = [threading.Thread(target=work, daemon=True) for work in (self._listen, self._judge)]
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(self.period)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Ask for patience without end while this process does what may hold up its signs of life, such as writing."""
        self._is_busy = True
        if self._threads:
            self._tell(0)
        try:
            yield
        finally:
            self._is_busy = False
            if self._threads:
                # At once: a process that stops before its next sign of life would seem busy for ever.
                with contextlib.suppress(RuntimeError):
                    self._tell(0)

    def _connect(self) -> TCPStore:
        is_main, host = self.accelerator.is_main_process, os.environ.get("MASTER_ADDR", "127.0.0.1")
        limit = timedelta(seconds=self.patience)
        own = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit) if is_main else None
        port = broadcast(self.accelerator, own.port if own is not None else None)
        return own or TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)

    def _tell(self, count: int) -> None:
        with self._telling:
            self._store.set(f"alive-{self.accelerator.process_index}", "busy" if self._is_busy else str(count))

    def _listen(self) -> None:
        """Tell the store of this process, and ask it for the others, again and again; a lost store answers nothing."""
        told = dict.fromkeys(self._heard, b"")
        count = 0
        while not self._stopped.wait(self.period):
            count += 1
            try:
                self._tell(count)
                for process in self._heard:
                    word = self._store.get(f"alive-{process}")
                    if word != told[process] or word == b"busy":
                        told[process], self._heard[process] = word, time.monotonic()
            except RuntimeError:  # the store has gone with the main process: perhaps this one is about to end as well
                if not self._stopped.wait(2 * self.period):
                    self._end(0, "has ended")
                return

    def _judge(self) -> None:
        """End this process when another has not been heard of for too long."""
        looked = time.monotonic()
        while not self._stopped.wait(self.period):
            before, looked = looked, time.monotonic()
            if looked - before > self.period + 0.5 * self.patience:  # it was this process that stood still
                self._heard |= dict.fromkeys(self._heard, looked)
            for process, moment in self._heard.items():
                if time.monotonic() - moment > self.patience and not self._stopped.is_set():
                    self._end(process, f"has given no sign of life for {self.patience:.0f} seconds")

    def _end(self, process: int, what: str) -> None:
        """End at once, for the main thread waits in a call that nothing interrupts."""
        sys.stderr.write(
            f"heedful: Process {process} of this run {what}, so process {self.accelerator.process_index} ends too: "
            "look for its message, and continue with resume=true.\n"
        )
        sys.stderr.flush()
        os._exit(1)
