"""What `HeedSeq2SeqTrainer` saves and pushes is whole, checked when it is loaded, or absent, kills included."""

import multiprocessing
import os
import shutil
import signal
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from pkgutil import resolve_name
from unittest.mock import patch

import pytest
import torch
from test_checkpoints import flip_a_bit
from transformers import Seq2SeqTrainer
from transformers.utils import logging as transformers_logging

import trainer_runs
from heedful import HeedForConditionalGeneration, HeedSeq2SeqTrainer, Translator
from heedful.cards.hub import check_folder
from heedful.data.tokenization import TokenizerPair
from heedful.training.run_folder.checkpoints import MANIFEST, find_damage
from heedful.training.trainer import saving
from helpers import CODE, assert_error, run_python
from hub_stand_in import HubStandIn
from tiny_runs import full_disk
from trainer_runs import SOURCES, fresh_model, joint_tokenizers, logged, make_trainer, same_weights, trained

OPTIONS = {"per_device_train_batch_size": 2, "train_sampling_strategy": "random", "max_steps": 6}
OPTIONS |= {"save_strategy": "steps", "save_steps": 2}


def run(folder, resume=None, kind=HeedSeq2SeqTrainer, **options):
    torch.set_num_threads(1)  # a forked process has none of OpenMP's other threads, and would wait for them
    return trained(kind, folder, fresh_model(dropout=0.2), resume=resume, **{**OPTIONS, **options})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole.args.output_dir, tmp_path / "run")


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


