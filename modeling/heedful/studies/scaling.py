"""Scaling: why section 3.2.1 divides scores by √d_k.

If the components of a query and a key are independent with mean 0 and variance 1, their product q·k has variance d_k.
A softmax over scores that large puts nearly all weight on one, and passes hardly any gradient on. Additive scores do
not grow with d_k. Three scorings are trained at three widths, where h·d_k = d_model as in Table 3, row A: so the costs
are equal, and fresh projections give queries and keys of variance 1.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from heedful.studies.figures import draw_lines, line_chart, new_figure
from heedful.studies.study import Figure, Lab, Outcome, Study, Table
from heedful.studies.training import Training

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

WIDTHS = (16, 32, 64, 128, 256, 512, 1024)  # d_k
KEYS = 32
QUERIES = 4096
TRAINED_WIDTHS = (16, 64, 256)
D_MODEL = 256
SCORINGS = ("dot", "scaled_dot", "additive")


@dataclass(frozen=True)
class Softmax:
    """What a softmax over the scores of random queries and keys does, means over queries.

    Attributes:
        variance: Of a score.
        largest: The largest weight.
        entropy: Of the weights, in nats.
        gradient: Norm of the matrix of derivatives of the weights by the scores.
    """

    variance: float
    largest: float
    entropy: float
    gradient: float


def softmax_of_random(d_k: int, is_scaled: bool, seed: int) -> Softmax:
    """Draw queries and keys with components of variance 1, and look at the softmax over their scores.

    Args:
        d_k: Width of queries and keys.
        is_scaled: Whether scores are divided by √d_k.
        seed: Of the draw; with and without scaling it is the same one.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(QUERIES, 1, d_k, generator=generator)
    scores = torch.cat(
        [(query * torch.randn(QUERIES, 1, d_k, generator=generator)).sum(-1) for _ in range(KEYS)], dim=-1
    )  # (queries, keys)
    if is_scaled:
        scores = scores / math.sqrt(d_k)
    weights = scores.double().softmax(-1)
    # The derivative of weight i by score j is w_i (δ_ij - w_j).
    squares = weights.square()
    norms = squares.sum(-1) - 2 * (squares * weights).sum(-1) + squares.sum(-1).square()
    return Softmax(
        variance=scores.double().square().mean().item(),
        largest=weights.amax(-1).mean().item(),
        entropy=torch.special.entr(weights).sum(-1).mean().item(),
        gradient=norms.clamp(min=0).sqrt().mean().item(),
    )


def run(lab: Lab) -> Outcome:
    """Look at random scores by width, and train each scoring at three widths."""
    plain = {d_k: softmax_of_random(d_k, False, lab.seed) for d_k in WIDTHS}
    scaled = {d_k: softmax_of_random(d_k, True, lab.seed) for d_k in WIDTHS}
    trainings = {
        (scoring, d_k): lab.train(
            f"{scoring}, d_k {d_k}",
            {
                "model.options.attention_scoring": scoring,
                "model.options.encoder_attention_heads": D_MODEL // d_k,
                "model.options.decoder_attention_heads": D_MODEL // d_k,
            },
        )
        for d_k in TRAINED_WIDTHS
        for scoring in SCORINGS
    }
    figures = [
        Figure(
            "softmax",
            f"Random scores over {KEYS} keys by d_k: largest weight, entropy, and norm of the softmax's derivative.",
            _draw_softmax(plain, scaled),
        ),
        Figure("variance", "Variance of q·k by d_k; the line is d_k.", _draw_variance(plain)),
        Figure("training", "Validation loss by update, by scoring and d_k.", _draw_training(trainings)),
    ]
    return Outcome(
        [_softmax_table(plain, scaled), _training_table(trainings)],
        figures,
        _values(plain, scaled, trainings),
        FINDINGS,
    )


FINDINGS = (
    "The variance of q·k is {variance_16:.1f} at d_k = 16, {variance_256:.0f} at 256 and {variance_1024:.0f} at 1024.",
    "Without the scaling the largest of 32 weights is {largest_16:.2f} at d_k = 16 and {largest_1024:.2f} at 1024, "
    "and the norm of the softmax's derivative falls from {gradient_16:.3f} to {gradient_1024:.3f}; with it the weight "
    "is {scaled_largest_1024:.2f} and the norm {scaled_gradient_1024:.3f} at 1024.",
    "After training, the validation loss at d_k = 256 is {loss_dot_256:.3f} with dot, {loss_scaled_dot_256:.3f} with "
    "scaled_dot and {loss_additive_256:.3f} with additive scores; at d_k = 16 it is {loss_dot_16:.3f}, "
    "{loss_scaled_dot_16:.3f} and {loss_additive_16:.3f}.",
)


