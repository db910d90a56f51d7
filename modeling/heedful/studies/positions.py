"""Positions: what each way to tell a model the order of its tokens is worth, and why sinusoids were chosen.

Section 3.5 chose sinusoids because PE(pos + k) is, for every k, a linear function of PE(pos): each frequency is a
point on a circle, and k steps turn it by an angle that does not depend on where it stands.
"""

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from heedful.studies.figures import draw_lines, new_figure
from heedful.studies.study import Figure, Lab, Outcome, Study, Table
from heedful.studies.training import Training

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure as Picture

ENCODINGS = ("sinusoidal", "learned", "rotary", "none")
WIDTH = 64
POSITIONS = 512
DRAWN = 24  # rows and columns of a matrix
OFFSETS = (1, 5, 10, 100, 1000)
LETTERS = "abcdefghijklmnop"
SEEN_LENGTHS, LONGER_LENGTHS = (2, 12), (13, 16)  # letters
PAIRS = {"train": 20_000, "validation": 200, "test": 200}
REVERSAL: dict[str, Any] = {
    "data.source": "source",
    "data.target": "target",
    "tokenizer.algorithm": "word",
    "tokenizer.vocab_size": None,
    "optimization.learning_rate": 0.003,
}


def shift_matrix(offset: int, width: int) -> "torch.Tensor":
    """Return the matrix M with PE(pos + offset) = M PE(pos) for every pos: a rotation for each pair of features.

    Args:
        offset: Number of positions, k.
        width: Size of the encoding, d_model.

    Returns:
        float64 `(width, width)`: for the features 2i and 2i+1, [[cos φ, sin φ], [-sin φ, cos φ]] with
        φ = k / 10000^(2i / width).
    """
    import torch

    angles = offset * wave_numbers(width)
    blocks = torch.stack([angles.cos(), angles.sin(), -angles.sin(), angles.cos()], dim=-1).view(-1, 2, 2)
    return torch.block_diag(*blocks)


def wave_numbers(width: int) -> "torch.Tensor":
    """Return how far each pair of features turns from one position to the next, 1 / 10000^(2i / width), in float64."""
    import torch

    return 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)


def encodings(positions: "torch.Tensor", width: int) -> "torch.Tensor":
    """Return the sinusoids of positions in float64, `(positions, width)`, by the formula of section 3.5."""
    import torch

    angles = positions.to(torch.float64)[:, None] * wave_numbers(width)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)


def shift_errors(offset: int) -> tuple[float, float]:
    """Return the largest error of M PE(pos) against PE(pos + offset), in float64 and of the model's float32."""
    import torch

    from heedful.positions_heed import sinusoids

    matrix = shift_matrix(offset, WIDTH)
    positions = torch.arange(POSITIONS)
    exact = encodings(positions, WIDTH) @ matrix.T - encodings(positions + offset, WIDTH)
    own = sinusoids(positions, WIDTH, "interleaved") @ matrix.T.float()
    own = own - sinusoids(positions + offset, WIDTH, "interleaved")
    return exact.abs().max().item(), own.abs().max().item()


def reversal_pairs(lengths: tuple[int, int], count: int, seed: int) -> list[tuple[str, str]]:
    """Return texts of random letters, all different, each with the same letters from the last to the first."""
    draw = random.Random(seed)
    texts: dict[tuple[str, ...], None] = {}
    while len(texts) < count:
        texts[tuple(draw.choices(LETTERS, k=draw.randint(*lengths)))] = None
    return [(" ".join(text), " ".join(reversed(text))) for text in texts]


def run(lab: Lab) -> Outcome:
    """Show the linear function, and train a model for each encoding on the built-in corpus and on reversal."""
    errors = {offset: shift_errors(offset) for offset in OFFSETS}
    shifts = Table(
        "shifts",
        f"PE(pos + k) as a linear function of PE(pos): largest error for pos from 0 to {POSITIONS - 1}",
        ("k", "float64", "float32, as in the model"),
        [(offset, *errors[offset]) for offset in OFFSETS],
        {"float64": ".1e", "float32, as in the model": ".1e"},
    )
    files = _reversal_data(lab)
    corpus: dict[str, Training] = {}
    reversal: dict[str, Training] = {}
    for name in ENCODINGS:
        option = {"model.options.position_encoding": name}
        corpus[name] = lab.train(f"corpus, {name}", option)
        reversal[name] = lab.train(f"reversal, {name}", {**REVERSAL, **option, **files})
    figures = [
        Figure(
            "shift",
            f"Left: the matrix that turns PE(pos) into PE(pos + 5), its first {DRAWN} rows and columns. Right: three "
            "features of PE(pos + 5) by pos (lines), and what the matrix makes of PE(pos) (dots).",
            _draw_shift(5),
        ),
        Figure(
            "losses", "Validation loss by update.", _draw_losses({"built-in corpus": corpus, "reversal": reversal})
        ),
    ]
    return Outcome([shifts, _quality(corpus, reversal)], figures, _values(errors, corpus, reversal), FINDINGS)


