"""Which studies there are."""

from difflib import get_close_matches
from importlib import import_module

from heedful.studies.study import Study

# The sub-room of each study; the module of that name in it has a `STUDY`.
ROOMS = {
    "dilution": "attention",
    "scaling": "attention",
    "masking": "attention",
    "questions": "attention",
    "positions": "models",
    "heads": "attention",
    "sharing": "models",
    "markov": "models",
    "dependence": "models",
    "gradients": "recurrent",
    "cells": "recurrent",
    "robustness": "recurrent",
    "clue": "recurrent",
    "ladder": "models",
    "paths": "models",
    "homonyms": "attention",
    "complexity": "complexity",
}
NAMES = tuple(ROOMS)


def find_study(name: str) -> Study:
    """Return a study, or name the nearest one in a `ValueError`."""
    if name not in ROOMS:
        nearest = get_close_matches(name, NAMES, n=1, cutoff=0)[0]
        raise ValueError(
            f"The study must be one of {', '.join(NAMES)}, but is {name} instead; did you mean {nearest}?"
        )
    return import_module(f"heedful.studies.{ROOMS[name]}.{name}").STUDY
