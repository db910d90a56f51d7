"""Texts damaged anew in every epoch: the model reads what is left, and learns to write the text or what is missing."""

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice, pairwise

from heedful.data.data_recipe import DENOISE, USUAL_SHARES, DenoiseRules
from heedful.data.epochs.augmentation import Draws, drawn_numbers
from heedful.data.epochs.batching import Row
from heedful.data.epochs.encoding import CHUNK, EncodedPairs, PairEncoder
from heedful.data.mixture import mark_ids
from heedful.data.tokenization import encode_texts

DRAW = 0xD401  # tells the draws of this damage from others of the same seed and epoch
HELD_OUT = 2**32 - 1  # the epoch of held-out texts, which comes in no run
Tokens = list[int]


class Denoising:
    """Damages the rows of an epoch that have the tag `<denoise>`: each follows from seed, epoch and its number alone.

    A row's source and target are one text, by which it is known where the tokenizer has no such tag; what is before it
    and behind it, as tags and `</s>`, stays. A text whose row would be longer than its limit stays whole for an epoch.

    Raises:
        ValueError: If the tokenizers cannot say what is missing.
    """

    def __init__(self, rules: DenoiseRules, encoder: PairEncoder, seed: int):
        tokenizer = encoder.tokenizers.source
        self._marks = mark_ids(rules, encoder.tokenizers)
        self._rules, self._encoder, self._seed = rules, encoder, seed
        self._share = rules.share or USUAL_SHARES.get(rules.kind, 0.0)
        self._tag = tokenizer.added_tokens_encoder.get(f"<{DENOISE}>")
        special = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special = special - {tokenizer.unk_token_id}  # which is a part of a text

    def rows(self, rows: EncodedPairs, epoch: int) -> EncodedPairs:
        """Return the rows of an epoch, from 0, which keep their `numbers`."""
        found = EncodedPairs(self.damaged((rows[index] for index in range(len(rows))), epoch))
        found.numbers = rows.numbers
        return found

    def held_out(self, pairs: Iterable[Mapping[str, str]]) -> EncodedPairs:
        """Return a damaged text of each held-out pair: its target, or its source where no target is learned."""
        side = "target" if self._rules.text or "target" in self._rules.sides else "source"
        part = [*self._rules.sides, side].index(side)  # of texts alone the first, which is behind the sides
        texts = ({"source": pair[side], "target": pair[side], "part": part} for pair in pairs)
        whole = PairEncoder(self._encoder.tokenizers, heads=self._encoder.heads)
        return self.rows(EncodedPairs(whole.rows(texts)), HELD_OUT)

    def damaged(self, rows: Iterable[Row | None], epoch: int) -> Iterator[Row | None]:
        """Yield the rows of an epoch, from 0; `None` for a row stays `None`."""
        stream, first = iter(rows), 0
        while chunk := list(islice(stream, CHUNK)):
            ours = {index: row for index, row in enumerate(chunk) if row and self._is_text(row)}
            draws = [drawn_numbers(self._seed, epoch, DRAW, first + index, block=64) for index in ours]
            make = self._in_other_order if self._rules.kind == "order" else self._with_marks
            for index, row in zip(ours, make([*ours.values()], draws), strict=True):
                chunk[index] = row if self._fits(row) else ours[index]
            first += len(chunk)
            yield from chunk

    def _is_text(self, row: Row) -> bool:
        return self._tag in row["input_ids"] if self._tag is not None else row["input_ids"] == row["labels"]

    def _with_marks(self, rows: list[Row], draws: list[Draws]) -> Iterator[Row]:
        share, length, marks = self._share, self._rules.length, self._marks
        for row, drawn in zip(rows, draws, strict=True):
            before, text, behind = self._parted(row["input_ids"])
            labels = row["labels"]
            if self._rules.kind == "spans":
                begin, _, end = self._parted(labels)
                text, missing = spans(text, share, length, marks, drawn)
                labels = [*begin, *missing, *end]
            elif self._rules.kind == "infilling":
                text = infilled(text, share, length, marks[0], drawn)
            else:
                text = deleted(text, share, drawn)
            yield {"input_ids": [*before, *text, *behind], "labels": labels}

    def _in_other_order(self, rows: list[Row], draws: list[Draws]) -> Iterator[Row]:
        tokenizers, length = self._encoder.tokenizers, self._rules.length
        texts = tokenizers.decode_target(row["labels"] for row in rows)
        moved = [" ".join(reordered(text.split(), length, drawn)) for text, drawn in zip(texts, draws, strict=True)]
        for row, ids in zip(rows, encode_texts(tokenizers.source, "text", moved), strict=True):
            before, _, behind = self._parted(row["input_ids"])
            yield {"input_ids": [*before, *self._parted(ids)[1], *behind], "labels": row["labels"]}

    def _parted(self, ids: Tokens) -> tuple[Tokens, Tokens, Tokens]:
        """Return the control tokens before a text, its own tokens, and the control tokens behind it."""
        own = [index for index, id_ in enumerate(ids) if id_ not in self._special]
        begin, end = (own[0], own[-1] + 1) if own else (len(ids), len(ids))
        return ids[:begin], ids[begin:end], ids[end:]

    def _fits(self, row: Row) -> bool:
        limits = (self._encoder.max_source_tokens, self._encoder.max_target_tokens)
        return all(limit is None or len(ids) <= limit for ids, limit in zip(row.values(), limits, strict=True))


