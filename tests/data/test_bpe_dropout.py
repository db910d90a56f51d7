"""BPE-dropout cuts words as its paper says, and as the tokenizer does where nothing is dropped."""

import logging
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from heedful import TokenizerPair
from heedful.data.encoding import EncodedPairs, PairEncoder
from heedful.data.epochs.bpe_dropout import BpeDropout, Merges
from heedful.data.epochs.mixture import both_ways
from heedful.data.korean_english.pairs import korean_english_pairs
from heedful.data.tokenization import WORD_START
from heedful.data.tokenizer_training import train_tokenizers

PAIRS = [{"source": pair["ko"], "target": pair["en"]} for pair in korean_english_pairs("train", 300)]


def train(**options) -> TokenizerPair:
    sides = [pair["source"] for pair in PAIRS], [pair["target"] for pair in PAIRS]
    return train_tokenizers(*sides, **{"vocab_size": 500, **options})


@pytest.fixture(scope="module")
def joint():
    return train(languages=("en", "ko"))


@pytest.fixture(scope="module")
def separate():
    return train(joint=False)


def cut(tokenizers, p, pairs=PAIRS, epoch=0, seed=1, **options):
    """Return rows of an epoch beside those of the tokenizer alone."""
    options = {"languages": tokenizers.languages, **options}
    heads = [tokenizers.head(language) for language in options.pop("languages")]
    pairs = list(both_ways(pairs)) if len(heads) > 1 else pairs
    encoder = PairEncoder(tokenizers, heads=heads, **options)
    plain = EncodedPairs(encoder.rows(pairs))
    dropout = BpeDropout(encoder, p, seed)
    return dropout.rows(EncodedPairs(encoder.rows(pairs)), epoch), plain


TEXTS = st.lists(
    st.one_of(
        st.text(max_size=20),
        st.sampled_from(["한국어를 배웁니다.", " <s> <2en></s>", "I've 1,234  words", "", "e\u0301 ﬁ ①\n\t나는"]),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(texts=TEXTS, kind=st.sampled_from(["joint", "separate"]))
def test_without_dropout_every_id_is_the_tokenizers(texts, kind, joint, separate):
    pairs = [{"source": text, "target": text[::-1]} for text in texts]
    rows, plain = cut({"joint": joint, "separate": separate}[kind], 0.0, pairs)
    assert rows.fingerprint() == plain.fingerprint()


def test_no_word_of_our_tokenizers_is_left_alone(joint, separate):
    for tokenizer in (joint.source, separate.source, separate.target):
        merges = Merges(tokenizer)
        words = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(" ".join(p["target"] for p in PAIRS))
        for word, _ in words:
            ids = [token.id for token in tokenizer.backend_tokenizer.model.tokenize(word)]
            symbols = merges.symbols(ids)
            assert symbols == tokenizer.convert_tokens_to_ids(list(word)) if len(word) > 1 else symbols is None


def test_rows_are_the_same_texts_in_other_pieces(joint):
    (rows, plain), (other, _) = (cut(joint, 0.3, epoch=epoch) for epoch in (0, 1))
    assert len(rows) == len(plain) == 600  # both directions
    for number in range(len(rows)):
        ours, theirs = rows[number], plain[number]
        assert ours["input_ids"][0] == theirs["input_ids"][0]  # the tag of the language
        assert ours["input_ids"][-1] == ours["labels"][-1] == joint.source.eos_token_id
        for side in ("input_ids", "labels"):
            assert joint.source.decode(ours[side]) == joint.source.decode(theirs[side])
    assert rows.source_lengths.sum() > 1.2 * plain.source_lengths.sum()
    assert rows.fingerprint() != other.fingerprint()
    assert max(rows.sources) < WORD_START
    again, _ = cut(joint, 0.3)
    assert again.fingerprint() == rows.fingerprint()
    reseeded, _ = cut(joint, 0.3, seed=2)
    assert reseeded.fingerprint() != rows.fingerprint()


def by_the_paper(table: dict, symbols: tuple, p: float) -> Counter:
    """Return the probability of each segmentation: at a step the first k merges are dropped, and the next is made."""
    places = sorted((table[pair], place) for place, pair in enumerate(pairwise(symbols)) if pair in table)
    found = Counter({symbols: p ** len(places)})
    for number, ((_, merged), place) in enumerate(places):
        after = (*symbols[:place], merged, *symbols[place + 2 :])
        for end, probability in by_the_paper(table, after, p).items():
            found[end] += p**number * (1 - p) * probability
    return found


def distance(ours: Counter, wanted: Counter) -> float:
    """Return chi-square minus its degrees of freedom, in its standard deviations, over what is not too rare."""
    draws, common = ours.total(), [each for each in wanted if wanted[each] >= 10]
    assert len(common) >= 3
    assert draws - sum(ours[each] for each in common) <= 0.1 * draws
    statistic = sum((ours[each] - wanted[each]) ** 2 / wanted[each] for each in common)
    return (statistic - len(common)) / (2 * len(common)) ** 0.5


def draw(merges: Merges, symbols: list[int], p: float, draws: int) -> Counter:
    stream = iter(np.random.PCG64(1).random_raw(draws * 60).tolist())
    return Counter(tuple(merges.apply(symbols, stream, round(p * 2**64))) for _ in range(draws))


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_segmentations_are_as_frequent_as_the_algorithm_of_the_paper_makes_them(joint, p):
    merges = Merges(joint.target)
    for word in (" the", " teach", "학교"):
        symbols = merges.symbols(joint.target(word, add_special_tokens=False)["input_ids"])
        wanted = Counter({end: 4000 * share for end, share in by_the_paper(merges._merges, tuple(symbols), p).items()})
        assert wanted.total() == pytest.approx(4000)
        assert distance(draw(merges, symbols, p, 4000), wanted) < 5


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_segmentations_are_as_frequent_as_those_of_tokenizers(p):
    """Where no merge undoes the chance of another: then `tokenizers` gives merges that it dropped a second one.

    It draws without a seed; chance exceeds the bound once in a million runs.
    """
    tokens = ["<pad>", "</s>", *"abcdef", "ab", "cd", "ef", "abcd", "abcdef"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [("a", "b"), ("c", "d"), ("e", "f"), ("ab", "cd"), ("abcd", "ef")]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocabulary, merges)))
    theirs = Tokenizer(models.BPE(vocabulary, merges, dropout=p))
    others = Counter(tuple(theirs.encode("abcdef").ids) for _ in range(4000))
    ours = draw(Merges(tokenizer), [2, 3, 4, 5, 6, 7], p, 4000)
    mean = Counter({each: (ours[each] + others[each]) / 2 for each in ours | others})
    assert distance(ours, mean) < 5


