"""Terms and placeholders for training: random aligned words and phrases.

Terms are marked in their sources with their translations. Numbers replace others on both sides, as `markup` writes
placeholders for a model.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, combinations_with_replacement, count
from sys import intern
from typing import TYPE_CHECKING, Any

import numpy as np

from heedful.data.data_recipe import AugmentationRules
from heedful.data.epochs.draws import Draws, drawn_numbers
from heedful.data.epochs.encoding import EncodedPairs, PairEncoder, control_id
from heedful.data.glossary import Mark, Word, with_marks, words_of
from heedful.data.sources import numbers_of_parts
from heedful.data.tokenization import MARKS
from heedful.symbols_heed import trimmed

if TYPE_CHECKING:
    from datasets import Dataset

OF_TERMS = 0x7E45  # separates these draws from others of one seed and epoch
LONGEST, MOST_TERMS = 3, 3  # words in a phrase, and terms in a source
COMMON, RARE = 0.01, 10  # share of sources, if more than so many, with a word too common to begin or end a term
EXCHANGED = 0.5  # share of one-word terms whose translation is exchanged for another word
LEAST_SCORE, BUCKETS, MULTIPLIER = 0.1, 2**24, 0x9E3779B1  # of aligned words; for the counts of word couples
ENDINGS = (0, 1, 1, 2)  # letters of a source word that may stay after the number, as Korean particles do
Links = Sequence[Sequence[int]]  # places of two words, source and target, from 0
Phrase = tuple[int, int, int, int]  # first source word, the one after the last, and the same of the target


class Terms:
    """Marks terms in a share of an epoch's rows, and replaces terms in another; seed, epoch and rows decide which.

    Some marked translations are exchanged for a rare word, in the target too, so that the model learns to copy what it
    cannot guess. A row that would be too long stays as it is. The `numbers` of rows are places in `pairs`.
    """

    def __init__(self, rules: AugmentationRules, pairs: "Dataset", encoder: PairEncoder, seed: int):
        self._rules, self._encoder, self._seed = rules, encoder, seed
        self._parts = numbers_of_parts(pairs).tolist()
        for mark in MARKS if rules.terms else ():
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
        drawn, replaced = dict[int, tuple[list[Mark], str]](), dict[int, dict[str, Any]]()
        changes = [next(draws) - self._rules.terms for _ in numbers]
        for index, (number, change) in enumerate(zip(numbers, changes, strict=True)):
            if change < 0:
                drawn[index] = self._marked(number, draws)
            elif change < self._rules.placeholders:
                replaced[index] = self._replaced(number, draws) | {"part": self._parts[number]}
        given = [(self._texts[0][numbers[index]], rows[index]["input_ids"], own) for index, (own, _) in drawn.items()]
        sources = with_marks(self._encoder.tokenizers.source, given) if given else []
        targets = self._encoder.tokenizers.encode_target([target for _, target in drawn.values()])
        limits = (self._encoder.max_source_tokens or math.inf, self._encoder.max_target_tokens or math.inf)
        changed = {
            index: {"input_ids": source, "labels": target}
            for index, source, target in zip(drawn, sources, targets, strict=True)
            if len(source) <= limits[0] and len(target) <= limits[1]
        } | dict(zip(replaced, self._encoder.rows(replaced.values()), strict=True))
        return EncodedPairs((changed.get(index) or rows[index] for index in range(len(rows))), rows.numbers)

    def _marked(self, number: int, draws: Draws) -> tuple[list[Mark], str]:
        """Draw a pair's terms; return their marks, in order, and the target with their translations."""
        text, marks, targets = self._texts[1][number], list[Mark](), list[tuple[int, int, str]]()
        for term, translation, change in self._terms(number, draws):
            start, end = translation[0].start, translation[-1].end
            is_exchanged = change < EXCHANGED and len(term) == len(translation) == 1 and self._rare
            written = self._rare[int(change / EXCHANGED * len(self._rare))] if is_exchanged else text[start:end]
            marks.append(Mark(term[0].start, term[-1].end, (written,)))
            targets.append((start, end, written))
        return sorted(marks), _with(text, targets)

    def _replaced(self, number: int, draws: Draws) -> dict[str, str]:
        """Draw a pair's terms; return source and target with numbers instead."""
        texts = [side[number] for side in self._texts]
        numbers = (each for each in map(str, count(3 + int(next(draws) ** 3 * 7))) if each not in "".join(texts))
        sources, targets = list[tuple[int, int, str]](), list[tuple[int, int, str]]()
        for term, translation, change in self._terms(number, draws):
            written, ending = next(numbers), ENDINGS[int(change * len(ENDINGS))]
            stem = term[-1].end - ending * (ending < term[-1].end - term[-1].start)
            sources.append((term[0].start, stem, written))
            targets.append((translation[0].start, translation[-1].end, written))
        return {"source": _with(texts[0], sources), "target": _with(texts[1], targets)}

    def _terms(self, number: int, draws: Draws) -> Iterator[tuple[list[Word], list[Word], float]]:
        """Draw some of a pair's terms, with their translations, and a number for each; they do not overlap."""
        source, target = (words_of(side[number]) for side in self._texts)
        found = ((source[first:after], target[begin:end]) for first, after, begin, end in phrases(self._links[number]))
        known, taken = [both for both in found if self._is_term(*both)], list[Word]()
        for _ in range(1 + int(next(draws) * MOST_TERMS) if known else 0):
            (term, translation), change = known[int(next(draws) * len(known))], next(draws)
            if not any(word in taken for word in term):
                taken += term
                yield term, translation, change

    def _is_term(self, source: list[Word], target: list[Word]) -> bool:
        are_common = {source[0].text.lower(), source[-1].text.lower()} & self._common
        return not are_common and all(word.text[0].isalnum() for word in (*source, *target))


def _with(text: str, written: Iterable[tuple[int, int, str]]) -> str:
    """Write words into a text, each instead of the characters between two places."""
    for start, end, word in sorted(written, reverse=True):
        text = f"{text[:start]}{word}{text[end:]}"
    return text


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
