"""HeedSeq2SeqTrainer's checkpoints: whole or absent, and checked before they are loaded."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import HubStrategy, rotate_checkpoints
from transformers.utils import logging

from heedful.files import flush, remove
from heedful.training.processes.collectives import any_rank, broadcast, local_shard
from heedful.training.run_folder import checkpoints
from heedful.training.run_folder.checkpoints import MANIFEST, find_damage, list_checkpoints
from heedful.training.trainer.streams import SharedUpdates

logger = logging.get_logger(__name__)

PREFIX = "checkpoint-"
UNFINISHED = "_unfinished_checkpoint"  # a folder to write into; Trainer pushes no name that begins with _
NEEDED = ("trainer_state.json", "optimizer.pt", "scheduler.pt")


class WholeCheckpoints(SharedUpdates):
    """The trainer's methods that save, resume and push."""

    _is_saving = False

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train like Seq2SeqTrainer; `resume_from_checkpoint=True` resumes from the newest whole checkpoint."""
        path: Any = self._checked(resume_from_checkpoint) if resume_from_checkpoint else None
        return super().train(path, *args, **kwargs)

    def _checked(self, given: str | bool, needed: Sequence[str] = NEEDED) -> str:
        """Let the main process check the checkpoint to load; all processes raise its error."""
        path, error = Path(str(given)), ""
        if self.accelerator.is_main_process:
            try:
                if given is True:
                    path = checkpoint_to_resume(Path(self.args.output_dir))
                else:
                    check_checkpoint(path)
                if not (self.is_deepspeed_enabled or self.is_fsdp_enabled):  # they write other files
                    check_is_complete(path, needed)
            except ValueError as failure:
                error = str(failure)
        path, error = broadcast(self.accelerator, (path, error))
        if error:
            raise ValueError(error)
        return str(path)

    def _load_best_model(self) -> None:
        self._checked(str(self.state.best_model_checkpoint), needed=())
        super()._load_best_model()

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return str(Path(folder) / UNFINISHED) if self._is_saving else folder

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a whole checkpoint, then push and delete like Trainer."""
        finite = (bool(local_shard(parameter.detach()).isfinite().all()) for parameter in model.parameters())
        self._stop_if(not all(finite), "a weight is not finite")
        folder = Path(self._get_output_dir(trial))
        path = folder / f"{PREFIX}{self.state.global_step}"
        written = folder / UNFINISHED / path.name
        if self.args.should_save:
            remove(written.parent)
        self.accelerator.wait_for_everyone()
        self._is_saving = True
        try:
            super()._save_checkpoint(model, trial)
            if self.state.best_model_checkpoint == str(written):
                self.state.best_model_checkpoint = str(path)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                self.state.save_to_json(str(written / TRAINER_STATE_NAME))
                if self._stream is not None:
                    self._stream.save(written, self.state.global_step)
                finish_checkpoint(written, path)
        except Exception as error:  # on a full disk, libraries raise different types
            if self.args.should_save:
                remove(written.parent)
            raise OSError(f"{path} could not be written: {error}. Earlier checkpoints are unharmed.") from error
        finally:
            self._is_saving = False
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(path))
        if self.args.should_save:
            limit, best = self.args.save_total_limit, self.state.best_model_checkpoint
            rotate_checkpoints(str(folder), save_total_limit=limit, best_model_checkpoint=best, use_mtime=True)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        # Tied weights are saved once, so Trainer takes their other names for missing.
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        load_result.missing_keys[:] = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push code and tokenizers with the weights and configs that Trainer pushes."""
        if self._is_saving:
            return  # it is not there yet
        if self.is_world_process_zero() and self.args.hub_strategy != HubStrategy.END:
            for path in Path(checkpoint_folder).glob("*.py"):
                shutil.copy(path, self.args.output_dir)
            tokenizer = getattr(self.data_collator, "tokenizer", None)
            if self.processing_class is None and tokenizer is not None:
                tokenizer.save_pretrained(self.args.output_dir)
        super()._push_from_checkpoint(checkpoint_folder)

    def _stop_if(self, is_bad: bool, what: str) -> None:
        if any_rank(self.accelerator, is_bad):
            cause = "the learning rate may be too high, or the warm-up too short. The last checkpoint is unharmed"
            diverged = f"Training has diverged near update {self.state.global_step + 1} ({what})"
            raise FloatingPointError(f"{diverged}: {cause}.")


def finish_checkpoint(written: Path, path: Path) -> None:
    """Move a written checkpoint to its path, and replace an earlier one."""
    checkpoints.write_manifest(written)
    if path.exists():
        path.rename(written.with_name("replaced"))
    written.rename(path)
    flush(path.parent)
    remove(written.parent)


def checkpoint_to_resume(folder: Path) -> Path:
    """Return a run's newest whole checkpoint, and rename newer, damaged ones."""
    for _, written in list_checkpoints(folder / UNFINISHED, PREFIX):
        if find_damage(written) is None:  # a process was killed before it could rename it
            remove(folder / written.name)
            written.rename(folder / written.name)
    paths = [path for _, path in list_checkpoints(folder, PREFIX)]
    if not paths:
        raise ValueError(f"`resume_from_checkpoint` must find a checkpoint in {folder}, but there is none.")
    newest, setting = paths[-1], "resume_from_checkpoint"
    if any((path / MANIFEST).exists() for path in paths):
        others = f"another `output_dir`, or leave `{setting}` out"
        newest = checkpoints.newest_whole_checkpoint(folder, PREFIX, setting, others) or newest
    else:
        check_checkpoint(newest)
    for damaged in paths[paths.index(newest) + 1 :]:
        remove(aside := damaged.with_name(f"_damaged-{damaged.name}"))
        damaged.rename(aside)
    return newest


def check_checkpoint(path: Path) -> None:
    """Refuse a damaged checkpoint; another trainer's checkpoint has no manifest to check."""
    if path.is_dir() and not (path / MANIFEST).exists():
        logger.warning(f"{path} has no {MANIFEST}, so that its files cannot be checked.")
    elif (damage := find_damage(path)) is not None:
        found = f"{path} is damaged ({damage}): True takes the newest whole one"
        raise ValueError(f"`resume_from_checkpoint` must name a whole checkpoint, but {found}.")


def check_is_complete(path: Path, needed: Sequence[str]) -> None:
    """Refuse a checkpoint without the files that training needs, in addition to the weights."""
    if missing := [name for name in needed if not (path / name).is_file()]:
        found = f"{path} lacks {', '.join(missing)} (`save_only_model` leaves them out)"
        raise ValueError(f"`resume_from_checkpoint` must name a checkpoint with {', '.join(needed)}, but {found}.")
