"""Two processes under DeepSpeed's ZeRO-2 give what one process without it gives, and write what it can read.

They run on the CPU, where DeepSpeed 0.19.8 runs in float32 and bf16. Nothing here has seen a GPU.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from process_checks import END, NO_DROPOUT, difference, make_loop, weights_of
from zero_process import COMPARED, NAMES

from heedful.training.checkpoints.checkpoints import checkpoint_path, load_state
from heedful.training.preparation import prepare_corpus
from heedful.training.processes.devices import make_accelerator
from tiny_runs import logged, tiny_recipe

pytestmark = pytest.mark.multiprocess

# What accelerate launch makes of configuration/accelerate/deepspeed_zero2.yaml, as far as it reaches DeepSpeed.
LAUNCHED = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
    "ACCELERATE_MIXED_PRECISION": "no",
}


def run_alone(folder: Path, changes: dict, tokenizer: Path) -> Path:
    """Train in this process, without DeepSpeed."""
    AcceleratorState._reset_state(reset_partial_state=True)
    recipe = tiny_recipe(folder, {"optimization.token_budget": 700, **changes})
    make_loop(folder, changes, prepare_corpus(recipe, tokenizer), make_accelerator(recipe.optimization)).run()
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The folder of all runs; one process has made some, and has begun one that two go on with."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("zero")
    (folder / "zero").mkdir()
    for name, changes in COMPARED.items():
        run_alone(folder / name, changes, folder / "tokenizer")
    run_alone(folder / "begun-alone", {**NO_DROPOUT, "optimization.max_updates": 3}, folder / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def zero(alone):
    """What each of two processes measured under DeepSpeed."""
    script = Path(__file__).with_name("zero_process.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", script, alone]
    environment = {**os.environ, **LAUNCHED, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert finished.returncode == 0, finished.stderr[-5000:]
    return [json.loads((alone / f"result-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def straight(alone):
    """The losses of one process without DeepSpeed or dropout."""
    losses = logged(alone / "several", "train/loss")
    assert len(losses) == END
    return losses


def test_two_processes_ran(zero):
    assert [measured["processes"] for measured in zero] == [2, 2]


@pytest.mark.parametrize("name", COMPARED)
def test_losses_and_gradient_norms_are_those_of_one_process(alone, zero, name):
    expected = {value: logged(alone / name, value) for value in NAMES}
    assert len(expected["train/loss"]) == len(expected["train/gradient_norm"]) == END
    for measured in zero:
        for value in NAMES:
            assert measured["compared"][name][value] == pytest.approx(expected[value], rel=1e-5), value


def test_weights_and_their_moving_average_are_those_of_one_process(alone, zero):
    for name in COMPARED:
        assert difference(weights_of(alone / "zero" / name), weights_of(alone / name)) < 1e-4, name
    ours, theirs = (
        load_state(checkpoint_path(folder / "several" / "checkpoints", END)).moving_average
        for folder in (alone / "zero", alone)
    )
    assert difference(ours, theirs) < 1e-4


def test_updates_are_of_several_micro_batches_and_a_process_may_have_no_rows(zero):
    first, second = (measured["compared"]["several"]["rows"] for measured in zero)
    assert len(first) == len(second) > 3
    assert sorted(measured["compared"]["lonely"]["rows"] for measured in zero) == [[0], [1]]


def test_gradients_of_many_micro_batches_add_up_in_float32_though_the_network_is_bf16(zero):
    for measured in zero:
        assert measured["many"]["micro_batches"] > 50
        # Added up in bf16, the norm is 4 in a thousand off.
        assert measured["many"]["bf16"] == pytest.approx(measured["many"]["no"], rel=1e-3)


def test_gradients_are_clipped(alone, zero):
    norms = zero[0]["compared"]["clipped"]["train/gradient_norm"]
    assert min(norms) > 0.4  # the norm before clipping at 0.3
    clipped, free = (zero[0]["compared"][name]["train/loss"] for name in ("clipped", "free"))
    assert clipped[0] == free[0]
    assert clipped[-1] > free[-1] * 1.01


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_run_resumes_bit_for_bit(zero, precision):
    stops = {"float32": [1, 3, 5], "bf16": [1, 4]}
    for measured in zero:
        assert measured["resumed"][precision] == stops[precision]


@pytest.mark.parametrize("name", ["free", "decayed"])
def test_the_state_of_the_optimizer_is_that_of_one_process(alone, zero, name):
    ours, theirs = (
        load_state(checkpoint_path(folder / name / "checkpoints", END)).optimizer for folder in (alone / "zero", alone)
    )
    assert ours["param_groups"] == theirs["param_groups"]
    assert {group["weight_decay"] for group in ours["param_groups"]} == ({0.0, 0.5} if name == "decayed" else {0.0})
    assert list(ours["state"]) == list(theirs["state"])
    # Adam's usual epsilon makes steps of what is nothing but rounding, such as the gradient of a key's bias.
    relative, absolute = (1e-5, 1e-8) if name == "free" else (1e-2, 1e-5)
    for number, values in theirs["state"].items():
        assert list(ours["state"][number]) == list(values) == ["step", "exp_avg", "exp_avg_sq"]
        for moment, value in values.items():
            assert ours["state"][number][moment].dtype == value.dtype
            far = (ours["state"][number][moment] - value).norm()
            assert far < relative * value.norm() + absolute, (number, moment)
        assert ours["state"][number]["step"] == END


def test_two_processes_go_on_with_what_one_began_without_deepspeed(zero, straight):
    for measured in zero:
        assert measured["mixed"]["before"] == 3
        assert measured["mixed"]["losses"] == pytest.approx(straight, rel=1e-5)


def test_one_process_goes_on_without_deepspeed(alone, zero, straight):
    assert len(logged(alone / "begun-zero", "train/loss")) == 3
    run_alone(alone / "begun-zero", {**NO_DROPOUT, "resume": True}, alone / "tokenizer")
    assert logged(alone / "begun-zero", "train/loss") == pytest.approx(straight, rel=1e-5)


def test_weights_are_begun_and_saved_in_float32_though_the_network_is_bf16(alone, zero):
    from transformers import AutoModelForSeq2SeqLM

    for measured in zero:
        masters = measured["masters"]
        assert masters["begun_with_float32"]
        assert masters["kind_of_network"] == ["torch.bfloat16"]
        assert masters["kind_of_saved"] == ["torch.float32"]
        assert masters["copies_are_rounded"]
        assert masters["saved_are_not"]
        assert masters["losses"][-1] < masters["losses"][0] * 0.95
    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint_path(alone / "bf16" / "checkpoints", END))
    saved = weights_of(alone / "bf16")
    weights = dict(model.named_parameters())
    assert saved.keys() == weights.keys()
    assert all(torch.equal(saved[name], weight) for name, weight in weights.items())


def test_an_update_that_is_spoilt_in_one_process_is_skipped_by_both(zero):
    for first, second in zip(zero[0]["skipped"], zero[1]["skipped"], strict=True):
        assert (first["skipped"], second["skipped"]) == (1, 1)
        assert (first["update"], second["update"]) == (END, END)
        assert first["sum"] == second["sum"]


def test_a_budget_that_shrinks_is_refused_by_both(zero):
    for measured in zero:
        assert measured["refused"].startswith("`optimization.shrink_token_budget` must be false")


def test_a_whole_run_ends_with_a_model_that_loads(zero):
    from transformers import AutoModelForSeq2SeqLM

    for measured in zero:
        assert measured["run"]["count"] == 7
        assert measured["run"]["processes"] == 2
    model = AutoModelForSeq2SeqLM.from_pretrained(zero[0]["run"]["folder"])
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
