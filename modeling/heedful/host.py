"""Settings for the process: freed memory stays, and OpenMP's threads share the cores."""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

INTERVAL = 0.5  # seconds between two measurements
CONTENDED, CALM = 0.2, 0.1  # seconds of waiting for a core, per second
CALM_INTERVALS = 4
USER_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
TASKS = Path("/proc/self/task")


@cache
def share_cores() -> None:
    """Let OpenMP's waiting threads sleep while other processes need cores; a second call does nothing.

    A waiting thread of GNU's OpenMP keeps its core busy for milliseconds: if another process needs the core, training
    slows to a third. With more threads than cores it sleeps at once. So a background thread measures how long this
    process waits for cores, and if it waits starts one idle thread. Nothing happens on other systems, or if a variable
    in `USER_SETTINGS` is set.
    """
    if sys.platform.startswith("linux") and not any(name in os.environ for name in USER_SETTINGS):
        threading.Thread(target=_follow, args=(_shares(),), daemon=True, name="share_cores").start()


def _follow(shares: Iterable[float]) -> None:
    end: threading.Event | None = None
    calm = 0
    for share in shares:
        calm = calm + 1 if share < CALM else 0
        if end is None and share > CONTENDED and torch.get_num_threads() > 1:
            end = threading.Event()
            threading.Thread(target=_crowd, args=(end,), daemon=True, name="share_cores idle").start()
        elif end is not None and calm >= CALM_INTERVALS:
            end.set()
            end = None


def _shares() -> Iterator[float]:
    """Yield, after each interval, this process's seconds of waiting for cores per second, summed over threads."""
    before = time.perf_counter(), _seconds_waited()
    while True:
        time.sleep(INTERVAL)
        now = time.perf_counter(), _seconds_waited()
        yield max(0.0, now[1] - before[1]) / (now[0] - before[0])
        before = now


def _seconds_waited() -> float:
    nanoseconds = 0
    with suppress(OSError):  # the kernel does not count
        for task in TASKS.iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                nanoseconds += int((task / "schedstat").read_text().split()[1])
    return 1e-9 * nanoseconds


def _crowd(end: threading.Event) -> None:
    """Give OpenMP one thread more than there are cores, until the event."""
    missing = len(os.sched_getaffinity(0)) - torch.get_num_threads()
    free = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # does nothing with a null pointer
    for library in _loaded_libraries("libgomp"):
        with suppress(OSError, AttributeError):  # no such file any more, or no such function
            ctypes.CDLL(library).GOMP_parallel(free, None, max(missing, 0) + 2, 0)  # with this thread
    end.wait()


def _loaded_libraries(name: str) -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if f"/{name}" in line}


def keep_freed_memory() -> None:
    """Let glibc keep freed memory: mapping it again takes a fifth to a third of each step on the CPU."""
    if not sys.platform.startswith("linux"):
        return
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
    with suppress(OSError, AttributeError):  # another C library
        library = ctypes.CDLL("libc.so.6")
        if not library.mallopt(mmap_threshold, 1 << 30):
            library.mallopt(mmap_threshold, 1 << 25)  # the most that glibc before 2.35 takes
        library.mallopt(trim_threshold, (1 << 31) - 1)