def _softmax_table(plain: dict[int, Softmax], scaled: dict[int, Softmax]) -> Table:
    rows = []
    for d_k in WIDTHS:
        one, other = plain[d_k], scaled[d_k]
        rows.append(
            (d_k, one.variance, one.largest, other.largest, one.entropy, other.entropy, one.gradient, other.gradient)
        )
    columns = (
        *("d_k", "variance of q·k", "largest weight", "largest, scaled", "entropy", "entropy, scaled"),
        *("derivative", "derivative, scaled"),
    )
    formats = dict(zip(columns[1:], (".1f", ".3f", ".3f", ".2f", ".2f", ".3f", ".3f"), strict=True))
    title = f"Softmax over the scores of random queries and {KEYS} keys, mean of {QUERIES:,} queries"
    return Table("softmax", title, columns, rows, formats)


def _training_table(trainings: dict[tuple[str, int], Training]) -> Table:
    rows = []
    for d_k in TRAINED_WIDTHS:
        for scoring in SCORINGS:
            curve = trainings[scoring, d_k].curve()
            middle = curve[(len(curve) - 1) // 2]
            rows.append((d_k, D_MODEL // d_k, scoring, middle[1], curve[-1][1]))
    columns = ("d_k", "heads", "scoring", "validation loss, halfway", "at the end")
    return Table("training", "Trained models", columns, rows, dict.fromkeys(columns[3:], ".3f"))


def _values(
    plain: dict[int, Softmax], scaled: dict[int, Softmax], trainings: dict[tuple[str, int], Training]
) -> dict[str, float]:
    values = {f"variance_{d_k}": plain[d_k].variance for d_k in (16, 256, 1024)}
    for d_k in (16, 1024):
        values |= {f"largest_{d_k}": plain[d_k].largest, f"gradient_{d_k}": plain[d_k].gradient}
        values |= {f"scaled_largest_{d_k}": scaled[d_k].largest, f"scaled_gradient_{d_k}": scaled[d_k].gradient}
    return values | {
        f"loss_{scoring}_{d_k}": training.metrics["validation"]["loss"]
        for (scoring, d_k), training in trainings.items()
    }


def _draw_variance(plain: dict[int, Softmax]) -> "Picture":
    lines = {
        "measured": [(d_k, plain[d_k].variance) for d_k in WIDTHS],
        "d_k": [(d_k, float(d_k)) for d_k in WIDTHS],
    }
    return line_chart(lines, "d_k", "variance of q·k", log="xy")


def _draw_softmax(plain: dict[int, Softmax], scaled: dict[int, Softmax]) -> "Picture":
    figure = new_figure(1, 3)
    labels = {"largest": "largest weight", "entropy": "entropy in nats", "gradient": "norm of the derivative"}
    for axes, (name, label) in zip(figure.axes, labels.items(), strict=True):
        lines = {
            title: [(d_k, getattr(some[d_k], name)) for d_k in WIDTHS]
            for title, some in {"q·k": plain, "q·k / √d_k": scaled}.items()
        }
        draw_lines(axes, lines, "d_k", label, log="x")
        axes.set_ylim(bottom=0)
    return figure


def _draw_training(trainings: dict[tuple[str, int], Training]) -> "Picture":
    figure = new_figure(1, len(TRAINED_WIDTHS))
    for axes, d_k in zip(figure.axes, TRAINED_WIDTHS, strict=True):
        lines = {scoring: trainings[scoring, d_k].curve() for scoring in SCORINGS}
        draw_lines(axes, lines, "update", "validation loss in nats per token")
        axes.set_title(f"d_k {d_k}, h {D_MODEL // d_k}")
    return figure


STUDY = Study(
    "scaling",
    "Why are scores divided by the square root of d_k?",
    run,
    {
        "model.options.d_model": D_MODEL,
        "model.options.encoder_layers": 1,
        "model.options.decoder_layers": 1,
        "optimization.learning_rate": 0.003,
        "optimization.max_updates": 160,
        "optimization.tokens_per_update": 1024,
        "validation.every_updates": 20,
        "data.train": "builtin:train:8000",
        "data.validation": "builtin:validation:150",
        "data.test": {},
    },
)
