"""The benchmarks run at a tiny size, and their tokens and losses agree there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import untrained_folder

pytestmark = pytest.mark.slow
BENCHMARKS = Path(__file__).parents[2] / "scripts" / "benchmarks"
NATIVE = [f"{engine} {precision}" for engine in ("native", "ctranslate2") for precision in ("float32", "int8")]
OPTIMIZERS = [f"{name} of {tokens}" for name in ("adamw", "schedule_free", "muon") for tokens in (100, 900)]
TINY = "--sizes tiny --vocabulary 90 "
# Its options, an extra's package that it needs, and what it measures.
RUNS = {
    "generate.py": (
        TINY + "--rounds 1 --cases 1x1,3x2 --new-tokens 5 --source-length 9",
        "ctranslate2",
        ["generate", "prepared", "marian_ms_per_step", *NATIVE],
    ),
    "train.py": (TINY + "--rounds 1 --batch 3 --length 7", "torch", ["heed", "heed, clock"]),
    "startup.py": (TINY + "--rounds 1", "torch", ["heed_seconds", "heed_cpu_seconds"]),
    "optimizers.py": (TINY + "--rounds 1 --batch 3 --length 7 --updates 100,900", "schedulefree", OPTIMIZERS),
    "memory.py": (
        "--sizes tiny --vocabulary 20000 --target-tokens 256 --batch 2 --source-length 9 --new-tokens 3",
        "torch",
        ["heed", "native", "marian_mib"],
    ),
    "batching.py": (
        "--sizes tiny --rounds 1 --vocabulary 500 --tokens 500 --buckets 2 --updates 2 --quality --pairs 60 --seeds 1",
        "torch",
        ["heed", "random", "group_by_length", "heed_trainer_ratio", "heed_loop_ratio", "random_of_equal_capacity"],
    ),
    "scale.py": (TINY + "--rounds 1 --lengths 256,512,1024 --batches 1,2,4", "torch", ["exponent_of_memory"]),
    "profiles.py": (TINY + "--rounds 1 --cases training,2 --new-tokens 3", "torch", ["milliseconds"]),
    "translate.py": (
        "model --data builtin:test:9 --source ko --target en --batch 4 --longest 7 --beams 1,2 --rounds 1",
        "ctranslate2",
        ["ratio"],
    ),
    "markup.py": ("model --count 9", "torch", ["all tags back"]),
    "minutes.py": (
        "quickstart data.train=builtin:train:200 data.validation=builtin:validation:9 data.test.t=builtin:test:9"
        " tokenizer.vocab_size=400 model.options.d_model=32 optimization.max_updates=40 optimization.warmup_updates=4"
        " optimization.tokens_per_update=512 output=run --learning-rate 0.001",
        "torch",
        ["minutes", "parameters"],
    ),
    "gpu.py": (
        TINY + "--rounds 1 --device cpu --precision float32 --peak-teraflops 1e-5 --target-tokens 64 --loops tiny"
        " --compile no --batches 1,3 --beams 1,2 --new-tokens 3",
        "torch",
        ["heed MFU", "marian MFU", "nn.Transformer MFU", "t5 MFU", "loop to bare"],
    ),
}


@pytest.mark.parametrize("script", RUNS)
def test_a_benchmark_measures_all_that_it_compares_with_equal_tokens_and_losses(script, tmp_path):
    options, package, names = RUNS[script]
    pytest.importorskip(package)
    if script in ("translate.py", "markup.py"):
        untrained_folder(tmp_path / "model")
    # What a GPU is asked for needs no optional library.
    for name in ("ctranslate2", "pytest") if script == "gpu.py" else ():
        (tmp_path / f"{name}.py").write_text("raise ImportError")
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, BENCHMARKS / script, *options.split(), "--json", tmp_path / "figures.json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stdout.startswith("processor ")
    _, _, *rows = json.loads((tmp_path / "figures.json").read_text())
    assert {*names} <= {name for row in rows for name in row}
    assert [row for row in rows if not all(row[name] > 0 for name in names if name in row)] == []
    assert {row["result"] for row in rows if "result" in row} <= {"ok"}
    assert {row["same"] for row in rows if "same" in row} <= {1}
    exact = ("marian", "generate", "native float32")
    assert [row for row in rows if row.get("differing") and row["name"] in exact] == []
