"""Pairs as token ids: compact in memory for a corpus, row by row for a stream."""

import hashlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from heedful.data.data_recipe import DENOISE, DataRecipe
from heedful.data.tokenization import TokenizerPair, encode_texts
from heedful.messages_heed import wrong
from heedful.symbols_heed import UnknownSymbol, symbols_of, trimmed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SOURCES_FILE = "training_sources.bin"  # checksums, in the run's folder
CHUNK = 2000  # pairs in a tokenizer call, enough for all cores


@dataclass(frozen=True)
class PairEncoder:
    """Turns pairs into rows of token ids, after the language prefix of their `part` (default 0)."""

    tokenizers: TokenizerPair
    max_source_tokens: int | None = None  # in a source, special tokens included; None: no limit
    max_target_tokens: int | None = None
    heads: Sequence[list[int]] = ()  # ids before each part's sources

    def rows(self, pairs: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, list[int]] | None]:
        """Yield each pair's `input_ids` and `labels`, which end in `</s>`; `None` if they are too long."""
        stream, tokenizers = iter(pairs), self.tokenizers
        limits = (self.max_source_tokens, self.max_target_tokens)
        most_source, most_target = (math.inf if limit is None else limit for limit in limits)
        heads = self.heads or [tokenizers.head()]
        while chunk := list(islice(stream, CHUNK)):
            sources, targets = [pair["source"] for pair in chunk], [trimmed(pair["target"]) for pair in chunk]
            try:
                inputs = encode_texts(tokenizers.source, "text", sources)
                labels = encode_texts(tokenizers.target, "text_target", targets)
            except UnknownSymbol as error:  # in a stream: pairs in memory were checked before
                raise error.at(f"{sources[error.index]!r} → {targets[error.index]!r}") from None
            for pair, ids, target in zip(chunk, inputs, labels, strict=True):
                source = heads[pair.get("part", 0)] + ids
                fits = len(source) <= most_source and len(target) <= most_target
                yield {"input_ids": source, "labels": target} if fits else None


class EncodedPairs:
    """Rows of token ids in two flat arrays, four bytes per token.

    `sources` and `targets` are all tokens; `source_lengths` and `target_lengths` `(rows,)` count each row's tokens.
    `None` rows are dropped: `left_out` counts them, and `numbers` `(rows,)` are the kept rows' original positions.
    """

    def __init__(self, rows: Iterable[Mapping[str, list[int]] | None], numbers: np.ndarray | None = None):
        sides: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        kept, self.left_out = [], 0
        for number, row in enumerate(rows):
            if row is None:
                self.left_out += 1
            else:
                kept.append(number)
                sides[0].append(np.asarray(row["input_ids"], dtype=np.int32))
                sides[1].append(np.asarray(row["labels"], dtype=np.int32))
        self.numbers = np.array(kept, np.int64) if numbers is None else numbers
        self.sources, self.targets = (np.concatenate([np.empty(0, np.int32), *side]) for side in sides)
        self._source_bounds, self._target_bounds = (np.cumsum([0, *map(len, side)], dtype=np.int64) for side in sides)
        self.source_lengths, self.target_lengths = map(np.diff, (self._source_bounds, self._target_bounds))

    def chosen(self, rows: np.ndarray) -> "EncodedPairs":
        """Return some rows, with their `numbers`."""
        return EncodedPairs((self[index] for index in rows.tolist()), self.numbers[rows])

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


def source_prefixes(data: DataRecipe, tokenizers: TokenizerPair) -> list[list[int]]:
    """Return the ids before each part's sources: a language tag if there are several languages, and the part's tag."""
    parts, known = data.parts, tokenizers.languages
    is_known = len(known) > 1
    languages = data.languages or {str(part.to) for part in parts.values() if is_known}
    if not {*languages} <= {*known}:
        wanted, found = ", ".join(languages), ", ".join(known) or "none"
        must = f"have a tag for each learned language ({wanted})"
        raise wrong("tokenizer.path` or `model.start_from", must, f"those of {found}", verb="has")
    tags = ((part.tag, "data.denoise" if part.tag == DENOISE else f"{key}.tag") for key, part in parts.items())
    ids = ([] if tag is None else [control_id(f"<{tag}>", tokenizers.source, key)] for tag, key in tags)
    heads = (tokenizers.head(part.to if is_known else None) for part in parts.values())
    return [head + id_ for head, id_ in zip(heads, ids, strict=True)]


def window_of(rows: Sequence[Sequence[int]], separator: int) -> list[int]:
    """Join sentences' ids, with a separator for each `</s>` but the last."""
    return [*chain.from_iterable((*row[:-1], separator) for row in rows[:-1]), *rows[-1]]


def control_id(token: str, tokenizer: "PreTrainedTokenizerFast", key: str) -> int:
    """Return a control token's id; raise a `ValueError` unless it is one that is never read from text."""
    id_ = tokenizer.added_tokens_encoder.get(token)
    is_closed = symbols_of(tokenizer) is not None  # it accepts only its symbols
    texts = [] if is_closed else [token, f"a {token} a"]
    if id_ is None or any(id_ in tokenizer(text, verbose=False)["input_ids"] for text in texts):
        must = "be a special token that the tokenizer never makes from text"
        raise wrong(key, must, token, advice="remove `tokenizer.path` to train a tokenizer, or leave the key out")
    return int(id_)


def rows_of_parts(parts: Collection[str], numbers: np.ndarray) -> dict[str, int]:
    """Count rows by part key, from `numbers` `(rows,)`; raise a `ValueError` if a part is empty."""
    counts = dict(zip(parts, np.bincount(numbers, minlength=len(parts)).tolist(), strict=True))
    for key in [key for key, count in counts.items() if not count]:
        raise ValueError(f"`{key}` must hold pairs to train on, but cleaning and length limits leave none.")
    return counts


def source_digests(pairs: Iterable[Mapping[str, Any]]) -> np.ndarray:
    """Return source checksums, which identify training sources later."""
    digests = (hashlib.blake2b(pair["source"].strip().encode(), digest_size=8).digest() for pair in pairs)
    return np.array([int.from_bytes(digest) for digest in digests], np.uint64)
