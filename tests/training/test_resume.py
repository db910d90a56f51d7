"""A run that was stopped goes on as if it had not been, and refuses to go on as another."""

import json
import os
import shutil
import signal
from dataclasses import replace

import pytest
import torch
from accelerate.state import AcceleratorState

from heed.training.checkpoints import _write_manifest, checkpoint_path, load_progress, load_state
from heed.training.devices import make_accelerator
from heed.training.loop import TrainingInterrupted, TrainingLoop
from heed.training.preparation import prepare_corpus
from heed.training.run import changed_keys, check_output_folder
from tiny_runs import logged, tiny_recipe, tiny_tree

END = 9
# Two epochs of four updates, each in several micro-batches; validations and checkpoints in between.
CHANGES = {"optimization.max_updates": END, "optimization.token_budget": 600, "logging.every_updates": 4}
CHANGES |= {"validation.every_updates": 3, "checkpoints.every_updates": 2, "checkpoints.keep_last": 2}


def final(folder):
    """Return all that a run has come to, but for its clock."""
    path = checkpoint_path(folder / "checkpoints", END)
    state = load_state(path)
    progress = replace(state.progress, seconds=0, window={})
    logs = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    timeless = [
        {k: v for k, v in line.items() if "second" not in k and "per_s" not in k and "wait" not in k} for line in logs
    ]
    return (
        (path / "model.safetensors").read_bytes(),
        state.optimizer,
        state.moving_average,
        state.scaler,
        progress,
        timeless,
    )


def assert_same(ours, theirs):
    assert ours[0] == theirs[0]
    for number, values in theirs[1]["state"].items():
        assert all(torch.equal(ours[1]["state"][number][name], value) for name, value in values.items())
    for name, value in (theirs[2] or {}).items():
        assert torch.equal(ours[2][name], value)
    assert ours[3:] == theirs[3:]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Runs that were never stopped, by what is special about them."""
    made = {}

    def of(name, make_loop, changes, data):
        if name not in made:
            folder = tmp_path_factory.mktemp("undisturbed")
            make_loop({**CHANGES, **changes}, folder, data).run()
            made[name] = final(folder)
        return made[name]

    return of


KINDS = {
    "plain": {},
    "stream": {"data.streaming": True, "data.pool_size": 70},
    "moving_average": {"optimization.ema_decay": 0.5, "checkpoints.publish": "ema", "validation.sentences": 3},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", range(1, END))
def test_a_run_stopped_after_any_update_ends_as_if_it_had_not_been(
    make_loop, corpus, tmp_path, undisturbed, kind, stop
):
    data = corpus
    if kind == "stream":
        data = prepare_corpus(tiny_recipe(tmp_path / "any", KINDS[kind]), tmp_path / "tokenizer")
    changes = {**CHANGES, **KINDS[kind]}
    loop = make_loop(changes, tmp_path / "run", data)
    count, told = loop._count, []

    def count_and_stop(**values):
        count(**values)
        # In the middle of the update's micro-batches.
        if loop.progress.update == stop - 1 and not told:
            told.append(True)
            os.kill(os.getpid(), signal.SIGTERM)

    loop._count = count_and_stop
    with pytest.raises(TrainingInterrupted, match=f"after update {stop};"):
        loop.run()
    resumed = make_loop({**changes, "resume": True}, tmp_path / "run", data)
    assert resumed.progress.update == stop
    resumed.run()
    assert_same(final(tmp_path / "run"), undisturbed(kind, make_loop, KINDS[kind], data))


def half_precision_loop(corpus, folder, changes):
    """Make a loop with a gradient scaler, which Accelerate gives to GPUs only; the CPU's works the same."""
    recipe = tiny_recipe(folder, {**CHANGES, **changes})
    recipe.folder.mkdir(exist_ok=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = make_accelerator(recipe)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
    return TrainingLoop(recipe, corpus, accelerator)


def test_the_scale_of_half_precision_comes_back(corpus, tmp_path):
    straight = half_precision_loop(corpus, tmp_path / "straight", {})
    straight.run()
    assert straight.accelerator.scaler.get_scale() == 2.0**13
    half_precision_loop(corpus, tmp_path / "resumed", {"optimization.max_updates": 5}).run()
    half_precision_loop(corpus, tmp_path / "resumed", {"resume": True}).run()
    assert_same(final(tmp_path / "resumed"), final(tmp_path / "straight"))


def test_too_large_a_scale_skips_updates_without_an_error(corpus, tmp_path):
    loop = half_precision_loop(corpus, tmp_path / "run", {"optimization.max_updates": 2})
    loop.accelerator.scaler = loop.optimizer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    before = {name: weight.clone() for name, weight in loop.model.named_parameters()}
    progress = loop.run()
    assert (progress.update, progress.skipped_updates) == (2, 2)
    assert loop.accelerator.scaler.get_scale() == 2.0**125
    assert all(torch.equal(before[name], weight) for name, weight in loop.model.named_parameters())


def test_a_run_stopped_before_its_validation_validates_when_it_goes_on(make_loop, tmp_path, monkeypatch):
    make_loop(CHANGES, tmp_path / "straight").run()
    loop = make_loop(CHANGES, tmp_path / "run")

    def be_told_to_stop(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("the run went on")

    with monkeypatch.context() as patch:
        patch.setattr("heed.training.loop.validation_loss", be_told_to_stop)
        with pytest.raises(TrainingInterrupted, match="after update 3;"):
            loop.run()
    assert load_progress(checkpoint_path(loop.checkpoints, 3)).validated_update == 0
    make_loop({**CHANGES, "resume": True}, tmp_path / "run").run()
    assert_same(final(tmp_path / "run"), final(tmp_path / "straight"))
    validated = [line for line in (tmp_path / "run/log.jsonl").read_text().splitlines() if "validation/loss" in line]
    assert len(validated) == 3


def test_the_log_of_a_killed_run_has_no_line_twice(make_loop, tmp_path):
    make_loop({**CHANGES, "logging.every_updates": 1}, tmp_path / "straight").run()
    folder = tmp_path / "run"
    make_loop({**CHANGES, "logging.every_updates": 1, "optimization.max_updates": 6}, folder).run()
    shutil.rmtree(checkpoint_path(folder / "checkpoints", 6))
    with (folder / "log.jsonl").open("a") as log:
        log.write('{"update": 7, "train/lo')
    loop = make_loop({**CHANGES, "logging.every_updates": 1, "resume": True}, folder)
    assert loop.progress.update == 4
    assert len(logged(folder, "train/loss")) == 4
    loop.run()
    assert_same(final(folder), final(tmp_path / "straight"))


def test_changed_rows_are_not_trained_on_as_if_they_were_the_same(make_loop, corpus, tmp_path):
    make_loop({"optimization.max_updates": 2}).run()
    changed = replace(corpus, fingerprint="another")
    with pytest.raises(ValueError, match="their rows have changed; allow_changes=true resumes all the same"):
        make_loop({"resume": True}, data=changed)
    assert make_loop({"resume": True, "allow_changes": True}, data=changed).run().update == 6


def changed(changes, before=None):
    return changed_keys(tiny_tree("run", before), tiny_tree("run", {**(before or {}), **changes}))


@pytest.mark.parametrize(
    "change",
    [
        {"logging.every_updates": 7},
        {"validation.every_updates": 7},
        {"validation.patience": 7},
        {"checkpoints.keep_last": 7},
        {"checkpoints.publish": "best"},
        {"optimization.max_updates": 70},
        {"optimization.token_budget": 70},
        {"decoding.num_beams": 7},
        {"data.folder": "elsewhere"},
        {"card.license": "mit"},
        {"output": "elsewhere"},
    ],
    ids=str,
)
def test_a_harmless_change_is_allowed(change):
    assert changed(change) == []


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 7},
        {"name": "other"},
        {"data.train": "builtin:train:301"},
        {"data.cleaning": {"max_ratio": 3}},
        {"tokenizer.vocab_size": 401},
        {"model.options": {"dropout": 0.2}},
        {"optimization.learning_rate": 0.004},
        {"optimization.tokens_per_update": 2001},
        {"optimization.mixed_precision": "bf16"},
        {"optimization.ema_decay": 0.9},
    ],
    ids=str,
)
def test_a_change_that_makes_it_another_run_is_named(change):
    (key,) = change
    assert all(name.startswith(key) for name in changed(change))
    assert changed(change)


