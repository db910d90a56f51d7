"""A stopped run goes on as if it had not been, and refuses to go on as another."""

import itertools
import json
import logging
import os
import re
import shutil
import signal
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from accelerate.state import AcceleratorState

from heedful import processor_heed
from heedful.training.loop.loop import TrainingLoop, seed_of_update
from heedful.training.preparation import prepare_corpus
from heedful.training.processes.devices import make_accelerator
from heedful.training.processes.signals import TrainingInterrupted
from heedful.training.recipe_file import to_yaml
from heedful.training.run_folder import checkpoints
from heedful.training.run_folder.checkpoints import checkpoint_path
from heedful.training.run_folder.folder import changed_keys, check_output_folder
from helpers import assert_error, slow_but
from process_checks import write_teacher
from tiny_runs import around, logged, tiny_recipe, tiny_tree

END = 6
# An epoch has four updates, each in several micro-batches; validations and checkpoints come in between.
CHANGES = {"optimization.max_updates": END, "optimization.token_budget": 600, "logging.every_updates": 4}
CHANGES |= {"validation.every_updates": 3, "checkpoints.every_updates": 2, "checkpoints.keep_last": 2}


def final(folder):
    """Return all that a run has come to, but for its clock."""
    path = checkpoint_path(folder / "checkpoints", END)
    state = checkpoints.load_state(path)
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    clock = re.compile("second|per_s|wait")
    timeless = [{key: value for key, value in line.items() if not clock.search(key)} for line in lines]
    progress = replace(state.progress, seconds=0, window={})
    weights = (path / "model.safetensors").read_bytes()
    return weights, state.optimizer, (state.scaler, progress, timeless)


def assert_same(ours, theirs):
    assert ours[0] == theirs[0]
    for number, values in theirs[1]["state"].items():
        assert all(torch.equal(ours[1]["state"][number][name], value) for name, value in values.items())
    assert ours[2] == theirs[2]


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


DROPPED = {"model.options.source_word_dropout": 0.1, "model.options.target_word_dropout": 0.1}
DROPPED |= {"model.options.attention_dropout": 0.1, "model.options.activation_dropout": 0.1}
RECURRENT = {"model.options": {"model_type": "heed_rnn", "hidden_size": 32, "embedding_size": 16, "dropout": 0.2}}
RECURRENT["model.options"] |= {"source_word_dropout": 0.1, "target_word_dropout": 0.1}
SEVERAL = {
    "data.mixture": {"back": {"train": "builtin:train:40", "source": "en", "target": "ko", "to": "ko", "tag": "bt"}},
    "data.temperature": 2.0,
    "data.augmentation": {
        **{"lower_case": 0.1, "upper_case": 0.1, "title_case": 0.1},
        **{"typos": 0.1, "no_final_punctuation": 0.3, "joined": 0.2, "terms": 0.3},
    },
    "data.documents": {"sentences": 3},
}
FEW = {"optimization.r_drop": 5.0, "data.train": "builtin:train:80"}
KINDS = {
    "plain": {},
    "stream": {"data.streaming": True, "data.pool_size": 70},
    "schedule_free": {"optimization.optimizer": "schedule_free", "optimization.weight_decay": 0.1},
    "muon": {"optimization.optimizer": "muon", "optimization.embedding_learning_rate": 0.02},
    "all against overfitting": FEW | DROPPED | SEVERAL,
    "student": FEW | {"optimization.mixed_precision": "bf16"},
    "recurrent student": FEW | RECURRENT,
}

# Inside and at the end of an epoch, before and after a validation. The rest of the product is slow.
QUICK = [("plain", 1), ("plain", 4), ("stream", 3), ("stream", 4)]
QUICK += [("schedule_free", 5), ("muon", 4), ("all against overfitting", 4), ("recurrent student", 3)]


