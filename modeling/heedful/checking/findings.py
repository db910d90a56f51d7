"""What a check finds, in a recipe or in a model."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, Self

from heedful.files import first_line

Settings = ParamSpec("Settings")
# What a check of a model measures: the worst figure seen, the largest that passes, and what was compared.
Measured = tuple[float, float, str]
Level = Literal["error", "warning", "note"]
EXAMPLES = 3  # shown for each finding


@dataclass(frozen=True)
class RecipeFinding:
    """What one check found in a recipe."""

    check: str  # its name
    level: Level  # an error ruins the run or its scores, a warning probably costs quality or time
    message: str  # what was found, in a sentence with its numbers
    where: str  # the recipe's key that it concerns
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
    """Make a function that measures a model a check, which fails above the limit and where an error is raised."""

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

        return judge

    return decorate


@dataclass(frozen=True)
class RowCheck:
    """A check that looks for rows: what it says of those it finds, and from which share of all on they are grave."""

    name: str
    message: str  # `{count}` of `{total}` were found, a `{share}` of the `{split}`; who looks gives other fields
    advice: str = ""
    warning: float = 0.0  # fewer are a note
    error: float | None = None

    def findings(
        self, pairs: Any, found: Sequence[int], where: str, can_be_error: bool = True, **fields: Any
    ) -> Iterator[RecipeFinding]:
        """Yield the finding about the rows of `Pairs` that were found, if any; their share may be among the fields."""
        share = fields.pop("share", len(found) / max(1, len(pairs)))
        fields |= {"count": f"{len(found):,}", "total": f"{len(pairs):,}", "share": percent(share)}
        level = graded(share, self.warning, self.error if can_be_error else None)
        if found:
            message, advice = (text.format(split=pairs.name, **fields) for text in (self.message, self.advice))
            yield RecipeFinding(self.name, level, message, where, advice, pairs.examples(found))


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
