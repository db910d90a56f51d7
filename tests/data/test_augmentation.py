"""Noise in training texts is what its rules say, and leaves everything else as it is."""

import unicodedata
from collections import Counter

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.data.data_recipe import AugmentationRules
from heedful.data.epochs.draws import Augmentation, noisy
from heedful.data.epochs.encoding import EncodedPairs, PairEncoder
from heedful.data.tokenizer_training import train_tokenizers
from heedful_lab.korean_english.pairs import korean_english_pairs
from helpers import assert_error

PAIRS = [{"source": pair["ko"], "target": pair["en"]} for pair in korean_english_pairs("train", 200)]
ALPHABET = "abcdeé가나다각한अिंक्ष้กÅ 12.,!?\u0301"
WORDS = st.lists(st.text(ALPHABET, max_size=12), max_size=6)
TEXTS = WORDS.map(lambda words: unicodedata.normalize("NFC", " ".join(words)))


@pytest.fixture(scope="module")
def tokenizers():
    return train_tokenizers([p["source"] for p in PAIRS], [p["target"] for p in PAIRS], vocab_size=400)


def texts_of(tokenizers, shares, epoch=0, parts=None, **limits):
    """Return the texts of an epoch's rows, and the encoder that made them."""
    encoder = PairEncoder(tokenizers, heads=[[], []], **limits)
    pairs = Dataset.from_list([{**pair, "part": parts[number] if parts else 0} for number, pair in enumerate(PAIRS)])
    rows = EncodedPairs(encoder.rows(pairs))
    found = Augmentation(AugmentationRules(**shares), pairs, encoder, seed=1).rows(rows, epoch)
    both = [found[number] for number in range(len(found))]
    return [tuple(tokenizers.decode_target([row["input_ids"], row["labels"]])) for row in both], encoder


def draws(seed):
    return iter(np.random.default_rng(seed).random(10_000).tolist())


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, seed=st.integers(0, 99))
def test_a_mistyped_text_stays_nfc_and_differs_in_one_place_of_each_word(text, seed):
    found = noisy(text, AugmentationRules(typos=1.0), draws(seed))
    assert unicodedata.is_normalized("NFC", found)
    for word, typo in zip(text.split(" "), found.split(" "), strict=True):
        if any(map(str.isdigit, word)):
            assert typo == word  # numbers stay numbers
        assert set(unicodedata.normalize("NFD", typo)) <= set(unicodedata.normalize("NFD", word))
        # A mark is never left without its letter.
        assert (unicodedata.category(typo[:1] or "a")[0] == "M") <= (unicodedata.category(word[:1] or "a")[0] == "M")


WITHOUT_END = {"Is it SO?!": "Is it SO", "아니요。 ": "아니요", "क्या।": "क्या", "Où vas-tu ?": "Où vas-tu"}


def test_final_punctuation_goes_and_nothing_else(tokenizers):
    for text, found in (WITHOUT_END | {text: text for text in (" ?", "...", 'He said "no."')}).items():
        assert noisy(text, AugmentationRules(no_final_punctuation=1.0), draws(0)) == found
    plain, (found, _) = [tuple(pair.values()) for pair in PAIRS], texts_of(tokenizers, {"lower_case": 1.0})
    assert found == [(source.lower(), target) for source, target in plain]


def test_each_case_has_its_share_of_the_sources():
    text = "it's the 3rd NASA (über-cool) straße."
    changes = {
        "lower_case": text.lower(),
        "upper_case": text.upper(),
        "title_case": "It's The 3rd NASA (Über-Cool) Straße.",
    }
    for name, changed in changes.items():
        found = Counter(noisy(text, AugmentationRules(**{name: 0.3}), draws(seed)) for seed in range(1000))
        assert found == {changed: pytest.approx(300, abs=60), text: pytest.approx(700, abs=60)}


def test_joined_pairs_are_two_of_one_part_source_with_source_and_target_with_target(tokenizers):
    parts = [number % 2 for number in range(200)]
    found, _ = texts_of(tokenizers, {"joined": 1.0}, parts=parts)
    of_part = [{p["source"]: p["target"] for p, part in zip(PAIRS, parts, strict=True) if part == k} for k in (0, 1)]
    others = Counter()
    for (source, target), pair, part in zip(found, PAIRS, parts, strict=True):
        other = source.removeprefix(pair["source"] + " ")
        assert target == f"{pair['target']} {of_part[part][other]}"
        others[other] += 1
    assert len(others) > 80  # drawn from all of them


def test_what_would_be_too_long_stays_as_it_is(tokenizers):
    longest = max(len(ids) for ids in tokenizers.encode_source([pair["source"] for pair in PAIRS]))
    found, _ = texts_of(tokenizers, {"joined": 1.0}, max_source_tokens=longest)
    assert 0 < sum(source != pair["source"] for (source, _), pair in zip(found, PAIRS, strict=True)) < 200
    assert max(len(ids) for ids in tokenizers.encode_source([source for source, _ in found])) <= longest


def test_shares_are_kept_and_drawn_anew_in_every_epoch_from_the_seed(tokenizers):
    plain = [tuple(pair.values()) for pair in PAIRS]
    changed = []
    for epoch in (0, 0, 1):
        found, _ = texts_of(tokenizers, {"no_final_punctuation": 0.3}, epoch)
        assert [target for _, target in found] == [target for _, target in plain]
        changed.append([number for number in range(200) if found[number] != plain[number]])
    assert changed[0] == changed[1] != changed[2]
    assert all(30 < len(numbers) < 90 for numbers in changed)
    assert texts_of(tokenizers, {})[0] == plain
    for share in (-0.1, 1.1, float("nan")):
        message = rf"`data.augmentation.typos` must be at least 0 and at most 1, but is {share} instead"
        assert_error(message, AugmentationRules, typos=share)
