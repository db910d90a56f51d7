"""Messages about a user's mistake, all of one form: what must be, and what is."""

from collections.abc import Sequence


def wrong(field: str, must: str, value: object, *, verb: str = "is", advice: str = "") -> ValueError:
    """Return the error to raise: "`field` must {must}, but {verb} {value} instead: {advice}."."""
    message = f"`{field}` must {must}, but {verb} {value} instead"
    return ValueError(f"{message}: {advice}." if advice else f"{message}.")


def shortened(value: object, width: int = 60) -> str:
    """Quote a text with its invisible characters escaped, or write another value, cut to a width."""
    written = value if isinstance(value, str) else repr(value)
    written = written if len(written) <= width else written[: width - 1] + "…"
    return repr(written) if isinstance(value, str) else written


def listed(names: Sequence[str]) -> str:
    """Return the first three of some names in alphabetical order, and how many more there are."""
    return ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
