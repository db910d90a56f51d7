"""Error rates against a plain count of edits, several references, what scores ignore, and the commonest confusions."""

import json
import math
from unicodedata import normalize

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful.evaluation.error_rates import ERROR_RATES, commonest_confusions, confusions_table
from heedful.evaluation.metrics import score_translations
from helpers import assert_refused
from memorised import PAIRS, saved_model


def plain_distance(one: list[str], other: list[str]) -> int:
    """Count the fewest edits between two sequences, as the textbook does."""
    row = list(range(len(other) + 1))
    for i, unit in enumerate(one, start=1):
        before, row = row, [i]
        for j, wanted in enumerate(other, start=1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (unit != wanted)))
    return row[-1]


def plain_rate(predictions, references, cut) -> float:
    """Divide the edits to the nearest references by the lengths of these, in percent."""
    edits = length = 0
    for prediction, texts in zip(predictions, references, strict=True):
        counts = [(plain_distance(cut(prediction), cut(text)), len(cut(text))) for text in texts]
        shares = [(count / size if size else math.inf if count else 0, size, count) for count, size in counts]
        _, size, count = min(shares)
        edits, length = edits + count, length + size
    return 100 * edits / length if length else 100.0 * (edits > 0)


def rates(predictions, references, **settings) -> tuple[float, float]:
    scores = score_translations(predictions, references, metrics=ERROR_RATES, **settings)
    return scores["token_error_rate"], scores["character_error_rate"]


TEXTS = st.lists(st.sampled_from(["a", "b", "ab", "c"]), max_size=6).map(" ".join)


@given(st.lists(st.tuples(TEXTS, st.lists(TEXTS, min_size=1, max_size=3)), min_size=1, max_size=5))
def test_rates_are_those_of_a_plain_count_of_edits_to_the_nearest_reference_and_confusions_are_all_of_these(pairs):
    predictions, references = map(list, zip(*pairs, strict=True))
    plain = [plain_rate(predictions, references, cut) for cut in (str.split, list)]
    assert rates(predictions, references) == pytest.approx(tuple(plain))
    found = commonest_confusions(predictions, references, predictions, 1000, lowercase=False)
    counts = [each["count"] for each in found]
    assert counts == sorted(counts, reverse=True)
    assert (sum(counts) > 0) == (plain[0] > 0)
    alone = [rates([prediction], [texts])[0] for prediction, texts in pairs if all(texts)]
    assert sum(counts) >= sum(rate > 0 for rate in alone)


def test_of_several_references_the_one_with_the_fewest_edits_for_its_length_counts():
    # One edit of two tokens, two of five, one of two again: the second is the nearest.
    assert rates(["a b c d x"], [["a x x", "a b c x x x", "y"]])[0] == pytest.approx(100 * 2 / 6)
    # One edit of two and two edits of four are equally near: the shorter counts, and weighs less beside another pair.
    for texts in (["a c", "a b c c"], ["a b c c", "a c"]):
        assert rates(["a b", "z z"], [texts, "z z"])[0] == rates(["a b", "z z"], [texts, ["z z"]])[0] == 25


RATES = [  # predictions, references, and both rates
    (["a b c d"], ["x"], (400, 700)),
    (["", " "], ["", ""], (0, 0)),
    (["a", ""], ["", ""], (100, 100)),
    (["a"], [["", "b"]], (100, 100)),
    ([""], [["b", ""]], (0, 0)),
    # A character is what a reader takes for one, and a space is one, but around a text it is none.
    (["xa"], ["👩‍👩‍👧a"], (100, 50)),
    (["xa"], ["e\u0301a"], (100, 50)),
    (["x" + normalize("NFD", "글")], [normalize("NFD", "한글")], (100, 50)),
    (["abc"], ["a bc"], (100, 25)),
    ([" a bc "], ["a bc"], (0, 0)),
    (["Aa B"], ["aA b"], (100, 75)),
]


def test_a_rate_may_be_above_100_and_one_of_nothing_is_0_or_100():
    for predictions, references, expected in RATES:
        assert rates(predictions, references) == expected, (predictions, references)
    assert rates(["Aa B"], ["aA b"], lowercase=True) == (0, 0)


def test_an_interval_has_the_draws_of_sacrebleus_scores(monkeypatch):
    # Of substitutions alone, TER counts what the token error rate counts.
    references = [f"a b c d{number}" for number in range(30)]
    predictions = [text.replace("b", "x") if number % 3 else text for number, text in enumerate(references)]
    intervals = []
    for seed in ("12345", "7"):
        monkeypatch.setenv("SACREBLEU_SEED", seed)
        scores = score_translations(predictions, references, metrics=("ter", *ERROR_RATES), bootstrap=100)
        assert scores["token_error_rate"] == pytest.approx(scores["ter"])
        assert scores["token_error_rate_interval"] == pytest.approx(scores["ter_interval"], abs=1e-5)
        low, high = scores["character_error_rate_interval"]
        assert low < scores["character_error_rate"] < high
        intervals.append(scores["token_error_rate_interval"])
    assert intervals[0] != intervals[1]


