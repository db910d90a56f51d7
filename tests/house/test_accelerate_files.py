"""Every file of configuration/accelerate/ starts what it says, and docs/scaling.md calculates right."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import accelerate.utils.launch as launching
import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from test_recipes import comments

from heedful import HeedConfig, HeedForConditionalGeneration
from heedful.data.batching import BatchingSettings, UpdateBatches
from heedful.data.micro_batches import split_update
from heedful.training.launch.launch_checks import check_launch
from heedful.training.recipe import OptimizationRecipe
from heedful.training.recipe_file import read_recipe

ROOT = Path(__file__).parents[2]
FILES = {path.stem: path for path in sorted((ROOT / "configuration" / "accelerate").glob("*.yaml"))}
SCALING = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_", "MASTER_")) or name in ("WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(launching, "is_port_in_use", lambda port: False)


def launched(name: str, *options: str):
    """Return Accelerate's own arguments for a file, and the environment that its launcher would give a process."""
    arguments = ["--config_file", str(FILES[name]), *options, "scripts/train.py", "RECIPE.yaml"]
    settings, *_ = _validate_launch_command(launch_command_parser().parse_args(arguments))
    if settings.use_fsdp or settings.multi_gpu:
        return settings, launching.prepare_multi_gpu_env(settings)
    return settings, launching.prepare_simple_launcher_cmd_env(settings)[1]


def enter(monkeypatch, environment: dict[str, str], processes: int, gpus: int) -> None:
    """Make this process one of those that a launcher starts."""
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    if processes > 1:  # what torchrun adds, which Accelerate's launcher of several processes stands on
        for key, value in {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": 8, "LOCAL_RANK": 0, "RANK": 0}.items():
            monkeypatch.setenv(key, str(value))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)


def test_the_five_files_are_there():
    assert sorted(FILES) == ["cpu", "fsdp2", "multi_gpu", "multi_node", "one_gpu"]


@pytest.mark.parametrize("name", FILES)
def test_every_key_has_its_comment(name):
    found = comments(FILES[name])
    assert len(found) >= 6
    # A section is explained by its keys.
    assert [key for key, comment in found.items() if not comment and not key.endswith("_config")] == []


@pytest.mark.parametrize("name", FILES)
def test_the_head_of_each_file_tells_the_command_that_uses_it(name):
    head = FILES[name].read_text(encoding="utf-8").split("\n\n")[0]
    assert f"accelerate launch --config_file configuration/accelerate/{name}.yaml " in head


@pytest.mark.parametrize(
    ("name", "kind", "processes"),
    [
        ("cpu", "NO", 1),
        ("one_gpu", "NO", 1),
        ("multi_gpu", "MULTI_GPU", 8),
        ("fsdp2", "FSDP", 8),
        ("multi_node", "MULTI_GPU", 16),
    ],
)
def test_accelerate_reads_each_file_and_leaves_precision_to_the_recipe(name, kind, processes):
    config = load_config_from_file(str(FILES[name]))
    assert config.distributed_type.value == kind
    assert config.num_processes == processes
    settings, environment = launched(name)
    assert settings.num_processes == processes
    assert environment["ACCELERATE_MIXED_PRECISION"] == "no"
    assert not settings.use_parallelism_config


def test_the_cpu_file_starts_one_process_on_the_cpu():
    settings, environment = launched("cpu")
    assert (settings.multi_gpu, settings.use_fsdp) == (False, False)
    assert environment["ACCELERATE_USE_CPU"] == "True"
    assert "MASTER_ADDR" not in environment


def test_the_file_for_one_gpu_starts_one_process_that_sees_one_gpu():
    _, environment = launched("one_gpu")
    assert environment["ACCELERATE_USE_CPU"] == "False"
    assert environment["CUDA_VISIBLE_DEVICES"] == "0"
    assert "MASTER_ADDR" not in environment


def test_the_file_for_many_gpus_starts_eight_processes_without_sharding():
    settings, environment = launched("multi_gpu")
    assert (settings.multi_gpu, settings.nproc_per_node) == (True, "8")
    assert "ACCELERATE_USE_FSDP" not in environment
    assert environment["CUDA_VISIBLE_DEVICES"] == os.environ["CUDA_VISIBLE_DEVICES"]


def test_the_file_for_fsdp_asks_for_version_two_and_whole_checkpoints():
    settings, environment = launched("fsdp2")
    expected = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
        "FSDP_OFFLOAD_PARAMS": "false",
        "FSDP_ACTIVATION_CHECKPOINTING": "false",
    }
    assert {key: environment.get(key) for key in expected} == expected
    assert settings.nproc_per_node == "8"


