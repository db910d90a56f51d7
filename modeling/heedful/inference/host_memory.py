"""How the C library hands memory back."""

import contextlib
import ctypes
import sys


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next step: to map it anew takes a fifth to a third of a step on the CPU."""
    if not sys.platform.startswith("linux"):
        return
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
    with contextlib.suppress(OSError, AttributeError):  # another C library: it has its own ways
        library = ctypes.CDLL("libc.so.6")
        if not library.mallopt(mmap_threshold, 1 << 30):
            library.mallopt(mmap_threshold, 1 << 25)  # the most that glibc before 2.35 takes
        library.mallopt(trim_threshold, (1 << 31) - 1)
