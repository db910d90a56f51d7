"""What the doctor says, and the pairs it says it about."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Literal

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
EXAMPLES = 3  # shown for each finding
SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth knowing, before a recipe is trained.

    Attributes:
        severity: `error` ruins the run or its scores, `warning` probably costs quality or time, `note` is to know.
        check: The check that found it.
        where: The recipe's key it concerns.
        told: What was found, in a sentence with its numbers.
        advice: What to do about it.
        examples: Pairs it concerns, each with its split and row.
    """

    severity: Severity
    check: str
    where: str
    told: str
    advice: str = ""
    examples: tuple[str, ...] = ()


@dataclass
class Pairs:
    """The texts of one split, or of its beginning.

    Attributes:
        name: The split: train, validation, or the name of a test set.
        key: The recipe's key that says where it lies.
        sources: Source texts.
        targets: Target texts.
        rows: Each pair's number in the split, from 1.
        total: Pairs of the whole split; `None` where the end was not reached.
        looked_at: Pairs that were read, those included that have been taken out since.
    """

    name: str
    key: str
    sources: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    total: int | None = None
    looked_at: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, str]]:
        for source, target in zip(self.sources, self.targets, strict=True):
            yield {"source": source, "target": target}

    @classmethod
    def first(cls, pairs: Iterable[Mapping[str, str]], limit: int, name: str, key: str) -> "Pairs":
        """Take the first `limit` pairs of a corpus, in memory or streamed."""
        split = cls(name, key)
        for row, pair in enumerate(islice(pairs, limit), start=1):
            split.sources.append(pair["source"])
            split.targets.append(pair["target"])
            split.rows.append(row)
        split.looked_at = len(split)
        # Only a corpus in memory knows its length, and a stream that ended early has told it.
        split.total = len(split) if len(split) < limit else None
        if isinstance(pairs, Sized):
            split.total = len(pairs)
        return split

    def chosen(self, places: Iterable[int]) -> "Pairs":
        """Return the pairs at these places, with the numbers they have in the split."""
        places = list(places)
        return replace(
            self,
            sources=[self.sources[place] for place in places],
            targets=[self.targets[place] for place in places],
            rows=[self.rows[place] for place in places],
        )

    @property
    def is_whole(self) -> bool:
        """Whether every pair of the split was looked at."""
        return self.total == self.looked_at

    def examples(self, places: Iterable[int]) -> tuple[str, ...]:
        """Show the first few of the pairs at these places."""
        return tuple(
            f"{self.name} row {self.rows[place]}: {shortened(self.sources[place])} → {shortened(self.targets[place])}"
            for place in islice(places, EXAMPLES)
        )


def shortened(text: str, width: int = SHOWN_CHARACTERS) -> str:
    """Quote a text, invisible characters made visible, and cut it where it is long."""
    return repr(text if len(text) <= width else text[: width - 1] + "…")


def graded(share: float, warning: float, error: float | None = None) -> Severity:
    """Grade a share: an error from `error` on, a warning from `warning` on, below that a note."""
    if error is not None and share >= error:
        return "error"
    return "warning" if share >= warning else "note"


def percent(share: float) -> str:
    """Write a share as a percentage, small ones with enough digits to be seen."""
    for digits in (0, 1, 2):
        if round(100 * share, digits) >= 10 ** (1 - digits):
            return f"{100 * share:.{digits}f} %"
    return "less than 0.1 %" if share else "0 %"


def in_order(findings: Sequence[Finding]) -> list[Finding]:
    """Sort by severity, the worst first; what is equally bad stays in order."""
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
