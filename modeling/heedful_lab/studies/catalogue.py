"""The list of studies."""

from dataclasses import fields
from difflib import get_close_matches
from importlib import import_module
from itertools import chain
from pathlib import Path

from heedful_lab.studies.study import Study, description_of

# Studies by sub-room; each has a module and a description of its name.
ROOMS = {
    "attention": ("dilution", "scaling", "masking", "heads", "questions", "homonyms"),
    "models": ("positions", "sharing", "markov", "dependence", "ladder", "paths"),
    "recurrent": ("gradients", "cells", "robustness", "clue"),
    "complexity": ("complexity",),
}
SHARED_CHANGES = Path(__file__).with_name("changes.toml")
NAMES = tuple(chain.from_iterable(ROOMS.values()))


def find_study(name: str) -> Study:
    """Return a study, with its module's function and its description; an unknown name is a `ValueError`."""
    if name not in NAMES:
        nearest = get_close_matches(name, NAMES, n=1, cutoff=0)[0]
        known = ", ".join(NAMES)
        raise ValueError(f"The study must be one of {known}, but is {name} instead; did you mean {nearest}?")
    (room,) = (room for room, names in ROOMS.items() if name in names)
    module = import_module(f"heedful_lab.studies.{room}.{name}")
    description = {"changes": {}, **description_of(str(module.__file__))}
    if shared := description.get("shared_changes"):
        description["changes"] = {**description_of(SHARED_CHANGES)[shared], **description["changes"]}
    words = {field.name: description[field.name] for field in fields(Study) if field.name in description}
    return Study(name=name, run=module.run, **words)
