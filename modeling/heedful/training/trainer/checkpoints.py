"""HeedSeq2SeqTrainer's checkpoints: whole or absent, like those of the loop, and checked before they are loaded."""

from pathlib import Path

from transformers.utils import logging

from heedful.files import flush, remove
from heedful.training.run_folder.checkpoints import (
    MANIFEST,
    find_damage,
    list_checkpoints,
    newest_whole_checkpoint,
    write_manifest,
)

logger = logging.get_logger(__name__)

PREFIX = "checkpoint-"
# The folder beside the checkpoints in which one is written. Trainer pushes no name that begins like that.
UNFINISHED = "_unfinished_checkpoint"
NEEDED = ("trainer_state.json", "optimizer.pt", "scheduler.pt")


def finish_checkpoint(written: Path, path: Path) -> None:
    """Make a checkpoint that has been written elsewhere appear, in place of an earlier one."""
    write_manifest(written)
    if path.exists():
        path.rename(written.with_name("replaced"))
    written.rename(path)
    flush(path.parent)
    remove(written.parent)


def checkpoint_to_resume(folder: Path) -> Path:
    """Return the newest whole checkpoint of a run, and put damaged ones that are newer aside."""
    for _, written in list_checkpoints(folder / UNFINISHED, PREFIX):
        if find_damage(written) is None:  # a process was killed before it could rename it
            remove(folder / written.name)
            written.rename(folder / written.name)
    listed = list_checkpoints(folder, PREFIX)
    if not listed:
        raise ValueError(f"`resume_from_checkpoint` must find a checkpoint in {folder}, but there is none.")
    path = listed[-1][1]
    if any((path / MANIFEST).exists() for _, path in listed):
        path = newest_whole_checkpoint(folder, PREFIX) or path
    else:
        check_checkpoint(path)
    for _, damaged in listed[listed.index((int(path.name.removeprefix(PREFIX)), path)) + 1 :]:
        aside = damaged.with_name(f"_damaged-{damaged.name}")
        remove(aside)
        damaged.rename(aside)
    return path


def check_checkpoint(path: Path) -> None:
    """Refuse a damaged checkpoint; one without a manifest, which another trainer wrote, cannot be checked."""
    if path.is_dir() and not (path / MANIFEST).exists():
        logger.warning(f"{path} has no {MANIFEST}, so that its files cannot be checked.")
        return
    damage = find_damage(path)
    if damage is not None:
        raise ValueError(
            f"`resume_from_checkpoint` must name a whole checkpoint, but {path} is damaged ({damage}): with True, the "
            "newest whole one is taken."
        )


def check_is_complete(path: Path) -> None:
    """Refuse a checkpoint that lacks what training needs besides the weights, instead of beginning without it."""
    missing = [name for name in NEEDED if not (path / name).is_file()]
    if missing:
        raise ValueError(
            f"`resume_from_checkpoint` must name a checkpoint with {', '.join(NEEDED)}, but {path} lacks "
            f"{', '.join(missing)} (`save_only_model` leaves them out)."
        )
