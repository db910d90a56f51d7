"""Start-up time of imports, `heedful --help` and model loading, compared with transformers.

    python scripts/benchmarks/startup.py
    python scripts/benchmarks/startup.py --cases load --sizes base --rounds 15

`import` and `process` are fresh processes, timed from their first line (`process` imports the class and loads the
model); `help` is `heedful --help`, and `translate` a `heedful translate` of one sentence with a model of the
quickstart's size; `load` is repeated `from_pretrained` in one process. Calls take turns, and medians are compared.
Ratios of CPU seconds are less disturbed by other processes.
"""

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from harness import Json, Rounds, Row, Sizes, Threads, Vocabulary, begin, report, seconds_of, take_turns
from peers import make_heed, make_marian
from transformers import MarianMTModel

from heedful import HeedConfig, HeedForConditionalGeneration
from heedful.data.tokenizer_training import train_tokenizers
from heedful.training.recipe_file import read_recipe
from heedful_lab.korean_english.pairs import korean_english_pairs

CLASSES = {"marian": MarianMTModel, "heed": HeedForConditionalGeneration}
MODULES = {"marian": "transformers", "heed": "heedful"}

Seconds = tuple[float, float]  # clock, CPU


def process_seconds(statement: str) -> Seconds:
    """Run a statement in a fresh process and return its seconds, without Python's start."""
    timed = f"import time\nstart = time.perf_counter(), time.process_time()\n{statement}\n"
    timed += "print(time.perf_counter() - start[0], time.process_time() - start[1])"
    process = subprocess.run([sys.executable, "-c", timed], capture_output=True, text=True, check=True)
    wall, cpu = process.stdout.split()[-2:]
    return float(wall), float(cpu)


def command_seconds(*arguments: str) -> Seconds:
    """Run a `heedful` command and return its process's seconds."""
    used, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([Path(sys.executable).with_name("heedful"), *arguments], capture_output=True, check=True)
    wall, now = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime


def compare(calls: dict[str, Callable[[], Seconds]], rounds: int) -> Row:
    """Let calls take turns, and return medians and ratios to Marian's."""
    medians = {
        name: [statistics.median(each) for each in zip(*seconds, strict=True)]
        for name, seconds in take_turns(calls, rounds).items()
    }
    row: Row = {f"{name}_seconds": round(wall, 3) for name, (wall, _) in medians.items()}
    row |= {f"{name}_cpu_seconds": round(cpu, 3) for name, (_, cpu) in medians.items()}
    if "marian" in medians:
        ratios = [ours / theirs for ours, theirs in zip(medians["heed"], medians["marian"], strict=True)]
        row |= {"ratio": round(ratios[0], 3), "cpu_ratio": round(ratios[1], 3)}
    return row


def saved_models(size: str, vocabulary: int, folder: Path) -> dict[str, Path]:
    """Save both models with the same weights."""
    marian = make_marian(size, vocabulary)
    paths = {name: folder / size / name for name in CLASSES}
    marian.save_pretrained(paths["marian"])
    make_heed(marian).save_pretrained(paths["heed"])
    return paths


def translating_model(folder: Path) -> Path:
    """Save an untrained model of the quickstart's size, with its tokenizer."""
    pairs = list(korean_english_pairs("train", 2000))
    tokenizers = train_tokenizers(*([pair[side] for pair in pairs] for side in ("ko", "en")), vocab_size=1000)
    options = read_recipe("quickstart").model.options
    config = HeedConfig(**options, vocab_size=tokenizers.source.vocab_size, **tokenizers.special_ids())
    HeedForConditionalGeneration(config).save_pretrained(folder / "translating")
    tokenizers.save_pretrained(folder / "translating")
    return folder / "translating"


def calls_of(case: str, paths: dict[str, Path]) -> dict[str, Callable[[], Seconds]]:
    """Return the compared calls of one case."""
    if case == "help":
        return {"heed": partial(command_seconds, "--help")}
    if case == "translate":
        model = translating_model(next(iter(paths.values())).parent)
        return {"heed": partial(command_seconds, "translate", str(model), "고양이가 잔다.", "--max-new-tokens", "10")}
    if case == "load":
        return {
            name: partial(seconds_of, partial(model.from_pretrained, paths[name])) for name, model in CLASSES.items()
        }
    statements = {name: f"import {module}" for name, module in MODULES.items()}
    if case == "process":
        for name, model in CLASSES.items():
            loading = f"Model.from_pretrained({str(paths[name])!r})"
            statements[name] = f"from {MODULES[name]} import {model.__name__} as Model\n{loading}"
    return {name: partial(process_seconds, statement) for name, statement in statements.items()}


def measured(sizes: list[str], cases: list[str], vocabulary: int, rounds: int) -> Iterator[Row]:
    """Yield a row for each case, and for each size if models are loaded."""
    with tempfile.TemporaryDirectory() as folder:
        for number, size in enumerate(sizes):
            paths = saved_models(size, vocabulary, Path(folder))
            for case in cases:
                has_size = case in ("process", "load")
                if has_size or number == 0:
                    named = {"size": size} if has_size else {}
                    yield {"case": case, **named, **compare(calls_of(case, paths), rounds)}


def main(
    sizes: Sizes = "base",
    cases: Annotated[
        str, typer.Option(help="Comma-separated cases: import, help, translate, process, load.")
    ] = "import,help,translate,process,load",
    vocabulary: Vocabulary = 37_000,
    rounds: Rounds = 7,
    threads: Threads = 1,
    json: Json = None,
):
    """Print a line for each case, and for each size if models are loaded."""
    begin(threads)
    report(measured(sizes.split(","), cases.split(","), vocabulary, rounds), json)


if __name__ == "__main__":
    typer.run(main)
