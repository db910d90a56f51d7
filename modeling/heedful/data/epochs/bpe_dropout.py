"""BPE-dropout: words cut in other ways in every epoch, so that a model learns what they are made of.

Provilkov, Emelianenko and Voita, "BPE-Dropout: Simple and Effective Subword Regularization", 2020. The dropout that
`tokenizers` has draws from a generator that nobody can seed, so the merges are applied here. (It also gives a dropped
merge another chance for every merge that has become impossible since, of which the paper knows nothing.)
"""

import json
import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, count, islice, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from heedful.data.encoding import CHUNK, EncodedPairs, PairEncoder
from heedful.data.tokenization import WORD_START

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

MOST_SEGMENTATIONS = 64  # of one word in an epoch


class BpeDropout:
    """Cuts the words of rows anew for an epoch; the same seed, epoch and rows give the same.

    At each step every merge that is possible in a word is dropped with probability p, and the best of the others is
    made, until none is left (algorithm 1 of the paper). A word that comes n times is cut min(n, 64) times, and these
    segmentations are dealt out to where it stands in random order: each place sees the paper's distribution, at a
    small part of the cost. A side of a row that would be longer than its limit stays as the tokenizer cuts it.
    """

    def __init__(self, encoder: PairEncoder, p: float, seed: int):
        self._encoder, self._threshold, self._seed = encoder, round(p * 2**64), seed
        encoder.mark_words = True
        source, target = encoder.tokenizers.source, encoder.tokenizers.target
        merges = Merges(source)
        self._merges = merges, merges if target is source else Merges(target)

    def stream(self, pairs: Iterable[Mapping[str, str]], epoch: int) -> Iterator[dict[str, list[int]]]:
        """Yield the rows of an epoch, from 0, of pairs that are read once."""
        remaining = iter(pairs)
        while chunk := list(islice(remaining, CHUNK)):
            rows = self.rows(EncodedPairs(self._encoder.rows(chunk)), epoch)
            yield from (rows[number] for number in range(len(rows)))

    def rows(self, marked: EncodedPairs, epoch: int) -> EncodedPairs:
        """Return the rows of an epoch, from 0, of rows with marked words, as the encoder makes them."""
        if not len(marked):
            return marked
        sides = (marked.sources, marked.source_lengths), (marked.targets, marked.target_lengths)
        limits = self._encoder.max_source_tokens, self._encoder.max_target_tokens
        cut = []
        for number, (tokens, lengths) in enumerate(sides):
            # The raw output of a bit generator is the one thing numpy promises never to change.
            seed = np.random.SeedSequence([self._seed, epoch, number, zlib.crc32(tokens.tobytes())])
            cut.append(self._side(tokens, lengths, self._merges[number], np.random.PCG64(seed), limits[number]))
        return EncodedPairs({"input_ids": source, "labels": target} for source, target in zip(*cut, strict=True))

    def _side(
        self, tokens: np.ndarray, lengths: np.ndarray, merges: "Merges", generator: np.random.PCG64, limit: int | None
    ) -> list[np.ndarray]:
        """Return the tokens of one side of each row."""
        words = Words.of(tokens, lengths)
        draws = chain.from_iterable(generator.random_raw(2**12).tolist() for _ in count())
        pieces: list[list[int]] = []
        starts = []  # where the segmentations of each word begin among the pieces: first the tokenizer's, then others
        for word, times in zip(words.distinct, words.times.tolist(), strict=True):
            starts.append(len(pieces))
            pieces.append(word)
            if symbols := merges.symbols(word):
                drawn = range(min(times, MOST_SEGMENTATIONS))
                pieces.extend(merges.apply(symbols, draws, self._threshold) for _ in drawn)
        others = np.diff(starts, append=len(pieces))[words.numbers] - 1  # (places)
        plain = np.array(starts)[words.numbers]
        order = np.lexsort((generator.random_raw(len(plain)), words.numbers))
        ranks = np.empty_like(order)  # of each place among those of its word, at random
        ranks[order] = np.arange(len(order)) - np.repeat(np.cumsum(words.times) - words.times, words.times)
        chosen = plain + np.where(others > 0, 1 + ranks % np.maximum(others, 1), 0)
        sizes = np.array([len(piece) for piece in pieces])
        cut = np.bincount(words.rows, sizes[chosen]).astype(np.int64)  # (rows) tokens
        if limit is not None and (cut > limit).any():
            told = "%s of %s texts stay as they are: cut by BPE-dropout they would have more than %s tokens"
            logger.info(told, int((cut > limit).sum()), len(cut), limit)
            chosen = np.where((cut > limit)[words.rows], plain, chosen)
            cut = np.where(cut > limit, lengths, cut)
        flat = np.array(list(chain.from_iterable(pieces)), np.int32)
        first, sizes = (np.cumsum(sizes) - sizes)[chosen], sizes[chosen]
        inside = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # (tokens)
        return np.split(flat[np.repeat(first, sizes) + inside], np.cumsum(cut)[:-1])