def test_fsdp_shards_every_layer_of_both_stacks_and_nothing_else(monkeypatch):
    enter(monkeypatch, launched("fsdp2")[1], processes=8, gpus=8)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    config = HeedConfig(vocab_size=64, d_model=16, encoder_layers=2, decoder_layers=3)
    with torch.device("meta"):
        model = HeedForConditionalGeneration(config)
    is_sharded = fsdp2_prepare_auto_wrap_policy(plugin, model)
    kinds = [type(module).__name__ for module in model.modules() if is_sharded(module)]
    assert sorted(kinds) == ["HeedDecoderLayer"] * 3 + ["HeedEncoderLayer"] * 2


def test_the_file_for_two_machines_gives_each_its_rank_and_half_of_the_processes():
    for rank in (0, 1):
        settings, _ = launched("multi_node", "--machine_rank", str(rank), "--main_process_ip", "node-a")
        told = (settings.nnodes, settings.nproc_per_node, settings.node_rank, settings.rdzv_backend)
        assert told == ("2", "8", rank, "static")
        assert settings.rdzv_endpoint == "node-a:29500"


@pytest.mark.parametrize(("name", "gpus"), [("cpu", 0), ("one_gpu", 1), ("multi_gpu", 8), ("fsdp2", 8)])
def test_the_machine_that_a_file_is_for_takes_it(monkeypatch, name, gpus):
    settings, environment = launched(name)
    enter(monkeypatch, environment, settings.num_processes, gpus)
    check_launch(OptimizationRecipe(max_updates=1, mixed_precision="bf16"), on_cpu=gpus == 0)


@pytest.mark.parametrize("name", ["multi_gpu", "multi_node", "fsdp2"])
def test_a_machine_without_gpu_refuses_the_files_for_gpus(monkeypatch, name):
    enter(monkeypatch, launched(name)[1], processes=8, gpus=0)
    with pytest.raises(ValueError, match="`distributed_type` of the accelerate file must be NO where there is no GPU"):
        check_launch(OptimizationRecipe(max_updates=1), on_cpu=True)


def test_two_processes_asked_of_the_cpu_file_are_refused_because_one_is_started(monkeypatch):
    enter(monkeypatch, launched("cpu", "--num_processes", "2")[1], processes=1, gpus=0)
    with pytest.raises(ValueError, match=r"asked for more and has started one.*torchrun"):
        check_launch(OptimizationRecipe(max_updates=1), on_cpu=True)


def test_a_precision_of_the_command_line_that_contradicts_the_recipe_is_refused(monkeypatch):
    enter(monkeypatch, launched("multi_gpu", "--mixed_precision", "bf16")[1], processes=8, gpus=8)
    check_launch(OptimizationRecipe(max_updates=1, mixed_precision="bf16"), on_cpu=False)
    with pytest.raises(ValueError, match=r"`mixed_precision` .* must be no or fp16.* bf16 instead"):
        check_launch(OptimizationRecipe(max_updates=1, mixed_precision="fp16"), on_cpu=False)