@pytest.mark.parametrize(("kind", "stop"), slow_but(QUICK, itertools.product(KINDS, range(1, END))))
def test_a_run_stopped_after_any_update_ends_as_if_undisturbed(make_loop, corpus, tmp_path, undisturbed, kind, stop):
    if kind == "schedule_free":
        pytest.importorskip("schedulefree")
    data, changes = corpus, {**CHANGES, **KINDS[kind]}
    if kind not in ("plain", "schedule_free", "muon"):
        data = prepare_corpus(tiny_recipe(tmp_path / "any", changes), tmp_path / "tokenizer")
    if "student" in kind:
        changes |= write_teacher(tmp_path / "teacher", data.tokenizers, FEW["data.train"])
    loop, signals = make_loop(changes, tmp_path / "run", data), [signal.SIGINT if stop == 4 else signal.SIGTERM]

    def interrupt():
        # In the middle of the update's micro-batches.
        if loop.progress.update == stop - 1 and signals:
            os.kill(os.getpid(), signals.pop())

    around(loop.engine, "backward", before=interrupt)
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert_error(f"after update {stop} of 6; continue with resume=true", loop.run, error=TrainingInterrupted)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    resumed = make_loop({**changes, "resume": True}, tmp_path / "run", data)
    assert resumed.progress.update == stop
    resumed.run()
    assert_same(final(tmp_path / "run"), undisturbed(kind, make_loop, changes, data))