def test_a_word_that_comes_often_is_dealt_its_segmentations_evenly(joint):
    pairs = [{"source": "학교에", "target": " teacher"}] * 640
    rows, _ = cut(joint, 0.3, pairs, languages=("en",))
    found = Counter(tuple(rows[number]["labels"]) for number in range(len(rows)))
    assert 3 < len(found) <= 64
    assert all(times % 10 == 0 for times in found.values())


def test_a_text_that_would_be_too_long_stays_as_it_is(joint, caplog):
    plain = EncodedPairs(PairEncoder(joint, heads=[joint.head("en")]).rows(PAIRS))
    limit = int(plain.source_lengths.max())
    with caplog.at_level(logging.INFO):
        rows, _ = cut(joint, 0.5, languages=("en",), max_source_tokens=limit)
    assert len(rows) == len(PAIRS)
    assert rows.source_lengths.max() <= limit < rows.target_lengths.max()
    assert "of 300 texts stay as they are" in caplog.text
    number = int(plain.source_lengths.argmax())
    assert rows[number]["input_ids"] == plain[number]["input_ids"]


def test_merges_with_prefixes_and_words_that_are_not_merged_stay_exact():
    """A foreign tokenizer: pieces within a word are marked, unknown letters, and words taken from the vocabulary."""
    tokens = ["<pad>", "</s>", "<unk>", "a", "##b", "##c", "ab", "abc", "##bc"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    for ignores in (False, True):
        merges = [("a", "##b"), ("##b", "##c"), ("ab", "##c")]
        options = {"unk_token": "<unk>", "continuing_subword_prefix": "##", "ignore_merges": ignores}
        model = models.BPE(vocabulary, merges, **options)
        backend = Tokenizer(model)
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
        pairs = [{"source": "abc ab x a", "target": "abx abc </s> c"}] * 40
        pair = TokenizerPair(tokenizer, tokenizer)
        rows, plain = cut(pair, 0.0, pairs)
        assert rows.fingerprint() == plain.fingerprint()
        rows, _ = cut(pair, 0.5, pairs)
        assert {tuple(rows[n]["input_ids"][:2]) for n in range(40)} > {(7, 6)} if not ignores else True
        assert all(list(rows[n]["labels"]).count(1) == 1 for n in range(40))


def test_a_stream_may_have_a_part_without_any_pair_that_fits(joint):
    pairs = [{"source": "a b c d", "target": "a"}, {"source": "a", "target": "b"}]
    encoder = PairEncoder(joint, max_source_tokens=4, heads=[joint.head("en")])
    dropout = BpeDropout(encoder, 0.5, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("heedful.data.epochs.bpe_dropout.CHUNK", 1)
        assert [len(row["input_ids"]) for row in dropout.stream(pairs, 0)] == [3]
    assert encoder.too_long == 1


def test_a_tokenizer_without_merges_is_refused():
    with pytest.raises(ValueError, match="given with SimpleNamespace instead"):  # one written in Python, as Marian's
        Merges(SimpleNamespace())
    for algorithm, size in (("unigram", 400), ("word", None)):
        encoder = PairEncoder(train(algorithm=algorithm, vocab_size=size))
        with pytest.raises(ValueError, match=r"`tokenizer.dropout` must be 0 for a tokenizer without the merges"):
            BpeDropout(encoder, 0.1, 1)
