"""Positions: ways to give a model the order of tokens, and sinusoids as a linear function of the offset."""

from typing import Any

import torch

from heedful.figures import Panel, Points, lines
from heedful.positions_heed import sinusoids
from heedful_lab.figures import matrix
from heedful_lab.studies.pairs import Pair, reversal_pairs
from heedful_lab.studies.report import Outcome
from heedful_lab.studies.study import Lab, description_of

ENCODINGS = ("sinusoidal", "learned", "rotary", "none")
WIDTH = 64
POSITIONS = 512
DRAWN = 24  # rows and columns in a matrix
DRAWN_OFFSET = 5
OFFSETS = (1, 5, 10, 100, 1000)
LETTERS = "abcdefghijklmnop"
SEEN_LENGTHS, LONGER_LENGTHS = (2, 12), (13, 16)  # letters
PAIRS = {"train": 20_000, "validation": 200, "test": 200}
DESCRIPTION = description_of(__file__)
REVERSAL = {**DESCRIPTION["reversal"], "tokenizer.vocab_size": None}  # each letter is a word


def shift_matrix(offset: int, width: int) -> torch.Tensor:
    """Return the matrix M with PE(pos + offset) = M PE(pos) for each pos, `(width, width)` in float64."""
    angles = offset * wave_numbers(width)
    blocks = torch.stack([angles.cos(), angles.sin(), -angles.sin(), angles.cos()], dim=-1).view(-1, 2, 2)
    return torch.block_diag(*blocks)


def wave_numbers(width: int) -> torch.Tensor:
    """Return the angle of each pair of features from one position to the next, 1 / 10000^(2i / width), in float64."""
    return 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)


def encodings(positions: torch.Tensor, width: int) -> torch.Tensor:
    """Return the sinusoids of positions in float64, `(positions, width)` (section 3.5)."""
    angles = positions.to(torch.float64)[:, None] * wave_numbers(width)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)


def shift_errors(offset: int) -> tuple[float, float]:
    """Return the largest error between M PE(pos) and PE(pos + offset), in float64 and with the model's float32."""
    shift = shift_matrix(offset, WIDTH)
    positions = torch.arange(POSITIONS)
    exact = encodings(positions, WIDTH) @ shift.T - encodings(positions + offset, WIDTH)
    moved, there = (sinusoids(one, WIDTH, "interleaved") for one in (positions, positions + offset))
    own = moved @ shift.T.float() - there
    return exact.abs().max().item(), own.abs().max().item()


def reversed_letters(lengths: tuple[int, int], count: int, seed: int) -> list[Pair]:
    """Return texts of different random letters and their reversals."""
    return reversal_pairs(
        lambda random: random.choices(LETTERS, k=random.randint(*lengths)), count, seed, is_distinct=True
    )


def run(lab: Lab) -> Outcome:
    """Show the linear function, and train a model for each encoding on the built-in corpus and on reversal."""
    errors = {offset: shift_errors(offset) for offset in OFFSETS}
    letters = {
        name: reversed_letters(SEEN_LENGTHS, count, seed) for seed, (name, count) in enumerate(PAIRS.items(), lab.seed)
    }
    files = lab.write_data(**letters, longer=reversed_letters(LONGER_LENGTHS, PAIRS["test"], lab.seed))
    values, quality = {"exact": max(error for error, _ in errors.values())}, []
    curves: dict[str, dict[str, Points]] = {"built-in corpus": {}, "reversal": {}}
    for name in ENCODINGS:
        option = {"model.options.position_encoding": name}
        corpus = lab.train(f"corpus, {name}", option)
        reversal = lab.train(f"reversal, {name}", {**REVERSAL, **option, **files})
        exact, longer = (reversal.metrics[test]["exact_match"] for test in ("test", "longer"))
        quality.append((name, corpus.loss, corpus.bleu(), corpus.bleu("compositional"), exact, longer))
        curves["built-in corpus"][name], curves["reversal"][name] = corpus.curve(), reversal.curve()
    losses = [lines(curve, "update", "validation loss in nats per token", task) for task, curve in curves.items()]
    return Outcome(
        {"shifts": [(offset, *both) for offset, both in errors.items()], "quality": quality},
        {"shift": _shift_panels(), "losses": losses},
        values,
        {"last_position": POSITIONS - 1, "offset": DRAWN_OFFSET, "drawn": DRAWN},
    )


def _shift_panels() -> list[Panel]:
    """Draw a matrix M, and next to it PE(pos + k) and M PE(pos)."""
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

    return [matrix(shift[:DRAWN, :DRAWN].numpy(), image=image, **labels), draw_features]
