"""Texts damaged anew in every epoch, which the model learns to restore."""

import math
from collections.abc import Iterator

from heedful.data.data_recipe import MASK
from heedful.data.epochs.augmentation import Draws, drawn_numbers
from heedful.data.epochs.encoding import EncodedPairs, PairEncoder
from heedful.data.mixture import control_id
from heedful.messages_heed import wrong

DRAW = 0xD401  # separates these draws from others of the same seed and epoch
HELD_OUT = 2**32 - 1  # the epoch of held-out texts
SHARE, LENGTH = 0.3, 3  # of dropped tokens; mean of a span
Tokens = list[int]


class Denoising:
    """Damages the sources of rows, depending on seed, epoch and number of the row.

    Tags and `</s>` around a text stay, and so does a text whose row would be longer than its limit. Tokenizers without
    `<mask>`, or with two vocabularies, are a `ValueError`.
    """

    def __init__(self, encoder: PairEncoder, seed: int):
        if not encoder.tokenizers.is_joint:
            raise wrong("data.denoise", "be empty where source and target have two vocabularies", "given")
        tokenizer = encoder.tokenizers.source
        self._mask, self._seed = control_id(MASK, encoder.tokenizers, "data.denoise"), seed
        self._limit = encoder.max_source_tokens or math.inf
        special = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special = special - {tokenizer.unk_token_id}  # it is text

    def rows(self, rows: EncodedPairs, epoch: int) -> EncodedPairs:
        """Return the rows of an epoch, from 0, with their `numbers`."""
        found = EncodedPairs(self._damaged(rows, epoch))
        found.numbers = rows.numbers
        return found

    def _damaged(self, rows: EncodedPairs, epoch: int) -> Iterator[dict[str, Tokens]]:
        for number, row in enumerate(rows[index] for index in range(len(rows))):
            ids = row["input_ids"]
            own = [place for place, id_ in enumerate(ids) if id_ not in self._special]
            begin, end = (own[0], own[-1] + 1) if own else (len(ids), len(ids))
            draws = drawn_numbers(self._seed, epoch, DRAW, number, block=64)
            ids = [*ids[:begin], *infilled(ids[begin:end], self._mask, draws), *ids[end:]]
            yield {**row, "input_ids": ids} if len(ids) <= self._limit else row


def infilled(text: Tokens, mask: int, draws: Draws) -> Tokens:
    """Return a text with a mask for each dropped span, also for spans of no token.

    This is BART's text infilling (Lewis et al., 2020, section 2.2, arXiv 1910.13461): a Poisson distribution gives the
    lengths of spans until they have the share of the tokens. Spans never touch.
    """
    left, lengths = max(1, round(len(text) * SHARE)), list[int]()
    most = len(text) - left + 1  # spans between kept tokens
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
