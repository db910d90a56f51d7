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


@pytest.fixture(scope="module")
def tokenizers():
    return train_tokenizers([p["source"] for p in PAIRS], [p["target"] for p in PAIRS], vocab_size=265)


@pytest.fixture(scope="module")
def tagged():
    sides = [p["source"] for p in PAIRS], [p["target"] for p in PAIRS]
    return train_tokenizers(*sides, vocab_size=265, languages=("ko", "en"))


def test_rows_are_the_token_ids_of_both_sides(tokenizers):
    rows = list(PairEncoder(tokenizers).rows(PAIRS))
    assert [row["input_ids"] for row in rows] == tokenizers.encode_source([pair["source"] for pair in PAIRS])
    assert tokenizers.decode_target(row["labels"] for row in rows) == [pair["target"] for pair in PAIRS]
    assert {row[side][-1] for row in rows for side in row} == {tokenizers.source.eos_token_id}
    spaced = [{side: f" {text}\u00a0\n" for side, text in pair.items()} for pair in PAIRS]
    assert list(PairEncoder(tokenizers).rows(spaced)) == rows  # white space around texts is no part of them


def test_what_is_too_long_is_left_out_and_counted(tokenizers):
    lengths = [(len(row["input_ids"]), len(row["labels"])) for row in PairEncoder(tokenizers).rows(PAIRS)]
    longest_source, longest_target = max(source for source, _ in lengths), max(target for _, target in lengths)
    exact = PairEncoder(tokenizers, longest_source, longest_target)
    assert len(list(exact.rows(PAIRS))) == 3
    assert exact.too_long == 0
    by_source = PairEncoder(tokenizers, max_source_tokens=longest_source - 1)
    found = list(by_source.rows(PAIRS))
    assert [len(row["input_ids"]) < longest_source for row in found if row] == [True, True]
    assert EncodedPairs(found).numbers.tolist() == [number for number in range(3) if found[number]]
    assert by_source.too_long == 1
    by_target = PairEncoder(tokenizers, max_target_tokens=longest_target - 1)
    assert len(EncodedPairs(by_target.rows(PAIRS))) == 2
    both = PairEncoder(tokenizers, longest_source - 1, longest_target - 1)
    assert len(EncodedPairs(both.rows(PAIRS))) == 1
    assert both.too_long == 2


def test_both_directions_have_their_tags(tagged):
    heads = [tagged.head("en"), tagged.head("ko")]
    rows = list(PairEncoder(tagged, heads=heads).rows(both_ways(PAIRS)))
    sources, targets = [p["source"] for p in PAIRS], [p["target"] for p in PAIRS]
    tags = [tagged.source.convert_tokens_to_ids(tag) for tag in ("<2en>", "<2ko>")]
    assert len(rows) == 6
    assert [row["input_ids"][0] for row in rows] == [tags[0]] * 3 + [tags[1]] * 3
    assert tagged.decode_target(row["labels"] for row in rows) == targets + sources
    assert tagged.decode_target(row["input_ids"] for row in rows) == sources + targets
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
def test_encoded_pairs_give_back_their_rows(rows):
    encoded = EncodedPairs(iter(rows))
    assert [encoded[number] for number in range(len(encoded))] == rows
    assert encoded.source_lengths.tolist() == [len(row["input_ids"]) for row in rows]
    assert encoded.target_lengths.tolist() == [len(row["labels"]) for row in rows]
    assert (encoded.sources.dtype, encoded.targets.dtype) == (np.int32, np.int32)


def test_a_row_that_does_not_exist_is_refused(tokenizers):
    encoded = EncodedPairs(PairEncoder(tokenizers).rows(PAIRS))
    for index in (-1, 3):
        with pytest.raises(IndexError, match=f"Row {index} does not exist: there are 3"):
            encoded[index]
