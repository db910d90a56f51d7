"""The built-in corpus: Korean-English sentence pairs from a small grammar, made on the spot, without a download.

A pair is drawn from one of the sentence patterns in `heedful.data.korean_english_patterns`. Korean determines English:
the same Korean sentence always has the same English sentence, and an English sentence has one Korean sentence in the
plain style and at most one in the polite style. So exact match against the one reference is a fair measure.

The splits never share a sentence, in either language: a hash of the English sentence says which of "train" (80 %),
"validation" (10 %) and "test" (10 %) it is in, together with all its Korean styles. "compositional" asks for more than
unseen sentences: each of its sentences has a noun and a verb, or a noun and an adjective, that occur together in no
other split, though each of the two words is frequent there.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import product
from math import prod
from random import Random
from typing import Any

from heedful.data.korean_english_patterns import Pattern, patterns
from heedful.data.korean_english_phrases import PRONOUN_LEMMAS, Tree

BUILTIN_SPLITS = ("train", "validation", "test", "compositional")
# Well below what a split has, so that drawing new sentences stays fast up to the last one.
LARGEST_COUNTS = {"train": 5_000_000, "validation": 500_000, "test": 500_000, "compositional": 500_000}
HELD_OUT_SHARE = 20  # one combination in twenty


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@cache
def is_held_out(noun: str, other: str) -> bool:
    """Tell whether a noun and a verb or adjective (Korean dictionary forms) occur together only in "compositional".

    Pronouns are never held out, nor is anything with a predicate that has no word of its own (의사다).
    """
    return other != "" and noun not in PRONOUN_LEMMAS and _hash(f"{noun} {other}") % HELD_OUT_SHARE == 0


def _draw(pattern: Pattern, random) -> list[Any] | None:
    """Draw one leaf for every slot, and a style; None if a noun occurs twice (the boy met the boy)."""
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
    """Return a sentence's (noun, verb) and (noun, adjective) combinations.

    These are every noun with the predicate, and every adjective inside a phrase with the noun it describes.
    """
    lemma = choices[-2].lemma
    found = [(noun, lemma) for leaf in choices[:-1] for noun in leaf.nouns]
    found += [leaf.described[::-1] for leaf in choices[:-1] if leaf.described]
    return found


def _english(pattern: Pattern, choices: list[Any]) -> str:
    predicate = choices[-2]
    by_slot = dict(zip(pattern.korean, choices, strict=False))
    number = by_slot["subject"].number
    parts = []
    for slot in pattern.english:
        if slot == "predicate":
            parts.append(predicate.main[number])
        elif slot == "auxiliary":
            parts.append(predicate.auxiliary[number])
        else:
            parts.append(by_slot[slot].english)
    text = " ".join(part for part in parts if part)
    return text[0].upper() + text[1:] + pattern.mark


def _korean(pattern: Pattern, choices: list[Any]) -> str:
    style = choices[-1]
    return " ".join([leaf.korean[style] for leaf in choices[:-1]]) + pattern.mark


def _split(english_hash: int, choices: list[Any]) -> str:
    if any(is_held_out(noun, other) for noun, other in combinations_of(choices)):
        return "compositional"
    return {0: "test", 1: "validation"}.get(english_hash % 10, "train")


def _sentences(random) -> Iterator[tuple[Pattern, list[Any]]]:
    """Draw sentences for ever: a pattern by weight, then its words."""
    weighted = [pattern for pattern in patterns() for _ in range(pattern.weight)]
    while True:
        pattern = weighted[int(random() * len(weighted))]
        if choices := _draw(pattern, random):
            yield pattern, choices


def korean_english_pairs(split: str, count: int, seed: int = 0) -> Iterator[dict[str, str]]:
    """Make distinct Korean-English sentence pairs.

    Args:
        split: one of `BUILTIN_SPLITS`.
        count: how many pairs; the first of a larger count are those of a smaller one.
        seed: another seed draws other pairs of the same split; the splits themselves never change.

    Returns:
        An iterator over `{"ko": …, "en": …}`.

    Raises:
        ValueError: if there is no such split, or `count` is below 1 or above the split's `LARGEST_COUNTS`.
    """
    if split not in BUILTIN_SPLITS:
        raise ValueError(f"`split` must be one of {', '.join(BUILTIN_SPLITS)}, but is {split!r} instead.")
    if not 1 <= count <= LARGEST_COUNTS[split]:
        raise ValueError(
            f"`count` must be between 1 and {LARGEST_COUNTS[split]:,} for the split {split!r}, but is {count} instead."
        )
    return _pairs(split, count, seed)


def _pairs(split: str, count: int, seed: int) -> Iterator[dict[str, str]]:
    seen: set[tuple[int, int]] = set()
    for pattern, choices in _sentences(Random(f"{seed} {split}").random):
        english = _english(pattern, choices)
        english_hash = _hash(english)
        # English and the style determine Korean, so these two are the pair.
        key = (english_hash, choices[-1])
        if _split(english_hash, choices) == split and key not in seen:
            seen.add(key)
            yield {"ko": _korean(pattern, choices), "en": english}
            if len(seen) == count:
                return


def _leaves(tree: Tree | Any, known: dict[int, Counter]) -> Counter:
    """Count a tree's leaves by the nouns inside them; `known` keeps what was counted, by the tree's identity."""
    if type(tree) is not tuple:
        return Counter([frozenset(getattr(tree, "nouns", ()))])
    if id(tree) not in known:
        total: Counter = Counter()
        for child in tree:
            total.update(_leaves(child, known))
        known[id(tree)] = total
    return known[id(tree)]


def _size(row: tuple[Tree, ...], known: dict[int, Counter]) -> int:
    """Count a row's sentences exactly: the product over its slots, less those in which a noun occurs twice."""
    groups: list[tuple[set[str], list[Counter]]] = []  # slots that share no noun are independent
    for tree in row:
        leaves = _leaves(tree, known)
        nouns, slots = set().union(*leaves), [leaves]
        for group in [group for group in groups if group[0] & nouns]:
            groups.remove(group)
            nouns, slots = nouns | group[0], slots + group[1]
        groups.append((nouns, slots))
    return prod(_distinct(slots) for _, slots in groups)


def _distinct(slots: list[Counter]) -> int:
    """Count the ways to fill some slots without using a noun twice."""
    if len(slots) == 1:
        return slots[0].total()
    # A noun that only one slot has can't occur twice: leave it out, and most leaves become alike.
    owners = Counter(noun for leaves in slots for noun in set().union(*leaves))
    shared = frozenset(noun for noun, count in owners.items() if count > 1)
    alike: list[Counter] = [Counter() for _ in slots]
    for counts, leaves in zip(alike, slots, strict=True):
        for nouns, count in leaves.items():
            counts[nouns & shared] += count
    # Slot by slot: how often each set of nouns is in use so far.
    used = Counter({frozenset[str](): 1})
    for counts in alike:
        following: Counter = Counter()
        for (before, ways), (nouns, count) in product(used.items(), counts.items()):
            if before.isdisjoint(nouns):
                following[before | nouns] += ways * count
        used = following
    return used.total()


def count_pairs() -> dict[str, int]:
    """Count the distinct pairs of every sentence pattern, over all splits, exactly and without making them.

    Within a pattern different choices make different sentences, so a row of a pattern has as many pairs as there are
    choices in which no noun occurs twice.
    """
    known: dict[int, Counter] = {}
    return {pattern.name: sum(_size(row, known) for row in pattern.rows) for pattern in patterns()}
