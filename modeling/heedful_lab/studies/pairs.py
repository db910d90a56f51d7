"""Pairs for training and measuring: from the built-in corpus, joined, reversed, written to files."""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, takewhile
from pathlib import Path
from random import Random

from heedful.data.sources import read_pairs
from heedful.files import write_text
from heedful_lab.tasks.task_pairs import Pair, reversed_symbols

TEST_PAIRS = "builtin:test:500"


def corpus_pairs(location: str | list[str]) -> list[Pair]:
    """Return pairs of the built-in corpus, such as "builtin:validation:100"."""
    return [(row["source"], row["target"]) for row in read_pairs(location, "ko", "en")]


def held_out_pairs() -> list[Pair]:
    """Return the test pairs of the built-in corpus, for all studies."""
    return corpus_pairs(TEST_PAIRS)


def joined_pairs(pairs: Iterable[Pair], sizes: Iterable[int]) -> list[Pair]:
    """Join neighbouring pairs, `sizes` at a time, with spaces between; the last text may have fewer."""
    rest = iter(pairs)
    parts = takewhile(bool, (list(islice(rest, size)) for size in sizes))
    return [(" ".join(source for source, _ in part), " ".join(target for _, target in part)) for part in parts]


def reversal_pairs(
    draw: Callable[[Random], Sequence[str]], count: int, seed: int, *, is_distinct: bool = False
) -> list[Pair]:
    """Return drawn sequences of symbols and their reversals, without repetition if `is_distinct`."""
    random, pairs = Random(seed), dict[str | int, Pair]()
    while len(pairs) < count:
        pair = reversed_symbols(draw(random))
        pairs[pair[0] if is_distinct else len(pairs)] = pair
    return list(pairs.values())


def write_pairs(pairs: Iterable[Pair], folder: Path) -> str:
    """Write pairs into a file in the folder's `data`, named by its checksum, and return its path."""
    rows = ({"source": source, "target": target} for source, target in pairs)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path = folder / "data" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    return str(path)
