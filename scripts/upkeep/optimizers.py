"""Compare the updates and minutes that optimizers need, in tables and pictures.

    python scripts/upkeep/optimizers.py tatoeba=path/to/tatoeba_en_de cmudict=path/to/cmudict quickstart=

Each optimizer gets the same number of short runs to tune its learning rate ("Muon, both rates" has three more), and
then trains with two seeds. Runs are `heedful` commands, which are printed. Results are in docs/figures/optimizers.json
and are not measured again; an interrupted run continues. Set OMP_NUM_THREADS=1 to give a run one core.
"""

import argparse
import gzip
import json
import random
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from heedful.figures import lines, save_figure
from heedful.files import write_text
from heedful.training.loop.monitoring import LOG_FILE, lines_of

FIGURES = Path(__file__).parents[2] / "docs" / "figures"
FOUND = FIGURES / "optimizers.json"
LOSS = "validation/loss"
POINTS = 20  # validations of a run
SHARE = 4  # a short run has a quarter of the updates


class Task(NamedTuple):
    """A task."""

    recipe: str
    updates: int
    settings: tuple[str, ...]
    test: str  # the scored set,
    score: str  # its metric
    pairs: int | None = None  # number of random training pairs


SMALL = [f"model.options.{side}_{name}" for side in ("encoder", "decoder") for name in ("layers=3", "ffn_dim=512")]
SMALL += ["model.options.d_model=128", "model.options.dropout=0.3", "tokenizer.vocab_size=4000"]
PLAIN = ("optimization.mixed_precision=no", "optimization.token_budget=null", "checkpoints.publish=last")
PLAIN += ("checkpoints.keep_last=1", "model.options.norm_placement=post")
PLAIN += ("optimization.embedding_learning_rate=null", "optimization.weight_decay=0")
TOKENS = "optimization.tokens_per_update="
TASKS = {
    "quickstart": Task("quickstart", 900, (*PLAIN, "optimization.max_minutes=null"), "test", "exact_match"),
    "tatoeba": Task("tatoeba-en-de", 2000, (*PLAIN, *SMALL, f"{TOKENS}2048"), "test", "bleu", 20_000),
    "tatoeba-large": Task("tatoeba-en-de", 500, (*PLAIN, *SMALL, f"{TOKENS}8192"), "test", "bleu", 20_000),
    "cmudict": Task("cmudict-g2p", 1000, (*PLAIN, f"{TOKENS}4096"), "held_out", "exact_match", 20_000),
}
RATES = (0.001, 0.002, 0.004, 0.008)
# By name: optimizer and schedule, the tuned key, and its values. Muon first has AdamW's best rate for embeddings, then
# a tuned one.
OPTIMIZERS = {
    "Adam, inverse square root": (["adam", "inverse_sqrt"], "learning_rate", RATES),  # the paper's, by its peak
    "AdamW, linear": (["adamw", "linear"], "learning_rate", RATES),
    "schedule-free AdamW": (["schedule_free", "constant"], "learning_rate", (0.002, 0.004, 0.008, 0.016)),
    "Muon, linear": (["muon", "linear"], "learning_rate", (0.002, 0.004, 0.008, 0.016)),
    "Muon, both rates": (["muon", "linear"], "embedding_learning_rate", (0.004, 0.008, 0.016)),
}
ADAMW, MUON, BOTH = "AdamW, linear", "Muon, linear", "Muon, both rates"


def known() -> list[dict]:
    """Return the finished runs, with those of other processes that measure other tasks."""
    return json.loads(FOUND.read_text(encoding="utf-8")) if FOUND.is_file() else []


