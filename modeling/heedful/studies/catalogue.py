"""Which studies there are."""

from difflib import get_close_matches
from importlib import import_module

from heedful.studies.study import Study

# Each is the name of a module of this room that has a `STUDY`.
NAMES = ("dilution", "scaling", "positions", "heads", "sharing", "markov", "dependence", "ladder")


def find_study(name: str) -> Study:
    """Return a study.

    Raises:
        ValueError: If there is none of this name; the nearest is named.
    """
    if name not in NAMES:
        nearest = get_close_matches(name, NAMES, n=1, cutoff=0)[0]
        raise ValueError(
            f"The study must be one of {', '.join(NAMES)}, but is {name} instead; did you mean {nearest}?"
        )
    return import_module(f"heedful.studies.{name}").STUDY
