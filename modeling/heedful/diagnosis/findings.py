"""What a check finds, in a recipe or in a model, and what all checks find together."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, Self

from heedful.inference.loading import first_line

Settings = ParamSpec("Settings")
# What a check of a model measures: the worst figure seen, the largest that passes, and what was compared.
Measured = tuple[float, float, str]
Level = Literal["error", "warning", "note", "pass", "FAIL", "skipped"]
EXAMPLES = 3  # shown for each finding
SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        check: Name of the check.
        level: Of a recipe: `error` ruins the run or its scores, `warning` probably costs quality or time, `note` is
            good to know. Of a model: `pass`, `FAIL`, or `skipped` where the check cannot be made.
        told: What was found or compared, in a sentence with its numbers.
        where: The recipe's key that it concerns.
        advice: What to do about it.
        examples: Pairs that it concerns, each with its split and row.
        figure: The worst case measured in a model, a relative difference or a number of faults; None where nothing
            was measured.
        limit: The largest figure that passes.
    """

    check: str
    level: Level
    told: str
    where: str = ""
    advice: str = ""
    examples: tuple[str, ...] = ()
    figure: float | None = None
    limit: float | None = None

    @property
    def passed(self) -> bool:
        """Whether the check was made and came out well."""
        return self.level == "pass"

    def assert_passed(self) -> Self:
        """Return the finding itself.

        Raises:
            AssertionError: If the check failed or was skipped; the message has the figure.
        """
        if not self.passed:
            raise AssertionError(f"{self.check}: {self.level}, {shown(self.figure)}: {self.told}")
        return self


@dataclass
class Report:
    """What all checks found.

    Attributes:
        findings: One or more for each check that has something to say.
    """

    findings: list[Finding]

    def at(self, level: Level) -> list[Finding]:
        """Return the findings of a level."""
        return [finding for finding in self.findings if finding.level == level]

    def rows(self, **columns: str) -> list[dict[str, Any]]:
        """Return the findings as plain data: for each column an attribute, called so."""
        return [{key: getattr(finding, name) for key, name in columns.items()} for finding in self.findings]


class SkippedError(Exception):
    """Raised by a check that cannot be made here; its text is the reason."""


def check(name: str) -> Callable[[Callable[Settings, Measured]], Callable[Settings, Finding]]:
    """Make a check of a function that measures a model: one that returns a `Finding`.

    It fails above the limit, and where the model raises an error; it is skipped on a `SkippedError`.

    Args:
        name: What is checked, in a few words.
    """

    def decorate(measure: Callable[Settings, Measured]) -> Callable[Settings, Finding]:
        @functools.wraps(measure)
        def judge(*args: Settings.args, **kwargs: Settings.kwargs) -> Finding:
            try:
                figure, limit, told = measure(*args, **kwargs)
            except SkippedError as reason:
                return Finding(name, "skipped", str(reason))
            # The models of others raise whatever they like, and that they raise is what the check has found.
            except Exception as error:
                return Finding(name, "FAIL", first_line(error))
            # Not `figure > limit`: what is not a number fails.
            return Finding(name, "pass" if figure <= limit else "FAIL", told, figure=figure, limit=limit)

        judge.__annotations__["return"] = Finding
        return judge

    return decorate


def collected(find: Callable[Settings, Iterator[Finding]]) -> Callable[Settings, list[Finding]]:
    """Make a check of a function that looks through a recipe: one that returns a list of the findings it yields."""

    @functools.wraps(find)
    def look(*args: Settings.args, **kwargs: Settings.kwargs) -> list[Finding]:
        return list(find(*args, **kwargs))

    return look


@dataclass(frozen=True)
class RowCheck:
    """A check that looks for rows: what it says of those it finds, and from how many on they are grave.

    Attributes:
        name: Name of the check.
        told: The sentence of its finding. `{count}` rows of `{total}` were found, a `{share}` of the `{split}`; other
            fields are given by whoever looks.
        advice: What to do about them, with the same fields.
        warning: The share from which on they are a warning; fewer are a note.
        error: The share from which on they are an error, if they can be.
    """

    name: str
    told: str
    advice: str = ""
    warning: float = 0.0
    error: float | None = None

    def findings(
        self,
        rows: Any,
        found: Sequence[int],
        where: str,
        fields: Mapping[str, Any] | None = None,
        share: float | None = None,
        can_be_error: bool = True,
    ) -> list[Finding]:
        """Return the finding about the rows that were found, or nothing if there are none.

        Args:
            rows: All rows that were looked at: texts (`Pairs`) or token ids (`Encoded`) of one split.
            found: Numbers of those that were found; the first few become examples.
            where: The recipe's key that they concern.
            fields: What the sentences name beside count, total, share and split.
            share: What the level goes by; the share of the rows that were found by default.
            can_be_error: Whether it may be an error here.
        """
        if not len(found):
            return []
        share = len(found) / len(rows) if share is None else share
        counts = {"count": f"{len(found):,}", "total": f"{len(rows):,}", "share": percent(share), "split": rows.name}
        fields = {**counts, **(fields or {})}
        return [
            Finding(
                self.name,
                graded(share, self.warning, self.error if can_be_error else None),
                self.told.format(**fields),
                where,
                self.advice.format(**fields),
                rows.examples(found),
            )
        ]


def graded(share: float, warning: float, error: float | None = None) -> Level:
    """Grade a share: an error from `error` on, a warning from `warning` on, below that a note."""
    if error is not None and share >= error:
        return "error"
    return "warning" if share >= warning else "note"


def shortened(text: str, width: int = SHOWN_CHARACTERS) -> str:
    """Quote a text with its invisible characters made visible, and cut a long one."""
    return repr(text if len(text) <= width else text[: width - 1] + "…")


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
