"""Rows of token ids, how often those of each part of a mixture come, and what stands before their sources."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.data.data_recipe import DataRecipe, MixturePart
from heedful.data.epochs import encoding
from heedful.data.epochs.draws import Sampling
from heedful.data.epochs.encoding import EncodedPairs, PairEncoder, source_prefixes
from heedful.data.tokenization import TokenizerPair
from heedful.data.tokenizer_training import train_tokenizers
from helpers import assert_error

PAIRS = [
    {"source": "고양이가 잔다.", "target": "The cat sleeps."},
    {"source": "네.", "target": "Yes, that is how it is."},
    {"source": "나는 사과를 먹는다.", "target": "I eat."},
]
SIDES = [pair["source"] for pair in PAIRS], [pair["target"] for pair in PAIRS]


@pytest.fixture(scope="module")
def tokenizers():
    return train_tokenizers(*SIDES, vocab_size=265)


def test_rows_are_the_token_ids_of_both_sides(tokenizers):
    rows = list(PairEncoder(tokenizers).rows(PAIRS))
    assert [row["input_ids"] for row in rows] == tokenizers.encode_source(SIDES[0])
    assert tokenizers.decode_target(row["labels"] for row in rows) == SIDES[1]
    assert {row[side][-1] for row in rows for side in row} == {tokenizers.source.eos_token_id}
    spaced = [{side: f" {text}\u00a0\n" for side, text in pair.items()} for pair in PAIRS]
    assert list(PairEncoder(tokenizers).rows(spaced)) == rows  # white space around texts is no part of them


def test_chunks_change_nothing_and_are_read_one_by_one(tokenizers, monkeypatch):
    whole, read = list(PairEncoder(tokenizers).rows(PAIRS)), []
    monkeypatch.setattr(encoding, "CHUNK", 2)
    rows = PairEncoder(tokenizers).rows(read.append(number) or pair for number, pair in enumerate(PAIRS))
    first = next(rows)
    assert read == [0, 1]
    assert [first, *rows] == whole


TEXTS = ["a b c d e f <bt> </s>", "Ein <bt> <2de> Hund."]


def drawn(sizes, temperature, epoch, seed=1):
    """Return the counts of parts of these sizes, and how often each of their rows comes, part by part."""
    rows = EncodedPairs({"input_ids": [number], "labels": [number]} for number in range(sum(sizes)))
    sampling = Sampling(np.repeat(np.arange(len(sizes)), sizes), temperature, seed)
    found = sampling.rows(rows, epoch)
    assert found.numbers.tolist() == found.sources.tolist() == found.targets.tolist()
    times = np.bincount(found.sources, minlength=sum(sizes))
    return sampling.counts, np.split(times, np.cumsum(sizes)[:-1])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=4), st.floats(1, 100), st.integers(0, 5))
def test_an_epoch_has_as_many_rows_as_the_parts_whose_rows_come_equally_often(sizes, temperature, epoch):
    counts, times = drawn(sizes, temperature, epoch)
    assert counts.sum() == sum(sizes)
    wanted = np.array(sizes) ** (1 / temperature)
    assert np.abs(counts - wanted / wanted.sum() * sum(sizes)).max() < 1
    for count, part in zip(counts, times, strict=True):
        assert part.sum() == count
        assert part.max() - part.min() <= 1  # whole repetitions first
    assert all((part == 1).all() for part in drawn(sizes, 1.0, epoch)[1])


def test_epochs_and_seeds_draw_other_rows():
    counts, times = drawn([1000, 10], 1e9, 0)
    assert counts.tolist() == [505, 505]
    others = [drawn([1000, 10], 1e9, epoch, seed)[1][0] for epoch, seed in ((0, 1), (1, 1), (0, 2))]
    assert [(other == times[0]).all() for other in others] == [True, False, False]


SEVERAL = DataRecipe("a", "en", "de", "v", mixture={"x": MixturePart("b", to="fr", tag="bt")})


@pytest.mark.parametrize("algorithm", ["bpe", "unigram", "word"])
@settings(max_examples=30, deadline=None)
@given(st.text("<bt>/s2de \n", max_size=20))
def test_a_tag_stands_before_sources_and_never_comes_out_of_text(algorithm, text):
    tokenizers = TAGGED.setdefault(algorithm, train(algorithm))
    tags = source_prefixes(SEVERAL, tokenizers)
    assert [tokenizers.source.convert_ids_to_tokens(head) for head in tags] == [["<2de>"], ["<2fr>", "<bt>"]]
    for written in (text, f"{text}<bt>", f"a <bt> {text}"):
        (ids,) = tokenizers.encode_source([written], "de")
        assert not {*ids[1:]} & {id_ for head in tags for id_ in head}


def train(algorithm="bpe", **options) -> TokenizerPair:
    options = {"languages": ("fr", "de", "<bt>"), **options}
    return train_tokenizers(TEXTS, TEXTS, vocab_size=300, algorithm=algorithm, **options)


TAGGED: dict[str, TokenizerPair] = {}


def test_a_given_tokenizer_without_the_tag_or_that_reads_it_out_of_text_is_refused():
    separate = train(joint=False)
    assert ["<bt>" in each.get_vocab() for each in (separate.source, separate.target)] == [True, False]
    tagged = DataRecipe("a", "en", "de", "v", mixture={"x": MixturePart("b", tag="bt")})
    plain, ordinary, reading = (train(languages=()) for _ in range(3))
    ordinary.source.add_tokens(["<bt>"])
    reading.source.add_special_tokens({"additional_special_tokens": ["<bt>"]})
    reading.source.split_special_tokens = False
    for tokenizers in (plain, ordinary, reading):
        with pytest.raises(ValueError, match=r"`data.mixture.x.tag` must be a special token .* but is <bt> instead"):
            source_prefixes(tagged, tokenizers)
    reading.source.split_special_tokens = True
    assert len(source_prefixes(tagged, reading)[1]) == 1


def test_a_given_tokenizer_must_have_the_tags_of_the_languages_that_are_learned():
    one, back = DataRecipe("a", "en", "de"), MixturePart("a", "de", "en", "en")
    both = DataRecipe("a", "en", "de", mixture={"back": back})
    for data, tokenizers, told in (
        (both, train(languages=()), r"\(en, de\), but has those of none"),
        (both, train(), r"\(en, de\), but has those of fr, de"),
        (DataRecipe("a", "de", "en"), train(), r"\(en\), but has those of fr, de"),
    ):
        assert_error(rf"`tokenizer.path` or .+ each learned language {told}", source_prefixes, data, tokenizers)
    assert source_prefixes(one, train()) == [train().head("de")]  # one direction of a model of several
    for tag in ("<s>", "<unk>", "<bt", "<1a>"):  # of which none can be a language's
        assert_error("`languages` must be different codes", train, languages=[tag])
