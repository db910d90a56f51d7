"""Each file in configuration/accelerate/ starts the processes that it names, and docs/scaling.md calculates right."""

from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from torch.utils.flop_counter import FlopCounterMode

from heedful import HeedConfig, HeedForConditionalGeneration
from heedful.data.epochs.batching import BatchingSettings, UpdateBatches
from heedful.data.epochs.micro_batches import split_update

ROOT = Path(__file__).parents[2]
FILES = {path.stem: path for path in sorted((ROOT / "configuration" / "accelerate").glob("*.yaml"))}
SCALING = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
# What each file is for.
KINDS = {
    **{"cpu": ("NO", 1, True), "one_gpu": ("NO", 1, False), "multi_gpu": ("MULTI_GPU", 8, False)},
    **{"multi_node": ("MULTI_GPU", 16, False), "fsdp2": ("FSDP", 8, False)},
}


def test_accelerate_reads_each_file_and_every_key_has_its_comment():
    assert FILES.keys() == KINDS.keys()
    for name, path in FILES.items():
        config, lines = load_config_from_file(str(path)), path.read_text(encoding="utf-8").splitlines()
        assert (config.distributed_type, config.num_processes, bool(config.use_cpu)) == KINDS[name], name
        assert config.mixed_precision == "no"  # that is the recipe's
        keys = [(above, line) for above, line in pairwise(lines) if ":" in line and not line.lstrip().startswith("#")]
        # A section is explained by its keys.
        assert not [key for above, key in keys if "#" not in above + key and "_config:" not in key], name
        head = path.read_text(encoding="utf-8").split("\n\n")[0]
        assert f"accelerate launch --config_file configuration/accelerate/{name}.yaml " in head


def test_fsdp_shards_every_layer_of_both_stacks_and_nothing_else(monkeypatch):
    for key, value in load_config_from_file(str(FILES["fsdp2"])).fsdp_config.items():
        monkeypatch.setenv(key.upper(), str(value).lower() if isinstance(value, bool) else str(value))
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    config = HeedConfig(vocab_size=64, d_model=16, encoder_layers=2, decoder_layers=3)
    with torch.device("meta"):
        model = HeedForConditionalGeneration(config)
    is_sharded = fsdp2_prepare_auto_wrap_policy(plugin, model)
    kinds = [type(module).__name__ for module in model.modules() if is_sharded(module)]
    assert sorted(kinds) == ["HeedDecoderLayer"] * 3 + ["HeedEncoderLayer"] * 2


# docs/scaling.md: its arithmetic.
PEAK = {"A100": 312e12, "H100": 989e12}  # bf16 multiplications and additions a second, without sparsity
UTILISATION = 0.35
LENGTH = 30  # tokens of a source and of a target


def sizes(name: str):
    return HeedConfig.from_pretrained(ROOT / "configuration" / "models" / name)


@cache
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


def operations_and_speed():
    for name in ("small", "base", "big"):
        sizes_and_work = f"{parameters(name) / 1e6:.1f} M", f"{flops_per_pair_of_tokens(name) / 1e6:,.0f} M"
        yield [name, *sizes_and_work, *(f"{tokens_per_second(name, device) / 1e3:,.0f} thousand" for device in PEAK)]


def exchange():
    for name in ("base", "big"):
        for processes, link, bandwidth in ((8, "NVLink, 300 GB/s", 300e9), (16, "network, 50 GB/s", 50e9)):
            seconds = 2 * (processes - 1) / processes * 4 * parameters(name) / bandwidth
            enough = 10 * seconds * processes * tokens_per_second(name, "A100")
            cells = f"{seconds * bandwidth / 1e9:.2f} GB", f"{seconds * 1e3:.1f} ms", f"{enough / 1e3:,.0f} thousand"
            yield [name, str(processes), link, *cells]


def memory():
    for way, size in {"multi_gpu": 16, "fsdp2": 16 / 8}.items():  # bytes of a parameter
        yield [f"`{way}.yaml`", *(f"{size * parameters(name) / 1e9:.2f} GB" for name in ("base", "big"))]


def micro_batches():
    lengths = [25] * 8000  # 400,000 tokens, source and target together
    (update,) = UpdateBatches(lengths, lengths, BatchingSettings(tokens_per_update=400_000)).epoch(0)
    row = {"input_ids": range(25), "labels": range(25)}
    rows = [[row for _ in bucket] for bucket in update]
    for processes in (1, 2, 8, 16, 32):
        parts = split_update(rows, 25_000, processes)
        (number,) = {len(part) for part in parts}
        yield [str(processes), str(number), f"{max(2 * 25 * len(rows) for part in parts for rows in part):,}"]


TABLES = {"Operations and speed": operations_and_speed, "Exchange": exchange, "Memory": memory}
TABLES["Micro-batches"] = micro_batches


@pytest.mark.parametrize(("heading", "expected"), TABLES.items())
def test_a_table_of_the_document_is_what_the_formulas_or_the_loop_give(heading, expected):
    text = SCALING.split(f"\n### {heading}\n", 1)[1]
    lines = text.partition("\n|---")[2].partition("\n\n")[0].splitlines()[1:]
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in lines] == list(expected())
    seconds = 100_000 * 50_000 / (8 * tokens_per_second("base", "A100"))
    assert f"≈ {seconds:,.0f} seconds" in SCALING  # of the paper's run


def test_the_operations_of_the_table_are_what_torch_counts():
    config = sizes("small")
    config._attn_implementation = "eager"
    model = HeedForConditionalGeneration(config)
    rows = {name: torch.full((2, LENGTH), 5) for name in ("input_ids", "labels")}
    # The counter does not know oneDNN's products.
    with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as counter:
        model(**rows).loss.backward()
    counted = counter.get_total_flops() / (2 * LENGTH)
    assert counted == pytest.approx(flops_per_pair_of_tokens("small"), rel=0.02)