def half_precision_loop(corpus, folder, changes):
    """Make a loop with a gradient scaler, which Accelerate gives to GPUs only; the CPU's works the same."""
    recipe = tiny_recipe(folder, {**CHANGES, **changes})
    recipe.folder.mkdir(exist_ok=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = make_accelerator(recipe.optimization)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
    return TrainingLoop(recipe, corpus, accelerator)


def test_the_scale_of_half_precision_comes_back(corpus, tmp_path):
    straight = half_precision_loop(corpus, tmp_path / "straight", {})
    straight.run()
    assert straight.accelerator.scaler.get_scale() == 2.0**12
    half_precision_loop(corpus, tmp_path / "resumed", {"optimization.max_updates": 5}).run()
    half_precision_loop(corpus, tmp_path / "resumed", {"resume": True}).run()
    assert_same(final(tmp_path / "resumed"), final(tmp_path / "straight"))


def test_too_large_a_scale_skips_updates_without_an_error(corpus, tmp_path):
    loop = half_precision_loop(corpus, tmp_path / "run", {"optimization.max_updates": 2})
    loop.accelerator.scaler = loop.engine.optimizer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    before = {name: weight.clone() for name, weight in loop.engine.model.named_parameters()}
    progress = loop.run()
    assert (progress.update, progress.skipped_updates) == (2, 2)
    assert loop.accelerator.scaler.get_scale() == 2.0**125
    assert all(torch.equal(before[name], weight) for name, weight in loop.engine.model.named_parameters())


def test_a_run_stopped_before_validation_validates_on_resuming(make_loop, corpus, tmp_path, monkeypatch, undisturbed):
    straight, loop = undisturbed("plain", make_loop, {}, corpus), make_loop(CHANGES, tmp_path / "run")

    def receive_a_signal(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("the run went on")

    with monkeypatch.context() as patch:
        patch.setattr("heedful.training.loop.validation.validation_loss", receive_a_signal)
        assert_error("after update 3 of 6;", loop.run, error=TrainingInterrupted)
    assert checkpoints.load_progress(checkpoint_path(loop.checkpoints.folder, 3)).validated_update == 0
    make_loop({**CHANGES, "resume": True}, tmp_path / "run").run()
    assert_same(final(tmp_path / "run"), straight)
    validated = [line for line in (tmp_path / "run/log.jsonl").read_text().splitlines() if "validation/loss" in line]
    assert len(validated) == 2


def test_a_killed_run_replaces_what_is_damaged_and_has_no_line_of_its_log_twice(make_loop, tmp_path):
    changes, folder = {**CHANGES, "logging.every_updates": 1}, tmp_path / "run"
    make_loop(changes, tmp_path / "straight").run()
    make_loop(changes, folder).run()
    damaged = checkpoint_path(folder / "checkpoints", 6)
    (damaged / "model.safetensors").write_bytes(b"")
    half_written = folder / "checkpoints" / ".update-00000007.abcdefgh.partial"
    half_written.mkdir()
    with (folder / "log.jsonl").open("a") as log:
        log.write('{"update": 7, "train/lo')
    loop = make_loop({**changes, "resume": True}, folder)
    assert loop.progress.update == len(logged(folder, "train/loss")) == 4
    loop.run()
    assert_same(final(folder), final(tmp_path / "straight"))
    assert checkpoints.find_damage(damaged) is None
    assert not half_written.exists()


def test_changed_rows_are_not_trained_on_as_if_they_were_the_same(make_loop, corpus, tmp_path):
    make_loop({"optimization.max_updates": 1}).run()
    changed, changes = replace(corpus, fingerprint="another"), {"resume": True, "optimization.max_updates": 2}
    assert_error("their rows have changed; allow_changes=true resumes anyway", make_loop, changes, data=changed)
    assert make_loop({**changes, "allow_changes": True}, data=changed).run().update == 2
    for streaming in (False, True):
        counts = ("builtin:validation:19", "builtin:validation:20")
        recipes = [{"data.validation": count, "data.streaming": streaming} for count in counts]
        corpora = [prepare_corpus(tiny_recipe(tmp_path, recipe), tmp_path / "tokenizer") for recipe in recipes]
        assert corpora[0].fingerprint != corpora[1].fingerprint


def test_a_run_that_is_validated_otherwise_than_before_forgets_what_was_best(make_loop, corpus, tmp_path):
    before = {"validation.every_updates": 1, "checkpoints.every_updates": 1, "optimization.max_updates": 2}
    before["validation.sentences"] = 2
    make_loop(before).run()
    resumed = {**before, "resume": True, "allow_changes": True}
    for changes, data in (
        ({}, corpus),
        ({"decoding.bleu_tokenizer": "char"}, corpus),  # which the loss does not depend on
        ({"validation.select": "chrf"}, corpus),
        ({}, replace(corpus, fingerprint="another")),
    ):
        loop = make_loop({**resumed, **changes}, data=data)
        is_same = data is corpus and "validation.select" not in changes
        assert (loop.progress.best or (0, 0))[1] == is_same  # 2 was saved before its validation
        select = changes.get("validation.select", "loss")
        assert loop.run().best == (logged(tmp_path / "run", f"validation/{select}")[-1], 2)
        assert len(logged(tmp_path / "run", f"validation/{select}")) == 2


def test_a_run_on_another_kind_of_machine_says_that_it_is_not_equal_to_the_bit(make_loop, monkeypatch, caplog):
    make_loop({"optimization.max_updates": 1}).run()
    changes = {"resume": True, "optimization.max_updates": 2}
    make_loop(changes)
    assert "up to rounding" not in caplog.text
    monkeypatch.setattr(processor_heed, "vendor", lambda: "Another")
    loop = make_loop(changes)
    said = r"was \w+ CPU with .* float32 and is now Another CPU with .* by rounding"
    assert re.search(said, caplog.text)
    loop.run()
    caplog.clear()
    make_loop({**changes, "optimization.max_updates": 3})
    assert "up to rounding" not in caplog.text


def changed(changes, before=None):
    found = changed_keys(tiny_tree("run", before), tiny_tree("run", {**(before or {}), **changes}))
    return [name for name, *_ in found]


HARMLESS = {"logging.every_updates": 7, "validation.patience": 7, "checkpoints.publish": "best", "data.folder": "x"}
HARMLESS |= {"validation.every_updates": 7, "checkpoints.keep_last": 7, "optimization.max_updates": 70}
HARMLESS |= {"optimization.token_budget": 70, "decoding.num_beams": 7, "card.license": "mit", "output": "elsewhere"}
ANOTHER_RUN = {"seed": 7, "name": "other", "data.train": "builtin:train:301", "data.cleaning": {"max_ratio": 3}}
ANOTHER_RUN |= {"tokenizer.vocab_size": 401, "optimization.r_drop": 5.0}
ANOTHER_RUN |= {"validation.select": "chrf", "model.options": {"dropout": 0.2}, "optimization.learning_rate": 0.004}
ANOTHER_RUN |= {"optimization.tokens_per_update": 2001, "optimization.mixed_precision": "bf16"}

# More updates, where the learning rate ends with them, and where a stream lies, which nothing tells from another.
LONGER, ELSEWHERE = {"optimization.max_updates": 70}, {"data.folder": "x", "data.test": {"new": "new.tsv"}}
LATER_RUN = [
    (LONGER, {"optimization.schedule": "linear"}, ["optimization.max_updates"]),
    (LONGER, {"optimization.schedule": "paper"}, []),
    (ELSEWHERE, {"data.streaming": True}, ["data.folder", "data.test.new"]),
    (ELSEWHERE, {}, []),
]


def test_a_change_that_makes_it_another_run_is_named():
    for key, value in HARMLESS.items():
        assert changed({key: value}) == [], key
    for key, value in ANOTHER_RUN.items():
        assert {name.startswith(key) for name in changed({key: value})} == {True}, key
    for change, before, names in LATER_RUN:
        assert changed(change, before) == names


def test_the_random_numbers_of_an_update_are_its_own_and_its_processs(make_loop):
    seeds = {seed_of_update(*numbers) for numbers in itertools.product((1, 2), (0, 1, 2), (0, 1, 2))}
    assert len(seeds) == 18
    found, loop = [], make_loop()
    around(loop.engine, "accumulate", before=lambda: found.append(torch.initial_seed()))
    loop.run()
    assert found == [seed_of_update(1, update, 0) for update in range(6)]


def test_what_the_last_validation_found_is_found_again(make_loop, tmp_path):
    loop = make_loop({**CHANGES, "optimization.max_updates": 3}, tmp_path / "run")
    found = loop.run()
    assert found.best[1] == 3
    # The recipe that goes on validates at other updates, but this one is still to come.
    other = make_loop({**CHANGES, "validation.every_updates": 100, "resume": True}, tmp_path / "run")
    assert other.progress.best is None
    assert other.run().best == found.best
    assert len(logged(tmp_path / "run", "validation/loss")) == 1


def test_the_clock_goes_on_where_it_was(make_loop):
    loop = make_loop({"optimization.max_minutes": 25.0})
    around(loop, "_train_on", before=lambda: setattr(loop, "_started", loop._started - 600))
    assert loop.run().update == 3
    resumed = make_loop({"optimization.max_minutes": 25.0, "resume": True})
    assert resumed.progress.seconds > 1800
    assert resumed.run().update == 3
    changes = {"optimization.max_minutes": 70.0, "optimization.max_updates": 4, "resume": True}
    assert make_loop(changes).run().update == 4


def test_a_damaged_line_of_the_log_is_dropped_with_a_warning(make_loop, tmp_path, caplog):
    make_loop({"optimization.max_updates": 2}).run()
    damaged = [b'{"update": 1, "x": "\xff"}', b'{"train/loss": 2.0}', b'{"update": null}', b'"x"', b'{"update": 7, "x']
    with (tmp_path / "run/log.jsonl").open("ab") as log:
        log.write(b"\n".join(damaged) + b"\n")
    with caplog.at_level(logging.WARNING, logger="heedful"):
        make_loop({"optimization.max_updates": 3, "resume": True}).run()
    assert "log.jsonl are dropped: 3, 4, 5" in caplog.text
    assert len(logged(tmp_path / "run", "train/loss")) == 3


def test_a_damaged_tokenizer_of_the_run_is_restored_from_a_checkpoint(make_loop, tmp_path):
    make_loop({"optimization.max_updates": 1}).run()
    folder = tmp_path / "run/tokenizer"
    corpus = prepare_corpus(tiny_recipe(tmp_path / "run"), folder)
    half = (folder / "tokenizer.json").read_text(encoding="utf-8")[:1000]
    for damage in ("half", "empty", "missing"):
        shutil.rmtree(folder)
        if damage != "missing":
            folder.mkdir()
            if damage == "half":
                (folder / "tokenizer.json").write_text(half, encoding="utf-8")
            with pytest.raises(ValueError, match="`output` must be a run's folder with a whole tokenizer"):
                prepare_corpus(tiny_recipe(tmp_path / "run"), folder)
        resumed = prepare_corpus(tiny_recipe(tmp_path / "run", {"resume": True}), folder)
        assert resumed.fingerprint == corpus.fingerprint
        assert prepare_corpus(tiny_recipe(tmp_path / "run"), folder).fingerprint == corpus.fingerprint


def test_all_checkpoints_damaged_are_refused_and_left_alone(make_loop, tmp_path):
    loop = make_loop({"optimization.max_updates": 1})
    loop.run()
    path = checkpoint_path(loop.checkpoints.folder, 1)
    state, weights = path / "training_state", (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(b"")
    assert_error("all are damaged", make_loop, {"resume": True})
    assert path.is_dir()
    # And a newer recipe does not hide that the checkpoint is newer.
    (path / "model.safetensors").write_bytes(weights)
    (state / "progress.json").write_text((state / "progress.json").read_text().replace('"format": 3', '"format": 9'))
    (state / "recipe.yaml").write_text("new_key: 1\n" + (state / "recipe.yaml").read_text())
    checkpoints.write_manifest(path)
    for resume in (check_output_folder, lambda recipe: make_loop({"resume": True})):
        with pytest.raises(ValueError, match="has format 9; this Heedful loads 3: upgrade Heedful"):
            resume(tiny_recipe(tmp_path / "run", {"resume": True}))


def test_a_signal_during_the_last_save_is_obeyed(make_loop):
    loop = make_loop({"optimization.max_updates": 1})
    around(loop.checkpoints, "save", before=lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert_error("after update 1", loop.run, error=TrainingInterrupted)


ALLOWED, RATE = {"allow_changes": True}, {"optimization.learning_rate": 0.004}
FREE = {"optimization.optimizer": "schedule_free", "optimization.schedule": None}
RESUMED = [  # the recipe of the run, what is changed, and what is said
    ({}, RATE, "`optimization.learning_rate` must be as in the resumed run"),
    ({}, RATE | ALLOWED, None),
    ({}, {"tokenizer.vocab_size": 500}, r"`tokenizer.vocab_size` must be as in the resumed run .*\(400\), but is 500"),
    ({}, {"tokenizer.vocab_size": 500, **ALLOWED}, "`tokenizer.vocab_size` must be .* the weights fit only that"),
    ({}, {"optimization.optimizer": "adamw", **ALLOWED}, None),
    ({}, {"optimization.optimizer": "muon", **ALLOWED}, r"optimizer` must be .*\(adam\), .* continue with its state"),
    (FREE, {"optimization.beta1": 0.95, **ALLOWED}, r"beta1` must be as .*\(0.9\), but is 0.95 instead: the averaged"),
]


def test_allowed_changes_are_not_refused(tmp_path):
    (tmp_path / "run").mkdir()
    written = tmp_path / "run/recipe.yaml"
    for before, changes, message in RESUMED:
        written.write_text(to_yaml(tiny_recipe(tmp_path / "run", before)))
        recipe = tiny_recipe(tmp_path / "run", {**before, **changes, "resume": True})
        with nullcontext() if message is None else pytest.raises(ValueError, match=message):
            check_output_folder(recipe)
    written.write_text(written.read_text() + "unheard_of: 1\n")
    message = r"has a recipe \(.*recipe.yaml\) from another version: `unheard_of` is not a key"
    assert_error(message, check_output_folder, recipe)
    written.rename(tmp_path / "run/notes.yaml")
    assert_error("`output` must be a run's folder with resume=true", check_output_folder, recipe)


def test_allowed_changes_of_the_optimizer_are_at_work(make_loop):
    make_loop({"optimization.max_updates": 1}).run()
    loop = make_loop({"optimization.beta2": 0.9, "optimization.max_updates": 2, "resume": True, **ALLOWED})
    assert {group["betas"] for group in loop.engine.optimizer.param_groups} == {(0.9, 0.9)}
    assert len(loop.engine.optimizer.state) == len(loop.engine.parameters)


def test_a_run_that_came_further_than_a_lowered_number_of_epochs_stays_where_it_is(make_loop):
    changes = {"optimization.max_epochs": 2, "optimization.max_updates": None, "optimization.tokens_per_update": 9000}
    there = make_loop(changes).run()
    again = make_loop(changes | {"optimization.max_epochs": 1, "resume": True}).run()
    assert (again.epoch, again.update_in_epoch, again.update) == (2, 0, there.update)
