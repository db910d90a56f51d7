"""What a check finds, in a recipe or in a model."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, Self

from heedful.inference.loading import first_line

Settings = ParamSpec("Settings")
# What a check of a model measures: the worst figure seen, the largest that passes, and what was compared.
Measured = tuple[float, float, str]
Level = Literal["error", "warning", "note"]
EXAMPLES = 3  # shown for each finding


@dataclass(frozen=True)
class Finding:
    """What one check found.

    An `error` ruins the run or its scores, a `warning` probably costs quality or time, a `note` is good to know.
    """

    check: str  # its name
    level: Level
    told: str  # what was found or compared, in a sentence with its numbers
    where: str = ""  # the recipe's key that it concerns
    advice: str = ""  # what to do about it
    examples: tuple[str, ...] = ()  # pairs that it concerns, each with its split and row


@dataclass(frozen=True)
class ModelFinding:
    """What one check found in a model."""

    check: str  # its name
    level: Literal["pass", "FAIL", "skipped"]
    message: str  # what was compared, in a sentence with its numbers
    figure: float | None = None  # the worst case measured: a relative difference or a number of faults
    limit: float | None = None  # the largest figure that passes

    @property
    def passed(self) -> bool:
        """Whether the check was made and came out well."""
        return self.level == "pass"

    def assert_passed(self) -> Self:
        """Return the finding itself; one that failed or was skipped raises an `AssertionError` with its figure."""
        if not self.passed:
            raise AssertionError(f"{self.check}: {self.level}, {shown(self.figure)}: {self.message}")
        return self


class SkippedError(Exception):
    """Raised by a check that cannot be made here; its text is the reason."""


def check(name: str) -> Callable[[Callable[Settings, Measured]], Callable[Settings, ModelFinding]]:
    """Make a check of a function that measures a model: one that returns a `ModelFinding`.

    It fails above the limit, and where the model raises an error; it is skipped on a `SkippedError`.
    """

    def decorate(measure: Callable[Settings, Measured]) -> Callable[Settings, ModelFinding]:
        @functools.wraps(measure)
        def judge(*args: Settings.args, **kwargs: Settings.kwargs) -> ModelFinding:
            try:
                figure, limit, message = measure(*args, **kwargs)
            except SkippedError as reason:
                return ModelFinding(name, "skipped", str(reason))
            # The models of others raise whatever they like, and that they raise is what the check has found.
            except Exception as error:
                return ModelFinding(name, "FAIL", first_line(error))
            # Not `figure > limit`: what is not a number fails.
            return ModelFinding(name, "pass" if figure <= limit else "FAIL", message, figure, limit)

        judge.__annotations__["return"] = ModelFinding
        return judge

    return decorate


@dataclass(frozen=True)
class RowCheck:
    """A check that looks for rows: what it says of those it finds, and from which share of all on they are grave.

    `{count}` rows of `{total}` were found, a `{share}` of the `{split}`; other fields are given by whoever looks.
    """

    name: str
    told: str
    advice: str = ""
    warning: float = 0.0  # fewer are a note
    error: float | None = None

    def findings(
        self,
        rows: Any,
        found: Sequence[int],
        where: str,
        share: float | None = None,
        can_be_error: bool = True,
        **fields: Any,
    ) -> Iterator[Finding]:
        """Yield the finding about the rows that were found, if there are any; the first few become examples.

        `rows` are all that were looked at: the `Pairs` or the `Encoded` of one split. The level goes by `share`, which
        is that of the rows found unless it is given.
        """
        if not len(found):
            return
        share = len(found) / len(rows) if share is None else share
        counts = {"count": f"{len(found):,}", "total": f"{len(rows):,}", "share": percent(share), "split": rows.name}
        level = graded(share, self.warning, self.error if can_be_error else None)
        told, advice = (text.format(**counts, **fields) for text in (self.told, self.advice))
        yield Finding(self.name, level, told, where, advice, rows.examples(found))


def graded(share: float, warning: float, error: float | None = None) -> Level:
    """Grade a share: an error from `error` on, a warning from `warning` on, below that a note."""
    if error is not None and share >= error:
        return "error"
    return "warning" if share >= warning else "note"


def percent(share: float) -> str:
    """Write a share as a percentage; a small one with enough digits to be seen."""
    for digits in (0, 1, 2):
        if round(100 * share, digits) >= 10 ** (1 - digits):
            return f"{100 * share:.{digits}f} %"
    return "less than 0.1 %" if share else "0 %"


def shown(figure: float | None) -> str:
    """Write a figure: counts as they are, measured differences with two digits."""
    if figure is None:
        return "-"
    return str(int(figure)) if figure == 0 or (figure >= 1 and float(figure).is_integer()) else f"{figure:.1e}"