def test_more_updates_are_another_run_where_the_learning_rate_ends_with_them():
    change = {"optimization.max_updates": 70}
    assert changed(change, {"optimization.schedule": "linear"}) == ["optimization.max_updates"]
    assert changed(change, {"optimization.schedule": "paper"}) == []


def test_allowed_changes_are_not_refused(make_loop, tmp_path):
    loop = make_loop({"optimization.max_updates": 2})
    loop.run()
    other = {"optimization.learning_rate": 0.004, "resume": True}
    with pytest.raises(ValueError, match=r"`optimization.learning_rate` must be as in the run that is resumed"):
        check_output_folder(tiny_recipe(tmp_path / "run", other))
    check_output_folder(tiny_recipe(tmp_path / "run", {**other, "allow_changes": True}))


def test_allowed_changes_of_the_optimizer_are_at_work(make_loop):
    make_loop({"optimization.max_updates": 2}).run()
    loop = make_loop({"optimization.beta2": 0.9, "resume": True, "allow_changes": True})
    assert {group["betas"] for group in loop.optimizer.param_groups} == {(0.9, 0.9)}
    assert len(loop.optimizer.state) == len(loop.engine.parameters)


def test_a_folder_that_holds_no_run_is_not_resumed(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="`output` must be the folder of a run where resume=true"):
        check_output_folder(tiny_recipe(tmp_path, {"resume": True}))


def test_a_checkpoint_of_a_newer_heed_is_refused_with_one_line(make_loop, tmp_path):
    loop = make_loop({"optimization.max_updates": 1})
    loop.run()
    path = checkpoint_path(loop.checkpoints, 1)
    text = (path / "training_state/progress.json").read_text().replace('"format": 2', '"format": 9')
    (path / "training_state/progress.json").write_text(text)
    _write_manifest(path)
    with pytest.raises(ValueError, match="has format 9; this Heed reads 2: upgrade it"):
        make_loop({"resume": True})
