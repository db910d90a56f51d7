"""Sharing: one embedding matrix for source, target and output, as in the paper (section 3.4), against more of them."""

from typing import TYPE_CHECKING, Any

from heedful.studies.comparison import LEARNING, mean, spread, train_with_seeds
from heedful.studies.figures import draw_lines, new_figure
from heedful.studies.study import Cell, Figure, Lab, Outcome, Study, Table
from heedful.studies.training import Training

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

ONE, OWN_OUTPUT, OWN_SOURCE, EACH = "one matrix", "own output", "own source", "a matrix each"
# All that can be told apart with a joint vocabulary: neither shared nor tied is a matrix each.
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
    caption = "Validation loss in training, the first seed of each."
    figures = [Figure("curves", caption, _draw_curves({name: runs[0] for name, runs in trainings.items()}))]
    return Outcome([_table(trainings)], figures, _values(trainings), _findings())


def _losses(runs: list[Training]) -> list[float]:
    return [run.metrics["validation"]["loss"] for run in runs]


def _scores(runs: list[Training], name: str) -> list[float]:
    return [run.metrics["test"][name] for run in runs]


def _table(trainings: dict[str, list[Training]]) -> Table:
    columns = (
        "embeddings",
        "matrices",
        "parameters",
        "validation loss",
        "between seeds",
        "BLEU",
        "BLEU between seeds",
    )
    rows = [
        (
            *(name, MATRICES[name], runs[0].parameters, mean(_losses(runs)), spread(_losses(runs))),
            *(mean(_scores(runs, "bleu")), spread(_scores(runs, "bleu"))),
        )
        for name, runs in trainings.items()
    ]
    formats = {"parameters": ",", "validation loss": ".3f", "between seeds": ".3f"}
    formats |= {"BLEU": ".1f", "BLEU between seeds": ".1f"}
    return Table("quality", f"Size and quality (means of {SEEDS} seeds)", columns, rows, formats)


def _values(trainings: dict[str, list[Training]]) -> dict[str, Cell]:
    one, each = trainings[ONE][0].parameters, trainings[EACH][0].parameters
    values: dict[str, Cell] = {"one": one, "each": each, "saved": 1 - one / each}
    for name, runs in trainings.items():
        key = name.replace(" ", "_")
        values |= {f"loss_{key}": mean(_losses(runs)), f"bleu_{key}": mean(_scores(runs, "bleu"))}
    return values | {"spread": max(spread(_losses(runs)) for runs in trainings.values())}


def _findings() -> list[str]:
    told = ", ".join(f"{{loss_{name.replace(' ', '_')}:.3f}} ({name})" for name in SHARINGS)
    scores = ", ".join(f"{{bleu_{name.replace(' ', '_')}:.1f}} ({name})" for name in SHARINGS)
    return [
        "One matrix makes a model of {one:,} parameters, a matrix each one of {each:,}: {saved:.0%} are saved.",
        f"Validation loss per token: {told}; two seeds of one model differ by up to {{spread:.3f}}.",
        f"BLEU: {scores}.",
    ]


def _draw_curves(trainings: dict[str, Training]) -> "Picture":
    figure = new_figure()
    lines = {name: training.curve() for name, training in trainings.items()}
    draw_lines(figure.axes[0], lines, "updates", "validation loss (nats per token)")
    return figure


STUDY = Study("sharing", "What does it cost to share source, target and output embeddings?", run, LEARNING)