FINDINGS = (
    "PE(pos + k) is a linear function of PE(pos): one matrix per k, a rotation for each frequency, is right to "
    "{exact:.1e} for every pos in float64.",
    "Reversing letters, a model without positions gets {reversal_none:.1f} % right, with sinusoids "
    "{reversal_sinusoidal:.1f} %, with learned ones {reversal_learned:.1f} %, with rotary ones "
    "{reversal_rotary:.1f} %.",
    "Of texts longer than any in training, it is {longer_sinusoidal:.1f} % with sinusoids, {longer_learned:.1f} % "
    "with learned positions, {longer_rotary:.1f} % with rotary ones.",
    "On the built-in corpus BLEU is {bleu_sinusoidal:.1f} with sinusoids, {bleu_learned:.1f} with learned positions, "
    "{bleu_rotary:.1f} with rotary ones, and {bleu_none:.1f} without any.",
)


def _reversal_data(lab: Lab) -> dict[str, Any]:
    files = {
        name: lab.write_pairs(reversal_pairs(SEEN_LENGTHS, count, lab.seed + number))
        for number, (name, count) in enumerate(PAIRS.items())
    }
    longer = lab.write_pairs(reversal_pairs(LONGER_LENGTHS, PAIRS["test"], lab.seed))
    return {
        "data.train": files["train"],
        "data.validation": files["validation"],
        "data.test": {"test": files["test"], "longer": longer},
    }


def _quality(corpus: dict[str, Training], reversal: dict[str, Training]) -> Table:
    rows = []
    for name in ENCODINGS:
        ours, turned = corpus[name].metrics, reversal[name].metrics
        rows.append(
            (
                name,
                ours["validation"]["loss"],
                ours["test"]["bleu"],
                ours["compositional"]["bleu"],
                turned["test"]["exact_match"],
                turned["longer"]["exact_match"],
            )
        )
    columns = (
        "positions",
        "corpus: validation loss",
        "BLEU, test",
        "BLEU, compositional",
        "reversal: exact match in %",
        "longer than in training",
    )
    formats = dict(zip(columns[1:], (".3f", ".1f", ".1f", ".1f", ".1f"), strict=True))
    return Table("quality", "Quality by position encoding", columns, rows, formats)


def _values(
    errors: dict[int, tuple[float, float]], corpus: dict[str, Training], reversal: dict[str, Training]
) -> dict[str, float]:
    values = {"exact": max(exact for exact, _ in errors.values())}
    for name in ENCODINGS:
        values[f"bleu_{name}"] = corpus[name].metrics["test"]["bleu"]
        values[f"reversal_{name}"] = reversal[name].metrics["test"]["exact_match"]
        values[f"longer_{name}"] = reversal[name].metrics["longer"]["exact_match"]
    return values


def _draw_shift(offset: int) -> "Picture":
    import torch

    figure = new_figure(1, 2)
    left, right = figure.axes
    matrix = shift_matrix(offset, WIDTH)
    image = left.imshow(matrix[:DRAWN, :DRAWN].numpy(), cmap="coolwarm", vmin=-1, vmax=1)
    figure.colorbar(image, ax=left)
    left.set_xlabel("feature of PE(pos)")
    left.set_ylabel(f"feature of PE(pos + {offset})")
    positions = torch.arange(0, 60)
    made, real = encodings(positions, WIDTH) @ matrix.T, encodings(positions + offset, WIDTH)
    for feature in (0, 8, 20):
        (line,) = right.plot(positions, real[:, feature], linewidth=1.2, label=f"feature {feature}")
        right.plot(positions[::3], made[::3, feature], ".", color=line.get_color())
    right.set_xlabel("pos")
    right.legend(fontsize=8)
    return figure


def _draw_losses(groups: dict[str, dict[str, Training]]) -> "Picture":
    figure = new_figure(1, len(groups))
    for axes, (title, trainings) in zip(figure.axes, groups.items(), strict=True):
        lines: dict[str, Sequence[tuple[float, float]]] = {name: one.curve() for name, one in trainings.items()}
        draw_lines(axes, lines, "update", "validation loss in nats per token")
        axes.set_title(title)
    return figure


STUDY = Study(
    "positions",
    "What is each way to tell a model the order of its tokens worth, and what makes sinusoids special?",
    run,
    {"optimization.max_updates": 400},
)
