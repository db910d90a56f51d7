"""The `heedful` command in several processes does what it does in one."""

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from heedful.data.korean_english.pairs import korean_english_pairs
from heedful.data.tokenizer_training import train_tokenizers
from helpers import ending_model

pytestmark = pytest.mark.multiprocess
KO_EN = ["--source", "ko", "--target", "en"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A folder of an untrained model whose translations depend on the sources."""
    folder = tmp_path_factory.mktemp("model")
    pairs = list(korean_english_pairs("train", 200))
    tokenizers = train_tokenizers([p["ko"] for p in pairs], [p["en"] for p in pairs], vocab_size=380)
    sizes = {"vocab_size": 380, "encoder_layers": 1, "decoder_layers": 1}
    for each in (ending_model(seed=4, **sizes, **tokenizers.special_ids()), tokenizers):
        each.save_pretrained(folder)
    return folder


def test_two_processes_share_a_test_set_and_tell_what_one_tells(model, tmp_path, heedful_command):
    data = ["--data", "builtin:test:11", *KO_EN]  # which two processes cannot share evenly
    settings = [*data, "--max-new-tokens", "8", "--bootstrap", "40", "--json", "--predictions"]
    code, one, errors = heedful_command("evaluate", model, *settings, tmp_path / "one.txt")
    assert code == 0, errors
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    script = Path(__file__).parents[1] / "support" / "evaluate_run.py"
    command = [sys.executable, *launcher, script, tmp_path, "evaluate", model, *settings, tmp_path / "two.txt"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr[-3000:]
    # Each sentence was translated by one process.
    shares = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("sentences-*.json"))]
    assert [len(share) for share in shares] == [6, 5]
    assert sorted(chain(*shares)) == sorted(pair["ko"] for pair in korean_english_pairs("test", 11))
    assert json.loads(finished.stdout) == json.loads(one)  # it is there once, although two processes ran
    assert json.loads(one)["count"] == 11
    ours, theirs = ((tmp_path / f"{name}.txt").read_text(encoding="utf-8") for name in ("two", "one"))
    assert ours == theirs
    assert len(set(ours.splitlines())) > 5


def test_several_processes_refuse_a_device_that_is_only_one(heedful_command, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    arguments = ["none", "--data", "builtin:test:2", *KO_EN, "--device", "cuda:1"]
    code, output, errors = heedful_command("evaluate", *arguments)
    assert (code, output) == (2, "")
    assert "`--device` must be cpu or cuda where several processes run" in errors
