"""Measure what the contract promises, for Heed and for MarianMTModel with transformers' Seq2SeqTrainer.

    python scripts/benchmarks/contract.py

It launches itself on 1, 2 and 3 processes (about three minutes on two cores) and prints the table of docs/contract.md.
What it measures is what the tests of the trainer assert: tests/training/contract_measures.py.
"""

import json
import platform
import sys
import tempfile
from importlib.metadata import version
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from transformers import AutoModelForSeq2SeqLM

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "training"))
from contract_measures import EVALUATION_PAIRS, PAIRS, collate_sources, launch, measure, prepare, relative_difference

WORLDS = (1, 2, 3)
COLUMNS = {
    "loop": "Heed, own loop",
    "trainer": "Heed + HeedSeq2SeqTrainer",
    "marian": "MarianMTModel + Seq2SeqTrainer",
}


def tokens_differing(folder: Path, model_name: str) -> dict[str, int]:
    """Count the generated tokens that change with batch and padding, over greedy and beam search."""
    model = AutoModelForSeq2SeqLM.from_pretrained(folder / model_name).eval()
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
    return counts


def worst_cases(found: list[dict[str, Any]], name: str) -> dict[str, float | str]:
    """Return the figures of one column's rows; every process of every run is in `found`, one process first."""
    mine = [run[name] for run in found]
    references = {key[2]: value for key, value in mine[0]["updates"].items() if key[:2] == (PAIRS, 1) and not key[3]}
    updates = [(key, value) for run in mine for key, value in run["updates"].items()]
    evaluations = [value for run in mine for value in run["evaluations"].values()]
    first = evaluations[0]
    counts = sorted({len(value["predictions"]) for value in evaluations})
    return {
        "loss": max(abs(loss / references[key[2]][0] - 1) for key, (loss, _) in updates),
        "gradient": max(relative_difference(grad, references[key[2]][1]) for key, (_, grad) in updates),
        "evaluation loss": max(abs(value["loss"] / first["loss"] - 1) for value in evaluations),
        "predictions": " or ".join(map(str, counts)),
        "in order": "yes" if all(value["in_order"] for value in evaluations) else "no",
        "BLEU": max(abs(value["scores"][0] - first["scores"][0]) for value in evaluations),
        "chrF": max(abs(value["scores"][1] - first["scores"][1]) for value in evaluations),
        "resume": max(run["resumed"][0] for run in mine),
        "resume by length": max(run["resumed"][1] for run in mine),
    }


TITLES = {
    "loss": "training loss over splits and processes (relative)",
    "gradient": "gradient over splits and processes (relative)",
    "evaluation loss": "evaluation loss over batch sizes and processes (relative)",
    "predictions": f"number of predictions for {EVALUATION_PAIRS} pairs",
    "in order": "the first of them in the order of the data",
    "BLEU": "BLEU over batch sizes and processes (points)",
    "chrF": "chrF over batch sizes and processes (points)",
    "resume": "weights after a resume, random order (relative)",
    "resume by length": "weights after a resume, batches of similar length (relative)",
    "right": "tokens that change with the batch, padded right",
    "left": "tokens that change with the batch, padded left",
}


def table(folder: Path) -> str:
    """Return the markdown table of everything measured in a folder."""
    files = sorted(folder.glob("measured-*.pt"))
    found = [torch.load(file, weights_only=False) for file in files]
    columns = {name: worst_cases(found, name) for name in COLUMNS}
    for name in COLUMNS:
        columns[name] |= tokens_differing(folder, "marian" if name == "marian" else "heed")
    lines = [f"| worst case seen | {' | '.join(COLUMNS.values())} |", f"|---|{'---:|' * len(COLUMNS)}"]
    for key, title in TITLES.items():
        values = [values[key] for values in columns.values()]
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
