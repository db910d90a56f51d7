import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.data import encoding
from heedful.data.encoding import EncodedPairs, PairEncoder
from heedful.data.mixture import both_ways
from heedful.data.tokenizer_training import train_tokenizers

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


def test_what_is_too_long_is_left_out_and_counted(tokenizers):
    rows = list(PairEncoder(tokenizers).rows(PAIRS))
    source, target = (max(len(row[side]) for row in rows) for side in ("input_ids", "labels"))
    for limits, kept in (((source, target), 3), ((source - 1, None), 2), ((None, target - 1), 2)):
        encoder = PairEncoder(tokenizers, *limits)
        found = list(encoder.rows(PAIRS))
        assert (sum(map(bool, found)), encoder.too_long) == (kept, 3 - kept)
        assert EncodedPairs(found).numbers.tolist() == [number for number in range(3) if found[number]]
    both = PairEncoder(tokenizers, source - 1, target - 1)
    assert (len(EncodedPairs(both.rows(PAIRS))), both.too_long) == (1, 2)


def test_both_directions_have_their_tags():
    tagged = train_tokenizers(*SIDES, vocab_size=265, languages=("ko", "en"))
    heads = [tagged.head("en"), tagged.head("ko")]
    rows = list(PairEncoder(tagged, heads=heads).rows(both_ways(PAIRS)))
    tags = [tagged.source.convert_tokens_to_ids(tag) for tag in ("<2en>", "<2ko>")]
    assert [row["input_ids"][0] for row in rows] == [tags[0]] * 3 + [tags[1]] * 3
    assert tagged.decode_target(row["labels"] for row in rows) == SIDES[1] + SIDES[0]
    assert tagged.decode_target(row["input_ids"] for row in rows) == SIDES[0] + SIDES[1]
    one_way = list(PairEncoder(tagged, heads=heads[1:]).rows(PAIRS))
    assert [row["input_ids"][0] for row in one_way] == [tags[1]] * 3


def test_chunks_change_nothing_and_are_read_one_by_one(tokenizers, monkeypatch):
    whole = list(PairEncoder(tokenizers).rows(PAIRS))
    monkeypatch.setattr(encoding, "CHUNK", 2)
    read = []
    rows = PairEncoder(tokenizers).rows(read.append(number) or pair for number, pair in enumerate(PAIRS))
    first = next(rows)
    assert read == [0, 1]
    assert [first, *rows] == whole


ids = st.lists(st.integers(0, 2**31 - 1), max_size=6)


@settings(max_examples=50)
@given(st.lists(st.fixed_dictionaries({"input_ids": ids, "labels": ids}), max_size=8))
def test_encoded_pairs_give_back_their_rows_and_no_others(rows):
    encoded = EncodedPairs(iter(rows))
    assert [encoded[number] for number in range(len(encoded))] == rows
    assert encoded.source_lengths.tolist() == [len(row["input_ids"]) for row in rows]
    assert encoded.target_lengths.tolist() == [len(row["labels"]) for row in rows]
    assert (encoded.sources.dtype, encoded.targets.dtype) == (np.int32, np.int32)
    for index in (-1, len(rows)):
        with pytest.raises(IndexError, match=f"Row {index} does not exist: there are {len(rows)}"):
            encoded[index]
