"""Findings from checks on recipes and models."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, Self

from heedful.files import first_line

Settings = ParamSpec("Settings")
# A model check's worst figure, the largest figure that passes, and a description.
Measured = tuple[float, float, str]
Level = Literal["error", "warning", "note"]
EXAMPLES = 3  # per finding


@dataclass(frozen=True)
class RecipeFinding:
    """A finding in a recipe."""

    check: str
    level: Level  # an error ruins the run or its scores, a warning probably costs quality or time
    message: str  # a sentence with its numbers
    where: str  # the key in the recipe
    advice: str = ""
    examples: tuple[str, ...] = ()  # pairs, each with its split and row


@dataclass(frozen=True)
class ModelFinding:
    """A finding in a model."""

    check: str
    level: Literal["pass", "FAIL", "skipped"]
    message: str  # a sentence with its numbers
    figure: float | None = None  # the worst measured case: a relative difference or a number of faults
    limit: float | None = None  # the largest figure that passes

    @property
    def passed(self) -> bool:
        """Whether the check ran and passed."""
        return self.level == "pass"

    def assert_passed(self) -> Self:
        """Return the finding, or raise an `AssertionError` with its figure if it failed or was skipped."""
        if not self.passed:
            raise AssertionError(f"{self.check}: {self.level}, {shown(self.figure)}: {self.message}")
        return self


class SkippedError(Exception):
    """A check cannot run here; the text gives the reason."""


def check(name: str) -> Callable[[Callable[Settings, Measured]], Callable[Settings, ModelFinding]]:
    """Turn a measuring function into a check, which fails above its limit and at any error."""

    def decorate(measure: Callable[Settings, Measured]) -> Callable[Settings, ModelFinding]:
        @functools.wraps(measure)
        def judge(*args: Settings.args, **kwargs: Settings.kwargs) -> ModelFinding:
            try:
                figure, limit, message = measure(*args, **kwargs)
            except SkippedError as reason:
                return ModelFinding(name, "skipped", str(reason))
            # Foreign models may raise any error, which is then the finding.
            except Exception as error:
                return ModelFinding(name, "FAIL", first_line(error))
            # Not `figure > limit`: NaN fails.
            return ModelFinding(name, "pass" if figure <= limit else "FAIL", message, figure, limit)

        return judge

    return decorate


@dataclass(frozen=True)
class RowCheck:
    """A check that finds rows, with its message and the shares of rows at which it becomes grave."""

    name: str
    message: str  # with `{count}`, `{total}`, `{share}`, `{split}`, and fields of the caller
    advice: str = ""
    warning: float = 0.0  # below it: a note
    error: float | None = None

    def findings(
        self, pairs: Any, found: Sequence[int], where: str, can_be_error: bool = True, **fields: Any
    ) -> Iterator[RecipeFinding]:
        """Yield the finding for the rows `found`, if any. `fields` may override the share."""
        share = fields.pop("share", len(found) / max(1, len(pairs)))
        fields |= {"count": f"{len(found):,}", "total": f"{len(pairs):,}", "share": percent(share)}
        level = graded(share, self.warning, self.error if can_be_error else None)
        if found:
            message, advice = (text.format(split=pairs.name, **fields) for text in (self.message, self.advice))
            yield RecipeFinding(self.name, level, message, where, advice, pairs.examples(found))


def graded(share: float, warning: float, error: float | None = None) -> Level:
    """Grade a share as error, warning or note."""
    if error is not None and share >= error:
        return "error"
    return "warning" if share >= warning else "note"


def percent(share: float) -> str:
    """Write a share as a percentage, a small one with more digits."""
    for digits in (0, 1, 2):
        if round(100 * share, digits) >= 10 ** (1 - digits):
            return f"{100 * share:.{digits}f} %"
    return "less than 0.1 %" if share else "0 %"


def shown(figure: float | None) -> str:
    """Write a figure: a count as it is, a difference with two digits."""
    if figure is None:
        return "-"
    return str(int(figure)) if figure == 0 or (figure >= 1 and float(figure).is_integer()) else f"{figure:.1e}"