@pytest.mark.multiprocess
def test_two_real_processes_that_cannot_work_end_at_once_with_the_reason(tmp_path):
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(FILES["fsdp2"])]
    train = [str(ROOT / "scripts" / "train.py"), str(ROOT / "configuration" / "recipes" / "quickstart.yaml")]
    command = [*launch, "--num_processes", "2", "--main_process_port", "0", *train, f"output={tmp_path / 'run'}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert finished.returncode != 0
    told = [line for line in finished.stderr.splitlines() if line.startswith("heedful: ")]
    assert 1 <= len(told) <= 2  # the launcher may end the second before it speaks
    assert all("`distributed_type` of the accelerate file must be NO" in line for line in told)
    assert not (tmp_path / "run").exists()


# docs/scaling.md: its arithmetic

PEAK = {"A100": 312e12, "H100": 989e12}  # bf16 multiplications and additions a second, without sparsity
UTILISATION = 0.35
LENGTH = 30  # tokens of a source and of a target


def sizes(name: str):
    return HeedConfig.from_pretrained(ROOT / "configuration" / "models" / name)


def parameters(name: str) -> int:
    with torch.device("meta"):
        return HeedForConditionalGeneration(sizes(name)).num_parameters()


def flops_per_pair_of_tokens(name: str) -> float:
    """Return the training operations of one source token and one target token together."""
    config = sizes(name)
    layers = config.encoder_layers + 2 * config.decoder_layers
    return 6 * parameters(name) + 12 * config.d_model * LENGTH * layers


def tokens_per_second(name: str, device: str) -> float:
    return 2 * UTILISATION * PEAK[device] / flops_per_pair_of_tokens(name)


def exchange_seconds(name: str, processes: int, bandwidth: float) -> float:
    return 2 * (processes - 1) / processes * 4 * parameters(name) / bandwidth


def table_after(heading: str) -> list[list[str]]:
    """Return the cells of the first table behind a heading of docs/scaling.md, without its head."""
    lines = SCALING.split(heading, 1)[1].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_the_table_of_operations_and_speed_is_what_the_formulas_give():
    expected = [
        [
            name,
            f"{parameters(name) / 1e6:.1f} M",
            f"{flops_per_pair_of_tokens(name) / 1e6:,.0f} M",
            *(f"{tokens_per_second(name, device) / 1e3:,.0f} thousand" for device in PEAK),
        ]
        for name in ("small", "base", "big")
    ]
    assert table_after("### Operations and speed") == expected


def test_the_time_of_the_papers_run_is_what_the_formulas_give():
    seconds = 100_000 * 50_000 / (8 * tokens_per_second("base", "A100"))
    assert f"≈ {seconds:,.0f} seconds" in SCALING
    assert round(10 * seconds / 3600) == 3


def test_the_operations_of_the_table_are_what_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    config = sizes("small")
    config._attn_implementation = "eager"
    model = HeedForConditionalGeneration(config)
    rows = {name: torch.full((2, LENGTH), 5) for name in ("input_ids", "labels")}
    # The counter does not know oneDNN's products.
    with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as counter:
        model(**rows).loss.backward()
    counted = counter.get_total_flops() / (2 * LENGTH)
    assert counted == pytest.approx(flops_per_pair_of_tokens("small"), rel=0.02)


def test_the_table_of_exchanges_is_what_the_formulas_give():
    expected = []
    for name in ("base", "big"):
        for processes, link, bandwidth in ((8, "NVLink, 300 GB/s", 300e9), (16, "network, 50 GB/s", 50e9)):
            seconds = exchange_seconds(name, processes, bandwidth)
            enough = 10 * seconds * processes * tokens_per_second(name, "A100")
            volume = seconds * bandwidth / 1e9
            cells = f"{volume:.2f} GB", f"{seconds * 1e3:.1f} ms", f"{enough / 1e3:,.0f} thousand"
            expected.append([name, str(processes), link, *cells])
    assert table_after("### Exchange") == expected


def test_the_table_of_memory_is_what_the_formulas_give():
    ways = {"multi_gpu": 16, "fsdp2": 16 / 8}  # bytes of a parameter
    expected = [
        [f"`{way}.yaml`", *(f"{size * parameters(name) / 1e9:.2f} GB" for name in ("base", "big"))]
        for way, size in ways.items()
    ]
    assert table_after("### Memory") == expected


def test_the_table_of_micro_batches_is_what_the_loop_makes():
    lengths = [25] * 8000  # 400,000 tokens, source and target together
    (update,) = UpdateBatches(lengths, lengths, BatchingSettings(tokens_per_update=400_000)).epoch(0)
    row = {"input_ids": range(lengths[0]), "labels": range(lengths[0])}
    rows = [[row for _ in bucket] for bucket in update]
    expected = []
    for processes in (1, 2, 8, 16, 32):
        parts = split_update(rows, 25_000, processes)
        (number,) = {len(part) for part in parts}
        largest = max(2 * 25 * len(rows) for part in parts for rows in part)
        expected.append([str(processes), str(number), f"{largest:,}"])
    assert table_after("### Micro-batches") == expected


def test_every_command_of_the_document_names_files_that_exist():
    lines = [line for line in SCALING.splitlines() if re.match(r"(accelerate launch|torchrun|srun) ", line)]
    assert len(lines) >= 6
    for words in map(shlex.split, lines):
        if "--config_file" in words:
            assert ROOT / words[words.index("--config_file") + 1] in FILES.values(), words
        if "scripts/train.py" in words:
            start = words.index("scripts/train.py") + 1
            read_recipe(words[start], [word for word in words[start + 1 :] if not word.startswith("$")])
        else:
            assert words[words.index("-m") + 1 :][:2] == ["heedful", "evaluate"]
