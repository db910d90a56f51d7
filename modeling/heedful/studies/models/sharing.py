"""Sharing: one embedding matrix for source, target and output, as in the paper (section 3.4), against more of them."""

from typing import Any

from heedful.figures import lines
from heedful.studies.measures import seed_cells, train_with_seeds
from heedful.studies.report import Outcome
from heedful.studies.study import Lab, Study, description_of
from heedful.studies.training import LEARNING

ONE, OWN_OUTPUT, OWN_SOURCE, EACH = "one matrix", "own output", "own source", "a matrix each"
# With a joint vocabulary these are all ways that differ: neither shared nor tied is a matrix each.
SHARINGS: dict[str, dict[str, Any]] = {
    ONE: {},
    OWN_OUTPUT: {"model.options.tie_output_embeddings": False},
    OWN_SOURCE: {"model.options.share_encoder_decoder_embeddings": False},
    EACH: {"model.options.tie_word_embeddings": False},
}
MATRICES = {ONE: 1, OWN_OUTPUT: 2, OWN_SOURCE: 2, EACH: 3}
SEEDS = 2


def run(lab: Lab) -> Outcome:
    """Train a model for every way to share."""
    trainings = {name: train_with_seeds(lab, name, changes, SEEDS) for name, changes in SHARINGS.items()}
    curves = {name: runs[0].curve() for name, runs in trainings.items()}
    quality = [(name, MATRICES[name], *seed_cells(runs)) for name, runs in trainings.items()]
    return Outcome(
        {"quality": quality},
        {"curves": [lines(curves, "updates", "validation loss (nats per token)")]},
        {"saved": 1 - quality[0][2] / quality[-1][2], "spread": max(row[4] for row in quality)},
        {"seeds": SEEDS},
    )


STUDY = Study.described(run, description_of(__file__), LEARNING)
