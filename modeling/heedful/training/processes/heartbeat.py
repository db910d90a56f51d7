"""Heartbeats: a process ends if another one in its run sends none, even if its connection stays open."""

import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta

import torch
from accelerate import Accelerator
from torch.distributed import TCPStore

from heedful.training.processes.collectives import broadcast

PERIOD = 5.0  # seconds between two heartbeats
PATIENCE = 30.0  # seconds without a heartbeat until a process counts as lost
PAUSED = "paused"
# Gloo's messages about an ended process contain one of these.
CONNECTION_LOST = ("Connection closed by peer", "Connection reset by peer", "gloo/transport")


class ProcessLostError(RuntimeError):
    """Raised if another process in the run has ended, so that this one cannot continue."""

    exit_code = 1  # the command's exit code


class Watch(ExitStack):
    """A context in which a process notices lost processes; this class is for a single process."""

    def paused(self) -> AbstractContextManager[None]:
        """Return a context in which this process may be silent, for example to write files."""
        return nullcontext()


class Heartbeat(Watch):
    """A context for all processes: the main process watches the others, and they watch it."""

    def __init__(self, accelerator: Accelerator, period: float = PERIOD, patience: float = PATIENCE):
        super().__init__()
        self.accelerator, self.period, self.patience = accelerator, period, patience
        self._stopped, self._is_paused = threading.Event(), False
        self._sending = threading.Lock()  # keeps heartbeats in order
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._exchange, self._judge)]
        watched = range(1, accelerator.num_processes) if accelerator.is_main_process else [0]
        self._last_seen = dict.fromkeys(watched, 0.0)  # by rank
        self._store: TCPStore | None = None

    def __enter__(self) -> "Heartbeat":
        self._store = self._connect()
        self._send(0)
        self.accelerator.wait_for_everyone()
        self._last_seen = dict.fromkeys(self._last_seen, time.monotonic())
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(self.period)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the others wait without limit, because writing may delay heartbeats."""
        self._is_paused = True
        self._send(0)
        try:
            yield
        finally:
            self._is_paused = False
            # At once: a process that stops before its next heartbeat would seem paused for ever.
            with suppress(RuntimeError):
                self._send(0)

    def _connect(self) -> TCPStore:
        host, limit = os.environ.get("MASTER_ADDR", "127.0.0.1"), timedelta(seconds=self.patience)
        if not self.accelerator.is_main_process:
            port = broadcast(self.accelerator, None)
            return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
        broadcast(self.accelerator, store.port)
        return store

    def _send(self, count: int) -> None:
        if self._store is not None:  # a checkpoint may be written before the context is entered
            with self._sending:
                self._store.set(f"alive-{self.accelerator.process_index}", PAUSED if self._is_paused else str(count))

    def _exchange(self) -> None:
        assert self._store is not None
        last = dict.fromkeys(self._last_seen, b"")
        for count in itertools.takewhile(lambda _: not self._stopped.wait(self.period), itertools.count(1)):
            try:
                self._send(count)
                for rank in self._last_seen:
                    beat = self._store.get(f"alive-{rank}")
                    if beat != last[rank] or beat == PAUSED.encode():
                        last[rank], self._last_seen[rank] = beat, time.monotonic()
            except RuntimeError:  # the main process has ended; perhaps this one is ending too
                if not self._stopped.wait(2 * self.period):
                    self._end(0, "has ended")
                return

    def _judge(self) -> None:
        """End this process if another is lost; this thread never calls the store, which may hang."""
        looked = time.monotonic()
        while not self._stopped.wait(self.period):
            before, looked = looked, time.monotonic()
            if looked - before > self.period + 0.5 * self.patience:  # this process itself was suspended
                self._last_seen |= dict.fromkeys(self._last_seen, looked)
            for rank, moment in self._last_seen.items():
                if time.monotonic() - moment > self.patience and not self._stopped.is_set():
                    self._end(rank, f"has sent no heartbeat for {self.patience:.0f} seconds")

    def _end(self, rank: int, what: str) -> None:
        """End at once, because the main thread waits in a call that nothing interrupts."""
        end = f"process {self.accelerator.process_index} ends too: see its message, and continue with resume=true"
        sys.stderr.write(f"heedful: Process {rank} of this run {what}, so {end}.\n")
        sys.stderr.flush()
        os._exit(1)


def make_watch(accelerator: Accelerator, **settings: float) -> Watch:
    """Return a `Heartbeat` with these settings; for a single process, a `Watch`."""
    return Watch() if accelerator.num_processes == 1 else Heartbeat(accelerator, **settings)


@contextmanager
def lost_processes_reported(accelerator: Accelerator) -> Iterator[None]:
    """Raise a `ProcessLostError` for errors caused by another process's end."""
    try:
        yield
    except RuntimeError as error:
        is_lost = isinstance(error, torch.distributed.DistError) or any(part in str(error) for part in CONNECTION_LOST)
        if accelerator.num_processes > 1 and is_lost:
            lost = "Another process of this run has ended, so this one ends too"
            raise ProcessLostError(f"{lost}: see the other's message, and continue with resume=true.") from error
        raise