def test_what_is_ignored_is_taken_out_of_predictions_and_references_before_any_score():
    predictions, references = ["T V EH1 D T", "b (a) c"], [["T V EH0 D T", "T"], ["b c"]]
    ignored = score_translations(predictions, references, ignore=r"[0-9]|\(.\)", bootstrap=40)
    plain = score_translations(["T V EH D T", "b c"], [["T V EH D T", "T"], ["b c"]], bootstrap=40)
    assert ignored == plain | {"ignore": r"[0-9]|\(.\)"}
    assert (ignored["exact_match"], ignored["token_error_rate"]) == (100, 0)
    assert score_translations(predictions, references)["exact_match"] == 0
    # Taken out once: what is left together is a match no more.
    assert rates(["b"], ["aabb b"], ignore="ab")[0] == 50


def test_an_expression_that_is_none_or_leaves_nothing_is_refused():
    cases = [("[0-", r"`ignore` must be a regular expression, but is '\[0-' instead: ")]
    cases += [(".", r"`ignore` must leave something of the references, but '\.' takes out all")]
    assert_refused(cases, lambda ignore: score_translations(["a", "b"], ["a", ["b", "c"]], ignore=ignore))
    assert score_translations(["a", "b"], ["a", "b"], ignore="a")["exact_match"] == 100


SOURCES = ["eins", "zwei", "drei"]


def test_confusions_are_counted_and_the_commonest_stands_first_and_is_shown_with_its_source():
    predictions, references = ["A B D", "X B", "A C"], [["A C D"], ["A B C"], ["A B", "Z Z"]]
    found = commonest_confusions(predictions, references, SOURCES, 9, lowercase=False)
    edits = [(each["edit"], each["reference"], each["prediction"], each["count"]) for each in found]
    assert edits == [
        ("substitution", "C", "B", 1),
        ("substitution", "A", "X", 1),
        ("deletion", "C", None, 1),
        ("substitution", "B", "C", 1),
    ]
    assert found[1]["example"] == {"number": 2, "source": "zwei", "reference": "A B C", "prediction": "X B"}
    assert len(commonest_confusions(predictions, references, SOURCES, 2, lowercase=False)) == 2
    predictions, references = ["a y", "b Y", "z b"], [["a x"], ["b X"], ["b"]]
    found = commonest_confusions(predictions, references, SOURCES, 9, lowercase=True)
    assert [(each["edit"], each["count"]) for each in found] == [("substitution", 2), ("insertion", 1)]
    assert confusions_table(found).splitlines()[1:] == [
        "       2  x → y                 1: eins | a x | a y",
        "       1  – → z                 3: drei | b | z b",
    ]
    assert "none" in confusions_table(commonest_confusions(["a"], [["a"]], ["x"], 9, lowercase=False))


# The command


@pytest.fixture(scope="module")
def knowing(tmp_path_factory):
    """A folder with a model that knows the pairs by heart, and the pairs with other targets, these among the rest."""
    folder = tmp_path_factory.mktemp("knowing")
    saved_model(folder / "model", vocab_size=264)
    rows = [
        {"translation": {"ko": source, "en": target.replace("The", "A")}, "right": ["Else.", target]}
        for source, target in PAIRS.items()
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def evaluate(knowing, printed, monkeypatch):
    """Run `heedful evaluate` on these pairs, and return what it prints."""
    monkeypatch.chdir(knowing)
    settings = ["--data", "pairs.jsonl", "--source", "ko", "--target", "en", "--bootstrap", "40"]
    return lambda *arguments: printed("evaluate", "model", *settings, *arguments)


def test_the_command_scores_against_all_targets_that_are_right(evaluate):
    alone, all_of_them = (json.loads(evaluate("--json", *more)) for more in ([], ["--references", "right"]))
    assert alone["token_error_rate"] == pytest.approx(100 * 2 / 20)
    assert alone["exact_match"] < all_of_them["exact_match"] == 100
    assert all_of_them["token_error_rate"] == all_of_them["character_error_rate"] == 0
    assert all_of_them["bleu"] == pytest.approx(100)
    assert "nrefs:1|" in alone["bleu_signature"]
    assert "nrefs:var" in all_of_them["bleu_signature"]


def test_the_command_shows_what_is_ignored_and_the_commonest_confusions(evaluate):
    lines = evaluate("--ignore", "[.]", "--confusions", 1).splitlines()
    assert lines[1] == "What matches [.] is taken out of predictions and references before they are scored."
    assert [line.split("  ")[0] for line in lines[2:-2]] == [
        *("BLEU", "chrF", "TER", "exact match", "token error rate", "character error rate"),
    ]
    assert lines[-1].split("  ")[-1].strip() == "1: 고양이가 잔다. | A cat sleeps | The cat sleeps"
    found = json.loads(evaluate("--ignore", "[.]", "--confusions", 1, "--json"))
    assert found["ignore"] == "[.]"
    assert [(each["reference"], each["prediction"], each["count"]) for each in found["confusions"]] == [
        ("A", "The", 2)
    ]
