"""Environment variables that launchers set for their processes; this file imports nothing slow."""

import os

# torchrun and Accelerate set the first one, MPI one of the others.
RANK_NAMES = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
WORLD_SIZE_NAMES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def rank() -> int:
    """Return the number of this process; 0 is the main process."""
    return _first(RANK_NAMES, 0)


def world_size() -> int:
    """Return the number of processes on all machines."""
    return _first(WORLD_SIZE_NAMES, 1)


def local_world_size() -> int:
    """Return the number of processes on this machine."""
    return _first(("LOCAL_WORLD_SIZE",), 1)


def _first(names: tuple[str, ...], default: int) -> int:
    name = next((name for name in names if os.environ.get(name)), None)
    value = str(default) if name is None else os.environ[name]
    if not value.isdecimal():
        raise ValueError(f"`{name}`, which a launcher sets, must be a whole number, but is {value!r} instead.")
    return int(value)
