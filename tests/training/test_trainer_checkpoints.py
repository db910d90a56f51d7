"""The checkpoints of `HeedSeq2SeqTrainer`: whole or absent, checked when they are loaded, and kills included."""

import os
import shutil
import signal
from pathlib import Path
from pkgutil import resolve_name
from unittest.mock import patch

import pytest
from test_checkpoints import flip_a_bit
from transformers import Seq2SeqTrainer
from transformers.utils import logging as transformers_logging

from heedful import HeedSeq2SeqTrainer
from heedful.training.run_folder.checkpoints import MANIFEST, find_damage
from heedful.training.trainer import saving
from tiny_runs import full_disk
from trainer_runs import fresh_model, make_trainer, same_weights, trained

OPTIONS = {"per_device_train_batch_size": 2, "train_sampling_strategy": "random", "max_steps": 6}
OPTIONS |= {"save_strategy": "steps", "save_steps": 2}


def run(folder, resume=None, kind=HeedSeq2SeqTrainer, **options):
    trainer = make_trainer(kind, folder, fresh_model(dropout=0.2), **{**OPTIONS, **options})
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole.args.output_dir, tmp_path / "run")


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


DAMAGE = {
    **{f"no {name}": lambda path, name=name: (path / name).unlink() for name in ("optimizer.pt", "scheduler.pt")},
    **{f"no {name}": lambda path, name=name: (path / name).unlink() for name in ("rng_state.pth", MANIFEST)},
    "a flipped bit": flip_a_bit,
    "a flipped bit in the optimizer": lambda path: flip_a_bit(path, "optimizer.pt"),
    "an empty folder": lambda path: [shutil.rmtree(path), path.mkdir()],
    "no folder": lambda path: [shutil.rmtree(path), path.write_text("")],
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_the_newest_whole_one_used(folder, whole, kind):
    DAMAGE[kind](folder / "checkpoint-6")
    if kind != f"no {MANIFEST}":
        with pytest.raises(ValueError, match=r"must name a (whole )?checkpoint.* but .*checkpoint-6"):
            run(folder, str(folder / "checkpoint-6"))
    resumed = run(folder, True, max_steps=6)
    assert resumed.state.log_history[-2]["step"] == 6
    assert same_weights(resumed, whole)
    assert names(folder) == ["_damaged-checkpoint-6", "checkpoint-2", "checkpoint-4", "checkpoint-6"]


def test_checkpoints_are_whole_and_name_every_file_and_where_none_is_the_run_is_not_begun_again(folder):
    assert names(folder) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    for path in folder.iterdir():
        assert find_damage(path) is None
        flip_a_bit(path)
    with pytest.raises(ValueError, match=r"`resume_from_checkpoint` must find a whole .* all are damaged"):
        run(folder, True)
    assert len(names(folder)) == 3
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match="`resume_from_checkpoint` must find a checkpoint in"):
        run(folder, True)


def test_weights_alone_are_not_resumed(tmp_path):
    run(tmp_path, save_only_model=True)
    with pytest.raises(ValueError, match=r"lacks optimizer.pt, scheduler.pt \(`save_only_model` leaves them out\)"):
        run(tmp_path, True)


def test_what_transformers_trainer_has_saved_is_resumed_with_a_warning(tmp_path, caplog):
    transformers_logging.enable_propagation()
    stock = run(tmp_path, kind=Seq2SeqTrainer)
    resumed = run(tmp_path, True, max_steps=8)
    assert resumed.state.global_step == 8
    assert "checkpoint-6 has no manifest.json, so that its files cannot be checked" in caplog.text
    assert not same_weights(stock, resumed)


def test_a_damaged_best_checkpoint_is_not_loaded(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_total_limit": 1}
    best = run(tmp_path, **options)
    assert Path(best.state.best_model_checkpoint) in list(tmp_path.iterdir())
    trainer = make_trainer(HeedSeq2SeqTrainer, tmp_path, **{**OPTIONS, **options, "max_steps": 2})
    load = trainer._load_best_model
    trainer._load_best_model = lambda: [*map(flip_a_bit, tmp_path.glob("checkpoint-*")), load()]
    with pytest.raises(ValueError, match="another checksum"):
        trainer.train()


def test_a_full_disk_leaves_the_older_checkpoint_and_nothing_half_written(tmp_path):
    trainer = make_trainer(HeedSeq2SeqTrainer, tmp_path, fresh_model(), **{**OPTIONS, "save_steps": 1})
    trainer.state.global_step = 1
    trained(HeedSeq2SeqTrainer, tmp_path, **{**OPTIONS, "max_steps": 2})
    trainer.create_optimizer_and_scheduler(6)
    with pytest.raises(OSError, match=r"checkpoint-1 could not be written: .* unharmed"), full_disk(600):
        trainer._save_checkpoint(trainer.model, None)
    assert names(tmp_path) == ["checkpoint-2"]


KILLS = [
    ("transformers.modeling_utils.safe_save_file", 0),
    ("torch.save", 1),  # of the arguments, the optimizer, the schedule, the random numbers
    ("torch.save", 3),
    ("heedful.training.trainer.saving.finish_checkpoint", 0),
    ("heedful.training.run_folder.checkpoints.flush", 3),
    ("pathlib.Path.rename", 0),
    ("heedful.training.trainer.saving.flush", 0),
    ("heedful.training.trainer.saving.rotate_checkpoints", 0),
]


def train_and_be_killed(folder, target: str, calls: int) -> None:
    """Train in a process of its own that is killed in the middle of its second save."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGKILL
        return
    try:
        left = [calls]
        save = HeedSeq2SeqTrainer._save_checkpoint

        def die(*args, **kwargs):
            left[0] -= 1
            return os.kill(os.getpid(), signal.SIGKILL) if left[0] < 0 else original(*args, **kwargs)

        def save_and_die(trainer, *args):
            if trainer.state.global_step < 4:
                return save(trainer, *args)
            with patch(target, die):
                return save(trainer, *args)

        original = resolve_name(target)
        with patch.object(HeedSeq2SeqTrainer, "_save_checkpoint", save_and_die):
            run(folder, save_total_limit=1)
    finally:
        os._exit(1)


@pytest.mark.parametrize(("target", "calls"), KILLS)
def test_a_run_that_is_killed_while_it_saves_goes_on_from_a_whole_checkpoint(whole, tmp_path, target, calls):
    train_and_be_killed(tmp_path, target, calls)
    assert any(find_damage(path) is None for path in tmp_path.rglob("checkpoint-*"))
    resumed = run(tmp_path, True, save_total_limit=1)
    assert same_weights(resumed, whole)
    assert names(tmp_path) == ["checkpoint-6"]


def test_a_checkpoint_that_is_written_again_is_never_away(whole, folder):
    (folder / saving.UNFINISHED).mkdir()
    (folder / "checkpoint-6").rename(folder / saving.UNFINISHED / "checkpoint-6")
    assert saving.checkpoint_to_resume(folder) == folder / "checkpoint-6"
