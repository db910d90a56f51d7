"""Messages about a user's mistake, all of one form: what must be, and what is."""

from collections.abc import Sequence


def wrong(field: str, must: str, value: object, *, verb: str = "is", advice: str = "") -> ValueError:
    """Return the error to raise: "`field` must {must}, but {verb} {value} instead: {advice}."."""
    message = f"`{field}` must {must}, but {verb} {value} instead"
    return ValueError(f"{message}: {advice}." if advice else f"{message}.")


def listed(names: Sequence[str]) -> str:
    """Return the first three of some names in alphabetical order, and how many more there are."""
    return ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
