"""Positions: what each way to tell a model the order of its tokens is worth, and why sinusoids were chosen.

Section 3.5 chose sinusoids because PE(pos + k) is, for every k, a linear function of PE(pos): each frequency is a
point on a circle, and k steps turn it by an angle that does not depend on where it stands.
"""

from random import Random
from typing import Any

import torch

from heedful.positions_heed import sinusoids
from heedful.studies.figures import Figure, lines, matrix
from heedful.studies.pairs import Pair, reversal_pairs
from heedful.studies.report import Outcome, Table
from heedful.studies.study import Lab, Study

ENCODINGS = ("sinusoidal", "learned", "rotary", "none")
WIDTH = 64
POSITIONS = 512
DRAWN = 24  # rows and columns of a matrix
DRAWN_OFFSET = 5
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
QUALITY_COLUMNS = (
    "positions | corpus: validation loss :.3f | BLEU, test :.1f | BLEU, compositional :.1f | "
    "reversal: exact match in % :.1f | longer than in training :.1f"
)
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


def shift_matrix(offset: int, width: int) -> torch.Tensor:
    """Return the matrix M with PE(pos + offset) = M PE(pos) for every pos: a rotation for each pair of features.

    Args:
        offset: Number of positions, k.
        width: Size of the encoding, d_model.

    Returns:
        float64 `(width, width)`: for the features 2i and 2i+1, [[cos φ, sin φ], [-sin φ, cos φ]] with
        φ = k / 10000^(2i / width).
    """
    angles = offset * wave_numbers(width)
    blocks = torch.stack([angles.cos(), angles.sin(), -angles.sin(), angles.cos()], dim=-1).view(-1, 2, 2)
    return torch.block_diag(*blocks)


def wave_numbers(width: int) -> torch.Tensor:
    """Return how far each pair of features turns from one position to the next, 1 / 10000^(2i / width), in float64."""
    return 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)


def encodings(positions: torch.Tensor, width: int) -> torch.Tensor:
    """Return the sinusoids of positions in float64, `(positions, width)`, by the formula of section 3.5."""
    angles = positions.to(torch.float64)[:, None] * wave_numbers(width)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)


def shift_errors(offset: int) -> tuple[float, float]:
    """Return the largest error of M PE(pos) against PE(pos + offset), in float64 and of the model's float32."""
    shift = shift_matrix(offset, WIDTH)
    positions = torch.arange(POSITIONS)
    exact = encodings(positions, WIDTH) @ shift.T - encodings(positions + offset, WIDTH)
    own = sinusoids(positions, WIDTH, "interleaved") @ shift.T.float()
    own = own - sinusoids(positions + offset, WIDTH, "interleaved")
    return exact.abs().max().item(), own.abs().max().item()


def reversed_letters(lengths: tuple[int, int], count: int, seed: int) -> list[Pair]:
    """Return texts of random letters, all different, each with the same letters from the last to the first."""

    def draw(random: Random) -> list[str]:
        return random.choices(LETTERS, k=random.randint(*lengths))

    return reversal_pairs(draw, count, seed, is_distinct=True)


def run(lab: Lab) -> Outcome:
    """Show the linear function, and train a model for each encoding on the built-in corpus and on reversal."""
    errors = {offset: shift_errors(offset) for offset in OFFSETS}
    seeds = range(lab.seed, lab.seed + len(PAIRS))
    letters = {
        name: reversed_letters(SEEN_LENGTHS, count, seed)
        for (name, count), seed in zip(PAIRS.items(), seeds, strict=True)
    }
    files = lab.write_data(**letters, longer=reversed_letters(LONGER_LENGTHS, PAIRS["test"], lab.seed))
    corpus, reversal = {}, {}
    for name in ENCODINGS:
        option = {"model.options.position_encoding": name}
        corpus[name] = lab.train(f"corpus, {name}", option)
        reversal[name] = lab.train(f"reversal, {name}", {**REVERSAL, **option, **files})
    bleu = {name: one.bleu() for name, one in corpus.items()}
    exact = {name: one.metrics["test"]["exact_match"] for name, one in reversal.items()}
    longer = {name: one.metrics["longer"]["exact_match"] for name, one in reversal.items()}
    values = {"exact": max(error for error, _ in errors.values())}
    for name in ENCODINGS:
        values |= {f"bleu_{name}": bleu[name], f"reversal_{name}": exact[name], f"longer_{name}": longer[name]}
    quality = [
        (name, one.loss, bleu[name], one.bleu("compositional"), exact[name], longer[name])
        for name, one in corpus.items()
    ]
    title = f"PE(pos + k) as a linear function of PE(pos): largest error for pos from 0 to {POSITIONS - 1}"
    shifts = [(offset, *both) for offset, both in errors.items()]
    tables = [
        Table.of("shifts", title, "k | float64 :.1e | float32, as in the model :.1e", shifts),
        Table.of("quality", "Quality by position encoding", QUALITY_COLUMNS, quality),
    ]
    losses = []
    for task, trainings in {"built-in corpus": corpus, "reversal": reversal}.items():
        curves = {name: one.curve() for name, one in trainings.items()}
        losses.append(lines(curves, "update", "validation loss in nats per token", task))
    return Outcome(tables, [_shift_figure(), Figure("losses", "Validation loss by update.", losses)], values, FINDINGS)


def _shift_figure() -> Figure:
    shift = shift_matrix(DRAWN_OFFSET, WIDTH)
    labels = {"xlabel": "feature of PE(pos)", "ylabel": f"feature of PE(pos + {DRAWN_OFFSET})"}
    image = {"cmap": "coolwarm", "vmin": -1, "vmax": 1}
    positions = torch.arange(0, 60)
    made, real = encodings(positions, WIDTH) @ shift.T, encodings(positions + DRAWN_OFFSET, WIDTH)

    def draw_features(axes: Any) -> None:
        for feature in (0, 8, 20):
            (line,) = axes.plot(positions, real[:, feature], linewidth=1.2, label=f"feature {feature}")
            axes.plot(positions[::3], made[::3, feature], ".", color=line.get_color())
        axes.set_xlabel("pos")
        axes.legend(fontsize=8)

    return Figure(
        "shift",
        f"Left: the matrix that turns PE(pos) into PE(pos + {DRAWN_OFFSET}), its first {DRAWN} rows and columns. "
        f"Right: three features of PE(pos + {DRAWN_OFFSET}) by pos (lines), and what the matrix makes of PE(pos) "
        "(dots).",
        [matrix(shift[:DRAWN, :DRAWN].numpy(), image=image, **labels), draw_features],
    )


STUDY = Study(
    "positions",
    "What is each way to tell a model the order of its tokens worth, and what makes sinusoids special?",
    run,
    {"optimization.max_updates": 400},
)
