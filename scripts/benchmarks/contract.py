"""Measure the contract's promises for Heed, and for MarianMTModel with transformers' Seq2SeqTrainer.

    python scripts/benchmarks/contract.py

It starts itself on 1, 2 and 3 processes (about three minutes on two cores) and prints the table of docs/contract.md.
The trainer's tests use the same measurements (tests/support/contract_measures.py).
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import AutoModelForSeq2SeqLM

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
from contract_measures import EVALUATION_PAIRS, PAIRS, column, prepare, relative_difference

EVALUATION_SIZES = (1, 8, 48)

WORLDS = (1, 2, 3)
COLUMNS = {
    "loop": "Heed, own loop",
    "trainer": "Heed + HeedSeq2SeqTrainer",
    "marian": "MarianMTModel + Seq2SeqTrainer",
}


def measure(folder: Path, names: list[str]) -> dict[str, Any]:
    """Measure columns on these processes, and save the results in a file per process."""
    torch.set_num_threads(1)
    Accelerator(cpu=True)
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    rank = torch.distributed.get_rank() if world > 1 else 0
    assert world == int(os.environ.get("WORLD_SIZE", "1"))
    found: dict[str, Any] = {"world": world}
    for name in names:
        measured = column(name, folder)
        splits = [(PAIRS // world, 1), (8, 6 // world), (1, PAIRS // world)]
        token_choices = (False,) if name == "marian" else (False, True)
        updates = {
            (*split, smoothing, by_tokens): measured.update(*split, smoothing, by_tokens)
            for split, smoothing, by_tokens in product(splits, (0.0, 0.1), token_choices)
        }
        found[name] = {
            "updates": updates,
            "evaluations": {size: measured.evaluate(size) for size in EVALUATION_SIZES},
            "resumed": [measured.resume(by_length) for by_length in (False, True)],
        }
    torch.save(found, folder / f"measured-{world}-{rank}.pt")
    return found


def launch(script: Path, world: int, *arguments: object, timeout: float = 280) -> None:
    """Run a script on `world` processes.

    Raises:
        RuntimeError: If it fails, with the end of its output.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    environment["TOKENIZERS_PARALLELISM"] = "false"
    command += [str(script), *map(str, arguments)]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    if finished.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{finished.stdout[-1000:]}\n{finished.stderr[-5000:]}")


def collate_sources(sources: list[list[int]], side: str, pad: int) -> dict[str, torch.Tensor]:
    """Make `input_ids` and `attention_mask`, padded on one side."""
    options: dict[str, Any] = {"batch_first": True, "padding_side": side}
    tensors = [torch.tensor(source) for source in sources]
    ones = [torch.ones_like(tensor) for tensor in tensors]
    return {
        "input_ids": torch.nn.utils.rnn.pad_sequence(tensors, padding_value=pad, **options),
        "attention_mask": torch.nn.utils.rnn.pad_sequence(ones, **options),
    }


def tokens_differing(folder: Path, model_name: str) -> dict[str, int]:
    """Count generated tokens that change with batch and padding, over greedy and beam search, by row title."""
    model = AutoModelForSeq2SeqLM.from_pretrained(folder / model_name, trust_remote_code=False).eval()
    pad = model.config.pad_token_id
    sources = [row["input_ids"] for row in json.loads((folder / "rows.json").read_text())[model_name]]
    counts = {"right": 0, "left": 0}

    def until_end(tokens: list[int]) -> list[int]:
        ends = [place for place, token in enumerate(tokens) if token in model.generation_config.eos_token_id]
        return tokens[: ends[0] + 1] if ends else tokens

    for beams, side in product((1, 4), counts):
        batches = [collate_sources([source], side, pad) for source in sources]
        alone = [model.generate(**batch, num_beams=beams)[0].tolist() for batch in batches]
        together = model.generate(**collate_sources(sources, side, pad), num_beams=beams)
        for ours, theirs in zip(map(until_end, together.tolist()), map(until_end, alone), strict=True):
            counts[side] += sum(a != b for a, b in zip_longest(ours, theirs))
    return {f"tokens that change with the batch, padded {side}": count for side, count in counts.items()}


def worst_cases(found: list[dict[str, Any]], name: str) -> dict[str, float | str]:
    """Return a column's figures by row title; `found` has each run's processes, the single one first."""
    mine = [run[name] for run in found]
    references = {key[2]: value for key, value in mine[0]["updates"].items() if key[:2] == (PAIRS, 1) and not key[3]}
    updates = [(key, value) for run in mine for key, value in run["updates"].items()]
    evaluations = [value for run in mine for value in run["evaluations"].values()]
    first = evaluations[0]
    counts = sorted({len(value["predictions"]) for value in evaluations})
    losses = [abs(loss / references[key[2]][0] - 1) for key, (loss, _) in updates]
    gradients = [relative_difference(gradient, references[key[2]][1]) for key, (_, gradient) in updates]
    bleu, chrf = (
        max(abs(value["scores"][place] - first["scores"][place]) for value in evaluations) for place in (0, 1)
    )
    return {
        "training loss over splits and processes (relative)": max(losses),
        "gradient over splits and processes (relative)": max(gradients),
        "evaluation loss over batch sizes and processes (relative)": max(
            abs(value["loss"] / first["loss"] - 1) for value in evaluations
        ),
        f"number of predictions for {EVALUATION_PAIRS} pairs": " or ".join(map(str, counts)),
        "the first of them in the order of the data": "yes" if all(each["in_order"] for each in evaluations) else "no",
        "BLEU over batch sizes and processes (points)": bleu,
        "chrF over batch sizes and processes (points)": chrf,
        "weights after a resume, random order (relative)": max(run["resumed"][0] for run in mine),
        "weights after a resume, batches of similar length (relative)": max(run["resumed"][1] for run in mine),
    }


def table(folder: Path) -> str:
    """Return the Markdown table of a folder's measurements."""
    files = sorted(folder.glob("measured-*.pt"))
    found = [torch.load(file, weights_only=False) for file in files]
    columns = [
        worst_cases(found, name) | tokens_differing(folder, "marian" if name == "marian" else "heed")
        for name in COLUMNS
    ]
    lines = [f"| worst case seen | {' | '.join(COLUMNS.values())} |", f"|---|{'---:|' * len(COLUMNS)}"]
    for title in columns[0]:
        values = [figures[title] for figures in columns]
        shown = [f"{value:.2g}" if isinstance(value, float) else str(value) for value in values]
        lines.append(f"| {title} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure all columns on 1, 2 and 3 processes and print the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        AcceleratorState._reset_state(reset_partial_state=True)
        for world in WORLDS:
            launch(Path(__file__), world, folder, *COLUMNS)
        print(table(folder))
    packages = ", ".join(f"{package} {version(package)}" for package in ("torch", "transformers", "accelerate"))
    print(f"\nPython {platform.python_version()}, {packages}, CPU, float32.")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(Path(sys.argv[1]), sys.argv[2:])
    else:
        main()
