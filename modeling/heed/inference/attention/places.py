"""Files that appear whole or not at all."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


def check_place(path: str | Path, suffixes: Sequence[str]) -> Path:
    """Return the path of a file to be written.

    Raises:
        ValueError: For a suffix other than these, or a folder.
        FileNotFoundError: When its folder does not exist.

    """
    path = Path(path)
    if path.suffix.lower() not in suffixes:
        raise ValueError(f"`path` must end in one of {', '.join(suffixes)}, but is {path} instead.")
    if path.is_dir():
        raise ValueError(f"`path` must be a file to write, but {path} is a folder.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"`path` must lie in an existing folder, but {path.parent} does not exist.")
    return path


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Give a file beside `path` to write, which takes its name when it is whole, and goes away when that fails."""
    written = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield written
        written.replace(path)
    except BaseException:
        written.unlink(missing_ok=True)
        raise
