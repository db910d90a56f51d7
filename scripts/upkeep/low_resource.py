"""Measure each method for few pairs, and write a table.

    python scripts/upkeep/low_resource.py path/to/tatoeba_en_de --pairs 5000 --rows plain R-Drop --seeds 1 2

Each row is one or a few `heedful` commands, which are printed. Results are in docs/figures/lowresource.json and are
not measured again; an interrupted run continues. `--jobs 4` trains several rows at once on a GPU. `--prices` measures
the time of an update on the CPU, for the cost column.
"""

import argparse
import gzip
import json
import random
import re
import shlex
import statistics
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from heedful.files import write_text

FOUND = Path(__file__).parents[2] / "docs" / "figures" / "lowresource.json"
RECIPE = "tatoeba-en-de"
WIDTH, UPDATES = 128, 4000
# By number of pairs: vocabulary size, layers each side, and sentences for back-translation.
SIZES = {5000: (2000, 2, 20_000), 20_000: (4000, 3, 60_000), 164_303: (8000, 3, 0)}
BACKWARD = ["data.source=de", "data.target=en"]
SYNTHETIC = "synthetic: {train: $back, source: source, target: target, tag: bt}"
FORWARD = "forward: {train: $forward, source: en, target: de}"
DIVERSE = "backward: {train: $backward, source: source, target: target}"
DROPPED = [f"model.options.{name}" for name in ("attention_dropout=0.1", "activation_dropout=0.1")]
WORDS = [f"model.options.{side}_word_dropout=0.1" for side in ("source", "target")]
MADE = [
    *["data.cleaning.drop_duplicates=true", "model.options.dropout=0.2"],
    f"data.mixture={{{SYNTHETIC}, {FORWARD}, {DIVERSE}}}",
]
TAGGED = "back-translation, tagged"
ROWS = {
    "plain": [],
    "dropout of 0.1 only": ["model.options.dropout=0.1"],
    "R-Drop": ["optimization.r_drop=5"],
    "BPE-dropout": ["tokenizer.dropout=0.1"],
    "word dropout": WORDS,
    "attention and activation dropout": DROPPED,
    "joined sentences": ["data.augmentation={joined: 0.2}"],
    "noise": ["data.augmentation={typos: 0.02, lower_case: 0.1, no_final_punctuation: 0.1}"],
    "both directions": ["data.both_directions=true"],
    TAGGED: [f"data.mixture={{{SYNTHETIC}}}"],
    "data diversification": ["data.cleaning.drop_duplicates=true", f"data.mixture={{{FORWARD}, {DIVERSE}}}"],
    "R-Drop and BPE-dropout": ["optimization.r_drop=5", "tokenizer.dropout=0.1"],
    "back-translation and diversification, dropout of 0.2": MADE,
    "all together": [*MADE, "optimization.r_drop=1", "tokenizer.dropout=0.05"],
}
# These keys were removed: their rows stay in the tables, but cannot be trained again.
REMOVED = ("tokenizer.dropout", "data.both_directions")
TRAINABLE = [row for row, changes in ROWS.items() if not any(key in " ".join(changes) for key in REMOVED)]