DAMAGE = {
    **{
        f"no {name}": lambda path, name=name: (path / name).unlink()
        for name in ("optimizer.pt", "rng_state.pth", MANIFEST)
    },
    "a flipped bit in the optimizer": lambda path: flip_a_bit(path, "optimizer.pt"),
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
    assert_error(r"`resume_from_checkpoint` must find a whole .* all are damaged", run, folder, True)
    assert len(names(folder)) == 3
    shutil.rmtree(folder)
    assert_error("`resume_from_checkpoint` must find a checkpoint in", run, folder, True)


def test_weights_alone_are_not_resumed(tmp_path):
    run(tmp_path, save_only_model=True)
    assert_error(r"lacks optimizer.pt, scheduler.pt \(`save_only_model` leaves them out\)", run, tmp_path, True)


def test_what_transformers_trainer_has_saved_is_resumed_with_a_warning(tmp_path, caplog):
    transformers_logging.enable_propagation()
    stock = run(tmp_path, kind=Seq2SeqTrainer)
    resumed = run(tmp_path, True, max_steps=8)
    assert resumed.state.global_step == 8
    assert "checkpoint-6 has no manifest.json, so that its files cannot be checked" in caplog.text
    assert not same_weights(stock, resumed)


def test_the_best_checkpoint_is_kept_and_loaded_unless_it_is_damaged(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_total_limit": 2}
    # A rate at which updates make the loss worse.
    worse = {"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "learning_rate": 1.0}
    trainer = run(tmp_path, **options, **worse)
    losses, best = logged(trainer, "eval_loss"), Path(trainer.state.best_model_checkpoint)
    assert best.name == f"checkpoint-{2 + 2 * losses.index(min(losses))}" != "checkpoint-6"
    assert names(tmp_path) == [best.name, "checkpoint-6"]
    saved = HeedForConditionalGeneration.from_pretrained(best)
    assert all(map(torch.equal, saved.parameters(), trainer.model.parameters()))
    trainer = make_trainer(HeedSeq2SeqTrainer, tmp_path, **{**OPTIONS, **options, "max_steps": 2})
    load = trainer._load_best_model
    trainer._load_best_model = lambda: [*map(flip_a_bit, tmp_path.glob("checkpoint-*")), load()]
    assert_error("another checksum", trainer.train)


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
    save, original, left = HeedSeq2SeqTrainer._save_checkpoint, resolve_name(target), [calls]

    def die(*args, **kwargs):
        left[0] -= 1
        return os.kill(os.getpid(), signal.SIGKILL) if left[0] < 0 else original(*args, **kwargs)

    def save_and_die(trainer, *args):
        with patch(target, die) if trainer.state.global_step >= 4 else nullcontext():
            return save(trainer, *args)

    def train():
        with patch.object(HeedSeq2SeqTrainer, "_save_checkpoint", save_and_die):
            run(folder, save_total_limit=1)

    process = multiprocessing.get_context("fork").Process(target=train)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


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


WHOLE = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
WHOLE |= {"target_tokenizer/tokenizer.json", "target_tokenizer/tokenizer_config.json"}


def test_two_tokenizers_are_saved_with_every_checkpoint_and_at_the_end(tmp_path):
    tokenizers = trainer_runs.separate_tokenizers()
    rows = trainer_runs.encoded_pairs(tokenizers)
    given, model = {"processing_class": tokenizers, "train_dataset": rows}, fresh_model(**trainer_runs.SEPARATE)
    trainer = trained(HeedSeq2SeqTrainer, tmp_path, model, given, save_strategy="steps")
    trainer.save_model(tmp_path / "saved")
    for folder in (tmp_path / "checkpoint-2", tmp_path / "saved"):
        loaded = TokenizerPair.from_pretrained(folder)
        assert loaded.encode_target(SOURCES) == tokenizers.encode_target(SOURCES)
        assert loaded.encode_source(SOURCES) == tokenizers.encode_source(SOURCES)


def test_with_tokenizers_that_fit_the_model_the_collator_is_made(tmp_path):
    for tokenizers in (joint_tokenizers(), joint_tokenizers().source):
        given = {"processing_class": tokenizers, "data_collator": None}
        assert trained(HeedSeq2SeqTrainer, tmp_path, given=given).state.global_step == 2
    separate, split = trainer_runs.separate_tokenizers(), deepcopy(joint_tokenizers().source)
    with pytest.raises(ValueError, match="`vocab_size` must be 264, but is 272 instead"):
        make_trainer(HeedSeq2SeqTrainer, tmp_path / "run", given={"processing_class": separate})
    assert not (tmp_path / "run").exists()
    split.add_special_tokens({"additional_special_tokens": ["<ent>"]})
    with pytest.warns(UserWarning, match="^<ent> will be split in texts"):
        make_trainer(HeedSeq2SeqTrainer, tmp_path, given={"processing_class": split})
    separate.save_pretrained(tmp_path)
    for tokenizer in (joint_tokenizers(), joint_tokenizers().source):
        with pytest.raises(ValueError, match="must not hold a `target_tokenizer`"):
            make_trainer(HeedSeq2SeqTrainer, tmp_path, given={"processing_class": tokenizer})


def test_a_tokenizer_that_would_be_lost_is_warned_of(tmp_path, caplog):
    transformers_logging.enable_propagation()
    tokenizers, source = trainer_runs.separate_tokenizers(), joint_tokenizers().source
    separate, from_a_pair = fresh_model(**trainer_runs.SEPARATE), fresh_model()
    # Two tokenizers of one size show in the folder that the model comes from.
    (tmp_path / "origin" / "target_tokenizer").mkdir(parents=True)
    from_a_pair.config._name_or_path = str(tmp_path / "origin")
    for model, given, warns in (
        (separate, {"processing_class": tokenizers.source}, True),
        (separate, {}, True),  # the collator has one, which Trainer saves
        (separate, {"processing_class": tokenizers}, False),
        (separate, {"data_collator": lambda rows: trainer_runs.collator()(rows)}, False),
        (fresh_model(), {"processing_class": source}, False),
        (from_a_pair, {"processing_class": source}, True),
    ):
        caplog.clear()
        make_trainer(HeedSeq2SeqTrainer, tmp_path, model, given)
        assert ("only one would be saved" in caplog.text) == warns


@pytest.fixture(scope="module")
def repositories(tmp_path_factory):
    """What a process that takes the stand-in for the Hub has pushed there."""
    folder = tmp_path_factory.mktemp("pushed")
    with HubStandIn() as hub:
        run_python(Path(__file__).parents[1] / "support/trainer_runs.py", folder, **hub.environment(folder / "caches"))
    return hub.repositories


@pytest.mark.multiprocess
@pytest.mark.parametrize("strategy", trainer_runs.PUSHES)
def test_what_is_pushed_is_whole(repositories, strategy, tmp_path):
    repository = repositories[f"me/{strategy}"]
    files = repository.commits[repository.branches["main"]]
    assert files.keys() >= WHOLE | CODE
    folders = {path.split("/")[0] for path in files if "checkpoint" in path}
    expected = {"checkpoint": {"last-checkpoint"}, "all_checkpoints": {"checkpoint-1", "checkpoint-2"}}
    assert folders == expected.get(strategy, set())
    for folder in folders:
        names = {path.removeprefix(f"{folder}/") for path in files if path.startswith(f"{folder}/")}
        assert names >= WHOLE | CODE | {"trainer_state.json", "optimizer.pt", "scheduler.pt"}
    for path, content in files.items():
        (tmp_path / "fetched" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fetched" / path).write_bytes(content)
    assert Translator.from_pretrained(tmp_path / "fetched").model.config.d_model == 32
    if strategy == "end":
        check_folder(tmp_path / "fetched")
        assert b"Training hyperparameters" in files["README.md"]
