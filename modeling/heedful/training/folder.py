"""The folder of a run: who may write into it, and which recipe may go on with what lies there."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from heedful.files import write_text
from heedful.training.checkpoints.checkpoints import STATE_FOLDER, load_progress, newest_whole_checkpoint
from heedful.training.recipe import Recipe
from heedful.training.recipe_file import read_recipe, to_yaml

OTHER_RUN = "it would no longer be the same run. allow_changes=true resumes all the same."
# What a run that ended before it began may leave.
LEFTOVERS = {"tokenizer", "tokenizer.partial", "recipe.yaml.partial"}
# What a run writes into its folder; `overwrite` deletes these and nothing else.
RUN_FILES = (
    "recipe.yaml",
    "recipe.yaml.partial",
    "log.jsonl",
    "checkpoints",
    "tokenizer",
    "tokenizer.partial",
    "trackers",
    "model.partial",
    "model",
)
# What may change when a run is resumed, and leaves its updates the same: where things lie, how long it goes on, how it
# is split (which changes dropout), looked at, kept and published.
CHANGEABLE_KEYS = (
    "output",
    "resume",
    "overwrite",
    "allow_changes",
    "data.folder",
    "data.test",
    "optimization.max_updates",
    "optimization.max_epochs",
    "optimization.max_minutes",
    "optimization.token_budget",
    "optimization.shrink_token_budget",
    "optimization.skip_nonfinite_updates",
    "optimization.device",
    "validation.every_updates",
    "validation.patience",
    "checkpoints",
    "decoding",
    "logging",
    "card",
)


def check_output_folder(recipe: Recipe) -> None:
    """Check that the run may write into its folder.

    Raises:
        ValueError: If the folder is not empty and the recipe says neither `resume` nor `overwrite`, or the run in it
            was another one.
    """
    folder = recipe.folder
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"`output` must be a folder, but {folder} is a file.")
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if names <= LEFTOVERS:
        return
    if recipe.overwrite:
        if "recipe.yaml" not in names:
            raise ValueError(
                f"`output` must be empty or a run's folder, which overwrite=true deletes, but {folder} is neither."
            )
        return
    if not recipe.resume:
        raise ValueError(
            f"`output` must be an empty folder, but {folder} is not: continue the run in it with resume=true, "
            "delete it with overwrite=true, or choose another folder with output=…"
        )
    checkpoint = newest_whole_checkpoint(folder / "checkpoints")
    if checkpoint is not None:
        load_progress(checkpoint)  # a newer Heedful may have written the recipe too
    written = folder / "recipe.yaml" if checkpoint is None else checkpoint / STATE_FOLDER / "recipe.yaml"
    if not written.is_file():
        raise ValueError(f"`output` must be the folder of a run where resume=true, but {folder} holds none.")
    earlier, now = asdict(read_recipe(written)), asdict(recipe)
    for name in changed_keys(earlier, now):
        if recipe.allow_changes and not name.startswith("tokenizer."):
            continue
        then, value = (_look_up(tree, name) for tree in (earlier, now))
        raise ValueError(
            f"`{name}` must be as in the run that is resumed ({then}), but is {value} instead: "
            + ("the weights know no other tokenizer." if name.startswith("tokenizer.") else OTHER_RUN)
        )


def changed_keys(earlier: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """List the keys, with dots, whose change makes of a recipe another run: not those of logging, say."""
    harmless = set(CHANGEABLE_KEYS)
    if now.get("optimization", {}).get("schedule") in ("linear", "cosine"):
        harmless.discard("optimization.max_updates")  # the learning rate follows from it
    if now.get("data", {}).get("streaming"):
        harmless -= {"data.folder", "data.test"}  # of a stream there is no checksum
    return [
        name
        for name in _leaves(now) | _leaves(earlier)
        if not any(name == key or name.startswith(key + ".") for key in harmless)
        and _look_up(earlier, name) != _look_up(now, name)
    ]


def _leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, None]:
    """Return the dotted names of all values, in order."""
    names: dict[str, None] = {}
    for key, value in tree.items():
        names |= _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": None}
    return names


def _look_up(tree: dict[str, Any], name: str) -> Any:
    value: Any = tree
    for key in name.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


@contextlib.contextmanager
def folder_of_run(folder: Path) -> Iterator[None]:
    """Make the folder and keep other runs out of it; for the main process.

    Raises:
        ValueError: If another run is writing into it, or it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"`output` must be a folder that can be made, but {folder} cannot: {error}") from error
    if not os.access(folder, os.W_OK):
        raise ValueError(f"`output` must be a folder that can be written to, but {folder} cannot.")
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, folder)
        if {path.name for path in folder.iterdir()} <= LEFTOVERS:
            _delete_run(folder)  # a tokenizer of perhaps other data
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    with contextlib.suppress(ImportError):  # there is none on Windows
        import fcntl

        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"`output` must be a folder of its own, but another run is writing into {folder}."
            ) from None


def write_recipe(recipe: Recipe) -> None:
    """Write the recipe into its run's folder, in place of an earlier one."""
    write_text(recipe.folder / "recipe.yaml", to_yaml(recipe))


@contextlib.contextmanager
def earlier_run_set_aside(folder: Path) -> Iterator[None]:
    """Move an earlier run's files beside its folder; delete them if what follows succeeds, else put them back.

    Raises:
        ValueError: If there is something in their place already.
    """
    aside = folder.with_name(folder.name + ".replaced")
    if aside.exists():
        raise ValueError(
            f"{aside} holds a run that an interrupted overwrite=true set aside: move it away or delete it."
        )
    aside.mkdir(parents=True)
    for name in RUN_FILES:
        if (folder / name).exists():
            (folder / name).rename(aside / name)
    try:
        yield
    except BaseException:
        _delete_run(folder)
        for path in aside.iterdir():
            path.rename(folder / path.name)
        aside.rmdir()
        raise
    shutil.rmtree(aside)


def _delete_run(folder: Path) -> None:
    for name in RUN_FILES:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
