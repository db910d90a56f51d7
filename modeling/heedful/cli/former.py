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

TASKS = ("spelling", "spacing", "scan", "numbers", "dates", "reverse")  # of `heedful pairs`


def in_todays_spelling(args: list[str]) -> list[str]:
    """Return arguments in today's spelling, with a hint on standard error if they are in the former one."""
    name, *rest = args
    if name == "pairs":
        return [name, *_task_first(rest)]
    if name == "distill" and "--level" in rest[:-1]:
        place = rest.index("--level")
        rest[place : place + 2] = ["=".join(rest[place : place + 2])]
    for former, option, today, stays in FORMER:
        found = [word for word in rest if word == option or word.startswith(f"{option}=")]
        if name == former and found:
            _check_one_command(rest)
            new = f"{today} {option}" if stays else today
            options.report(f"hint: write `heedful {new}`; the next version knows no `heedful {former} {option}`.")
            return [today, *(rest if stays else (word for word in rest if word not in found))]
    return args


def _task_first(words: list[str]) -> list[str]:
    """Return the words behind `heedful pairs` with the name of the task in front, which could come later."""
    places = (place for place, word in enumerate(words) if word in TASKS)
    place = next((place for place in places if not place or not words[place - 1].startswith("-")), 0)
    return [*words[place : place + 1], *words[:place], *words[place + 1 :]]


def _check_one_command(words: list[str]) -> None:
    """Raise a `ValueError` if former options of `heedful attention` ask for what several commands do now."""
    given = {word.split("=")[0] for word in words}
    asked = {today for _, option, today, _ in FORMER if option in given and option != "--json"}
    if len(asked) + bool(given & {"-o", "--output"}) > 1:
        commands = "`heedful attention` draws, `heedful align` links words, `heedful attention-numbers` prints numbers"
        raise ValueError(f"Each command does one thing now, and must be asked for it alone: {commands}.")
