"""Readable token labels in any script, and the words that tokens belong to."""

import json
import re
import unicodedata
from collections.abc import Sequence
from itertools import count, islice
from typing import NamedTuple, cast

from tokenizers import decoders, models
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPACE_MARK = "▁"
CONTINUATION_MARK = "…"
BROKEN_CHARACTER = "\ufffd"
JOINERS = "\u200c\u200d"  # zero-width, in Persian, Indian scripts and emoji
# The inverse of GPT-2's table.
BYTE_OF_LETTER = {letter: byte for byte, letter in bytes_to_unicode().items()}
FALLBACK_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
# Scripts without spaces: Thai, Lao, Burmese, Khmer, kana, Chinese characters, and punctuation.
UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff\uff01-\uff0f"
BEGINS_UNSPACED = re.compile(f"▁?[{UNSPACED}]")


class Words(NamedTuple):
    """A sequence's displayed words."""

    labels: list[str]
    of_tokens: list[int]  # each token's label number


def token_labels(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Return readable labels of a sequence's tokens.

    Control tokens keep their name (`</s>`), a space is ▁, and an unknown id is <its number>. A byte-level piece
    becomes the characters that begin in it, after … if it continues one; bytes outside characters become ‹EC›.
    """
    pieces = tokenizer.convert_ids_to_tokens(list(ids))
    unknown = (id_ for id_, piece in zip(ids, pieces, strict=True) if piece is None)
    control = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder, *unknown}
    byte_of: dict[str, int] = {}  # by letter, if pieces are bytes
    if isinstance(tokenizer, ByT5Tokenizer):
        byte_of = {chr(byte): byte for byte in range(256)}
    elif tokenizer.is_fast and isinstance(tokenizer.backend_tokenizer.decoder, decoders.ByteLevel):
        byte_of = BYTE_OF_LETTER
    labels = [f"<{id_}>" if piece is None else piece for id_, piece in zip(ids, pieces, strict=True)]
    run: list[tuple[int, bytes]] = []  # neighbouring pieces, whose bytes may form a character
    for index, (id_, piece) in enumerate(zip(ids, labels, strict=True)):
        fallback = FALLBACK_BYTE.fullmatch(piece)
        if id_ not in control and (byte_of or fallback):
            own = bytes.fromhex(fallback[1]) if fallback else bytes(byte_of[letter] for letter in piece)
            run.append((index, own))
            continue
        _label_run(run, labels)
        run = []
        if id_ not in control:
            labels[index] = "".join(map(_visible, piece))
    _label_run(run, labels)
    return [label if label.strip(JOINERS) else _escaped(label) for label in labels]


def is_of_characters(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a tokenizer splits text into characters or jamo."""
    state = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {}
    return r"\X" in ((state.get("pre_tokenizer") or {}).get("pattern") or {}).get("Regex", "")


def token_words(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[int | None]:
    """Return each token's word number, from 0; white space separates words.

    Control tokens and white-space tokens belong to none. A token that ends one word and begins another belongs to the
    second.
    """
    control = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder} - {tokenizer.unk_token_id}
    is_word = tokenizer.is_fast and isinstance(tokenizer.backend_tokenizer.model, models.WordLevel)
    if is_word:  # decoding would join an unknown token to the previous word
        numbers = count()
        return [None if id_ in control else next(numbers) for id_ in ids]
    words, pieces = list[int | None](), tokenizer.convert_ids_to_tokens(list(ids))
    kept, shown, before = list[int](), "", list[str]()
    unseen: list[int] = []  # bytes that ByT5 hides until their character is complete
    for place, id_ in enumerate(ids):
        if id_ in control:
            words.append(None)
            continue
        kept.append(id_)
        # Decode all tokens so far, because characters need all bytes, and a leading space is dropped.
        text = cast(str, tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        longer = text.split()
        # Bytes of a broken character do not change the text.
        is_inside = longer != before or text.endswith(BROKEN_CHARACTER)
        words.append(len(longer) - 1 if is_inside else None)
        if text == shown and not is_inside and pieces[place].strip(f" {SPACE_MARK}"):
            unseen.append(place)
            continue
        for hidden in unseen if is_inside else ():
            words[hidden] = words[place]
        unseen, shown, before = [], text, longer
    return words


def shown_words(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> Words:
    """Join a sequence's tokens to readable words.

    Words are those of `token_words`. A control token is a word, and white space belongs to the next word. In scripts
    without spaces, and in a character tokenizer's single word, each token that begins a character is a word.
    """
    pieces, words = token_labels(tokenizer, ids), token_words(tokenizer, ids)
    control = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder} - {tokenizer.unk_token_id}
    is_spelt = is_of_characters(tokenizer) and len({*words} - {None}) == 1
    groups: list[list[int]] = []
    for index, (id_, word) in enumerate(zip(ids, words, strict=True)):
        is_apart = not groups or id_ in control or ids[index - 1] in control or words[index - 1] not in (None, word)
        if not is_apart and words[index - 1] == word and not pieces[index].startswith(CONTINUATION_MARK):
            is_apart = is_spelt or any(map(BEGINS_UNSPACED.match, (pieces[index], pieces[index - 1][-1])))
        if is_apart:
            groups.append([])
        groups[-1].append(index)
    labels, of_tokens = [], [number for number, group in enumerate(groups) for _ in group]
    for group in groups:
        text = cast(str, tokenizer.decode([ids[index] for index in group], clean_up_tokenization_spaces=False))
        text = unicodedata.normalize("NFC", text).strip()
        is_broken = not text or BROKEN_CHARACTER in text or ids[group[0]] in control
        joined = "".join(pieces[index] for index in group)
        labels.append(joined if is_broken else "".join(map(_visible, text)))
    return Words(labels, of_tokens)


def _label_run(run: list[tuple[int, bytes]], labels: list[str]) -> None:
    """Write the labels of neighbouring byte-level pieces."""
    owners = (index for index, piece in run for _ in piece)
    for index, _ in run:
        labels[index] = ""
    # Bytes outside characters become surrogates, U+DC80 to U+DCFF.
    for character in b"".join(piece for _, piece in run).decode(errors="surrogateescape"):
        own = character.encode(errors="surrogateescape")
        first, *others = dict.fromkeys(islice(owners, len(own)))
        labels[first] += f"‹{own[0]:02X}›" if "\udc80" <= character <= "\udcff" else _visible(character)
        for index in others:
            labels[index] += CONTINUATION_MARK


def _visible(character: str) -> str:
    if character == " ":
        return SPACE_MARK
    return character if character.isprintable() or character in JOINERS else _escaped(character)


def _escaped(text: str) -> str:
    return text.encode("unicode_escape").decode()
