"""Recipes for runs of one second, and helpers that several test files share."""

import json
import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from heedful.training.recipe import Recipe
from heedful.training.recipe_file import make_recipe

SIZES = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
SIZES |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}


def tiny_tree(folder: Path, changes: dict | None = None) -> dict:
    """Return the recipe of six updates on 300 built-in pairs, with `{"section.key": value}` on top."""
    tree = {
        "name": "tiny",
        "output": str(folder),
        "data": {"train": "builtin:train:300", "validation": "builtin:validation:20", "source": "ko", "target": "en"},
        "tokenizer": {"vocab_size": 400},
        "model": {"options": {**SIZES, "dropout": 0.1}},
        "optimization": {
            **{"schedule": "constant", "learning_rate": 0.003, "warmup_updates": 2, "max_updates": 6},
            **{"tokens_per_update": 2000, "device": "cpu"},
        },
        "validation": {"every_updates": 100, "sentences": 0},
        "checkpoints": {"every_updates": 100},
        "decoding": {"num_beams": 1, "max_length": 24, "bootstrap": 0},
        "logging": {"every_updates": 1},
    }
    for key, value in (changes or {}).items():
        *sections, last = key.split(".")
        section = tree
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = value
    return tree


def tiny_recipe(folder: Path, changes: dict | None = None) -> Recipe:
    return make_recipe(tiny_tree(folder, changes))


def around(owner, name: str, before: Callable[[], object] | None = None, after: Callable[[], object] | None = None):
    """Call functions before and after each call of a method of an object."""
    method = getattr(owner, name)

    def call(*given, **named):
        if before is not None:
            before()
        result = method(*given, **named)
        if after is not None:
            after()
        return result

    setattr(owner, name, call)


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """End every file that is written at a size, as at the end of a disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def saved_updates(folder: Path) -> list[int]:
    """List the updates whose checkpoints are there."""
    return sorted(int(path.name.split("-")[1]) for path in (folder / "checkpoints").iterdir())


def logged(folder: Path, name: str) -> list[float]:
    """Return all values of one name in a run's log, in order."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def recipe_file(folder: Path, changes: dict | None = None) -> Path:
    """Write the recipe of a run in the folder `run` beside it."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(tiny_tree(folder / "run", changes), allow_unicode=True), encoding="utf-8")
    return path


def table_file(path: Path, rows: Iterable[Iterable[str]], separator: str = "\t") -> str:
    """Write rows as a table, and return its path."""
    path.write_text("".join(separator.join(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)
