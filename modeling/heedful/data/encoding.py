"""Pairs as token ids: compact in memory for a corpus, one row at a time for a stream."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np

from heedful.data.tokenization import TokenizerPair

CHUNK = 2000  # pairs per call of the tokenizer: many enough that it uses every core


@dataclass
class PairEncoder:
    """Turns pairs into rows of token ids and leaves out what is too long, counting it.

    A multilingual model has a target language for each direction: with two, every pair is encoded both ways.
    """

    tokenizers: TokenizerPair
    max_source_tokens: int | None = None  # of the longest source, special tokens included; None for no limit
    max_target_tokens: int | None = None
    languages: tuple[str, ...] = ()  # (target,) or (target, source); empty for a model of one direction
    too_long: int = 0  # rows left out so far
    mark_words: bool = False  # whether `WORD_START` is added to the id of each word's first token

    def rows(self, pairs: Iterable[Mapping[str, str]]) -> Iterator[dict[str, list[int]]]:
        """Yield `input_ids` and `labels`, lists of token ids that end in `</s>`, for every pair that fits."""
        stream = iter(pairs)
        while chunk := list(islice(stream, CHUNK)):
            sides = [pair["source"] for pair in chunk], [pair["target"] for pair in chunk]
            for language, (texts, references) in zip(self.languages or (None,), (sides, sides[::-1]), strict=False):
                inputs = self.tokenizers.encode_source(texts, language, self.mark_words)
                labels = self.tokenizers.encode_target(references, self.mark_words)
                for row in zip(inputs, labels, strict=True):
                    if self._fits(row):
                        yield {"input_ids": row[0], "labels": row[1]}
                    else:
                        self.too_long += 1

    def _fits(self, row: tuple[list[int], list[int]]) -> bool:
        limits = (self.max_source_tokens, self.max_target_tokens)
        return all(limit is None or len(ids) <= limit for ids, limit in zip(row, limits, strict=True))


class EncodedPairs:
    """Rows of token ids, read once and held in two flat arrays: four bytes a token, whatever the number of rows.

    `sources` and `targets` are all tokens, row after row; `source_lengths` and `target_lengths` `(rows,)` count them.
    """

    def __init__(self, rows: Iterable[Mapping[str, list[int]]]):
        sides: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        for row in rows:
            sides[0].append(np.asarray(row["input_ids"], dtype=np.int32))
            sides[1].append(np.asarray(row["labels"], dtype=np.int32))
        self.sources, self.targets = (np.concatenate([np.empty(0, np.int32), *side]) for side in sides)
        self._source_bounds, self._target_bounds = (np.cumsum([0, *map(len, side)], dtype=np.int64) for side in sides)
        self.source_lengths, self.target_lengths = map(np.diff, (self._source_bounds, self._target_bounds))

    def __len__(self) -> int:
        return len(self.source_lengths)

    def fingerprint(self) -> str:
        """Return a checksum of all rows in their order."""
        digest = hashlib.sha256()
        for array in (self.source_lengths, self.target_lengths, self.sources, self.targets):
            digest.update(array.tobytes())
        return digest.hexdigest()

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if not 0 <= index < len(self):
            raise IndexError(f"Row {index} does not exist: there are {len(self)}.")
        return {
            "input_ids": self.sources[self._source_bounds[index] : self._source_bounds[index + 1]].tolist(),
            "labels": self.targets[self._target_bounds[index] : self._target_bounds[index + 1]].tolist(),
        }
