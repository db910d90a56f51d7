"""New draws in every epoch: rows of parts, pairs with users' typing habits, damaged texts, and documents' windows."""

import logging
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, pairwise, repeat
from typing import TYPE_CHECKING, Any

import numpy as np
import regex

from heedful.data.data_recipe import MASK, AugmentationRules
from heedful.data.epochs.encoding import EncodedPairs, PairEncoder, control_id, window_of
from heedful.data.sources import numbers_of_parts
from heedful.data.tokenization import SEPARATOR
from heedful.messages_heed import wrong
from heedful.symbols_heed import symbols_of

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

OF_PARTS, OF_CHANGES, OF_DAMAGES, OF_WINDOWS = 0x5A3, 0xA06, 0xD401, 0xD0C5  # separate the draws of one seed and epoch
FINAL_PUNCTUATION = re.compile(r"\s*[.?!…。．？！｡।۔؟።։]+\s*$")  # with the space of French
HELD_OUT = 2**32 - 1  # epoch number for held-out texts
SHARE, LENGTH = 0.3, 3  # share of dropped tokens; mean span length
CASES: dict[str, Callable[[str], str]] = {
    "title_case": lambda text: re.sub(r"(?<![\w'’])[^\W\d_]", lambda letter: letter[0].title(), text),
    "lower_case": str.lower,
    "upper_case": str.upper,
}
Draws = Iterator[float]  # from 0 to below 1
Tokens = list[int]


class Sampling:
    """Draws rows from parts for an epoch, as many as all rows.

    A part with n rows gets a share proportional to n^(1/T) (Arivazhagan et al., 2019, arXiv 1907.05019). All its rows
    are taken equally often; a random choice in every epoch fills the rest. A temperature T above 1 repeats small parts
    and thins large ones. `parts` `(rows,)` are part numbers; every part has rows.
    """

    def __init__(self, parts: np.ndarray, temperature: float, seed: int):
        self._parts, self._seed = parts, seed
        weights = np.bincount(parts) ** (1 / temperature)
        wanted = weights / weights.sum() * len(parts)
        self.counts = wanted.astype(np.int64)  # rows of each part in an epoch
        largest_rests = np.argsort(self.counts - wanted, kind="stable")
        self.counts[largest_rests[: len(parts) - self.counts.sum()]] += 1

    def rows(self, rows: EncodedPairs, epoch: int) -> EncodedPairs:
        """Return an epoch's rows."""
        chosen = []
        for part, count in enumerate(self.counts.tolist()):
            numbers = np.flatnonzero(self._parts == part)
            # Raw output: numpy never changes it.
            generator = np.random.PCG64(np.random.SeedSequence([self._seed, epoch, part, OF_PARTS]))
            order = np.argsort(generator.random_raw(len(numbers)), kind="stable")
            whole, rest = divmod(count, len(numbers))
            chosen += [np.repeat(numbers, whole), numbers[order[:rest]]]
        return rows.chosen(np.sort(np.concatenate(chosen)))


class Augmentation:
    """Changes an epoch's rows; seed, epoch and rows decide how.

    Joining appends another pair of the same part (Kondo et al., 2021, arXiv 2104.08478). Then the source may change. A
    pair that would be too long stays as it is. The `numbers` of rows are places in `pairs`.
    """

    def __init__(self, rules: AugmentationRules, pairs: "Dataset", encoder: PairEncoder, seed: int):
        changes_words = any(share for name, share in vars(rules).items() if name != "joined")
        if changes_words and symbols_of(encoder.tokenizers.source) is not None:
            must = "empty except for `joined` if the source vocabulary is closed"
            raise ValueError(f"`data.augmentation` must be {must}, but changes source words.")
        if rules.placeholders and symbols_of(encoder.tokenizers.target) is not None:
            must = "be 0 if the target vocabulary is closed"
            raise wrong("data.augmentation.placeholders", must, rules.placeholders)
        self._rules, self._pairs, self._encoder, self._seed = rules, pairs, encoder, seed

    def rows(self, rows: EncodedPairs, epoch: int) -> EncodedPairs:
        """Return an epoch's rows."""
        draws = drawn_numbers(self._seed, epoch, OF_CHANGES)
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
            logger.info("%s of %s changed pairs stay unchanged: they would be too long", too_long, len(changed))
        return EncodedPairs((encoded.get(index) or rows[index] for index in range(len(rows))), rows.numbers)


def drawn_numbers(*seeds: int, block: int = 2**12) -> Draws:
    """Draw numbers without end, `block` at a time; equal seeds give equal numbers."""
    # Raw output: numpy never changes it.
    generator = np.random.PCG64(np.random.SeedSequence(seeds))
    return chain.from_iterable(((generator.random_raw(block) >> 11) / 2**53).tolist() for _ in repeat(None))


def noisy(source: str, rules: AugmentationRules, draws: Draws) -> str:
    """Return a source as typed in a hurry, in NFC."""
    if next(draws) < rules.no_final_punctuation:
        source = FINAL_PUNCTUATION.sub("", source) or source
    if rules.typos:
        parts = re.split(r"(\s+)", source)  # words and the spaces between them
        parts[::2] = [_mistyped(word, draws) if next(draws) < rules.typos else word for word in parts[::2]]
        source = "".join(parts)
    for name, change in CASES.items():
        if next(draws) < getattr(rules, name):
            source = change(source)
    return unicodedata.normalize("NFC", source)


