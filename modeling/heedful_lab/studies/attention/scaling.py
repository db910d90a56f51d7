"""Scaling: why scores are divided by √d_k (section 3.2.1), by random scores and by training at equal costs."""

import math
from itertools import product
from typing import NamedTuple

import torch

from heedful.figures import Panel, Points, lines
from heedful_lab.studies.report import Outcome
from heedful_lab.studies.study import Lab, description_of

WIDTHS = (16, 32, 64, 128, 256, 512, 1024)  # d_k
KEYS = 32
QUERIES = 4096
TRAINED_WIDTHS = (16, 64, 256)
DESCRIPTION = description_of(__file__)
D_MODEL = DESCRIPTION["changes"]["model.options.d_model"]
SCORINGS = ("dot", "scaled_dot", "additive")

MEASURES = {"largest": "largest weight", "entropy": "entropy in nats", "gradient": "norm of the derivative"}


class Softmax(NamedTuple):
    """Results of softmax over scores of random queries and keys, means over queries."""

    variance: float  # of scores
    largest: float  # weight
    entropy: float  # of the weights, in nats
    gradient: float  # norm of the weights' Jacobian by the scores


def softmax_of_random(d_k: int, is_scaled: bool, seed: int) -> Softmax:
    """Return the results for random queries and keys, the same with and without scaling."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(QUERIES, d_k, generator=generator)
    products = [(query * torch.randn(QUERIES, d_k, generator=generator)).sum(-1) for _ in range(KEYS)]
    scores = torch.stack(products, dim=-1) / (math.sqrt(d_k) if is_scaled else 1)  # (queries, keys)
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
    """Measure random scores by width, and train each scoring at three widths."""
    plain = {d_k: softmax_of_random(d_k, False, lab.seed) for d_k in WIDTHS}
    scaled = {d_k: softmax_of_random(d_k, True, lab.seed) for d_k in WIDTHS}
    curves = {}
    for d_k, scoring in product(TRAINED_WIDTHS, SCORINGS):
        heads = {f"model.options.{stack}_attention_heads": D_MODEL // d_k for stack in ("encoder", "decoder")}
        changes = {"model.options.attention_scoring": scoring, **heads}
        curves[d_k, scoring] = lab.train(f"{scoring}, d_k {d_k}", changes).curve()
    softmax_rows = [
        (d_k, plain[d_k].variance, *(getattr(one[d_k], name) for name in MEASURES for one in (plain, scaled)))
        for d_k in WIDTHS
    ]
    training_rows = [
        (d_k, D_MODEL // d_k, scoring, curve[(len(curve) - 1) // 2][1], curve[-1][1])
        for (d_k, scoring), curve in curves.items()
    ]

    def by_width(name: str) -> dict[str, Points]:
        both = {"q·k": plain, "q·k / √d_k": scaled}
        return {label: [(d_k, getattr(one[d_k], name)) for d_k in WIDTHS] for label, one in both.items()}

    def by_scoring(d_k: int) -> Panel:
        losses = {scoring: curves[d_k, scoring] for scoring in SCORINGS}
        return lines(losses, "update", "validation loss in nats per token", f"d_k {d_k}, h {D_MODEL // d_k}")

    variances = {"measured": by_width("variance")["q·k"], "d_k": [(d_k, d_k) for d_k in WIDTHS]}
    return Outcome(
        {"softmax": softmax_rows, "training": training_rows},
        {
            "softmax": [lines(by_width(each), "d_k", MEASURES[each], log="x", ylim=(0, None)) for each in MEASURES],
            "variance": [lines(variances, "d_k", "variance of q·k", log="xy")],
            "training": [by_scoring(d_k) for d_k in TRAINED_WIDTHS],
        },
        settings={"keys": KEYS, "queries": QUERIES},
    )
