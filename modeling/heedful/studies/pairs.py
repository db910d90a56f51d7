"""Pairs of texts that studies train and measure on: from the built-in corpus, joined, reversed, written to files."""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from random import Random

from heedful.data.sources import read_pairs
from heedful.files import write_text

Pair = tuple[str, str]  # source, target

TEST_PAIRS = "builtin:test:500"


def corpus_pairs(location: str | list[str]) -> list[Pair]:
    """Return pairs of the built-in corpus, such as of "builtin:validation:100"."""
    return [(row["source"], row["target"]) for row in read_pairs(location, "ko", "en")]


def held_out_pairs() -> list[Pair]:
    """Return the test pairs of all studies that measure on the built-in corpus."""
    return corpus_pairs(TEST_PAIRS)


def joined_pairs(pairs: Iterable[Pair], sizes: Iterable[int]) -> list[Pair]:
    """Join neighbouring pairs to longer texts, with a blank between their sentences.

    Args:
        pairs: Pairs of one sentence each; none is used twice.
        sizes: How many pairs to join to each text, until there are no more sizes or no more pairs. The last text has
            fewer where the pairs run out.
    """
    rest, joined = iter(pairs), []
    for size in sizes:
        part = list(islice(rest, size))
        if not part:
            break
        joined.append((" ".join(source for source, _ in part), " ".join(target for _, target in part)))
    return joined


def reversal_pairs(
    draw: Callable[[Random], Sequence[str]], count: int, seed: int, *, is_distinct: bool = False
) -> list[Pair]:
    """Return random sequences of symbols, each with the same symbols from the last to the first.

    Args:
        draw: Draws a sequence.
        count: How many sequences.
        seed: Of what is drawn.
        is_distinct: Whether no sequence may come twice.
    """
    random, sequences = Random(seed), list[tuple[str, ...]]()
    seen = set[tuple[str, ...]]()
    while len(sequences) < count:
        sequence = tuple(draw(random))
        if not (is_distinct and sequence in seen):
            seen.add(sequence)
            sequences.append(sequence)
    return [(" ".join(sequence), " ".join(reversed(sequence))) for sequence in sequences]


def write_pairs(pairs: Iterable[Pair], folder: Path) -> str:
    """Write pairs into a file that is named by its checksum, with the columns `source` and `target`.

    Args:
        pairs: Source and target of each.
        folder: Where trainings are kept; the file goes into its subfolder `data`.

    Returns:
        The file's path, to be used as `data.train`, `data.validation` or a set of `data.test`.
    """
    rows = [{"source": source, "target": target} for source, target in pairs]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path = folder / "data" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    return str(path)
