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

    Args:
        tokenizers: The model's tokenizers.
        max_source_tokens: Longest source, special tokens included; `None` for no limit.
        max_target_tokens: Longest target, likewise.
        languages: For each direction of a multilingual model its target language, `(target,)` or
            `(target, source)`: with two, every pair is encoded both ways. Empty for a model of one direction.

    Attributes:
        too_long: Number of rows left out so far.
    """

    tokenizers: TokenizerPair
    max_source_tokens: int | None = None
    max_target_tokens: int | None = None
    languages: tuple[str, ...] = ()
    too_long: int = 0

    def rows(self, pairs: Iterable[Mapping[str, str]]) -> Iterator[dict[str, list[int]]]:
        """Yield `input_ids` and `labels`, lists of token ids that end in `</s>`, for every pair that fits."""
        stream = iter(pairs)
        while chunk := list(islice(stream, CHUNK)):
            sources = [pair["source"] for pair in chunk]
            targets = [pair["target"] for pair in chunk]
            directions = [(sources, targets), (targets, sources)][: max(1, len(self.languages))]
            for number, (texts, references) in enumerate(directions):
                language = self.languages[number] if self.languages else None
                inputs = self.tokenizers.encode_source(texts, target_language=language)
                labels = self.tokenizers.encode_target(references)
                for row in zip(inputs, labels, strict=True):
                    if self._fits(row):
                        yield {"input_ids": row[0], "labels": row[1]}
                    else:
                        self.too_long += 1

    def _fits(self, row: tuple[list[int], list[int]]) -> bool:
        limits = (self.max_source_tokens, self.max_target_tokens)
        return all(limit is None or len(ids) <= limit for ids, limit in zip(row, limits, strict=True))


class EncodedPairs:
    """Rows of token ids, held in two flat arrays: four bytes a token, whatever the number of rows.

    Args:
        rows: `input_ids` and `labels`, read once.

    Attributes:
        source_lengths, target_lengths: Tokens of every row, as arrays.
    """

    def __init__(self, rows: Iterable[Mapping[str, list[int]]]):
        sources: list[np.ndarray] = []
        targets: list[np.ndarray] = []
        for row in rows:
            sources.append(np.asarray(row["input_ids"], dtype=np.int32))
            targets.append(np.asarray(row["labels"], dtype=np.int32))
        self.source_lengths = np.array([len(ids) for ids in sources], dtype=np.int64)
        self.target_lengths = np.array([len(ids) for ids in targets], dtype=np.int64)
        self._sources = np.concatenate(sources) if sources else np.empty(0, np.int32)
        self._targets = np.concatenate(targets) if targets else np.empty(0, np.int32)
        self._source_ends = self.source_lengths.cumsum()
        self._target_ends = self.target_lengths.cumsum()

    def __len__(self) -> int:
        return len(self.source_lengths)

    def fingerprint(self) -> str:
        """Return a checksum of all rows in their order."""
        digest = hashlib.sha256()
        for array in (self.source_lengths, self.target_lengths, self._sources, self._targets):
            digest.update(array.tobytes())
        return digest.hexdigest()

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if not 0 <= index < len(self):
            raise IndexError(f"Row {index} does not exist: there are {len(self)}.")
        source_end, target_end = self._source_ends[index], self._target_ends[index]
        return {
            "input_ids": self._sources[source_end - self.source_lengths[index] : source_end].tolist(),
            "labels": self._targets[target_end - self.target_lengths[index] : target_end].tolist(),
        }