def spans(text: Tokens, share: float, length: int, marks: Tokens, draws: Draws) -> tuple[Tokens, Tokens]:
    """Return a text with a mark for each span that is dropped, and each mark with its span, ending in one mark more.

    This is T5's objective (Raffel et al., 2020, section 3.1.4, arXiv 1910.10683). Spans have `length` tokens on
    average, and never touch; of one token nothing is dropped. A span lies anywhere: the only one of a short text
    would be its end in T5's own code, which was written for texts of 512 tokens.
    """
    if len(text) < 2:
        return text, marks[:1]
    dropped = min(max(round(len(text) * share), 1), len(text) - 1)
    number = min(max(round(dropped / length), 1), len(text) - dropped + 1, len(marks) - 1)
    cuts = [0, *sorted(1 + place for place in _chosen(dropped - 1, number - 1, draws)), dropped]
    source, missing = Tokens(), Tokens()
    parts = _parts(text, [end - begin for begin, end in pairwise(cuts)], draws)
    for (kept, gone), mark in zip(parts, marks, strict=False):
        source += [*kept, mark]
        missing += [mark, *gone]
    return source[:-1], missing


def infilled(text: Tokens, share: float, length: int, mask: int, draws: Draws) -> Tokens:
    """Return a text with one mask for each span that is dropped, and for spans of no token one more between others.

    This is BART's text infilling (Lewis et al., 2020, section 2.2, arXiv 1910.13461): lengths of spans are drawn from
    a Poisson distribution until they have the share of the tokens. Spans never touch.
    """
    left, lengths = max(1, round(len(text) * share)), list[int]()
    most = len(text) - left + 1  # spans between what is kept
    while left and len(lengths) < most:
        lengths.append(min(_poisson(length, draws), left))
        left -= lengths[-1]
    return [token for kept, _ in _parts(text, lengths, draws) for token in (*kept, mask)][:-1]


def deleted(text: Tokens, share: float, draws: Draws) -> Tokens:
    """Return a text without some tokens, each dropped with the probability `share`.

    This is the token deletion of Lewis et al., 2020, section 2.2, and on words the dropout of Lample et al., 2018,
    section 2.3, arXiv 1711.00043.
    """
    return [token for token, drawn in zip(text, draws, strict=False) if drawn >= share]


def reordered(words: list[str], length: int, draws: Draws) -> list[str]:
    """Return words of which none is more than `length` places from its own (Lample et al., 2018, section 2.3)."""
    places = [place + next(draws) * (length + 1) for place in range(len(words))]
    return [words[place] for place in sorted(range(len(words)), key=places.__getitem__)]


def _parts(text: Tokens, lengths: list[int], draws: Draws) -> Iterator[tuple[Tokens, Tokens]]:
    """Yield what is kept before each span, and the span; in the end what is kept behind them, and nothing."""
    place = before = 0
    total = len(text) - sum(lengths)
    gaps = sorted(_chosen(total + 1, len(lengths), draws))
    for gap, length in zip([*gaps, total], [*lengths, 0], strict=True):
        end = place + gap - before
        yield text[place:end], text[end : end + length]
        place, before = end + length, gap


def _chosen(total: int, number: int, draws: Draws) -> list[int]:
    """Choose different numbers below a total."""
    return sorted(range(total), key=[next(draws) for _ in range(total)].__getitem__)[:number]


def _poisson(mean: float, draws: Draws) -> int:
    """Draw from a Poisson distribution (Knuth, The Art of Computer Programming 2, section 3.4.1)."""
    number, product = 0, next(draws)
    while product > math.exp(-mean):
        number, product = number + 1, product * next(draws)
    return number
