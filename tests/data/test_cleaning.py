from datasets import Dataset, IterableDataset
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.data.cleaning import clean_pairs
from heedful.data.data_recipe import CleaningRules
from helpers import assert_error

EVERYTHING = CleaningRules(max_ratio=3, drop_duplicates=True, drop_identical=True)


def rows(*pairs):
    return [{"source": source, "target": target} for source, target in pairs]


def clean(pairs, rules, held_out=()):
    """Clean a corpus at once and as a stream, which must give the same."""
    data = Dataset.from_list(rows(*pairs))
    cleaned, report = clean_pairs(data, rules, rows(*held_out))
    stream, stream_report = clean_pairs(data.to_iterable_dataset(), rules, iter(rows(*held_out)))
    assert isinstance(stream, IterableDataset)
    assert stream_report.kept == 0
    for _ in range(2):
        assert list(stream) == list(cleaned)
        assert stream_report.to_dict() == report.to_dict()
    return [(row["source"], row["target"]) for row in cleaned], report


BY_RULE = [  # the rules, the reason, pairs that are kept and pairs that are dropped
    ({}, "empty", [("a", "b")], [("c", " \t\u3000"), ("", "d")]),
    ({"max_ratio": 3}, "ratio", [("a", "bbb"), ("aaa", "b")], [("a", "bbbb"), ("aaaa", "b")]),
    ({"drop_identical": True}, "identical", [("a", "b")], [("same", "same ")]),
    ({}, "identical", [("same", "same "), ("a", "b")], []),
    ({"drop_duplicates": True}, "duplicate", [("a", "b"), ("a", "c"), ("ab", "c")], [("a", "b"), ("a ", "b")]),
    ({}, "duplicate", [("a", "b"), ("a", "c"), ("a", "b")], []),
]


def test_each_rule_drops_what_breaks_it_and_counts_it_under_its_reason(capfd):
    for rules, reason, good, bad in BY_RULE:
        kept, report = clean([*good, *bad], CleaningRules(**rules))
        assert kept == good, (rules, reason)
        assert report.dropped[reason] == report.dropped.total() == len(bad), rules
    pairs = [(" a ", "b\t"), ("c", "d")]
    kept, report = clean(pairs, CleaningRules())
    assert (kept, report.to_dict()) == (pairs, {"kept": 2, "dropped": {}, "examples": {}})
    assert clean_pairs(Dataset.from_list(rows(*pairs)), CleaningRules())[0].cache_files == []
    assert capfd.readouterr() == ("", "")  # no progress
    _, report = clean([("a" * 50, ""), ("b" * 50, "c"), ("x", "y"), ("d", "d")], EVERYTHING, [("d", "d")])
    assert report.to_dict()["dropped"] == {"empty": 1, "ratio": 1, "identical": 1}  # each under one reason


def test_a_held_out_source_is_dropped_whatever_its_translation():
    pairs, held_out = [("a", "b"), ("a ", "c"), ("b", "a"), ("A", "b")], [("a", "b"), ("x", "y")]
    kept, report = clean(pairs, CleaningRules(), held_out)
    assert kept == [("b", "a"), ("A", "b")]
    assert report.dropped["overlap"] == 2
    assert clean(pairs, CleaningRules(drop_overlap=False), held_out)[0] == pairs


texts = st.sampled_from(["", " ", "a", "ab", "a ", "abcdefgh", "x" * 25, "한국어"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(texts, texts), min_size=1), st.lists(st.tuples(texts, texts), max_size=2))
def test_every_pair_is_kept_or_counted(pairs, held_out):
    data = Dataset.from_list([*rows(*pairs), {"source": "always", "target": "kept"}])
    cleaned, report = clean_pairs(data, EVERYTHING, rows(*held_out))
    assert report.kept == len(cleaned)
    assert report.kept + sum(report.dropped.values()) == len(data)
    again, second = clean_pairs(cleaned, EVERYTHING, rows(*held_out))
    assert list(again) == list(cleaned)
    assert second.to_dict()["dropped"] == {}


def test_the_report_is_a_readable_table_with_which_a_corpus_of_nothing_is_refused():
    _, report = clean([("good", "gut"), *(("x" * 100, str(number)) for number in range(1200))], EVERYTHING)
    assert str(report).splitlines()[:3] == [
        "kept                  1  of 1,201",
        "ratio             1,200  one side is more than `max_ratio` times as long as the other",
        f"{'':25}'{'x' * 59}…' → '0'",
    ]
    pairs = Dataset.from_list(rows(("a", ""), ("", "b")))
    message = r"must leave at least one pair, but leave none:\nkept +0  of 2\nempty +2"
    assert_error(message, clean_pairs, pairs, CleaningRules())
    stream, _ = clean_pairs(pairs.to_iterable_dataset(), CleaningRules())
    assert_error("must leave at least one pair", list, stream)
    assert_error("`data.cleaning.max_ratio` must be at least 1, but is 0.5 instead.", CleaningRules, max_ratio=0.5)
