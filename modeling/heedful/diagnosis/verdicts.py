"""What a check of a model found, and how a function that measures becomes a check."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, Self

import torch

from heedful.inference.loading import first_line

# Largest difference of logits and losses, relative to the largest of them. Reordered sums differ by about 1e-6 in
# float32; a wrong position or mask by a hundredth and more.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

Settings = ParamSpec("Settings")
Result = Literal["pass", "FAIL", "skipped"]
# What a check measures: the worst figure seen, the largest that passes, and what was compared.
Measured = tuple[float, float, str]


@dataclass(frozen=True)
class Verdict:
    """What one check found.

    Attributes:
        check: What was checked, in a few words.
        result: `pass`, `FAIL` or `skipped`.
        figure: The worst case seen: a relative difference, or a number of faults; None where nothing was measured.
        limit: The largest figure that passes.
        told: What was compared, or why nothing was.

    """

    check: str
    result: Result
    figure: float | None
    limit: float | None
    told: str

    @property
    def passed(self) -> bool:
        """Whether the check was made and came out well."""
        return self.result == "pass"

    def assert_passed(self) -> Self:
        """Return the verdict itself.

        Raises:
            AssertionError: When the check failed or was skipped; the message has the figure.

        """
        if not self.passed:
            raise AssertionError(f"{self.check}: {self.result}, {shown(self.figure)}: {self.told}")
        return self


class SkippedError(Exception):
    """Raised by a check that cannot be made here; its text is the reason."""


def shown(number: float | None) -> str:
    """Write a figure: counts as they are, measured differences with two digits."""
    if number is None:
        return "-"
    return str(int(number)) if number == 0 or (number >= 1 and float(number).is_integer()) else f"{number:.1e}"


def check(name: str) -> Callable[[Callable[Settings, Measured]], Callable[Settings, Verdict]]:
    """Make a check of a function that measures: one that returns a `Verdict`.

    It fails above the limit, and where the model raises an error; it is skipped on a `SkippedError`.

    Args:
        name: What is checked, in a few words.

    Returns:
        The decorator.

    """

    def decorate(measure: Callable[Settings, Measured]) -> Callable[Settings, Verdict]:
        @functools.wraps(measure)
        def judge(*args: Settings.args, **kwargs: Settings.kwargs) -> Verdict:
            try:
                figure, limit, told = measure(*args, **kwargs)
            except SkippedError as reason:
                return Verdict(name, "skipped", None, None, str(reason))
            # The models of others raise whatever they like, and that they raise is what the check has found.
            except Exception as error:
                return Verdict(name, "FAIL", None, None, first_line(error))
            # Not `figure > limit`: what is not a number fails.
            return Verdict(name, "pass" if figure <= limit else "FAIL", figure, limit, told)

        judge.__annotations__["return"] = Verdict
        return judge

    return decorate


def tolerance_of(model: Any) -> float:
    """Return the relative difference that a model's dtype allows logits and losses."""
    return TOLERANCES.get(model.dtype, TOLERANCES[torch.bfloat16])


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name as users write it: float32."""
    return str(dtype).removeprefix("torch.")
