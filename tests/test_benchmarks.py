"""The benchmarks run, at a tiny size; what they assert of equal tokens and losses holds there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "scripts" / "benchmarks"


def figures(tmp_path, script, *options):
    command = [sys.executable, BENCHMARKS / script, "--sizes", "tiny", "--vocabulary", "90", "--rounds", "1"]
    file = tmp_path / "figures.json"
    process = subprocess.run([*command, *options, "--json", file], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-2000:]
    rows = json.loads(file.read_text())
    assert len(process.stdout.splitlines()) == len(rows)
    return rows


@pytest.mark.slow
def test_generation_is_timed_against_marian_with_equal_tokens(tmp_path):
    rows = figures(tmp_path, "generate.py", "--cases", "1x1,3x2", "--new-tokens", "5", "--source-length", "9")
    assert [(row["batch"], row["beams"]) for row in rows] == [(1, 1), (3, 2)]
    for row in rows:
        assert all(row[name] > 0 for name in ("generate", "native float32", "native int8", "marian_ms_per_step"))


@pytest.mark.slow
def test_training_is_timed_against_marian_with_equal_losses(tmp_path):
    rows = figures(tmp_path, "train.py", "--batch", "3", "--length", "7")
    assert [row["precision"] for row in rows] == ["float32", "bfloat16"]
    assert all(row["ratio"] > 0 for row in rows)
