"""Pairs as token ids: compact in memory for a corpus, a row at a time for a stream."""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from heedful.data.tokenization import TokenizerPair, encode_texts
from heedful.symbols_heed import UnknownSymbol, trimmed

CHUNK = 2000  # pairs per call of the tokenizer, enough for all cores


@dataclass(frozen=True)
class PairEncoder:
    """Turns pairs into rows of token ids, after the head of their `part` (default 0)."""

    tokenizers: TokenizerPair
    max_source_tokens: int | None = None  # of a source, special tokens included; None for no limit
    max_target_tokens: int | None = None
    heads: Sequence[list[int]] = ()  # ids before the sources of each part

    def rows(self, pairs: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, list[int]] | None]:
        """Yield `input_ids` and `labels`, which end in `</s>`, for every pair; `None` if it is too long."""
        stream, tokenizers = iter(pairs), self.tokenizers
        limits = (self.max_source_tokens, self.max_target_tokens)
        most_source, most_target = (math.inf if limit is None else limit for limit in limits)
        heads = self.heads or [tokenizers.head()]
        while chunk := list(islice(stream, CHUNK)):
            sources, targets = [pair["source"] for pair in chunk], [trimmed(pair["target"]) for pair in chunk]
            try:
                inputs = encode_texts(tokenizers.source, "text", sources)
                labels = encode_texts(tokenizers.target, "text_target", targets)
            except UnknownSymbol as error:  # of a stream: pairs in memory were checked before
                raise error.at(f"{sources[error.index]!r} → {targets[error.index]!r}") from None
            for pair, ids, target in zip(chunk, inputs, labels, strict=True):
                source = heads[pair.get("part", 0)] + ids
                fits = len(source) <= most_source and len(target) <= most_target
                yield {"input_ids": source, "labels": target} if fits else None


class EncodedPairs:
    """Rows of token ids in two flat arrays, four bytes a token.

    `sources` and `targets` are all tokens; `source_lengths` and `target_lengths` `(rows,)` count those of a row. A row
    that is `None` is left out: `left_out` counts them, and `numbers` `(rows,)` are the places of rows among all.
    """

    def __init__(self, rows: Iterable[Mapping[str, list[int]] | None]):
        sides: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        numbers, self.left_out = [], 0
        for number, row in enumerate(rows):
            if row is None:
                self.left_out += 1
            else:
                numbers.append(number)
                sides[0].append(np.asarray(row["input_ids"], dtype=np.int32))
                sides[1].append(np.asarray(row["labels"], dtype=np.int32))
        self.numbers = np.array(numbers, np.int64)
        self.sources, self.targets = (np.concatenate([np.empty(0, np.int32), *side]) for side in sides)
        self._source_bounds, self._target_bounds = (np.cumsum([0, *map(len, side)], dtype=np.int64) for side in sides)
        self.source_lengths, self.target_lengths = map(np.diff, (self._source_bounds, self._target_bounds))

    def chosen(self, rows: np.ndarray) -> "EncodedPairs":
        """Return some rows, with their `numbers`."""
        chosen = EncodedPairs(self[index] for index in rows.tolist())
        chosen.numbers = self.numbers[rows]
        return chosen

    def __len__(self) -> int:
        return len(self.source_lengths)

    def fingerprint(self) -> str:
        """Return a checksum of all rows."""
        digest = hashlib.sha256()
        for array in (self.source_lengths, self.target_lengths, self.sources, self.targets):
            digest.update(array.tobytes())
        return digest.hexdigest()

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if not 0 <= index < len(self):
            raise IndexError(f"Row {index} does not exist: there are {len(self)}.")
        source, target = (slice(*bounds[index : index + 2]) for bounds in (self._source_bounds, self._target_bounds))
        return {"input_ids": self.sources[source].tolist(), "labels": self.targets[target].tolist()}
