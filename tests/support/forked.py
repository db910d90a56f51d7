"""Processes of one run, forked from this one after all imports; they find each other like torchrun's processes.

A process that a launcher starts imports torch and transformers first, which takes longer than a test's own work;
`test_cli.py` and `test_accelerate_files.py` use the launchers.
"""

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from accelerate.state import AcceleratorState


def start(world: int, folder: Path, work: Callable[..., object], *arguments: object) -> list:
    """Start processes that call `work(*arguments)`; the process of rank R writes into the file `told(folder, R)`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = []
    for rank in range(world):
        environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        given = (environment, told(folder, rank), work, arguments)
        processes.append(multiprocessing.get_context("fork").Process(target=_work_as, args=given))
        processes[-1].start()
    return processes


def told(folder: Path, rank: int) -> Path:
    """Return the file of what a process wrote on standard output and standard error."""
    return folder / f"told-{rank}.txt"


def run(world: int, folder: Path, work: Callable[..., object], *arguments: object) -> None:
    """Let processes call `work(*arguments)`, and wait until all have ended well."""
    processes = start(world, folder, work, *arguments)
    try:
        for process in processes:
            process.join(280)
        codes = [process.exitcode for process in processes]
        assert codes == [0] * world, "\n".join(told(folder, rank).read_text()[-3000:] for rank in range(world))
    finally:
        for process in processes:
            process.kill()


def _work_as(environment: dict[str, str], output: Path, work: Callable[..., object], arguments: tuple) -> None:
    os.environ |= environment
    sys.stdout = sys.stderr = output.open("w", buffering=1, encoding="utf-8")
    for number in (1, 2):
        os.dup2(sys.stdout.fileno(), number)
    # What this process was told of itself before.
    AcceleratorState._reset_state(reset_partial_state=True)
    work(*arguments)
