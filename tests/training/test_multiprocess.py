"""Two real processes give what one gives."""

import json

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

import forked
import process_checks
from heedful.training.loop.loop import seed_of_update
from heedful.training.preparation import prepare_corpus
from process_checks import END, NO_DROPOUT, R_DROP, STREAM, losses_of, make_loop, rows_of, with_stand_in_for_dropout
from tiny_runs import logged, tiny_recipe

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def two(tmp_path_factory, corpus):
    """What each of two processes measured, and their folder, where one process had begun a run before."""
    AcceleratorState._reset_state(reset_partial_state=True)
    folder = tmp_path_factory.mktemp("two")
    begun, accelerator = {**NO_DROPOUT, "optimization.max_updates": 3}, Accelerator(cpu=True)
    make_loop(folder / "alone", begun, corpus, accelerator).run()
    process_checks.write_teacher(folder / "teacher", corpus.tokenizers)
    forked.run(2, folder, process_checks.main, folder)
    return folder, [json.loads((folder / f"result-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("one")
    return folder, process_checks.measure(folder)


def test_there_are_two_processes_of_which_one_writes_for_both(two, one):
    assert [measured["processes"] for measured in (*two[1], one[1])] == [[2] * 3, [2] * 3, [1] * 3]
    names = {path.name for path in (two[0] / "plain").iterdir()}
    assert names == {"recipe.yaml", "log.jsonl", "tokenizer", "checkpoints", "model", "training_sources.bin"}
    assert len((two[0] / "plain/log.jsonl").read_text().splitlines()) == END + 2


def test_training_losses_are_the_same(two, one):
    """In a run whose updates of one pair leave a process without rows, too; and so are the final weights."""
    for name in ("training_losses", "losses_of_single_rows"):
        assert len(one[1][name]) == END
        assert two[1][0][name] == pytest.approx(one[1][name], rel=1e-5), name
    assert two[1][0]["target_tokens"] == one[1]["target_tokens"]
    ours, theirs = (load_file(where[0] / "plain/model/model.safetensors") for where in (two, one))
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert (ours[name] - weight).norm() <= 1e-5 * weight.norm(), name


def test_translations_and_scores_are_the_same_and_in_order(two, one):
    assert len(one[1]["translations"]) == 9
    assert len(set(one[1]["translations"])) > 1
    for measured in two[1]:
        assert measured["validation_losses"] == pytest.approx(one[1]["validation_losses"], rel=1e-5)
        assert measured["translations"] == one[1]["translations"]
        assert measured["scores"] == pytest.approx(one[1]["scores"], abs=1e-6)
        assert measured["count"] == 7


def test_what_regularizes_resumes_bit_for_bit_and_draws_the_same_rows_on_every_process(two, tmp_path):
    corpus = prepare_corpus(tiny_recipe(tmp_path, {**process_checks.REGULAR, **STREAM}), tmp_path / "tokenizer")
    rows = rows_of(corpus, 1)
    several = prepare_corpus(tiny_recipe(tmp_path, process_checks.SEVERAL), tmp_path / "tagged")
    mixed = list(several.training.updates(1))
    alone = make_loop(tmp_path / "rows", {**R_DROP, **STREAM}, corpus, Accelerator(cpu=True))
    with_stand_in_for_dropout(alone).run()
    for check in two[1]:
        assert check["regular"]["exact"]
        assert check["regular"]["rows"] == rows
        assert check["regular"]["mixed"] == mixed
        for losses, expected in zip(check["regular"]["losses"], losses_of(tmp_path / "rows"), strict=True):
            assert losses == pytest.approx(expected, rel=1e-4)


def test_two_processes_follow_a_teacher_as_one_does_and_resume_bit_for_bit_after_any_update(two, corpus, tmp_path):
    changes = {**R_DROP, "optimization.distillation": str(two[0] / "teacher")}
    with_stand_in_for_dropout(make_loop(tmp_path / "alone", changes, corpus, Accelerator(cpu=True))).run()
    for check in two[1]:
        assert check["distilled"]["exact"]
        for losses, alone in zip(check["distilled"]["losses"], losses_of(tmp_path / "alone"), strict=True):
            assert losses == pytest.approx(alone, rel=1e-4)


def test_two_processes_train_with_every_optimizer_as_one_does_and_resume_bit_for_bit(two, corpus, tmp_path):
    for name, changes in {"free": process_checks.FREE, "muon": process_checks.MUON}.items():
        make_loop(tmp_path / name, {**NO_DROPOUT, **changes}, corpus, Accelerator(cpu=True)).run()
        alone = [logged(tmp_path / name, each) for each in ("train/loss", "validation/loss")]
        for check in two[1]:
            assert check["optimized"][name]["exact"]
            for losses, expected in zip(check["optimized"][name]["losses"], alone, strict=True):
                assert losses
                assert losses == pytest.approx(expected, rel=1e-5 if name == "free" else 1e-4)


def test_another_number_of_processes_goes_on_with_the_same_updates(two, one, corpus):
    straight = one[1]["training_losses"]
    assert len(straight) == END
    for check in two[1]:
        assert check["number"]["before"] == 3
        assert check["number"]["losses"] == pytest.approx(straight, rel=1e-5)
    changes = {**NO_DROPOUT, "resume": True}
    folder = two[0] / "number"
    loop = make_loop(folder, changes, corpus, Accelerator(cpu=True))
    assert loop.progress.update == 3
    loop.run()
    assert logged(folder, "train/loss") == pytest.approx(straight, rel=1e-5)


def test_a_stream_is_encoded_in_shares_and_comes_whole_to_every_process(two, tmp_path):
    recipe = tiny_recipe(tmp_path, {**STREAM, "data.max_source_tokens": 30, "data.train": "builtin:train:301"})
    alone = prepare_corpus(recipe, two[0] / "stream" / "tokenizer")
    expected = rows_of(alone, 0)
    kept = alone.report.kept
    assert 100 < len(expected) < kept - 10  # some are too long
    assert [check["stream"]["rows"] for check in two[1]] == [expected] * 2
    shares = [check["stream"]["encoded"] for check in two[1]]
    assert sum(shares) == kept
    assert max(shares) <= kept / 2 + 32


def test_sharded_weights_are_in_parts_and_train_to_the_same(two):
    for rank, check in enumerate(two[1]):
        sharded = check["sharded"]
        assert len(sharded["shares"]) == sharded["parameters"] > 20
        assert max(sharded["shares"]) <= 0.75
        assert sum(sharded["shares"]) / len(sharded["shares"]) == pytest.approx(0.5, abs=0.05), rank
        for name, (whole, parts) in sharded["logged"].items():
            assert len(whole) >= 2, name
            assert parts == pytest.approx(whole, rel=1e-5), name
        assert sharded["difference"] < 1e-4


def test_a_checkpoint_of_sharded_weights_is_an_ordinary_folder_and_resumes_bit_for_bit(two):
    for check in two[1]:
        sharded = check["sharded"]
        assert sharded["class"] == "HeedForConditionalGeneration"
        assert {"model.safetensors", "config.json", "tokenizer.json", "modeling_heed.py"} <= set(sharded["files"])
        assert sharded["exact"]


def test_sharded_and_whole_runs_go_on_with_each_other(two, one):
    """And memory that runs out in one process shrinks the budget of both."""
    for check in two[1]:
        assert check["shrunk"]["budget"] == 350
        for losses in (check["sharded"]["mixed_losses"], check["shrunk"]["losses"]):
            assert losses == pytest.approx(one[1]["training_losses"], rel=1e-5)


def test_an_update_that_is_spoilt_in_one_process_is_skipped_by_both(two):
    first, second = (check["skipped"] for check in two[1])
    assert first == second == {"skipped": 1, "update": END, "sum": first["sum"]}


def test_whatever_ends_a_run_is_decided_once_for_all_processes(two):
    told = f"stopped after update 3 of {END}; continue with resume=true"
    expected = {"late": 3, "patient": 4, "told": told, "full": [2, END], "unsaved": "No space left on device"}
    for check in two[1]:
        assert check["ends"].items() >= expected.items()
        assert "a weight is not finite" in check["ends"]["poisoned"]


def test_gpus_train_compiled_on_updates_made_ahead_and_stop_together_one_update_late(two, one):
    mean = sum(one[1]["training_losses"]) / END
    for check in two[1]:
        found = check["gpus"]
        assert found["is_compiled"]
        assert found["straight_losses"] == [pytest.approx(mean, rel=2e-3)]  # a mean over tokens, not over updates
        # Told in update 2, before the third is taken; heard when its result is read, which is during the fourth.
        assert found["end"] == f"stopped after update 4 of {END}; continue with resume=true"
        assert found["kept"][:3] == [1, 1, 1]
        assert found["resumed"]
        assert found["told_losses"] == found["straight_losses"]  # the checkpoint knows the fourth update's too
        # Warmed up in too little memory.
        assert found["small_losses"] == pytest.approx(found["straight_losses"], rel=1e-5)


def test_the_padding_of_all_processes_is_logged_and_each_draws_its_own_random_numbers(two):
    assert [check["padding"]["seed"] for check in two[1]] == [seed_of_update(1, 2, rank) for rank in (0, 1)]
    for check in two[1]:
        assert check["padding"]["logged"] == [pytest.approx(check["padding"]["share"])]
        assert check["padding"]["share"] > 0.01
        assert check["regular"]["threads"] == ["MainThread"]  # which read a stream