class Table:
    """The runs for one number of pairs, in one folder."""

    def __init__(self, corpus: Path, folder: Path, pairs: int):
        self.folder, self.pairs = folder / str(pairs), pairs
        self.folder.mkdir(parents=True, exist_ok=True)
        self._is_being_made: dict[Path, Lock] = defaultdict(Lock)
        vocabulary, layers, self.sentences = SIZES[pairs]
        with gzip.open(corpus / "train.jsonl.gz", "rt", encoding="utf-8") as stream:
            self.rows = [json.loads(line)["translation"] for line in stream]
        random.Random(1).shuffle(self.rows)  # the file is sorted by length
        self.train = (self.folder / "train.jsonl").resolve()
        lines = [json.dumps({"translation": row}, ensure_ascii=False) for row in self.rows[:pairs]]
        write_text(self.train, "\n".join(lines) + "\n")
        model = {"d_model": WIDTH, "dropout": 0.3, "norm_placement": "post"}
        for side in ("encoder", "decoder"):
            model |= {f"{side}_layers": layers, f"{side}_ffn_dim": 4 * WIDTH}
        run = {
            "max_updates": UPDATES,
            "warmup_updates": UPDATES // 10,
            "optimizer": "adam",
            "learning_rate": 0.003,
            "embedding_learning_rate": "null",
            "weight_decay": 0,
            "tokens_per_update": 4096,
            "mixed_precision": "bf16",
        }
        self.settings = [f"data.folder={corpus}", f"data.train={self.train}", f"tokenizer.vocab_size={vocabulary}"]
        self.settings += [f"model.options.{name}={value}" for name, value in model.items()]
        self.settings += [f"optimization.{name}={value}" for name, value in run.items()]
        self.settings += ["checkpoints.every_updates=250", "checkpoints.keep_last=5", "checkpoints.publish=best"]

    def measure(self, row: str, seed: int) -> dict:
        """Train a row with the models that it needs, and return its scores."""
        model = self._model(f"{row.replace(' ', '-')}-{seed}", [f"seed={seed}", *map(self._filled, ROWS[row])])
        scores = json.loads((model / "metrics.json").read_text())
        found = {"pairs": self.pairs, "row": row, "seed": seed, "loss": round(scores["validation"]["loss"], 4)}
        return found | {name: round(scores["test"][name], 2) for name in ("bleu", "chrf")}

    def price(self, changes: list[str]) -> float:
        """Return CPU seconds per update."""
        command = ["train", RECIPE, *self.settings, *changes, "optimization.device=cpu", "--dry-run"]
        done = subprocess.run([sys.executable, "-m", "heedful", *command], check=True, capture_output=True, text=True)
        return float(re.search(r"([\d.e-]+) s an update", done.stdout)[1])

    def _model(self, name: str, changes: list[str]) -> Path:
        output = self.folder / name
        self._run(output / "model", "train", RECIPE, *self.settings, f"output={output}", "resume=true", *changes)
        return output / "model"

    def _filled(self, change: str) -> str:
        """Replace a setting's $ files by paths, and make them first."""
        if not self.sentences:
            change = change.replace(f"{SYNTHETIC}, ", "")
        makers = {"back": self.back, "backward": self.backward, "forward": self.forward}
        return re.sub(r"\$(\w+)", lambda match: str(makers[match[1]]().resolve()), change)

    def back(self) -> Path:
        """Make English sources for German sentences without pairs."""
        return self._backtranslated("back", self.rows[self.pairs : self.pairs + self.sentences])

    def backward(self) -> Path:
        """Make English sources for the pairs' German."""
        return self._backtranslated("backward", self.rows[: self.pairs])

    def _backtranslated(self, name: str, rows: list[dict]) -> Path:
        made, texts = self.folder / f"{name}.jsonl", self.folder / f"{name}.de"
        texts.write_text("".join(row["de"] + "\n" for row in rows), encoding="utf-8")
        self._run(made, "backtranslate", self._model("other-direction", [*BACKWARD, "seed=11"]), texts, "-o", made)
        return made

    def forward(self) -> Path:
        """Make German targets for the pairs' English."""
        made = self.folder / "forward.jsonl"
        data = ("--data", self.train, "--source", "en", "--target", "de")
        self._run(made, "distill", self._model("other-seed", ["seed=12"]), *data, "-o", made)
        return made

    def _run(self, made: Path, *command: object) -> None:
        """Run a `heedful` command for a file or folder, unless it exists."""
        with self._is_being_made[made]:
            if not made.exists():
                words = [str(word) for word in command]
                sys.stdout.write(f"$ heedful {shlex.join(words)}\n")  # complete, next to those of other rows
                sys.stdout.flush()
                subprocess.run([sys.executable, "-m", "heedful", *words], check=True)


def hours(row: str, pairs: int, prices: dict[str, float]) -> float:
    """Return the CPU hours for a row's trainings, with the models that make its pairs."""
    text = " ".join(ROWS[row])
    models = ("$back" in text) + ("$forward" in text)
    return UPDATES * (prices["R-Drop" if "r_drop" in text else "plain"] + models * prices["plain"]) / 3600


def table(known: dict, pairs: int) -> str:
    """Return the Markdown rows for one number of pairs: means over seeds, and the difference from plain."""
    found, prices = known["rows"], known["seconds of an update"].get(str(pairs))
    lines = [f"| {pairs:,} pairs | seeds | BLEU | | chrF | CPU-hours |", "|---|---|---|---|---|---|"]
    plain = None
    for row in ROWS:
        runs = [each for each in found if each["pairs"] == pairs and each["row"] == row]
        if runs:
            bleu, chrf = (statistics.mean(each[key] for each in runs) for key in ("bleu", "chrf"))
            cost = f"{hours(row, pairs, prices):.1f}" if prices else ""
            plain = bleu if row == "plain" else plain
            difference = "" if plain is None or row == "plain" else f"{bleu - plain:+.1f}"
            seeds = ", ".join(str(each["seed"]) for each in runs)
            lines.append(f"| {row} | {seeds} | {bleu:.2f} | {difference} | {chrf:.2f} | {cost} |")
    return "\n".join(lines)


def main() -> None:
    """Measure missing rows, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="folder with train, validation and test_tatoeba .jsonl.gz")
    parser.add_argument("--pairs", type=int, nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=TRAINABLE)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--jobs", type=int, default=1, help="trainings at once")
    parser.add_argument("--prices", action="store_true", help="measure only the times of updates")
    parser.add_argument("--output", type=Path, default=Path("runs/lowresource"), help="folder for the runs")
    arguments = parser.parse_args()
    known = json.loads(FOUND.read_text(encoding="utf-8"))
    writing = Lock()

    def measure(runs: Table, row: str, seed: int) -> None:
        if any((each["pairs"], each["row"], each["seed"]) == (runs.pairs, row, seed) for each in known["rows"]):
            return
        found = runs.measure(row, seed)
        with writing:
            known["rows"].append(found)
            write_text(FOUND, json.dumps(known, indent=1) + "\n")

    with ThreadPoolExecutor(arguments.jobs) as pool:
        waiting = []
        for pairs in arguments.pairs:
            runs = Table(arguments.corpus.resolve(), arguments.output, pairs)
            if arguments.prices:
                prices = {row: runs.price(ROWS[row]) for row in ("plain", "R-Drop")}
                known["seconds of an update"][str(pairs)] = prices
                write_text(FOUND, json.dumps(known, indent=1) + "\n")
            else:
                rows = [row for row in arguments.rows if runs.sentences or row != TAGGED]
                waiting += [pool.submit(measure, runs, row, seed) for seed in arguments.seeds for row in rows]
        for each in waiting:
            each.result()
    for pairs in arguments.pairs:
        print(table(known, pairs))


if __name__ == "__main__":
    main()
