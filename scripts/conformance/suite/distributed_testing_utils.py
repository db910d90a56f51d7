"""Substitute for a missing file of transformers' source distribution: groups of gloo processes on the CPU.

`tests/test_fsdp_mixin.py` and `tests/test_tensor_parallel_mixin.py` import these names.
"""

import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as processes


def _get_distributed_backend() -> str:
    return "gloo"


def _get_distributed_device_type() -> str:
    return "cpu"


def _get_rank_device(rank: int) -> torch.device:
    return torch.device("cpu")


def _set_rank_device(rank: int) -> None:
    """Do nothing on the CPU."""


def _start_rank_processes(function, args: tuple, nprocs: int) -> None:
    """Call `function(rank, *args)` in `nprocs` processes and wait; an error in a process is raised here."""
    # A fork server imports the libraries once, not once for each process.
    processes.get_context("forkserver").set_forkserver_preload(["tests.test_fsdp_mixin"])
    processes.start_processes(function, args=args, nprocs=nprocs, start_method="forkserver")


def _join_and_call(rank: int, world_size: int, port: int, function, args: tuple) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    try:
        function(rank, *args)
    finally:
        dist.destroy_process_group()


def run_distributed(world_size: int):
    """Return a decorator: the decorated `function(rank, *args)` runs in a group of `world_size` processes."""

    def decorate(function):
        def run(*args):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            _start_rank_processes(_join_and_call, (world_size, port, function, args), world_size)

        return run

    return decorate