class Study:
    """The runs of one task, in one folder."""

    def __init__(self, name: str, corpus: str, folder: Path):
        self.name, self.task, self.folder = name, TASKS[name], folder / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.data = [f"data.folder={Path(corpus).resolve()}"] if corpus else []
        if self.task.pairs is not None:
            with gzip.open(Path(corpus) / "train.jsonl.gz", "rt", encoding="utf-8") as stream:
                rows = stream.readlines()
            random.Random(1).shuffle(rows)  # the file is sorted
            train = (self.folder / "train.jsonl").resolve()
            write_text(train, "".join(rows[: self.task.pairs]))
            self.data.append(f"data.train={train}")

    def run(self, optimizer: str, rate: float, seed: int, updates: int, is_short: bool = False) -> dict:
        """Train once, unless done, and return the results; a short run gives only its last loss."""
        (kind, schedule), key, _ = OPTIMIZERS[optimizer]
        place = {"task": self.name, "optimizer": optimizer, "rate": rate, "seed": seed, "updates": updates}
        for each in known():
            if place.items() <= each.items():
                return each
        output = self.folder / f"{'both' if optimizer == BOTH else kind}-{schedule}-{rate}-{seed}-{updates}"
        every = updates if is_short else max(1, updates // POINTS)
        settings = [f"output={output}", f"seed={seed}", "resume=true", f"validation.every_updates={every}"]
        settings += [
            f"optimization.optimizer={kind}",
            f"optimization.schedule={schedule}",
            f"optimization.{key}={rate}",
        ]
        settings += [f"optimization.max_updates={updates}", f"optimization.warmup_updates={updates // 10}"]
        settings += [f"checkpoints.every_updates={updates}", f"validation.sentences={2 * is_short}"]
        settings += ["data.test={}"] * is_short
        if optimizer == MUON:
            settings.append(f"optimization.embedding_learning_rate={self.best(ADAMW)}")
        if optimizer == BOTH:
            settings.append(f"optimization.learning_rate={self.best(MUON)}")
        words = ["train", self.task.recipe, *self.data, *self.task.settings, *settings]
        print(f"$ heedful {shlex.join(words)}", flush=True)
        subprocess.run([sys.executable, "-m", "heedful", *words], check=True)
        log = [line for _, line in lines_of(output / LOG_FILE) if line and LOSS in line]
        scores = json.loads((output / "model/metrics.json").read_text())
        place["curve"] = [(line["update"], round(line["seconds"] / 60, 3), round(line[LOSS], 4)) for line in log]
        if not is_short:
            place["score"] = round(scores[self.task.test][self.task.score], 2)
        write_text(FOUND, json.dumps([*known(), place]) + "\n")
        return place

    def best(self, optimizer: str) -> float:
        """Return the rate with the lowest final loss in short runs."""
        updates = self.task.updates // SHARE
        runs = [self.run(optimizer, rate, 1, updates, is_short=True) for rate in OPTIMIZERS[optimizer][2]]
        return min(runs, key=lambda run: run["curve"][-1][2])["rate"]

    def runs(self, optimizer: str, seeds: list[int]) -> list[dict]:
        """Return an optimizer's runs with its best rate."""
        return [self.run(optimizer, self.best(optimizer), seed, self.task.updates) for seed in seeds]


def reached(run: dict, loss: float, column: int) -> float | None:
    """Return the updates (column 0) or minutes (1) until a loss, interpolated between validations."""
    before = None
    for point in run["curve"]:
        if point[2] <= loss:
            if before is None:
                return point[column]
            share = (before[2] - loss) / (before[2] - point[2])
            return before[column] + share * (point[column] - before[column])
        before = point
    return None


def whole_runs(known: list[dict], name: str) -> dict[str, list[dict]]:
    """Return a task's full runs by optimizer, in order."""
    found: dict[str, list[dict]] = {}
    for run in known:
        if run["task"] == name and "score" in run:
            found.setdefault(run["optimizer"], []).append(run)
    return found


def table(name: str, found: dict[str, list[dict]]) -> str:
    """Return a task's Markdown table, with updates and minutes to the best final loss of Adam or AdamW."""
    adams = [name for name in found if name.startswith("Adam")]
    goal = min(statistics.mean(run["curve"][-1][2] for run in found[name]) for name in adams)
    head = f"| {name}, {TASKS[name].updates:,} updates | rate | loss | updates to {goal:.3f} | minutes to it"
    lines_found = [f"{head} | minutes | {TASKS[name].score} |", "|---|---|---|---|---|---|---|"]
    for optimizer, runs in found.items():
        cells = [optimizer, f"{runs[0]['rate']:g}", f"{statistics.mean(run['curve'][-1][2] for run in runs):.3f}"]
        for column in (0, 1):
            times = [reached(run, goal, column) for run in runs]
            whole = [time for time in times if time is not None]
            mean = f"{statistics.mean(whole):,.{column}f}" if whole else "not reached"
            cells.append(mean + f" ({len(whole)} of {len(runs)} runs)" * (0 < len(whole) < len(runs)))
        cells.append(f"{statistics.mean(run['curve'][-1][1] for run in runs):.1f}")
        cells.append(", ".join(f"{run['score']:.2f}" for run in runs))
        lines_found.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines_found)


def draw(name: str, found: dict[str, list[dict]]) -> None:
    """Draw each optimizer's validation loss (first run) over updates and minutes."""
    panels = []
    for column, unit in enumerate(("updates", "minutes")):
        curves = {each: [(point[column], point[2]) for point in runs[0]["curve"][1:]] for each, runs in found.items()}
        losses = [loss for points in curves.values() for _, loss in points]
        panels.append(lines(curves, unit, "validation loss", log="y" * (max(losses) > 10 * min(losses))))
    save_figure(panels, FIGURES / f"optimizers-{name}.svg")


def main() -> None:
    """Measure missing runs, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", help=f"NAME=FOLDER of a corpus; names are {', '.join(TASKS)}")
    parser.add_argument("--optimizers", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--output", type=Path, default=Path("runs/optimizers"), help="folder for the runs")
    arguments = parser.parse_args()
    for task in arguments.tasks:
        name, _, corpus = task.partition("=")
        study = Study(name, corpus, arguments.output.resolve())
        for optimizer in arguments.optimizers:
            study.runs(optimizer, arguments.seeds)
        found = whole_runs(known(), name)
        print(table(name, found), flush=True)
        draw(name, found)


if __name__ == "__main__":
    main()
