"""The benchmarks run, at a tiny size; what they assert of equal tokens and losses holds there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import untrained_folder

pytestmark = pytest.mark.slow
BENCHMARKS = Path(__file__).parents[2] / "scripts" / "benchmarks"


def measured(folder, script, *options):
    """Run a benchmark; return the rows of the machine and plain products, and those of its figures."""
    command = [sys.executable, BENCHMARKS / script, *options, "--json", folder / "figures.json"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stdout.startswith("processor ")
    machine, plain, *rows = json.loads((folder / "figures.json").read_text())
    return (machine, plain), rows


def figures(folder, script, *options):
    once = () if script == "memory.py" else ("--rounds", "1")  # it measures once anyway
    sizes = ("--sizes", "tiny", "--vocabulary", "90")
    (machine, plain), rows = measured(folder, script, *sizes, *once, *options)
    assert {"processor", "has", "torch uses", "cores", "load", "torch", "transformers"} <= machine.keys()
    assert all(plain[library] > 0 for library in ("MKL", "oneDNN", "oneDNN bfloat16") if library in plain)
    return rows


NATIVE = [f"{engine} {precision}" for engine in ("native", "ctranslate2") for precision in ("float32", "int8")]
OPTIMIZERS = [f"{name} of {tokens}" for name in ("adamw", "schedule_free", "muon") for tokens in (100, 900)]
# Its options, an extra's package that it needs, and what it measures.
RUNS = {
    "generate.py": (
        "--cases 1x1,3x2 --new-tokens 5 --source-length 9",
        "ctranslate2",
        ["generate", "prepared", "marian_ms_per_step", *NATIVE],
    ),
    "train.py": ("--batch 3 --length 7", "torch", ["heed", "heed, clock"]),
    "startup.py": ("", "torch", ["heed_seconds", "heed_cpu_seconds"]),
    "optimizers.py": ("--batch 3 --length 7 --updates 100,900", "schedulefree", OPTIMIZERS),
    "memory.py": (
        "--vocabulary 20000 --target-tokens 256 --batch 2 --source-length 9 --new-tokens 3",
        "torch",
        ["heed", "native", "marian_mib"],
    ),
    "batching.py": (
        "--vocabulary 500 --tokens 500 --buckets 2 --updates 2 --quality --pairs 60 --seeds 1",
        "torch",
        ["heed", "random", "group_by_length", "heed_trainer_ratio", "heed_loop_ratio", "random_of_equal_capacity"],
    ),
    "scale.py": ("--lengths 256,512,1024 --batches 1,2,4", "torch", ["exponent_of_memory"]),
    "profiles.py": ("--cases training,2 --new-tokens 3", "torch", ["milliseconds"]),
}


@pytest.mark.parametrize("script", RUNS)
def test_a_benchmark_measures_all_that_it_compares_with_equal_tokens_and_losses(script, tmp_path):
    options, package, names = RUNS[script]
    pytest.importorskip(package)
    rows = figures(tmp_path, script, *options.split())
    assert {*names} <= {name for row in rows for name in row}
    assert [row for row in rows if not all(row[name] > 0 for name in names if name in row)] == []
    for row in rows if script == "profiles.py" else ():  # tells where all of the time goes
        shares = [value for name, value in row.items() if name not in ("case", "model", "milliseconds")]
        assert abs(sum(shares) - 100) < 1


def test_what_a_gpu_is_asked_for_holds_on_the_cpu_without_optional_libraries(tmp_path, monkeypatch):
    for name in ("ctranslate2", "pytest"):
        (tmp_path / f"{name}.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    sizes = ("--device", "cpu", "--precision", "float32", "--peak-teraflops", "1e-5", "--target-tokens", "64")
    lists = ("--loops", "tiny", "--compile", "no", "--batches", "1,3", "--beams", "1,2", "--new-tokens", "3")
    _, *rows = figures(tmp_path, "gpu.py", *sizes, *lists)
    checks, timed = [row for row in rows if "result" in row], [row for row in rows if "result" not in row]
    assert {row["case"] for row in checks} == {"kernels", "exactness", "processes", "plans"}
    assert {row["result"] for row in checks} == {"ok"}
    for name in ("heed", "marian", "nn.Transformer", "t5"):
        # Of 2 pairs of 32 tokens, with 1 layer, d 32, f 64 and 90 tokens, by the formula.
        products = (4 + 6) * 32**2 * 32 + 2 * 2 * 32 * 64 * 32 + 2 * 32**2 * 32 + 32 * 90 * 32
        expected = 6 * products * 2 * timed[0][f"{name} tokens/s"] / 64 / 1e7
        assert timed[0][f"{name} MFU"] == pytest.approx(expected, rel=0.1)
    assert timed[1]["loop to bare"] > 0
    assert all(row["same"] == 1 for row in timed[2:6])


def test_a_check_on_a_gpu_that_takes_too_long_costs_no_other_and_fails_and_without_a_gpu_nothing_does(tmp_path):
    file, command = tmp_path / "figures.json", [sys.executable, BENCHMARKS / "gpu.py"]
    assert subprocess.check_output(command, text=True) == "not measured: there is no GPU\n"
    options = ["--device", "cpu", "--cases", "processes,plans", "--patience", "0.01"]
    assert subprocess.run([*command, *options, "--json", file], check=False).returncode == 1
    rows = [tuple(row.values()) for row in json.loads(file.read_text())[3:]]
    assert rows == [("processes", "FAILED", "its time is up"), ("plans", "not measured", "its time is up")]


def test_real_sentences_are_translated_alike_by_marian_with_the_same_weights(tmp_path):
    pytest.importorskip("ctranslate2")
    model = untrained_folder(tmp_path / "model")
    options = ("--data", "builtin:test:9", "--source", "ko", "--target", "en", "--batch", "4", "--longest", "7")
    _, rows = measured(tmp_path, "translate.py", model, *options, "--beams", "1,2", "--rounds", "1")
    exact = ["marian", "marian sorted", "generate", "native float32 unsorted", "native float32"]
    assert [row["name"] for row in rows[:5]] == exact
    assert all(row["differing"] == 0 for row in rows if row["name"] in exact)
    assert {row["beams"] for row in rows if row["name"] == "ctranslate2 int8"} == {1, 2}
    assert all(row["ratio"] > 0 for row in rows)


def test_marian_trains_as_many_minutes_as_heed_on_the_same_pairs(tmp_path):
    data = ["data.train=builtin:train:200", "data.validation=builtin:validation:9", "data.test={t: 'builtin:test:9'}"]
    size = ["tokenizer.vocab_size=400", "model.options.d_model=32", "model.options.dropout=0.1"]
    length = ["optimization.max_updates=40", "optimization.warmup_updates=4", "optimization.tokens_per_update=512"]
    options = ["quickstart", *data, *size, *length, f"output={tmp_path / 'run'}", "--learning-rate", "0.001"]
    _, (ours, theirs) = measured(tmp_path, "minutes.py", *options)
    assert (ours["model"], ours["updates"], theirs["model"], theirs["test"]) == ("heed", 40, "marian", "t")
    assert 0 < theirs["minutes"] <= ours["minutes"] + 0.1
    assert all(row[score] >= 0 for row in (ours, theirs) for score in ("bleu", "chrf"))
    # Beside Heed's weights Marian has two tables of positions, and biases.
    assert ours["parameters"] < theirs["parameters"]
