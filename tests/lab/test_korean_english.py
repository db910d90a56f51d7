"""The built-in corpus: its splits, and that it never changes, its grammar included."""

import hashlib
from itertools import combinations

import pytest

from heedful_lab.korean_english import conjugation
from heedful_lab.korean_english.pairs import (
    BUILTIN_SPLITS,
    LARGEST_COUNTS,
    korean_english_pairs,
    korean_english_phrases,
)
from helpers import assert_error, assert_refused

# Of 20,000 pairs of "train" and 3,000 of the others: a change changes every result that was measured on the corpus.
CHECKSUMS = {
    "train": "c6c442b016cf1502e14193589d6369a1cc63e24e13fd4cc38f76259c0a41dbe8",
    "validation": "861d7fdabe2e3634809eafbbc4aae3aa852fb2e2b48b8da3df7dd087562ba7e9",
    "test": "650c7554df8ede2cdd0debd9233204c64f82562b02aab5d239d09c47ffc23004",
    "compositional": "5e448a395b2f6982648cb8f67ae7d5b0cc9e151e09c4f94833c5bbafd1ac87fa",
}


@pytest.fixture(scope="module")
def train():
    return list(korean_english_pairs("train", 30_000))


@pytest.fixture(scope="module")
def others():
    return {split: list(korean_english_pairs(split, 3000)) for split in BUILTIN_SPLITS[1:]}


def test_the_same_arguments_give_the_same_pairs_and_another_seed_gives_others():
    first = list(korean_english_pairs("test", 200, seed=7))
    assert first == list(korean_english_pairs("test", 200, seed=7))
    assert first != list(korean_english_pairs("test", 200, seed=8))
    for split in BUILTIN_SPLITS:  # a smaller count is a prefix of a larger one
        assert list(korean_english_pairs(split, 100)) == list(korean_english_pairs(split, 300))[:100]


def test_the_pairs_never_change(train, others):
    digests = {}
    for split, pairs in {"train": train[:20_000], **others}.items():
        text = "".join(f"{pair['ko']}\t{pair['en']}\n" for pair in pairs)
        digests[split] = hashlib.sha256(text.encode()).hexdigest()
    assert digests == CHECKSUMS


def test_pairs_are_distinct_and_no_sentence_is_in_two_splits_in_either_language(train, others):
    assert len({pair["ko"] for pair in train}) == len(train) == 30_000
    for language in ("ko", "en"):
        texts = [{pair[language] for pair in pairs} for pairs in (train, *others.values())]
        assert all(one.isdisjoint(other) for one, other in combinations(texts, 2))


def test_a_wrong_argument_and_a_word_that_is_not_korean_are_named_at_once():
    cases = [
        (("dev", 1), r"`split` must be one of train, validation, test, compositional, but is 'dev' instead"),
        (("train", 0), r"`count` must be between 1 and 5,000,000 for the split 'train', but is 0 instead"),
        (("test", LARGEST_COUNTS["test"] + 1), r"`count` must be between 1 and 500,000 .* but is 500001 instead"),
    ]
    assert_refused(cases, lambda given: korean_english_pairs(*given))
    assert_error(r"`syllable` must be one Hangul syllable, but is 'k' instead", conjugation.attach, "book", "object")
    assert_error(r"`dictionary_form` must end in 다, but is '먹어' instead", conjugation.infinitive, "먹어")


def test_phrases_are_known_in_both_languages():
    found = list(korean_english_phrases("test", 300))
    assert [pair for pair, _ in found] == list(korean_english_pairs("test", 300))
    for pair, phrases in found:
        english = sorted(place for _, places in phrases for place in places)
        assert " ".join(pair["en"][start:end] for start, end in english) == pair["en"][:-1]
        assert " ".join(pair["ko"][start:end] for (start, end), _ in phrases) == pair["ko"][:-1]
    whose = {
        pair["ko"][slice(*korean)]: pair["en"][slice(*places[0])]
        for pair, phrases in found
        for korean, places in phrases
    }
    assert whose["공원에서"] == "in the park"
