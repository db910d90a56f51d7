"""Terms for training: random aligned words and phrases, marked in their sources with their translations."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, combinations_with_replacement, count
from sys import intern
from typing import TYPE_CHECKING

import numpy as np

from heedful.data.epochs.draws import Draws, drawn_numbers
from heedful.data.epochs.encoding import EncodedPairs, PairEncoder, control_id
from heedful.data.glossary import MARKS, Mark, Word, with_marks, words_of
from heedful.symbols_heed import trimmed

if TYPE_CHECKING:
    from datasets import Dataset

OF_TERMS = 0x7E45  # separates these draws from others of one seed and epoch
LONGEST, MOST_TERMS = 3, 3  # words in a phrase, and terms in a source
COMMON, RARE = 0.01, 10  # share of sources, if more than so many, with a word too common to begin or end a term
EXCHANGED = 0.5  # share of one-word terms whose translation is exchanged for another word
LEAST_SCORE, BUCKETS, MULTIPLIER = 0.1, 2**24, 0x9E3779B1  # of aligned words; for the counts of word couples
Links = Sequence[Sequence[int]]  # places of two words, source and target, from 0
Phrase = tuple[int, int, int, int]  # first source word, the one after the last, and the same of the target


class Terms:
    """Marks terms in a share of an epoch's rows; seed, epoch and rows decide which.

    Some translations are exchanged for a rare word, in the target too, so that the model learns to copy what it cannot
    guess. A row that would be too long stays as it is. The `numbers` of rows are places in `pairs`.
    """

    def __init__(self, share: float, pairs: "Dataset", encoder: PairEncoder, seed: int):
        self._share, self._encoder, self._seed = share, encoder, seed
        for mark in MARKS:
            control_id(mark, encoder.tokenizers.source, "data.augmentation.terms")
        self._texts = [[trimmed(text) for text in pairs[side][:]] for side in ("source", "target")]
        sides = [[[intern(word.text) for word in words_of(text)] for text in side] for side in self._texts]
        self._rare = [word for word, number in _counts(sides[1]).items() if number <= RARE and word.isalpha()]
        sides = [[[intern(word.lower()) for word in words] for words in side] for side in sides]
        most = max(RARE, COMMON * len(sides[0]))
        self._common = {word for word, number in _counts(sides[0]).items() if number > most}
        self._links = aligned(*sides)

    def rows(self, rows: EncodedPairs, epoch: int) -> EncodedPairs:
        """Return an epoch's rows; epochs count from 0."""
        draws, numbers = drawn_numbers(self._seed, epoch, OF_TERMS), rows.numbers.tolist()
        chosen = [index for index in range(len(rows)) if next(draws) < self._share]
        drawn = {index: self._drawn(numbers[index], draws) for index in chosen}
        given = [(self._texts[0][numbers[index]], rows[index]["input_ids"], own) for index, (own, _) in drawn.items()]
        sources = with_marks(self._encoder.tokenizers.source, given)
        targets = self._encoder.tokenizers.encode_target([target for _, target in drawn.values()])
        limits = (self._encoder.max_source_tokens or math.inf, self._encoder.max_target_tokens or math.inf)
        changed = {
            index: {"input_ids": source, "labels": target}
            for index, source, target in zip(drawn, sources, targets, strict=True)
            if len(source) <= limits[0] and len(target) <= limits[1]
        }
        return EncodedPairs((changed.get(index) or rows[index] for index in range(len(rows))), rows.numbers)

    def _drawn(self, number: int, draws: Draws) -> tuple[list[Mark], str]:
        """Draw a pair's terms; return their marks, in order, and the target with their translations."""
        source, target = (words_of(side[number]) for side in self._texts)
        found = ((source[first:after], target[begin:end]) for first, after, begin, end in phrases(self._links[number]))
        known, text = [both for both in found if self._is_term(*both)], self._texts[1][number]
        marks = list[tuple[int, int, Mark]]()
        for _ in range(1 + int(next(draws) * MOST_TERMS) if known else 0):
            term, translation = known[int(next(draws) * len(known))]
            start, end, change = translation[0].start, translation[-1].end, next(draws)
            is_exchanged = change < EXCHANGED and len(term) == len(translation) == 1 and self._rare
            written = self._rare[int(change / EXCHANGED * len(self._rare))] if is_exchanged else text[start:end]
            if all(term[-1].end <= other.start or term[0].start >= other.end for *_, other in marks):
                marks.append((start, end, Mark(term[0].start, term[-1].end, (written,))))
        for start, end, mark in sorted(marks, reverse=True):
            text = f"{text[:start]}{mark.targets[0]}{text[end:]}"
        return sorted(mark for *_, mark in marks), text

    def _is_term(self, source: list[Word], target: list[Word]) -> bool:
        are_common = {source[0].text.lower(), source[-1].text.lower()} & self._common
        return not are_common and all(word.text[0].isalnum() for word in (*source, *target))


def _counts(side: Sequence[Sequence[str]]) -> Counter[str]:
    """Count the texts that have each word."""
    return Counter(chain.from_iterable(map(dict.fromkeys, side)))


def phrases(links: Links) -> Iterator[Phrase]:
    """Yield short phrases whose words are only linked with each other (Koehn et al., 2003, section 2.2)."""
    linked = sorted({one for one, _ in links})
    for first, last in combinations_with_replacement(linked, 2):
        places = [other for one, other in links if first <= one <= last]
        begin, end = min(places), max(places) + 1
        is_closed = all(first <= one <= last for one, other in links if begin <= other < end)
        if is_closed and max(last - first, end - 1 - begin) < LONGEST:
            yield first, last + 1, begin, end


def aligned(sources: Sequence[Sequence[str]], targets: Sequence[Sequence[str]]) -> list[Links]:
    """Align the words of pairs.

    Both words prefer each other (Melamed, 2000, "Models of Translational Equivalence among Words") by Dice's
    coefficient of the pairs that have them, and by similar places. The same pairs always give the same links.
    """
    numbers: list[defaultdict[str, int]] = [defaultdict(count().__next__) for _ in range(2)]
    sides = [
        [np.array([known[word] for word in words], np.int64) for words in side]
        for known, side in zip(numbers, (sources, targets), strict=True)
    ]
    totals, together = [np.zeros(len(known)) for known in numbers], np.zeros(BUCKETS, np.float32)
    for both in zip(*sides, strict=True):
        for total, words in zip(totals, both, strict=True):
            total[np.unique(words)] += 1
        together[np.unique(_buckets(*both))] += 1
    links = list[Links]()
    for source, target in zip(*sides, strict=True):
        either = totals[0][source][:, None] + totals[1][target]
        places = ((np.arange(len(words)) + 0.5) / len(words) for words in (source, target))
        scores = 2 * together[_buckets(source, target)] / either * np.exp(-abs(np.subtract.outer(*places)))
        best = scores == np.maximum(scores.max(0, initial=0.0), scores.max(1, keepdims=True, initial=0.0))
        links.append(np.argwhere(best & (scores >= LEAST_SCORE)).tolist())
    return links


def _buckets(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the bucket of each couple of words, `(source words, target words)`; some couples share one."""
    return np.asarray((source[:, None] * MULTIPLIER + target) % BUCKETS)