class Words(NamedTuple):
    """The words of a side of many rows."""

    distinct: list[list[int]]  # the tokens of every word that occurs
    times: np.ndarray  # (distinct) how often
    numbers: np.ndarray  # (places) which of them stands at each place
    rows: np.ndarray  # (places) in which row

    @classmethod
    def of(cls, tokens: np.ndarray, lengths: np.ndarray) -> "Words":
        """Find the words in the tokens of rows, of which those that begin a word are marked."""
        starts = np.flatnonzero(tokens & WORD_START)
        plain = (tokens & ~WORD_START).astype(np.int32)
        data = plain.tobytes()
        known: dict[bytes, int] = {}  # numbers of words
        bounds = [*(4 * starts).tolist(), len(data)]
        numbers = [known.setdefault(data[start:end], len(known)) for start, end in pairwise(bounds)]
        rows = np.repeat(np.arange(len(lengths)), lengths)[starts]
        distinct = [np.frombuffer(word, np.int32).tolist() for word in known]
        found = np.array(numbers, np.int64)
        return cls(distinct, np.bincount(found, minlength=len(distinct)), found, rows)


class Merges:
    """The merges of a BPE tokenizer, between ids; words are taken apart into the symbols that the merges begin with.

    So the normalizer, the pre-tokenizer and special tokens are the tokenizer's own, and what it merges in another way
    than by its merges alone stays whole.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        backend = getattr(tokenizer, "backend_tokenizer", None)
        model = json.loads(backend.to_str())["model"] if backend is not None else {}
        if model.get("type") != "BPE" or not model.get("merges"):
            kind = model.get("type") or type(tokenizer).__name__
            raise ValueError(
                "`tokenizer.dropout` must be 0 for a tokenizer without the merges of BPE, which it leaves out, but is "
                f"given with {kind} instead."
            )
        ids, prefix = model["vocab"], len(model.get("continuing_subword_prefix") or "")
        self._merges: dict[tuple[int, int], tuple[int, int]] = {}  # of two ids the rank, and what they become
        self._parts: dict[int, tuple[int, int]] = {}
        for rank, merge in enumerate(model["merges"]):
            left, right = merge.split(" ") if isinstance(merge, str) else merge
            pair, merged = (ids[left], ids[right]), ids[left + right[prefix:]]
            self._merges[pair] = (rank, merged)
            self._parts.setdefault(merged, pair)

    def symbols(self, word: list[int]) -> list[int] | None:
        """Return what a word is merged of; `None` where nothing could be cut in another way."""
        symbols = list(chain.from_iterable(map(self._apart, word)))
        return symbols if len(symbols) > 1 and self.apply(symbols, iter(()), 0) == word else None

    def _apart(self, token: int) -> list[int]:
        parts = self._parts.get(token)
        return [token] if parts is None else [*self._apart(parts[0]), *self._apart(parts[1])]

    def apply(self, symbols: list[int], draws: Iterator[int], threshold: int) -> list[int]:
        """Merge a word's symbols, and drop a merge for a step where its draw of 64 bits is below the threshold."""
        symbols = list(symbols)
        merges = [self._merges.get(pair) for pair in pairwise(symbols)]
        while True:
            # The best first, of equals the leftmost.
            possible = sorted((merge, place) for place, merge in enumerate(merges) if merge is not None)
            kept = next((each for each in possible if not threshold or next(draws) >= threshold), None)
            if kept is None:
                return symbols
            (_, merged), place = kept
            symbols[place : place + 2] = [merged]
            del merges[place]
            if place:
                merges[place - 1] = self._merges.get((symbols[place - 1], merged))
            if place < len(merges):
                merges[place] = self._merges.get((merged, symbols[place + 1]))
