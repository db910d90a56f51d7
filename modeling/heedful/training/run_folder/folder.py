"""The folder of a run: who may write into it, and which recipe may go on with the run in it."""

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from heedful.checksums_heed import CHECKSUMS_FILE, TARGET_FOLDER
from heedful.checksums_heed import FILES as CHECKED_FILES
from heedful.files import leftovers, listed, remove
from heedful.training.recipe import Recipe
from heedful.training.recipe_file import read_recipe
from heedful.training.run_folder.checkpoints import STATE_FOLDER, load_progress, newest_whole_checkpoint

logger = logging.getLogger(__name__)

OTHER_RUN = "it would no longer be the same run. allow_changes=true resumes all the same."
# What a run writes into its folder; `overwrite` deletes these, but for what others have put into them.
RUN_FILES = ("tokenizer", "recipe.yaml", "log.jsonl", "checkpoints", "trackers", "model", "transformers")
TOKENIZER_FILES = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "*.jinja",
    CHECKSUMS_FILE,
    *CHECKED_FILES["tokenizer"],
)
TOKENIZER_FILES += tuple(f"{TARGET_FOLDER}/{name}" for name in TOKENIZER_FILES)
# Within them, what a run and the commands for its model write. What third parties log is theirs to name.
OWN_FILES = (
    *(f"{folder}/{name}" for folder in ("tokenizer", "model") for name in (*TOKENIZER_FILES, "recipe.yaml")),
    *(
        f"model/{name}"
        for name in (*CHECKED_FILES["weights"], "config.json", "generation_config.json", "metrics.json")
    ),
    *("model/README.md", "model/learning_curve.png", "model/*_heed*.py", "checkpoints/update-*/*", "trackers/*"),
    ".*.partial/*",
    *(
        f"transformers/{name}"
        for name in (*TOKENIZER_FILES, *CHECKED_FILES["weights"], "*config.json", "README.md", "*.png")
    ),
)
# A recipe that lacks one of these was written by hand, and not by a run.
RECIPE_KEYS = {"output", "seed", "resume", "overwrite", "data", "tokenizer", "model", "optimization", "logging"}
# Keys that may change when a run is resumed, because its updates stay the same: where files are, how long it goes on,
# how updates are split (which changes dropout), and how the run is validated, kept and published.
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
    "optimization.compile",
    "validation.every_updates",
    "validation.patience",
    "checkpoints",
    "decoding",
    "logging",
    "card",
    "publish",
)


def check_output_folder(recipe: Recipe) -> None:
    """Check that the run may write into its folder: empty, or to be overwritten, or that of the run to be resumed."""
    folder = recipe.folder
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"`output` must be a folder, but {folder} is a file.")
    if not folder.is_dir() or _holds_leftovers(folder):
        return
    if recipe.overwrite:
        if not _is_run(folder):
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
    for name, (then, value) in changed_keys(earlier, now).items():
        is_tokenizer = name.startswith("tokenizer.")
        if is_tokenizer or not recipe.allow_changes:
            reason = "the weights know no other tokenizer." if is_tokenizer else OTHER_RUN
            raise ValueError(
                f"`{name}` must be as in the run that is resumed ({then}), but is {value} instead: {reason}"
            )


def _holds_leftovers(folder: Path) -> bool:
    """Return whether a folder holds nothing, or only what a run leaves that ends before its first update."""
    tokenizer = folder / "tokenizer"
    is_trained = not tokenizer.exists() or (tokenizer / "recipe.yaml").is_file()
    others = {*folder.iterdir()} - {tokenizer, *_killed_writers(folder)}
    return not others and is_trained and not foreign_files(folder)


def _killed_writers(folder: Path) -> list[Path]:
    """List what killed runs left in a run's folder while they wrote one of its files."""
    return [path for path, name in leftovers(folder).items() if name in RUN_FILES]


def _run_files(folder: Path) -> list[Path]:
    """List what a run has written into its folder."""
    return [path for path in map(folder.joinpath, RUN_FILES) if path.exists()] + _killed_writers(folder)


def _is_run(folder: Path) -> bool:
    """Return whether the `recipe.yaml` in a folder is one that a run wrote: with every key, and no comment."""
    try:
        text = (folder / "recipe.yaml").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    keys = set(re.findall(r"^(\w+):", text, re.MULTILINE))
    return keys >= RECIPE_KEYS and not re.search(r"^\s*#", text, re.MULTILINE)


def foreign_files(folder: Path) -> list[Path]:
    """List the files, relative to a run's folder, that lie in folders of the run and that no run writes."""
    found = []
    for written in _run_files(folder):
        for path in written.rglob("*"):
            file = path.relative_to(folder)
            # An empty folder is nobody's loss.
            if (path.is_symlink() or not path.is_dir()) and not any(fnmatch(str(file), own) for own in OWN_FILES):
                found.append(file)
    return sorted(found)


def keep_foreign_files(earlier: Path, folder: Path) -> None:
    """Move what no run has written from a run's earlier folder to the same place in another, and name it."""
    foreign = foreign_files(earlier)
    for file in foreign:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (earlier / file).rename(folder / file)
    if foreign:
        logger.warning("kept in %s, since no run writes such files: %s", folder, listed(list(map(str, foreign))))


def changed_keys(earlier: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return both values of each key, with dots, that makes it another run; those of logging, for example, do not."""
    changeable = set(CHANGEABLE_KEYS)
    if now.get("optimization", {}).get("schedule") in ("linear", "cosine"):
        changeable.discard("optimization.max_updates")  # the learning rate follows from it
    if now.get("data", {}).get("streaming"):
        changeable -= {"data.folder", "data.test"}  # because a stream has no checksum
    then, values = leaves(earlier), leaves(now)
    return {
        name: (then.get(name), values.get(name))
        for name in values | then
        if then.get(name) != values.get(name)
        and not any(name == key or name.startswith(key + ".") for key in changeable)
    }


def leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return all values by their dotted names, in their order."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


@contextlib.contextmanager
def folder_of_run(folder: Path) -> Iterator[None]:
    """Make the folder, and lock it against other runs while the context is entered; for the main process."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"`output` must be a folder that can be made, but {folder} cannot: {error}") from error
    if not os.access(folder, os.W_OK):
        raise ValueError(f"`output` must be a folder that can be written to, but {folder} cannot.")
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, folder)
        if _holds_leftovers(folder):
            _delete_run(folder)  # the tokenizer may be of other data
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    with contextlib.suppress(ImportError):  # Windows has no such lock
        import fcntl

        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"`output` must be a folder of its own, but another run is writing into {folder}."
            ) from None


@contextlib.contextmanager
def earlier_run_backed_up(folder: Path) -> Iterator[None]:
    """Move an earlier run's files into a backup; delete it if the context ends without an error, else restore it.

    What others have put into the run's folders is moved back in either case.
    """
    backup = folder.with_name(folder.name + ".replaced")
    if backup.exists():
        raise ValueError(
            f"{backup} holds a run that an interrupted overwrite=true has left: move it away or delete it."
        )
    backup.mkdir(parents=True)
    for path in _run_files(folder):
        path.rename(backup / path.name)
    try:
        yield
    except BaseException:
        _delete_run(folder)
        for path in backup.iterdir():
            path.rename(folder / path.name)
        backup.rmdir()
        raise
    keep_foreign_files(backup, folder)
    shutil.rmtree(backup)


def _delete_run(folder: Path) -> None:
    for path in _run_files(folder):
        remove(path)
