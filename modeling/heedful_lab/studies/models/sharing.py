"""Sharing: one embedding matrix for source, target and output (section 3.4), or several."""

from heedful.figures import lines
from heedful_lab.studies.measures import seed_cells, train_with_seeds
from heedful_lab.studies.report import Outcome
from heedful_lab.studies.study import Lab, description_of

DESCRIPTION = description_of(__file__)
SEEDS = 2


def run(lab: Lab) -> Outcome:
    """Train a model for each way of sharing."""
    trainings = {
        name: train_with_seeds(lab, name, {f"model.options.{option}": False for option in options}, SEEDS)
        for name, options in DESCRIPTION["switched_off"].items()
    }
    curves = {name: runs[0].curve() for name, runs in trainings.items()}
    quality = [(name, DESCRIPTION["matrices"][name], *seed_cells(runs)) for name, runs in trainings.items()]
    return Outcome(
        {"quality": quality},
        {"curves": [lines(curves, "updates", "validation loss (nats per token)")]},
        {"saved": 1 - quality[0][2] / quality[-1][2], "spread": max(row[4] for row in quality)},
        {"seeds": SEEDS},
    )
