"""Spellings of the version before, which this version still takes; the next one goes without this file."""

from heedful.cli import options

# A subcommand, its option, the subcommand that has taken its place, and whether that has the option too.
FORMER = (
    ("attention", "--alignment", "align", False),
    ("attention", "--gold", "align", True),
    ("attention", "--steps", "attention-numbers", True),
    ("attention", "--entropy", "attention-numbers", True),
    ("attention", "--json", "attention-numbers", True),
    ("distill", "--level=token", "distill-tokens", False),
    ("distill", "--level=sequence", "distill", False),
)


def in_todays_spelling(args: list[str]) -> list[str]:
    """Return arguments in today's spelling, with a hint on standard error if they are in the former one."""
    name, *rest = args
    if name == "distill" and "--level" in rest[:-1]:
        place = rest.index("--level")
        rest[place : place + 2] = ["=".join(rest[place : place + 2])]
    for former, option, today, stays in FORMER:
        found = [word for word in rest if word == option or word.startswith(f"{option}=")]
        if name == former and found:
            new = f"{today} {option}" if stays else today
            options.report(f"hint: write `heedful {new}`; the next version knows no `heedful {former} {option}`.")
            return [today, *(rest if stays else (word for word in rest if word not in found))]
    return args
