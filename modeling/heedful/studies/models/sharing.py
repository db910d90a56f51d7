"""Sharing: one embedding matrix for source, target and output, as in the paper (section 3.4), against more of them."""

from typing import Any

from heedful.studies.figures import Figure, lines
from heedful.studies.measures import SEED_COLUMNS, seed_cells, seed_values, train_with_seeds
from heedful.studies.report import Outcome, Table
from heedful.studies.study import Lab, Study
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
KEYS = {name: name.replace(" ", "_") for name in SHARINGS}
SEEDS = 2
FINDINGS = [
    "One matrix makes a model of {one:,} parameters, a matrix each one of {each:,}: {saved:.0%} are saved.",
    f"Validation loss per token: {', '.join(f'{{loss_{key}:.3f}} ({name})' for name, key in KEYS.items())}; "
    "two seeds of one model differ by up to {spread:.3f}.",
    f"BLEU: {', '.join(f'{{bleu_{key}:.1f}} ({name})' for name, key in KEYS.items())}.",
]


def run(lab: Lab) -> Outcome:
    """Train a model for every way to share."""
    trainings = {name: train_with_seeds(lab, name, changes, SEEDS) for name, changes in SHARINGS.items()}
    rows = [(name, MATRICES[name], *seed_cells(runs)) for name, runs in trainings.items()]
    title, header = f"Size and quality (means of {SEEDS} seeds)", f"embeddings | matrices | {SEED_COLUMNS}"
    curves = {name: runs[0].curve() for name, runs in trainings.items()}
    by_key = {KEYS[name]: runs for name, runs in trainings.items()}
    panel = lines(curves, "updates", "validation loss (nats per token)")
    one, each = trainings[ONE][0].parameters, trainings[EACH][0].parameters
    return Outcome(
        [Table.of("quality", title, header, rows)],
        [Figure("curves", "Validation loss in training, the first seed of each.", [panel])],
        {"one": one, "each": each, "saved": 1 - one / each} | seed_values(by_key),
        FINDINGS,
    )


STUDY = Study("sharing", "What does it cost to share source, target and output embeddings?", run, LEARNING)
