import json
import logging
import math
import re
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq

from heedful.cards.run_card import facts_in_numbers, publish_run, write_run_card
from heedful.decoding.translation import Translator
from heedful.training import run
from heedful.training.loop.loop import TrainingLoop
from heedful.training.processes.devices import make_accelerator
from heedful.training.processes.heartbeat import Watch
from heedful.training.recipe_file import make_recipe, read_recipe
from heedful.training.run import train
from heedful.training.run_folder.folder import RUN_FILES, check_output_folder, folder_of_run, foreign_files
from heedful.training.run_folder.progress import Progress, early_end
from heedful_lab.korean_english.pairs import korean_english_pairs
from helpers import assert_error, assert_refused
from process_checks import equal
from tiny_runs import logged, tiny_recipe

CHANGES = {
    "data.test": {"small": "builtin:test:6", "other": "builtin:compositional:5"},
    "checkpoints.every_updates": 2,
    "checkpoints.keep_last": 2,
    "validation.every_updates": 3,
    "validation.sentences": 4,
    "decoding.bootstrap": 40,
    "decoding.num_beams": 2,
    "decoding.length_penalty": 0.6,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of six updates; nobody may change its folder."""
    AcceleratorState._reset_state(reset_partial_state=True)
    return train(tiny_recipe(tmp_path_factory.mktemp("finished") / "run", CHANGES))


def test_processes_watch_each_other_from_before_the_data_are_read_until_all_are_about_to_train(tmp_path, monkeypatch):
    seen, prepare = [], run.prepare_corpus

    class Watching(Watch):
        def __exit__(self, *error):
            seen.append("left")

    monkeypatch.setattr(run, "make_watch", lambda _, patience: seen.append(patience) or Watching())
    monkeypatch.setattr(run, "prepare_corpus", lambda *given: seen.append("prepared") or prepare(*given))
    loop = Mock(side_effect=lambda *_: seen.append("made") or Mock(run=Mock(side_effect=KeyboardInterrupt)))
    monkeypatch.setattr(run, "TrainingLoop", loop)
    with pytest.raises(KeyboardInterrupt):
        train(tiny_recipe(tmp_path / "run"))
    assert seen == [60, "prepared", "made", "left"]


def test_the_folders_of_the_run_and_of_its_model_hold_all_it_takes(finished):
    folder = finished.recipe.folder
    names = {path.name for path in folder.iterdir()}
    assert names == {"recipe.yaml", "log.jsonl", "tokenizer", "checkpoints", "model", "training_sources.bin"}
    assert names <= set(RUN_FILES)
    assert read_recipe(folder / "recipe.yaml") == finished.recipe
    assert finished.progress.update == len(logged(folder, "train/loss")) == 6
    assert len(logged(folder, "validation/loss")) == len(logged(folder, "validation/chrf")) == 2
    assert logged(folder, "update") == sorted(logged(folder, "update"))
    published = make_recipe(yaml.safe_load((finished.folder / "recipe.yaml").read_text()))
    assert published == replace(finished.recipe, output="run")  # without the folders of this machine
    written = json.loads((finished.folder / "generation_config.json").read_text())
    assert (written["num_beams"], written["length_penalty"], written["max_length"]) == (2, 0.6, 24)


def test_metrics_are_those_of_the_published_model(finished):
    written = json.loads((finished.folder / "metrics.json").read_text())
    assert written.keys() == finished.metrics.keys() == {"validation", "small", "other"}
    assert (written["small"]["count"], written["other"]["count"]) == (6, 5)
    assert 0 <= written["small"]["chrf_interval"][0] <= written["small"]["chrf_interval"][1] <= 100
    loss = written["validation"]["loss"]
    assert written["validation"]["perplexity"] == pytest.approx(math.exp(loss))
    # transformers alone loads the model and its tokenizer, and finds the same.
    model = AutoModelForSeq2SeqLM.from_pretrained(finished.folder)
    tokenizer = AutoTokenizer.from_pretrained(finished.folder)
    assert model.config.vocab_size == len(tokenizer) == 400
    assert finished.parameters == model.num_parameters()
    rows = [tokenizer(pair["source"], text_target=pair["target"]) for pair in finished.corpus.validation_pairs]
    assert model(**DataCollatorForSeq2Seq(tokenizer)(rows)).loss.item() == pytest.approx(loss, rel=1e-5)


def test_validation_and_tests_score_against_all_that_is_right_and_ignore_what_the_recipe_says(tmp_path):
    pairs = list(korean_english_pairs("test", 6))
    rows = [{**pair, "right": [f"{number}", pair["en"]]} for number, pair in enumerate(pairs)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    file = str(tmp_path / "pairs.jsonl")
    changes = {"data.validation": file, "data.test": {"held out": file}, "data.references": "right"}
    changes |= {"decoding.ignore": r"\D", "validation.every_updates": 3, "validation.sentences": 6}
    result = train(tiny_recipe(tmp_path / "run", {**changes, "validation.select": "character_error_rate"}))
    scores = json.loads((result.folder / "metrics.json").read_text())["held out"]
    # Without all but digits nothing is left of the targets, so whatever has no digit equals them.
    assert (scores["exact_match"], scores["token_error_rate"], scores["ignore"]) == (100, 0, r"\D")
    assert "nrefs:2" in scores["bleu_signature"]
    assert logged(result.recipe.folder, "validation/exact_match") == [100, 100]
    assert logged(result.recipe.folder, "validation/character_error_rate") == [0, 0]


def test_what_cannot_be_used_is_refused_before_anything_is_written(finished, tmp_path, monkeypatch):
    check_output_folder(tiny_recipe(tmp_path))  # which is empty
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cases = [
        ((finished.recipe.folder, {**CHANGES, "seed": 2, "resume": True}), "`seed` must be as in the resumed run"),
        ((finished.recipe.folder, {}), r"`output` must be an empty folder.*resume=true.*overwrite=true.*output="),
        (("file", {"overwrite": True}), r"`output` must be a folder, but .*file is a file"),
        (("file/run", {}), "`output` must be a folder that can be made"),
        (("run", {"logging.trackers": ["mist"]}), r"`logging.trackers` must name installed ones .* names mist"),
        (("run", {"decoding.bleu_tokenizer": "13b"}), r"`tokenize` must be one of .*13a.*but is '13b' instead"),
        (("run", {"optimization.device": "cuda"}), r"`optimization.device` must be cpu or auto if there is no GPU"),
    ]
    assert_refused(cases, lambda given: train(tiny_recipe(tmp_path / given[0], given[1])))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ValueError, match=r"must be NO, MULTI_GPU or FSDP .*, but is DEEPSPEED instead: fsdp2\.yaml"):
        train(tiny_recipe(tmp_path / "run"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_no_run_has_written_is_not_deleted(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    finished.corpus.tokenizers.save_pretrained("run/tokenizer")
    for changes in ({}, {"overwrite": True}, {"tokenizer.path": "run/tokenizer"}):
        assert_error(r"`output` must be .*empty", train, tiny_recipe(tmp_path / "run", changes))
    Path("mine/model").mkdir(parents=True)
    Path("mine/model/thesis.txt").write_text("mine")
    for recipe in (None, "x", "output: mine\nname: mine\ndata: {}\n"):  # which makes no folder a run's
        if recipe is not None:
            Path("mine/recipe.yaml").write_text(recipe)
        with pytest.raises(ValueError, match="`output` must be empty or a run's folder"):
            train(tiny_recipe(tmp_path / "mine", {"overwrite": True}))
        assert recipe is None or Path("mine/recipe.yaml").read_text() == recipe
    assert Path("run/tokenizer/tokenizer.json").is_file()
    assert Path("mine/model/thesis.txt").read_text() == "mine"


def test_all_that_a_run_with_two_tokenizers_writes_is_the_runs(tmp_path):
    changes = {"tokenizer.joint": False, "tokenizer.vocab_size": 300, "optimization.max_updates": 1}
    write_run_card(train(tiny_recipe(tmp_path / "run", changes)))
    folders = [tmp_path / "run" / name for name in ("model", "tokenizer")]
    assert list(map(foreign_files, folders)) == [[], []]
    for name in ("thesis.txt", "onnx/config.json", "target_tokenizer/a.txt"):
        (folders[0] / name).parent.mkdir(exist_ok=True)
        (folders[0] / name).write_text("mine")
    assert list(map(str, foreign_files(folders[0]))) == ["onnx/config.json", "target_tokenizer/a.txt", "thesis.txt"]


def test_a_mistake_before_training_leaves_a_folder_that_the_corrected_recipe_can_use(tmp_path):
    folder = tmp_path / "run"
    short = {"model.options.position_encoding": "learned", "model.options.max_position_embeddings": 8}
    assert_error(r"`data.train` must have at most 8 tokens in a row", train, tiny_recipe(folder, short))
    assert [path.name for path in folder.iterdir()] == ["tokenizer"]
    result = train(tiny_recipe(folder, {"tokenizer.vocab_size": 390, "optimization.max_updates": 1}))
    assert len(result.corpus.tokenizers.source) == 390
    # Of a stream it shows in training that all its pairs are too long.
    with pytest.raises(ValueError, match=r"No training pair is left: 300 .*`data.max_source_tokens` \(2\)"):
        train(tiny_recipe(tmp_path / "other", {"data.streaming": True, "data.max_source_tokens": 2}))


def test_two_runs_in_one_folder_are_refused(tmp_path):
    recipe = tiny_recipe(tmp_path / "run")
    with folder_of_run(recipe.folder), pytest.raises(ValueError, match="another run is writing into"):
        train(recipe)
    assert train(tiny_recipe(tmp_path / "run", {"optimization.max_updates": 1})).progress.update == 1


def test_overwriting_moves_an_earlier_run_aside_with_everything_in_its_folder(finished, tmp_path, caplog):
    folder, left = tmp_path / "run", tmp_path / "run.replaced"  # what an earlier version left
    shutil.copytree(finished.recipe.folder, folder)
    for file in (folder / "notes.txt", folder / "model/mine/a.txt", left / "log.jsonl", tmp_path / "run.1/b.txt"):
        file.parent.mkdir(exist_ok=True)
        file.write_text("mine")
    before = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    mistake = {"data.train": "no_such_file.jsonl"}  # leaves a folder that the corrected recipe can use
    with pytest.raises(FileNotFoundError):
        train(tiny_recipe(folder, {"overwrite": True, **mistake}))
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="heedful"):
        result = train(tiny_recipe(folder, {"optimization.max_updates": 1, "overwrite": True, "seed": 3}))
    aside = tmp_path / "run.2"
    assert {path.relative_to(aside): path.read_bytes() for path in aside.rglob("*") if path.is_file()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.1", "run.2", "run.replaced"]
    assert (left / "log.jsonl").read_text() == (tmp_path / "run.1/b.txt").read_text() == "mine"
    assert len(logged(folder, "train/loss")) == result.progress.update == 1
    assert logged(folder, "train/loss") != logged(aside, "train/loss")[:1]  # of another seed
    assert "is now in" not in caplog.text  # it was moved by the recipe with the mistake


def test_what_overwriting_does_is_said_and_what_it_cannot_move_refused(finished, tmp_path, monkeypatch, caplog):
    folder = shutil.copytree(finished.recipe.folder, tmp_path / "disk/run")
    (tmp_path / "link").symlink_to(folder)
    recipe = tiny_recipe(tmp_path / "link", {"overwrite": True})
    with monkeypatch.context() as patch:
        patch.chdir(folder / "model")
        assert_error("`output` must not hold the working directory with overwrite=true", check_output_folder, recipe)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", Mock(side_effect=OSError("Device or resource busy")))
        assert_error("must be a folder that can be renamed", folder_of_run(recipe.folder, overwrite=True).__enter__)
    with folder_of_run(folder), pytest.raises(ValueError, match="another run is writing into"):
        folder_of_run(recipe.folder, overwrite=True).__enter__()
    with caplog.at_level(logging.INFO, logger="heedful"), folder_of_run(recipe.folder, overwrite=True):
        assert list(folder.iterdir()) == []
        assert_error("another run is writing into", folder_of_run(folder).__enter__)
    assert f"the earlier run in {folder} is now in {folder}.1" in caplog.text
    assert (tmp_path / "disk/run.1/model/config.json").is_file()


def test_a_resumed_run_may_go_on_for_longer_and_publishes_what_an_undisturbed_one_does(finished, tmp_path):
    folder = tmp_path / "run"
    first = train(tiny_recipe(folder, {**CHANGES, "checkpoints.publish": "best", "optimization.max_updates": 2}))
    # It has ended before its first validation, so that its best weights are its last.
    paths = first.folder, folder / "checkpoints/update-00000002"
    assert equal(*(load_file(path / "model.safetensors") for path in paths))
    (folder / "model" / "thesis.txt").write_text("mine")
    before = (folder / "recipe.yaml").read_text()
    with pytest.raises(ValueError, match="`model` must have the resumed run's sizes"):
        train(tiny_recipe(folder, CHANGES | {"model.options.d_model": 64, "resume": True, "allow_changes": True}))
    assert (folder / "recipe.yaml").read_text() == before
    result = train(tiny_recipe(folder, {**CHANGES, "resume": True}))
    assert result.progress.update == 6
    assert equal(*(load_file(where.folder / "model.safetensors") for where in (result, finished)))
    assert result.metrics == finished.metrics
    assert (folder / "model" / "thesis.txt").read_text() == "mine"


def test_a_run_that_ends_before_its_last_update_says_why_and_goes_on_as_it_says(tmp_path, caplog):
    key = "optimization.max_minutes"
    changes = {"optimization.max_updates": 5, "optimization.schedule": "linear", key: 1e-6}

    def run(**more):
        result = train(tiny_recipe(tmp_path / "run", {**changes, **more}))
        *_, told = publish_run(result)
        card = (result.folder / "README.md").read_text(encoding="utf-8")
        return result, json.loads((result.folder / "metrics.json").read_text()), told, card

    result, written, told, card = run()
    assert written == {**result.metrics, "ended": {"by": key, "update": 1, "max_updates": 5, "message": told}}
    assert result.ended == facts_in_numbers(result)["ended"] == (told,)
    assert told.startswith(f"Training ended after update 1 of 5, by `{key}` (")
    assert f"\n{told}\n" in card
    assert [record.levelname for record in caplog.records if record.getMessage() == told] == ["WARNING"]
    again = run(resume=True)  # nothing has changed
    assert (again[0].progress.update, again[2]) == (1, told)
    result, written, told, card = run(resume=True, **{key: 60})
    assert (result.progress.update, result.ended) == (5, ())
    assert written == result.metrics
    assert "ended" not in facts_in_numbers(result)
    assert "Training ended" not in told + card


CLOCK_ENDS, EPOCHS = "optimization.max_minutes", {"optimization.max_updates": None, "optimization.max_epochs": 3}
EARLY = [  # what ended a run, what its recipe says of its end, and what is told
    (None, {}, "None"),
    (CLOCK_ENDS, {"optimization.max_updates": None}, "None"),  # the only end that the recipe has
    ("validation.patience", {}, "1,230 of 6, by `valid.* in 3 validations.* continue with `resume=true val.*=…`"),
    (CLOCK_ENDS, EPOCHS, "1,230, in epoch 2 of 3, by `optim.* [(]4.5 minutes[)]: .* fewer `max_epochs`, whose"),
    (CLOCK_ENDS, EPOCHS | {"optimization.max_updates": 2000}, "1,230 of 2,000, in epoch 2 of 3, by .* whose sched"),
]


def test_an_end_is_early_by_what_else_limits_the_run():
    for by, changes, told in EARLY:
        recipe = tiny_recipe(Path("run"), {"validation.patience": 3, "optimization.max_minutes": 4.5} | changes)
        end = early_end(by, recipe.optimization, 3, Progress(update=1230, epoch=1))
        assert re.search(told, str(end.get("message"))), changes


def test_a_run_in_tf32_multiplies_by_it_to_its_end_and_not_afterwards(tmp_path, monkeypatch):
    found, before = [], torch.get_float32_matmul_precision()

    def noting(function):
        return lambda *given: found.append(torch.get_float32_matmul_precision()) or function(*given)

    # The CPU has none: the rest of the run is one in float32.
    in_float32 = lambda settings, *rest: make_accelerator(replace(settings, mixed_precision="no"), *rest)  # noqa: E731
    monkeypatch.setattr(run, "make_accelerator", in_float32)
    monkeypatch.setattr(run, "score_published", noting(run.score_published))
    monkeypatch.setattr(TrainingLoop, "_train_on", noting(TrainingLoop._train_on))
    train(tiny_recipe(tmp_path / "run", {"optimization.mixed_precision": "tf32", "optimization.max_updates": 2}))
    assert found == ["high"] * 3
    assert torch.get_float32_matmul_precision() == before


def test_both_directions_end_in_one_model_that_translates_either_way_and_a_run_of_one_goes_on_from_it(tmp_path):
    back = {"train": "builtin:train:300", "source": "en", "target": "ko", "to": "ko"}
    changes = {"data.mixture": {"b": back}, "data.test": {"t": "builtin:test:3"}, "optimization.max_updates": 2}
    changes |= {"validation.every_updates": 2, "validation.sentences": 2}
    result = train(tiny_recipe(tmp_path / "run", changes))
    assert (result.metrics["t"]["count"], result.corpus.training.pairs) == (3, 600)
    translator = Translator.from_pretrained(result.folder)
    for language in ("en", "ko"):
        assert len(translator.translate(["네."], target_language=language, max_new_tokens=5)) == 1
    one = {"model": {"start_from": str(result.folder)}, "tokenizer": {}, "optimization.max_updates": 3}
    one |= {"optimization.schedule": "linear", "optimization.learning_rate": 0.001, "optimization.warmup_updates": 1}
    further = train(tiny_recipe(tmp_path / "one", one))
    known, before = further.corpus.tokenizers, result.corpus.tokenizers
    assert known.source.get_vocab() == before.source.get_vocab()
    assert (further.corpus.target_language, further.corpus.training.pairs) == ("en", 300)
    assert further.corpus.training.rows[0]["input_ids"][:1] == before.head("en")
    assert logged(tmp_path / "one", "train/learning_rate") == pytest.approx([0.001, 0.0005, 0])
    assert logged(tmp_path / "one", "train/loss")[0] < logged(tmp_path / "run", "train/loss")[0] - 0.1


def test_a_tracker_goes_back_with_a_resumed_run_and_ends_none(tmp_path, monkeypatch, caplog):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    changes = {"logging.trackers": ["tensorboard"], "logging.every_updates": 1, "checkpoints.every_updates": 2}
    changes |= {"checkpoints.keep_last": 9, "validation.every_updates": 2}
    train(tiny_recipe(tmp_path / "run", changes | {"optimization.max_updates": 3}))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "update-00000003")  # as if it had been killed then
    train(tiny_recipe(tmp_path / "run", changes | {"optimization.max_updates": 4, "resume": True}))
    events = EventAccumulator(str(tmp_path / "run" / "trackers" / "tiny"))
    events.Reload()
    for name, updates in (("train/loss", [1, 2, 3, 4]), ("validation/loss", [2, 4])):
        assert [event.step for event in events.Scalars(name)] == updates
        values = [event.value for event in events.Scalars(name)]
        assert values == pytest.approx(logged(tmp_path / "run", name))

    def fail(*_, **__):
        raise OSError("No space left on device")

    for method in ("start", "log", "finish"):
        monkeypatch.setattr(f"accelerate.tracking.TensorBoardTracker.{method}", fail)
    assert train(tiny_recipe(tmp_path / "full", changes | {"optimization.max_updates": 3})).progress.update == 3
    assert "trackers cannot be started, so the run goes on without them: No space left on device" in caplog.text
    assert "the tracker tensorboard lost values: No space left on device" in caplog.text


def test_trackio_gets_what_the_log_gets_and_says_nothing_between_results(tmp_path, capsys):
    folder = pytest.importorskip("trackio.utils").TRACKIO_DIR  # in the tests' own HF_HOME
    changes = {"data.test": {"t": "builtin:test:3"}, "optimization.max_updates": 2, "logging.trackers": ["trackio"]}
    train(tiny_recipe(tmp_path / "run", changes))
    with closing(sqlite3.connect(folder / "tiny.db")) as database:
        kept = [json.loads(row) for (row,) in database.execute("select metrics from metrics")]
    assert [row["train/loss"] for row in kept if "train/loss" in row] == logged(tmp_path / "run", "train/loss")
    assert "test/t/chrf" in kept[-1]
    assert capsys.readouterr().out == ""
