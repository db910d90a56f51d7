"""Training pairs changed in every epoch in the ways that users type."""

import logging
import re
import unicodedata
from collections.abc import Iterator
from itertools import chain, count, pairwise
from typing import TYPE_CHECKING

import numpy as np
import regex

from heedful.data.data_recipe import AugmentationRules
from heedful.data.epochs.encoding import EncodedPairs, PairEncoder
from heedful.data.mixture import numbers_of_parts
from heedful.symbols_heed import symbols_of

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

FINAL_PUNCTUATION = re.compile(r"\s*[.?!…。．？！｡।۔؟።։]+\s*$")  # with the space of French
DRAW = 0xA06  # separates these draws from others of the same seed and epoch
Draws = Iterator[float]  # from 0 to below 1


class Augmentation:
    """Changes the rows of an epoch; seed, epoch and rows decide how.

    A joined pair gets another pair of its part after it (Kondo et al., 2021, arXiv 2104.08478). Then its source may
    change. A pair that would be too long stays as it is. The `numbers` of rows are places in `pairs`.
    """

    def __init__(self, rules: AugmentationRules, pairs: "Dataset", encoder: PairEncoder, seed: int):
        changes_words = rules.lower_case or rules.typos or rules.no_final_punctuation
        if changes_words and symbols_of(encoder.tokenizers.source) is not None:
            must = "empty but for `joined` where the source's vocabulary is closed"
            raise ValueError(f"`data.augmentation` must be {must}, but changes the words of sources.")
        self._rules, self._pairs, self._encoder, self._seed = rules, pairs, encoder, seed

    def rows(self, rows: EncodedPairs, epoch: int) -> EncodedPairs:
        """Return the rows of an epoch, from 0."""
        draws = drawn_numbers(self._seed, epoch, DRAW)
        sources, targets = self._pairs["source"][:], self._pairs["target"][:]
        parts = numbers_of_parts(self._pairs).tolist()
        of_part: dict[int, list[int]] = {}
        numbers = rows.numbers.tolist()
        for number in numbers:
            of_part.setdefault(parts[number], []).append(number)
        changed = {}
        for index, number in enumerate(numbers):
            source, target = sources[number], targets[number]
            others = of_part[parts[number]]
            if next(draws) < self._rules.joined:
                other = others[int(next(draws) * len(others))]
                source, target = f"{source} {sources[other]}", f"{target} {targets[other]}"
            source = noisy(source, self._rules, draws)
            if source != sources[number]:
                changed[index] = {"source": source, "target": target, "part": parts[number]}
        encoded = dict(zip(changed, self._encoder.rows(changed.values()), strict=True))
        if too_long := sum(row is None for row in encoded.values()):
            logger.info("%s of %s changed pairs stay as they are: they would be too long", too_long, len(changed))
        return EncodedPairs(encoded.get(index) or rows[index] for index in range(len(rows)))


def drawn_numbers(*seeds: int, block: int = 2**12) -> Draws:
    """Draw numbers without end, a `block` at a time; the same seeds give the same."""
    # Raw output, which numpy promises never to change.
    generator = np.random.PCG64(np.random.SeedSequence(seeds))
    return chain.from_iterable(((generator.random_raw(block) >> 11) / 2**53).tolist() for _ in count())


def noisy(source: str, rules: AugmentationRules, draws: Draws) -> str:
    """Return a source as typed in a hurry, in NFC."""
    if next(draws) < rules.no_final_punctuation:
        source = FINAL_PUNCTUATION.sub("", source) or source
    if rules.typos:
        parts = re.split(r"(\s+)", source)  # words, and the spaces between
        parts[::2] = [_mistyped(word, draws) if next(draws) < rules.typos else word for word in parts[::2]]
        source = "".join(parts)
    if next(draws) < rules.lower_case:
        source = source.lower()
    return unicodedata.normalize("NFC", source)


def _mistyped(word: str, draws: Draws) -> str:
    """Swap two neighbouring letters, drop one, double it, or replace it by its neighbour."""
    if not {unicodedata.category(character)[0] for character in word} <= {*"LMP"}:  # numbers have meanings
        return word
    letters = regex.findall(r".\p{M}*", word)  # with their marks
    is_letter = [unicodedata.category(letter[0])[0] == "L" for letter in letters]
    places = [place for place, both in enumerate(pairwise(is_letter)) if all(both)]
    if not places:
        return word
    place = places[int(next(draws) * len(places))]
    one, other = letters[place : place + 2]
    letters[place : place + 2] = [(other + one, other, one + one + other, other + other)[int(next(draws) * 4)]]
    return "".join(letters)
