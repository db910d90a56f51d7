"""Which studies there are."""

from difflib import get_close_matches
from importlib import import_module
from itertools import chain

from heedful.studies.study import Study

# By sub-room the studies in it: the module of each name has a `STUDY`.
ROOMS = {
    "attention": ("dilution", "scaling", "masking", "heads", "questions", "homonyms"),
    "models": ("positions", "sharing", "markov", "dependence", "ladder", "paths"),
    "recurrent": ("gradients", "cells", "robustness", "clue"),
    "complexity": ("complexity",),
}
NAMES = tuple(chain.from_iterable(ROOMS.values()))


def find_study(name: str) -> Study:
    """Return a study, or name the nearest one in a `ValueError`."""
    if name not in NAMES:
        nearest = get_close_matches(name, NAMES, n=1, cutoff=0)[0]
        raise ValueError(
            f"The study must be one of {', '.join(NAMES)}, but is {name} instead; did you mean {nearest}?"
        )
    (room,) = (room for room, names in ROOMS.items() if name in names)
    return import_module(f"heedful.studies.{room}.{name}").STUDY
