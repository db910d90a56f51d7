"""A run's folder: whether a run may write into it, and whether a recipe may resume it."""

import contextlib
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from heedful.checksums_heed import CHECKSUMS_FILE, TARGET_FOLDER
from heedful.checksums_heed import FILES as CHECKED_FILES
from heedful.data.epochs.encoding import SOURCES_FILE
from heedful.files import leftovers, remove
from heedful.messages_heed import wrong
from heedful.recipe_keys import keys_of
from heedful.training.recipe import Recipe
from heedful.training.recipe_file import read_recipe
from heedful.training.run_folder.checkpoints import CHECKPOINTS, RECIPE, load_progress, newest_whole_checkpoint

logger = logging.getLogger(__name__)

OTHER_RUN = "it would be another run. allow_changes=true resumes anyway"
# Runs and commands write these into a run's folder.
RUN_FILES = ("tokenizer", "recipe.yaml", "log.jsonl", CHECKPOINTS, "trackers", "model", "transformers", SOURCES_FILE)
# Runs and commands write these into a model's or tokenizer's folder.
OWN_FILES = (*CHECKED_FILES["weights"], *CHECKED_FILES["tokenizer"], CHECKSUMS_FILE, "tokenizer*.json", "*.jinja")
OWN_FILES += ("special_tokens_map.json", "recipe.yaml", "config.json", "generation_config.json", "metrics.json")
OWN_FILES += ("README.md", "learning_curve.png", "confidence.json", "*_heed*.py")
# Each run's recipe has all of these.
RECIPE_KEYS = {"output", "seed", "resume", "overwrite", "data", "tokenizer", "model", "optimization", "logging"}


def check_output_folder(recipe: Recipe) -> None:
    """Check that a run may write into its folder: it is empty, or holds a run to overwrite or resume."""
    folder = recipe.folder
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"`output` must be a folder, but {folder} is a file.")
    if not folder.is_dir() or _holds_leftovers(folder):
        return
    if recipe.overwrite:
        # A run's recipe has every key and no comment.
        with contextlib.suppress(OSError, UnicodeDecodeError):
            text = (folder / "recipe.yaml").read_text(encoding="utf-8")
            keys = set(re.findall(r"^(\w+):", text, re.MULTILINE))
            if keys >= RECIPE_KEYS and not re.search(r"^\s*#", text, re.MULTILINE):
                if not Path.cwd().is_relative_to(folder.resolve()):
                    return
                must = "not hold the working directory with overwrite=true"
                raise ValueError(f"`output` must {must}, but {folder} does.")
        raise ValueError(f"`output` must be empty or a run's folder with overwrite=true, but {folder} is neither.")
    if not recipe.resume:
        ways = "continue the run in it with resume=true, move it aside with overwrite=true, or choose another folder"
        raise ValueError(f"`output` must be an empty folder, but {folder} is not: {ways} with output=…")
    checkpoint = newest_whole_checkpoint(folder / CHECKPOINTS)
    if checkpoint is not None:
        load_progress(checkpoint)  # a newer Heedful may have written the recipe too
    written = folder / "recipe.yaml" if checkpoint is None else checkpoint / RECIPE
    if not written.is_file():
        raise ValueError(f"`output` must be a run's folder with resume=true, but {folder} holds no run.")
    try:
        earlier, now = asdict(read_recipe(written)), asdict(recipe)
    except ValueError as error:
        raise ValueError(f"The resumed run has a recipe ({written}) from another version: {error}") from error
    for name, then, value, reason in changed_keys(earlier, now):
        if reason is not None or not recipe.allow_changes:
            raise wrong(name, f"be as in the resumed run ({then})", value, advice=reason or OTHER_RUN)


def _holds_leftovers(folder: Path) -> bool:
    """Return whether a folder holds at most the files that a run writes before its first update."""
    tokenizer = folder / "tokenizer"
    is_trained = not tokenizer.exists() or ((tokenizer / "recipe.yaml").is_file() and not foreign_files(tokenizer))
    half_written = (path for path, name in leftovers(folder).items() if name in RUN_FILES)  # from killed runs
    return is_trained and not {*folder.iterdir()} - {tokenizer, *half_written}


def foreign_files(folder: Path) -> list[Path]:
    """List a user's own files in a model's or tokenizer's folder, relative to it."""
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    ours = (Path(), Path(TARGET_FOLDER))
    return sorted(file for file in files if file.parent not in ours or not any(map(file.match, OWN_FILES)))


def changed_keys(earlier: dict[str, Any], now: dict[str, Any]) -> Iterator[tuple[str, object, object, str | None]]:
    """Yield each changed key (with dots) that makes it another run, both values, and why it may never change."""
    changeable, optimization = {key.name for key in keys_of(Recipe) if key.resumes}, now.get("optimization", {})
    if optimization.get("schedule") in ("linear", "cosine"):
        changeable.discard("optimization.max_updates")  # the learning rate depends on it
    if now.get("data", {}).get("streaming"):
        changeable -= {"data.folder", "data.test"}  # because a stream has no checksum
    sections = tuple(f"{key}." for key in changeable)
    then, values = leaves(earlier), leaves(now)
    for name in values | then:
        both, reason = (then.get(name), values.get(name)), None
        if name.startswith("tokenizer."):
            reason = "the weights fit only that tokenizer"
        elif name == "optimization.optimizer" and {*both} != {"adam", "adamw"}:
            reason = "another optimizer cannot continue with its state"
        elif name == "optimization.beta1" and optimization.get("optimizer") == "schedule_free":
            reason = "the averaged weights depend on it"
        if both[0] != both[1] and not f"{name}.".startswith(sections):
            yield name, *both, reason


def leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return all values by their dotted names, in their order."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


@contextlib.contextmanager
def folder_of_run(folder: Path, overwrite: bool = False) -> Iterator[None]:
    """Make and lock the folder; with `overwrite`, rename an earlier run's folder first."""
    folder = folder.resolve()  # a link stays, and its target is renamed
    with contextlib.ExitStack() as locks:
        _make_and_lock(folder, locks)
        if overwrite and not _holds_leftovers(folder):
            names = (folder.with_name(f"{folder.name}.{number}") for number in count(1))
            aside = next(path for path in names if not os.path.lexists(path))
            try:
                folder.rename(aside)
            except OSError as error:
                must = "be a folder that can be renamed"
                raise ValueError(f"`output` must {must}, but {folder} cannot: {error}") from error
            logger.info("the earlier run in %s is now in %s", folder, aside)
            _make_and_lock(folder, locks)
        for path in [*folder.iterdir()] if _holds_leftovers(folder) else ():
            remove(path)  # the tokenizer may belong to other data
        yield


def _make_and_lock(folder: Path, locks: contextlib.ExitStack) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"`output` must be a folder that can be made, but {folder} cannot: {error}") from error
    if not os.access(folder, os.W_OK):
        raise ValueError(f"`output` must be a folder that can be written to, but {folder} cannot.")
    descriptor = os.open(folder, os.O_RDONLY)
    locks.callback(os.close, descriptor)
    with contextlib.suppress(ImportError):  # Windows has no such lock
        import fcntl

        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            must = "not be in use"
            raise ValueError(f"`output` must {must}, but another run is writing into {folder}.") from None