def _mistyped(word: str, draws: Draws) -> str:
    """Swap two neighbouring letters, drop one, double it, or replace it by its neighbour."""
    if not {unicodedata.category(character)[0] for character in word} <= {*"LMP"}:  # a typo would change a number
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


class Denoising:
    """Damages source rows, depending on seed, epoch and row number.

    Tags and `</s>` around a text stay. A text also stays if its damaged row would exceed the limit. Raises a
    `ValueError` for tokenizers without `<mask>`, or with two vocabularies.
    """

    def __init__(self, encoder: PairEncoder, seed: int):
        if not encoder.tokenizers.is_joint:
            raise wrong("data.denoise", "be empty if source and target have separate vocabularies", "given")
        tokenizer = encoder.tokenizers.source
        self._mask, self._seed = control_id(MASK, tokenizer, "data.denoise"), seed
        self._limit = encoder.max_source_tokens or math.inf
        special = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special = special - {tokenizer.unk_token_id}  # it is text

    def rows(self, rows: EncodedPairs, epoch: int) -> EncodedPairs:
        """Return an epoch's rows with their `numbers`."""
        return EncodedPairs(self._damaged(rows, epoch), rows.numbers)

    def _damaged(self, rows: EncodedPairs, epoch: int) -> Iterator[dict[str, Tokens]]:
        for number, row in enumerate(rows[index] for index in range(len(rows))):
            ids = row["input_ids"]
            own = [place for place, id_ in enumerate(ids) if id_ not in self._special]
            begin, end = (own[0], own[-1] + 1) if own else (len(ids), len(ids))
            draws = drawn_numbers(self._seed, epoch, OF_DAMAGES, number, block=64)
            ids = [*ids[:begin], *infilled(ids[begin:end], self._mask, draws), *ids[end:]]
            yield {**row, "input_ids": ids} if len(ids) <= self._limit else row


def infilled(text: Tokens, mask: int, draws: Draws) -> Tokens:
    """Return a text with one mask for each dropped span, also for empty spans.

    This is BART's text infilling (Lewis et al., 2020, section 2.2, arXiv 1910.13461): span lengths come from a Poisson
    distribution until they sum to the share of dropped tokens. Spans never touch.
    """
    left, lengths = max(1, round(len(text) * SHARE)), list[int]()
    most = len(text) - left + 1  # most spans between kept tokens
    while left and len(lengths) < most:
        lengths.append(min(_poisson(LENGTH, draws), left))
        left -= lengths[-1]
    total = len(text) - sum(lengths)
    gaps = sorted(sorted(range(total + 1), key=[next(draws) for _ in range(total + 1)].__getitem__)[: len(lengths)])
    found, place, before = Tokens(), 0, 0
    for gap, length in zip(gaps, lengths, strict=True):
        found += [*text[place : place + gap - before], mask]
        place, before = place + gap - before + length, gap
    return found + text[place:]


def _poisson(mean: float, draws: Draws) -> int:
    """Draw from a Poisson distribution (Knuth, The Art of Computer Programming 2, section 3.4.1)."""
    number, product = 0, next(draws)
    while product > math.exp(-mean):
        number, product = number + 1, product * next(draws)
    return number


class Windows:
    """Joins consecutive rows of documents to windows (Tiedemann and Scherrer, 2017, arXiv 1708.05943).

    Seed, epoch and rows decide the windows, each of one to `sentences` rows. A row that would make a window too long
    begins the next one. The `numbers` of rows are places in `pairs`.
    """

    def __init__(self, sentences: int, pairs: Iterable[Mapping[str, Any]], encoder: PairEncoder, seed: int):
        self._most, self._seed = sentences, seed
        self._limits = encoder.max_source_tokens or math.inf, encoder.max_target_tokens or math.inf
        sides = {"input_ids": encoder.tokenizers.source, "labels": encoder.tokenizers.target}
        self._ids = [(side, control_id(SEPARATOR, each, "data.documents")) for side, each in sides.items()]
        self._places = np.array([(pair.get("part", 0) << 40) + pair["place"] for pair in pairs], np.int64)

    def rows(self, rows: EncodedPairs, epoch: int) -> EncodedPairs:
        """Return an epoch's windows; epochs count from 0."""
        draws, places = drawn_numbers(self._seed, epoch, OF_WINDOWS), self._places[rows.numbers]
        lengths, windows, left = np.stack([rows.source_lengths, rows.target_lengths], axis=1), list[list[int]](), 0
        for index in np.argsort(places, kind="stable").tolist():
            follows = left and places[index] == places[windows[-1][-1]] + 1
            if follows and (lengths[[*windows[-1], index]].sum(axis=0) <= self._limits).all():
                windows[-1].append(index)
                left -= 1
            else:
                windows.append([index])
                left = int(next(draws) * self._most)
        return EncodedPairs(
            {side: window_of([rows[index][side] for index in window], id_) for side, id_ in self._ids}
            for window in windows
        )
