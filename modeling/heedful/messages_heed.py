"""Messages about users' mistakes, all in one form: the rule, and the value given."""

from collections.abc import Sequence


def wrong(field: str, must: str, value: object, *, verb: str = "is", advice: str = "") -> ValueError:
    """Return the error to raise: "`field` must {must}, but {verb} {value} instead: {advice}."."""
    message = f"`{field}` must {must}, but {verb} {value} instead"
    return ValueError(f"{message}: {advice}." if advice else f"{message}.")


def shortened(value: object, width: int = 60) -> str:
    """Quote a text with invisible characters escaped, or write another value, cut to a width."""
    written = value if isinstance(value, str) else repr(value)
    written = written if len(written) <= width else written[: width - 1] + "…"
    return repr(written) if isinstance(value, str) else written


def listed(names: Sequence[str]) -> str:
    """Return the first three names in alphabetical order, and the number of others."""
    return ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
