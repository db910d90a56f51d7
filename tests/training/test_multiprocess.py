"""Two real processes give what one gives."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from process_run import measure
from safetensors.torch import load_file

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What each of two processes measured, and their folder."""
    folder = tmp_path_factory.mktemp("two")
    script = Path(__file__).with_name("process_run.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", script, folder]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return folder, [json.loads((folder / f"result-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("one")
    return folder, measure(folder)


def test_there_are_two_processes(two, one):
    for measured in two[1]:
        assert [measured[name] for name in measured if name.startswith("processes")] == [2, 2, 2]
    assert one[1]["processes"] == one[1]["processes_of_torch"] == 1


def test_training_losses_are_the_same(two, one):
    assert len(one[1]["training_losses"]) == 6
    assert two[1][0]["training_losses"] == pytest.approx(one[1]["training_losses"], rel=1e-5)
    assert two[1][0]["target_tokens"] == one[1]["target_tokens"]


def test_a_process_without_rows_takes_part(two, one):
    assert len(one[1]["losses_of_single_rows"]) == 6
    assert two[1][0]["losses_of_single_rows"] == pytest.approx(one[1]["losses_of_single_rows"], rel=1e-5)


def test_final_weights_are_the_same(two, one):
    ours, theirs = (load_file(where[0] / "plain/model/model.safetensors") for where in (two, one))
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert (ours[name] - weight).norm() <= 1e-5 * weight.norm(), name


def test_validation_losses_are_the_same_in_every_process(two, one):
    for measured in two[1]:
        assert measured["validation_losses"] == pytest.approx(one[1]["validation_losses"], rel=1e-5)


def test_translations_and_scores_are_the_same_and_in_order(two, one):
    assert len(one[1]["translations"]) == 9
    assert len(set(one[1]["translations"])) > 1
    for measured in two[1]:
        assert measured["translations"] == one[1]["translations"]
        assert measured["scores"] == pytest.approx(one[1]["scores"], abs=1e-6)
        assert measured["count"] == 7


def test_one_process_writes_for_both(two):
    folder = two[0] / "plain"
    assert {path.name for path in folder.iterdir()} == {
        "recipe.yaml",
        "log.jsonl",
        "tokenizer",
        "checkpoints",
        "model",
    }
    assert len((folder / "log.jsonl").read_text().splitlines()) == 6 + 2
    states = list((folder / "checkpoints").glob("*/training_state/random-*.pt"))
    assert sorted({path.name for path in states}) == ["random-0.pt", "random-1.pt"]


def test_two_processes_resume_bit_for_bit(two):
    assert [measured["resumes_bit_for_bit"] for measured in two[1]] == [True, True]
