"""Attention in numbers: the entropy of heads, and equation 1 step by step."""

import math
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from heedful.attention.maps import AttentionSteps
from heedful.attention.measures import Entropy


def entropy_lines(entropy: Entropy) -> Iterator[str]:
    """Yield a table of entropies in lines: a row for each layer, a column for each head."""
    yield f"{'nats (share of log n)':<23}" + _cells(f"head {head}" for head in range(entropy.nats.shape[1]))
    for layer, rows in enumerate(zip(entropy.nats, entropy.share, strict=True)):
        yield f"layer {layer:<17}" + _cells(f"{nats:.2f} ({share:4.0%})" for nats, share in zip(*rows, strict=True))


def _cells(texts: Iterable[str]) -> str:
    return "".join(f"{text:<15}" for text in texts).rstrip()


def steps_lines(steps: AttentionSteps) -> Iterator[str]:
    """Yield equation 1 with its numbers and shapes, rows and columns labelled by tokens."""
    rows, columns, weights = steps.attention.target_tokens, steps.attention.source_tokens, steps.attention.weights
    d_k, shape = steps.key.shape[1], weights.shape
    yield f"Q {steps.query.shape}: a query for each row; K {steps.key.shape} and V {steps.value.shape}: columns"
    yield f"\n1. Scores q·k, Q Kᵀ {shape}; −∞ where a later token is masked"
    yield from _table(rows, columns, steps.scores, 2)
    divisor = f"√d_k = √{d_k} = {math.sqrt(d_k):.3f}" if steps.scaling != 1 else "1: this model does not scale"
    yield f"\n2. Scores divided by {divisor}"
    yield from _table(rows, columns, steps.scaled, 2)
    yield "\n3. Weights, the softmax of each row: their sum is 1"
    yield from _table(rows, [*columns, "sum"], np.c_[weights, weights.sum(axis=1)], 3)
    yield f"\n4. Output, the sum of the values by these weights {steps.output.shape}: the norm of each row"
    yield from _table(rows, ["norm"], np.linalg.norm(steps.output, axis=1, keepdims=True), 3)


def _table(rows: Sequence[str], columns: Sequence[str], numbers: np.ndarray, digits: int) -> Iterator[str]:
    """Yield a table in lines. Korean and Chinese letters count as two columns, as in a terminal."""
    cells = [[f"{one:.{digits}f}".replace("-inf", "−∞") for one in row] for row in numbers]
    lines = [["", *columns], *([label, *row] for label, row in zip(rows, cells, strict=True))]
    widths = [max(map(_width, column)) for column in zip(*lines, strict=True)]
    for label, *others in lines:
        padded = (" " * (2 + width - _width(cell)) + cell for cell, width in zip(others, widths[1:], strict=True))
        yield f"{label}{' ' * (widths[0] - _width(label))}{''.join(padded)}"


def _width(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)
