"""A folder that appears whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_is_new(target: Path) -> None:
    """Raise a `ValueError` if there is something where a folder is to be made."""
    if target.exists() or target.is_symlink():
        raise ValueError(f"`target` must be a folder that does not exist yet, but {target} does.")


@contextmanager
def new_folder(target: str | Path) -> Iterator[Path]:
    """Give a folder that gets its name when all is in it, and goes away when that fails.

    Args:
        target: The folder to make; it must not exist.

    Returns:
        A context manager that yields a hidden folder beside `target` to write into.

    Raises:
        ValueError: If `target` exists.

    """
    target = Path(target)
    check_is_new(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ValueError(f"`target` must lie in a folder, but {target.parent} lies in a file or is one.") from error
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield folder
        mask = os.umask(0)
        os.umask(mask)
        folder.chmod(0o777 & ~mask)  # mkdtemp's folders are for their owner alone
        folder.rename(target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
