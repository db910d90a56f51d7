"""The pairs of the built-in corpus: sentences drawn from the patterns, and their split.

Korean determines English, and an English sentence has one Korean sentence per style, so exact match is fair. A hash of
the English sentence chooses "train" (80 %), "validation" or "test" (10 % each) for all its styles. Each sentence of
"compositional" has a noun with a verb or adjective that occur together in no other split, although both are frequent
there.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from random import Random
from typing import Any

from heedful.data.sources import Corpus
from heedful_lab.korean_english.patterns import Pattern, patterns
from heedful_lab.korean_english.phrases import PRONOUN_LEMMAS

BUILTIN_SPLITS = ("train", "validation", "test", "compositional")
# Well below the splits' sizes, so new sentences are found fast.
LARGEST_COUNTS = {"train": 5_000_000, "validation": 500_000, "test": 500_000, "compositional": 500_000}
HELD_OUT_SHARE = 20  # one combination in twenty

Phrases = tuple[tuple[int, int], list[tuple[int, int]]]  # characters in Korean, and in English, perhaps in two places


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@cache
def is_held_out(noun: str, other: str) -> bool:
    """Return True if a noun (no pronoun) and a verb or adjective occur together only in "compositional"."""
    return other != "" and noun not in PRONOUN_LEMMAS and _hash(f"{noun} {other}") % HELD_OUT_SHARE == 0


def _draw(pattern: Pattern, random: Callable[[], float]) -> list[Any] | None:
    """Draw a leaf for each slot, and a style; None if a noun occurs twice (the boy met the boy)."""
    rows = pattern.rows
    choices = []
    for tree in rows[int(random() * len(rows))]:
        leaf: Any = tree
        while type(leaf) is tuple:
            leaf = leaf[int(random() * len(leaf))]
        choices.append(leaf)
    nouns = [noun for leaf in choices[:-1] for noun in leaf.nouns]
    return choices if len(nouns) == len(set(nouns)) else None


def combinations_of(choices: list[Any]) -> list[tuple[str, str]]:
    """Return each (noun, verb) in a sentence, and each (noun, adjective) of its phrases."""
    lemma = choices[-2].lemma
    found = [(noun, lemma) for leaf in choices[:-1] for noun in leaf.nouns]
    found += [leaf.described[::-1] for leaf in choices[:-1] if leaf.described]
    return found


def _english_slots(pattern: Pattern, choices: list[Any]) -> dict[str, str]:
    *words, predicate, _ = choices
    english = {slot: leaf.english for slot, leaf in zip(pattern.korean, words, strict=False)}
    number = words[pattern.korean.index("subject")].number
    return english | {"auxiliary": predicate.auxiliary[number], "predicate": predicate.main[number]}


def _english(pattern: Pattern, choices: list[Any]) -> str:
    english = _english_slots(pattern, choices)
    text = " ".join([english[slot] for slot in pattern.english if english[slot]])
    return text[0].upper() + text[1:] + pattern.punctuation


def _korean(pattern: Pattern, choices: list[Any]) -> str:
    style = choices[-1]
    return " ".join([leaf.korean[style] for leaf in choices[:-1]]) + pattern.punctuation


def _split(english_hash: int, choices: list[Any]) -> str:
    if any(is_held_out(noun, other) for noun, other in combinations_of(choices)):
        return "compositional"
    return {0: "test", 1: "validation"}.get(english_hash % 10, "train")


def _sentences(random: Callable[[], float]) -> Iterator[tuple[Pattern, list[Any]]]:
    """Yield random sentences without end: a pattern by its weight, then its words."""
    weighted = [pattern for pattern in patterns() for _ in range(pattern.weight)]
    while True:
        pattern = weighted[int(random() * len(weighted))]
        if choices := _draw(pattern, random):
            yield pattern, choices


def korean_english_pairs(split: str, count: int, seed: int = 0) -> Iterator[dict[str, str]]:
    """Return an iterator over distinct `{"ko": …, "en": …}`; a larger `count` begins with the same pairs."""
    if split not in BUILTIN_SPLITS:
        raise ValueError(f"`split` must be one of {', '.join(BUILTIN_SPLITS)}, but is {split!r} instead.")
    most = LARGEST_COUNTS[split]
    if not 1 <= count <= most:
        raise ValueError(f"`count` must be between 1 and {most:,} for the split {split!r}, but is {count} instead.")
    return (pair for *_, pair in _drawn(split, count, seed))


def korean_english_phrases(split: str, count: int, seed: int = 0) -> Iterator[tuple[dict[str, str], list[Phrases]]]:
    """Return an iterator over the same pairs, each with its phrases: their characters in Korean, and in English."""
    for pattern, choices, pair in _drawn(split, count, seed):
        korean = _spans(pattern.korean, [leaf.korean[choices[-1]] for leaf in choices[:-1]])
        slots = _english_slots(pattern, choices)
        english = _spans(pattern.english, [slots[slot] for slot in pattern.english])
        english["predicate"] = english.pop("auxiliary", []) + english.get("predicate", [])
        yield pair, [(korean[slot][0], english[slot]) for slot in pattern.korean if english.get(slot)]


def _spans(slots: Sequence[str], texts: Sequence[str]) -> dict[str, list[tuple[int, int]]]:
    """Return the characters of each slot in a sentence."""
    ends = list(accumulate(len(text) + bool(text) for text in texts))
    return {slot: [(end - 1 - len(text), end - 1)] for slot, text, end in zip(slots, texts, ends, strict=True) if text}


def _drawn(split: str, count: int, seed: int) -> Iterator[tuple[Pattern, list[Any], dict[str, str]]]:
    seen: set[tuple[int, int]] = set()
    for pattern, choices in _sentences(Random(f"{seed} {split}").random):
        english = _english(pattern, choices)
        english_hash = _hash(english)
        # English and the style determine Korean.
        key = (english_hash, choices[-1])
        if _split(english_hash, choices) == split and key not in seen:
            seen.add(key)
            yield pattern, choices, {"ko": _korean(pattern, choices), "en": english}
            if len(seen) == count:
                return


CORPUS = Corpus(korean_english_pairs, BUILTIN_SPLITS, ("ko", "en"))
