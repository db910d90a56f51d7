"""The `heedful` command in several processes does what it does in one."""

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch

from heedful import HeedConfig, HeedForConditionalGeneration
from heedful.data.korean_english.pairs import korean_english_pairs
from heedful.data.tokenizer_training import train_tokenizers
from helpers import shake

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A folder of an untrained model whose translations depend on the sources."""
    folder = tmp_path_factory.mktemp("model")
    pairs = list(korean_english_pairs("train", 200))
    tokenizers = train_tokenizers([p["ko"] for p in pairs], [p["en"] for p in pairs], vocab_size=380)
    sizes = {"vocab_size": 380, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
    torch.manual_seed(4)  # one whose translations are all different
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = HeedForConditionalGeneration(HeedConfig(**sizes, **heads, **tokenizers.special_ids()))
    shake(model)
    model.save_pretrained(folder)
    tokenizers.save_pretrained(folder)
    return folder


def evaluate(model: Path, processes: int, folder: Path, *options: str) -> subprocess.CompletedProcess:
    """Run `heedful evaluate` on 11 pairs, which two processes cannot share evenly."""
    folder.mkdir()
    start = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)] if processes > 1 else []
    )
    script = Path(__file__).parents[1] / "support" / "evaluate_run.py"
    pairs = ["--data", "builtin:test:11", "--source", "ko", "--target", "en", "--max-new-tokens", "8"]
    command = [sys.executable, *start, str(script), str(folder), "evaluate", str(model), *pairs]
    command += ["--bootstrap", "40", "--json", "--predictions", str(folder / "predictions.txt"), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def shares(folder: Path) -> list[list[str]]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("sentences-*.json"))]


def test_two_processes_share_a_test_set_and_tell_what_one_tells(model, tmp_path):
    one, two = (evaluate(model, number, tmp_path / str(number)) for number in (1, 2))
    assert one.returncode == 0, one.stderr[-3000:]
    assert two.returncode == 0, two.stderr[-3000:]
    # Each sentence was translated by one process.
    assert [len(share) for share in shares(tmp_path / "2")] == [6, 5]
    assert sorted(chain(*shares(tmp_path / "2"))) == sorted(shares(tmp_path / "1")[0])
    scores = json.loads(two.stdout)  # it is there once, although two processes ran
    assert scores == json.loads(one.stdout)
    assert scores["count"] == 11
    ours, theirs = ((tmp_path / name / "predictions.txt").read_text(encoding="utf-8") for name in "21")
    assert ours == theirs
    assert len(set(ours.splitlines())) > 5


def test_several_processes_refuse_a_device_that_is_only_one(heedful_command, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    data = ["--data", "builtin:test:2", "--source", "ko", "--target", "en"]
    code, output, errors = heedful_command("evaluate", "none", *data, "--device", "cuda:1")
    assert (code, output) == (2, "")
    assert "`--device` must be cpu or cuda where several processes run" in errors
