"""OpenMP's threads sleep while they wait if other processes need the cores, and only then."""

import os
import sys
import threading
import time

import pytest
import torch

from heedful import host
from heedful.host import CALM_INTERVALS, _follow, _loaded_libraries, _seconds_waited

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it is for GNU's OpenMP on Linux")


def tasks():
    """Return the ids of this process's threads."""
    return {task.name for task in host.TASKS.iterdir()}


def happens(condition):
    """Wait until a condition holds, ten seconds at most."""
    return any(condition() or time.sleep(0.01) for _ in range(1000))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_further_thread_is_there_while_cores_are_contended_and_until_they_are_calm(monkeypatch, threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    began, release, found = threading.Event(), threading.Event(), []
    monkeypatch.setattr(host, "_crowd", lambda end: (began.set(), end.wait(10), release.set()))

    def shares():
        yield 0.15
        found.append(began.is_set())
        yield 0.5
        found.append(began.wait(10 if threads > 1 else 0))  # one thread waits for no other
        # What is neither contended nor calm lets the count of calm intervals begin again.
        yield from [*[0.0] * (CALM_INTERVALS - 1), 0.15, *[0.0] * (CALM_INTERVALS - 1)]
        found.append(release.is_set())
        yield 0.0
        found.append(release.wait(10 if threads > 1 else 0))

    _follow(shares())
    assert found == [False, threads > 1, False, threads > 1]


def test_openmp_has_more_threads_than_cores_while_it_is_to_share_them():
    if not _loaded_libraries("libgomp"):
        pytest.skip("torch's OpenMP is not GNU's here")
    end, before, missing = threading.Event(), tasks(), len(os.sched_getaffinity(0)) - torch.get_num_threads()
    threading.Thread(target=host._crowd, args=(end,)).start()
    try:
        assert happens(lambda: len(tasks() - before) >= missing + 2)  # of each library of that name
        started = tasks() - before
    finally:
        end.set()
    assert happens(lambda: not started & tasks())


def test_waiting_for_cores_is_counted_and_a_users_own_setting_stays(monkeypatch):
    assert 0 <= _seconds_waited() <= _seconds_waited()
    monkeypatch.setattr(host.threading, "Thread", lambda **_: pytest.fail("a thread was started"))
    for name in host.USER_SETTINGS:
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            host.share_cores.__wrapped__()
