"""The parts of a mixture, the tokens before their sources, and how often their rows come in an epoch."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from heedful.data.data_recipe import DENOISE, OTHER_DIRECTION, MixturePart, languages_of
from heedful.data.epochs.encoding import CHUNK, EncodedPairs
from heedful.data.sources import read_pairs, reading
from heedful.data.tokenization import TokenizerPair
from heedful.messages_heed import wrong
from heedful.symbols_heed import symbols_of

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

DRAW = 0x5A3  # separates the draws of rows from others of the same seed and epoch


def source_prefixes(parts: Mapping[str, MixturePart], tokenizers: TokenizerPair) -> list[list[int]]:
    """Return the ids before the sources of each part: a tag of its language if there are several, and its own tag."""
    known = tokenizers.languages
    is_known = len(known) > 1
    languages = languages_of(parts) or {str(part.to) for part in parts.values() if is_known}
    if not {*languages} <= {*known}:
        wanted, found = ", ".join(languages), ", ".join(known) or "none"
        must = f"have a tag of each language that is learned ({wanted})"
        raise wrong("tokenizer.path` or `model.start_from", must, f"those of {found}", verb="has")
    heads = (tokenizers.head(part.to if is_known else None) for part in parts.values())
    tags = ((part.tag, "data.denoise" if part.tag == DENOISE else f"{key}.tag") for key, part in parts.items())
    ids = ([] if tag is None else [control_id(f"<{tag}>", tokenizers, key)] for tag, key in tags)
    return [head + id_ for head, id_ in zip(heads, ids, strict=True)]


def control_id(token: str, tokenizers: TokenizerPair, key: str) -> int:
    """Return the id of a tag or the mask; raise a `ValueError` if it is no control token or can be read from text."""
    id_ = tokenizers.source.added_tokens_encoder.get(token)
    is_closed = symbols_of(tokenizers.source) is not None  # it reads only its symbols
    texts = [] if is_closed else [token, f"a {token} a"]
    if id_ is None or any(id_ in tokenizers.source(text, verbose=False)["input_ids"] for text in texts):
        must = "be a special token that the tokenizer never reads out of a text"
        raise wrong(key, must, token, advice="let one be trained (no `tokenizer.path`), or leave it out")
    return int(id_)


def read_parts(parts: Mapping[str, MixturePart], streaming: bool = False) -> "Dataset | IterableDataset":
    """Read all parts but the other direction; of several, each pair has its number as `part`."""
    import pyarrow as pa
    from datasets import Dataset

    read: dict[int, Dataset | IterableDataset] = {}
    for number, (key, part) in enumerate(parts.items()):
        if key != OTHER_DIRECTION:
            with reading(key):
                read[number] = read_pairs(part.train, str(part.source), str(part.target), streaming=streaming)
    if len(read) == 1:
        return read.popitem()[1]
    tables = {number: pairs.data.table.select(["source", "target"]) for number, pairs in read.items()}
    numbers = {number: pa.array([number] * len(table), pa.int32()) for number, table in tables.items()}
    return Dataset(pa.concat_tables([tables[number].append_column("part", numbers[number]) for number in read]))


def both_ways(pairs: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield pairs in chunks, each followed by its pairs of the first part in the other direction, as part 1."""
    stream = iter(pairs)
    while chunk := [{"part": 0, **pair} for pair in islice(stream, CHUNK)]:
        yield from chunk
        first = (pair for pair in chunk if pair["part"] == 0)
        yield from ({**pair, "source": pair["target"], "target": pair["source"], "part": 1} for pair in first)


def with_other_direction(pairs: "Dataset | IterableDataset") -> "Dataset | IterableDataset":
    """Return the pairs of `both_ways`."""
    from datasets import Dataset, IterableDataset

    if isinstance(pairs, Dataset):
        return Dataset.from_list([*both_ways(pairs)])
    return cast("IterableDataset", IterableDataset.from_generator(both_ways, gen_kwargs={"pairs": pairs}))


def numbers_of_parts(pairs: "Dataset") -> np.ndarray:
    """Return the part of each pair, `(pairs,)`."""
    return np.array(pairs["part"][:], np.int64) if "part" in pairs.column_names else np.zeros(len(pairs), np.int64)


def rows_of_parts(parts: Collection[str], numbers: np.ndarray) -> dict[str, int]:
    """Count rows by key of their part, from `numbers` `(rows,)`; an empty part is a `ValueError`."""
    counts = dict(zip(parts, np.bincount(numbers, minlength=len(parts)).tolist(), strict=True))
    for key in [key for key, count in counts.items() if not count]:
        raise ValueError(f"`{key}` must hold pairs to train on, but cleaning and the longest lengths leave none.")
    return counts


class Sampling:
    """Draws rows of parts for an epoch with the number of all rows.

    A part of n rows gets a share proportional to n^(1/T) (Arivazhagan et al., 2019, arXiv 1907.05019): each row as
    often as possible, and the rest drawn anew in every epoch. A temperature T above 1 repeats small parts and thins
    large ones. `parts` `(rows,)` are the numbers of the parts, which all have rows.
    """

    def __init__(self, parts: np.ndarray, temperature: float, seed: int):
        self._parts, self._seed = parts, seed
        weights = np.bincount(parts) ** (1 / temperature)
        wanted = weights / weights.sum() * len(parts)
        self.counts = wanted.astype(np.int64)  # rows of each part in an epoch
        largest_rests = np.argsort(self.counts - wanted, kind="stable")
        self.counts[largest_rests[: len(parts) - self.counts.sum()]] += 1

    def rows(self, rows: EncodedPairs, epoch: int) -> EncodedPairs:
        """Return the rows of an epoch, from 0."""
        chosen = []
        for part, count in enumerate(self.counts.tolist()):
            numbers = np.flatnonzero(self._parts == part)
            # Raw output, which numpy promises never to change.
            generator = np.random.PCG64(np.random.SeedSequence([self._seed, epoch, part, DRAW]))
            order = np.argsort(generator.random_raw(len(numbers)), kind="stable")
            whole, rest = divmod(count, len(numbers))
            chosen += [np.repeat(numbers, whole), numbers[order[:rest]]]
        return rows.chosen(np.sort(np.concatenate(chosen)))
