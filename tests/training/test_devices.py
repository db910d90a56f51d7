"""What the launcher, the recipe and the machine say of each other is checked before the processes meet."""

import os
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch
import torch.distributed
from accelerate.utils import FullyShardedDataParallelPlugin

from heedful import processor_heed
from heedful.training.processes import devices
from heedful.training.processes.devices import float32_products, join_processes, keep_exchange_exact, make_accelerator
from helpers import assert_error
from tiny_runs import tiny_recipe

LAUNCHED = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}
TWO = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
TWO |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
FSDP = {**LAUNCHED, **TWO, "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
FSDP |= {"FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
DEEPSPEED = {**TWO, "ACCELERATE_USE_DEEPSPEED": "true"}
ON_CPU = {"ACCELERATE_USE_CPU": "True"}


class ReachedAcceleratorError(Exception):
    """Raised in the place of Accelerate, which would wait for other processes."""


@pytest.fixture
def begin(monkeypatch, tmp_path):
    """Call `make_accelerator` in an environment; Accelerate itself is not reached, and its arguments are returned."""
    accelerator = Mock(side_effect=ReachedAcceleratorError)
    monkeypatch.setattr(devices, "Accelerator", accelerator)

    def run(environment, gpus=0, device="auto", precision="no"):
        for name in list(os.environ):
            if name.startswith(("ACCELERATE_", "FSDP_", "MASTER_")) or name in TWO:
                monkeypatch.delenv(name)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        changes = {"optimization.device": device, "optimization.mixed_precision": precision}
        with pytest.raises(ReachedAcceleratorError):
            make_accelerator(tiny_recipe(tmp_path, changes).optimization)
        return accelerator.call_args.kwargs

    return run


@pytest.mark.parametrize(
    ("environment", "gpus", "device", "on_cpu"),
    [
        ({}, 0, "auto", True),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, 1, "auto", False),  # left behind by others
        (ON_CPU, 1, "auto", True),
        (TWO, 0, "auto", True),
        ({**LAUNCHED, **TWO}, 0, "cpu", True),
        ({**LAUNCHED, **TWO}, 2, "auto", False),
        (FSDP, 2, "auto", False),
    ],
)
def test_what_fits_together_reaches_accelerate(begin, environment, gpus, device, on_cpu):
    given = begin(environment, gpus, device)
    assert given["cpu"] is on_cpu
    # Processes wait long for the one that prepares the data.
    (handler,) = given["kwargs_handlers"]
    assert timedelta(hours=1) <= handler.to_kwargs()["timeout"] <= timedelta(days=1)


@pytest.mark.parametrize(
    ("gpus", "has_it", "precision", "taken"),
    [
        (1, True, "bf16", "bf16"),
        (1, False, "bf16", "fp16"),
        (2, False, "bf16", "fp16"),
        (1, False, "fp16", "fp16"),
        (1, False, "no", "no"),
        (1, False, "tf32", "no"),
        (0, True, "bf16", "bf16"),
        (0, False, "bf16", "no"),
    ],
)
def test_bf16_is_left_to_what_has_it(begin, monkeypatch, caplog, gpus, has_it, precision, taken):
    # As torch answers for a V100 or T4, where bf16 is emulated.
    asked = lambda including_emulation=True: including_emulation or has_it  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", asked)
    monkeypatch.setattr(processor_heed, "has_bfloat16", lambda: has_it)
    assert begin(FSDP if gpus == 2 else {}, gpus, precision=precision)["mixed_precision"] == taken
    reason = "this GPU lacks: the run uses fp16" if gpus else "this processor lacks"
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == (precision == "bf16" and not has_it)
    assert all(each.startswith(f"`optimization.mixed_precision` is bf16, which {reason}") for each in warnings)


def test_a_precision_is_what_float32_is_multiplied_by_in_its_run_alone():
    before = torch.get_float32_matmul_precision()
    for precision, expected in (("no", before), ("bf16", before), ("tf32", "high")):
        with float32_products(precision):
            assert torch.get_float32_matmul_precision() == expected
    with pytest.raises(MemoryError), float32_products("tf32"):
        raise MemoryError
    assert torch.get_float32_matmul_precision() == before


LOADING = {**FSDP, "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
ACCUMULATING = {**TWO, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
IN_BF16 = {**LAUNCHED, **TWO, "ACCELERATE_MIXED_PRECISION": "bf16"}
NO_GPU = "`distributed_type` .* must be NO without a GPU, but is"
PRECISION = "`optimization.mixed_precision` must be no or bf16 on the CPU, but is"


@pytest.mark.parametrize(
    ("environment", "gpus", "given", "message"),
    [
        (TWO, 1, {}, r"number of processes on this machine .*at most 1, the number of its GPUs, but is 2 instead"),
        ({"WORLD_SIZE": "2"}, 2, {}, "`WORLD_SIZE` is 2 and `LOCAL_RANK` is missing"),
        ({}, 0, {"device": "cuda"}, "`optimization.device` must be cpu or auto if there is no GPU"),
        (ON_CPU, 1, {"device": "cuda"}, "if the accelerate file sets `use_cpu`"),
        (ON_CPU, 1, {"precision": "fp16"}, f"{PRECISION} fp16"),
        ({}, 0, {"precision": "tf32"}, f"{PRECISION} tf32"),
        ({**ON_CPU, "MASTER_ADDR": "127.0.0.1"}, 0, {"device": "cpu"}, "started one process instead of several"),
        ({**LAUNCHED, **TWO}, 0, {}, f"{NO_GPU} MULTI_GPU"),
        (FSDP, 0, {}, f"{NO_GPU} FSDP"),
        *((DEEPSPEED, gpus, {}, "must be NO, MULTI_GPU or FSDP .*, but is DEEPSPEED.*fsdp2") for gpus in (0, 1, 2)),
        (FSDP, 2, {"device": "cpu"}, "`optimization.device` must be auto or cuda .*`distributed_type: FSDP`"),
        (DEEPSPEED, 2, {"device": "cpu"}, "must be NO, MULTI_GPU or FSDP .*, but is DEEPSPEED"),
        ({**FSDP, "FSDP_VERSION": "1"}, 2, {}, "`fsdp_version` of the accelerate file must be 2, but is 1"),
        (LOADING, 2, {}, "`fsdp_cpu_ram_efficient_loading` .*must be false"),
        (ACCUMULATING, 0, {}, "`gradient_accumulation_steps` .*`optimization.tokens_per_update`.* is 4 instead"),
        (IN_BF16, 2, {}, "`mixed_precision` .* must be no, because .*`optimization.mixed_precision`.*bf16"),
        (IN_BF16, 2, {"precision": "tf32"}, "`mixed_precision` of the accelerate file must be no, because .*bf16"),
        (IN_BF16, 2, {"precision": "fp16"}, "`mixed_precision` .* must be no or fp16, because .* is bf16 instead"),
        ({**TWO, "ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, 0, {}, "`parallelism_config` .* must be absent"),
    ],
)
def test_what_contradicts_is_refused_before_any_process_waits(begin, monkeypatch, environment, gpus, given, message):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    assert_error(message, begin, environment, gpus, **given)
    assert not torch.distributed.is_initialized()


def test_fsdp_multiplies_in_bf16_and_sums_gradients_in_float32(monkeypatch):
    for name, value in FSDP.items():
        monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    keep_exchange_exact(plugin)
    assert plugin.mixed_precision_policy is None
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy.reduce_dtype == torch.bfloat16  # what Accelerate makes of it
    keep_exchange_exact(plugin)
    policy = plugin.mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (torch.bfloat16, torch.float32, None)


def test_processes_without_a_recipe_need_a_device_each_too(monkeypatch):
    for device in ("cuda:1", "mps"):
        assert_error(f"`device` must be cpu or cuda .* but is {device} instead", join_processes, device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in TWO.items():
        monkeypatch.setenv(name, value)
    assert_error("at most 1, the number of its GPUs", join_processes, None)
    assert not torch.distributed.is_initialized()
