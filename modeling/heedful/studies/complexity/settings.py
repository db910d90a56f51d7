"""What `heedful complexity` is asked to measure."""

from dataclasses import dataclass
from typing import Literal, get_args

from heedful.files import check_at_least

Cell = Literal["rnn", "gru", "lstm"]
# On longer ways through a recurrent layer gradients become zero, in float64 too.
LONGEST_REACH = 256
# A line through the upper half of fewer lengths than three would be a line through a point.
FEWEST_LENGTHS = 3


@dataclass(frozen=True)
class ComplexitySettings:
    """What is measured; a number out of range or an unknown cell is a `ValueError` that names the field."""

    d_model: int = 512  # width d of every layer
    heads: int = 8  # of self-attention
    neighbourhood: int = 32  # r, how many positions away restricted self-attention sees
    kernel_width: int = 3  # k, of a convolution
    cell: Cell = "lstm"  # of the recurrent layer
    lengths: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096)  # numbers of positions n to time
    reach_lengths: tuple[int, ...] = (16, 32, 64, 128)  # for which the path length is looked for by gradient
    rounds: int = 5  # how often each layer is timed at each length, in turns
    seed: int = 0  # of weights and inputs

    def __post_init__(self) -> None:
        check_at_least(1, **{name: getattr(self, name) for name in ("d_model", "heads", "neighbourhood", "rounds")})
        if self.d_model % self.heads:
            raise ValueError(f"`heads` must divide `d_model`, but they are {self.heads} and {self.d_model} instead.")
        if self.kernel_width < 3 or self.kernel_width % 2 == 0:
            raise ValueError(f"`kernel_width` must be odd and at least 3, but is {self.kernel_width} instead.")
        if self.cell not in get_args(Cell):
            raise ValueError(f"`cell` must be rnn, gru or lstm, but is {self.cell!r} instead.")
        for name, fewest in (("lengths", FEWEST_LENGTHS), ("reach_lengths", 1)):
            lengths = getattr(self, name)
            if len(lengths) < fewest or any(n < 2 for n in lengths) or list(lengths) != sorted(set(lengths)):
                raise ValueError(
                    f"`{name}` must be at least {fewest} rising numbers from 2 on, but is {list(lengths)} instead."
                )
        if self.reach_lengths[-1] > LONGEST_REACH:
            raise ValueError(
                f"`reach_lengths` must be at most {LONGEST_REACH}, but the last is {self.reach_lengths[-1]} instead."
            )


def numbers_of(name: str, text: str) -> tuple[int, ...]:
    """Read numbers with commas between them; the message of a `ValueError` calls them `name`."""
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise ValueError(f"`{name}` must be whole numbers with commas between, but is {text!r} instead.") from None
