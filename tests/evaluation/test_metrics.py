"""Scores of translations: the numbers, their signatures and intervals, and the mistakes that are caught."""

import json
import math
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unicodedata import normalize

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from sacrebleu.metrics import BLEU, CHRF, TER

from guides import text_of
from heedful.data.epochs.encoding import SOURCES_FILE, source_digests
from heedful.evaluation.error_rates import ERROR_RATES, PERCENTAGES, commonest_confusions, confusions_table
from heedful.evaluation.metrics import METRICS, affordable_metrics, score_translations, scores_table, wilson_interval
from heedful.evaluation.translation_metric import TranslationMetric
from helpers import assert_refused
from memorised import PAIRS, saved_model

PREDICTIONS = ["The cat sat on the mat.", "A dog runs in the park today.", "고양이가 매트 위에 앉았다.", "Yes"]
REFERENCES = ["The cat sat on the mat.", "The dog runs through the park today.", "고양이는 매트에 앉았다.", " Yes "]


def test_the_scores_are_those_of_sacrebleu_and_exact_match_forgives_blanks_around_a_sentence():
    scores = score_translations(PREDICTIONS, REFERENCES)
    for name, metric in {"bleu": BLEU, "chrf": CHRF, "chrf++": partial(CHRF, word_order=2), "ter": TER}.items():
        assert 0 < scores[name] == metric().corpus_score(PREDICTIONS, [REFERENCES]).score < 100
    assert (scores["exact_match"], scores["count"]) == (50.0, 4)
    # Without bootstrap there are no intervals.
    signed = [f"{name}_signature" for name in ("bleu", "chrf", "chrf++", "ter")]
    assert sorted(scores) == sorted([*METRICS, *signed, "count"])
    chosen = score_translations(PREDICTIONS, REFERENCES, metrics=("chrf", "exact_match"), bootstrap=40)
    names = ["chrf", "chrf_signature", "chrf_interval", "exact_match", "exact_match_interval", "count"]
    assert sorted(chosen) == sorted(names)
    lines = scores_table(score_translations(PREDICTIONS, REFERENCES, metrics=("bleu", "exact_match"))).split("\n")
    assert [line.split()[0] for line in lines[1:]] == ["BLEU", "exact"]


def test_signatures_tell_the_tokenizer_and_the_case_which_counts_for_bleu_chrf_and_exact_match():
    scores = score_translations(PREDICTIONS, REFERENCES, tokenize="char", lowercase=True)
    parts = {"bleu": ["tok:char", "case:lc"], "chrf": ["nrefs:1", "nc:6"], "ter": ["case:lc"]}
    assert all(part in scores[f"{name}_signature"] for name, some in parts.items() for part in some)
    plain, lowered = (score_translations(["A CAT SAT HERE"], ["a cat sat here"], lowercase=on) for on in (False, True))
    assert (plain["bleu"], plain["exact_match"]) == (0.0, 0.0)
    assert [lowered[name] for name in ("bleu", "chrf", "exact_match")] == pytest.approx([100, 100, 100])


def test_intervals_surround_the_scores_and_repeat_and_are_those_of_sacrebleu_within_the_scale(monkeypatch):
    predictions, references = PREDICTIONS * 25, REFERENCES * 25
    scores = score_translations(predictions, references, bootstrap=100)
    for name in METRICS:
        low, high = scores[f"{name}_interval"]
        assert low < scores[name] < high
    assert "bs:100" in scores["bleu_signature"]
    assert "seed:12345" in scores["bleu_signature"]
    assert scores == score_translations(predictions, references, bootstrap=100)
    monkeypatch.setenv("SACREBLEU_SEED", "7")
    others = score_translations(predictions, references, bootstrap=100)
    assert all(others[f"{name}_interval"] != scores[f"{name}_interval"] for name in METRICS if name != "exact_match")
    monkeypatch.undo()
    printed = BLEU().corpus_score(predictions, [references], n_bootstrap=100).format(width=3)
    low, high = scores["bleu_interval"]
    assert f"μ = {(low + high) / 2:.3f} ± {(high - low) / 2:.3f}" in printed
    predictions, references = ["a b c d e f"] * 9 + ["x"], ["a b c d e f"] * 10
    mean_and_width = BLEU().corpus_score(predictions, [references], n_bootstrap=100)
    assert mean_and_width._mean + mean_and_width._ci > 100
    assert score_translations(predictions, references, bootstrap=100)["bleu_interval"][1] == 100.0
    nothing_right = score_translations(["x"] * 5, ["a b c d e"] * 5, bootstrap=40)
    assert nothing_right["bleu_interval"] == (0.0, 0.0)
    assert nothing_right["exact_match_interval"][0] == 0.0 < nothing_right["exact_match_interval"][1]


def test_several_references_per_prediction_are_transposed_for_sacrebleu_and_may_differ_in_number():
    references = [["The cat sat on the mat.", "A cat sat there."], ["The dog runs.", "A dog runs in a park."]]
    scores = score_translations(PREDICTIONS[:2], references)
    streams = [["The cat sat on the mat.", "The dog runs."], ["A cat sat there.", "A dog runs in a park."]]
    assert scores["bleu"] == BLEU().corpus_score(PREDICTIONS[:2], streams).score
    assert "nrefs:2" in scores["bleu_signature"]
    scores = score_translations(["a b c d", "e f g h"], [["x", "a b c d"], ["e f g h"]])
    assert (scores["bleu"], scores["exact_match"]) == (pytest.approx(100), 100.0)


def test_wrong_sentences_and_settings_are_named():
    nested = r"`references\[0\]` must be text or a list of texts, but is "
    cases = [
        ((["a", "b", "c"], ["a", "b"]), "3 predictions and 2 references instead: pair 3 has no reference"),
        ((["a"], ["a", "b"]), "1 predictions and 2 references instead: pair 2 has no prediction"),
        ((["a"], [[]]), rf"{nested}\[\] instead"),
        (([], []), "empty"),
        ((["a"], [[["a"]]]), rf"{nested}\[\['a'\]\] instead"),
        ((["a", "b"], ["a", None]), r"`references\[1\]` must be text"),
        ((["a", None], ["a", "b"]), r"`predictions\[1\]` must be a string"),
        (("a sentence", ["a"]), "`predictions` must be a list"),
        ((["a"], "a"), "`references` must be a list"),
    ]
    assert_refused(cases, lambda given: score_translations(*given))
    cases = [
        ({"tokenize": "14a"}, "`tokenize` must be one of .*13a.* but is '14a'"),
        ({"bootstrap": 1}, "`bootstrap` must be 0 or at least 40, but is 1"),
        ({"bootstrap": -5}, "but is -5"),
        *(({"metrics": metrics}, "`metrics` must be some of") for metrics in (("bleu", "meteor"), "bleu", ())),
        ({"metrics": ("chrf",), "tokenize": "char"}, "`tokenize` must be None without BLEU"),
    ]
    assert_refused(cases, lambda settings: score_translations(["a"], ["a"], **settings))


def test_a_missing_korean_tokenizer_is_named_with_its_package(monkeypatch):
    monkeypatch.setattr("sacrebleu.tokenizers.tokenizer_ko_mecab.MeCab", None)
    with pytest.raises(ImportError, match=r"mecab-ko.*sacrebleu\[ko\]"):
        score_translations(["네"], ["네"], tokenize="ko-mecab")


@given(st.integers(1, 10_000).flatmap(lambda count: st.tuples(st.integers(0, count), st.just(count))))
def test_wilsons_interval_holds_the_share_within_bounds_and_has_the_published_width(numbers):
    successes, count = numbers
    low, high = wilson_interval(successes, count)
    assert 0 <= low <= 100 * successes / count <= high <= 100
    assert low < high
    # Newcombe (1998), table I: 81 of 263 gives 0.2553 to 0.3662, and 15 of 148 gives 0.0624 to 0.1605.
    assert wilson_interval(81, 263) == pytest.approx((25.53, 36.62), abs=0.005)
    assert wilson_interval(15, 148) == pytest.approx((6.24, 16.05), abs=0.005)


def test_the_function_does_without_the_evaluate_library(monkeypatch):
    for library in ("evaluate", "datasets"):
        monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, "heedful.evaluation.metrics")
    assert runpy.run_module("heedful.evaluation.metrics")["score_translations"](["a"], ["a"])["count"] == 1


def test_every_score_sees_a_space_for_a_line_break_and_texts_in_nfc():
    spread = ["one\ntwo\nthree", "e\u0301te\u0301 \u1112\u1161\u11ab", "p\n\nq"]
    plain = ["one two three", "\u00e9t\u00e9 \ud55c", "p  q"]
    scores = score_translations(spread, plain)
    assert scores == score_translations(plain, spread) == score_translations(plain, plain)
    assert scores["exact_match"] == 100.0
    assert scores["character_error_rate"] == 0.0
    assert score_translations(spread, plain, ignore="q")["exact_match"] == 100.0


def test_ter_is_left_out_where_it_takes_long_unless_it_is_asked_for(caplog):
    caplog.set_level("INFO", "heedful")
    texts, others = [" ".join(map(str, range(250)))] * 40, [" ".join(map(str, range(250, 0, -1)))] * 40
    accepted = [[text] for text in texts]
    assert "ter" not in affordable_metrics(None, others, accepted)
    assert "TER is left out, which may take 2 min 30 s here: `--ter` computes it." in caplog.text
    assert affordable_metrics(True, others, accepted) == METRICS
    assert affordable_metrics(None, texts, accepted) == METRICS  # alike, so it takes no time
    assert affordable_metrics(None, PREDICTIONS * 500, [[text] for text in REFERENCES] * 500) == METRICS
    assert "ter" not in affordable_metrics(False, PREDICTIONS, [[text] for text in REFERENCES])


# As an `evaluate.Metric`.
THREE, WANTED = PREDICTIONS[:3], REFERENCES[:3]


@pytest.fixture
def metric(tmp_path):
    return TranslationMetric(cache_dir=str(tmp_path))


def whole(*given, **settings):
    scores = score_translations(*given, **settings)
    return scores | {"score": scores["bleu"]}  # as sacrebleu's own metric calls it


def test_batches_give_the_scores_of_the_whole_and_references_may_be_nested_and_mixed(metric):
    metric.add_batch(predictions=[], references=[])
    cases = [((["a", "b"], ["a"]), "2 predictions and 1 references")]
    cases += [(("a", ["a"]), "`predictions` must be a list"), ((["a"], "a"), "`references` must be a list")]
    assert_refused(cases, lambda given: metric.add_batch(predictions=given[0], references=given[1]))
    metric.add_batch(predictions=THREE[:2], references=WANTED[:2])
    metric.add(prediction=THREE[2], reference=WANTED[2])
    assert metric.compute() == whole(THREE, WANTED)
    nested = [[WANTED[0], "A cat."], [WANTED[1]], [WANTED[2], "고양이"]]
    metric.add_batch(predictions=THREE[:1], references=nested[:1])
    metric.add_batch(predictions=THREE[1:], references=[WANTED[1], nested[2]])
    assert metric.compute() == whole(THREE, nested)
    settings = {"tokenize": "char", "lowercase": True, "bootstrap": 40, "ignore": "[.]"}
    assert metric.compute(predictions=THREE, references=WANTED, **settings) == whole(THREE, WANTED, **settings)
    # Without BLEU there is no `score`; and what was computed before is forgotten.
    scores = metric.compute(predictions=THREE[:1], references=WANTED[:1], metrics=["chrf"])
    assert scores.keys() == {"chrf", "chrf_signature", "count"}
    assert scores["count"] == 1


def test_two_processes_give_the_scores_of_one(tmp_path):
    def score_every_second_sentence(number):
        metric = TranslationMetric(num_process=2, process_id=number, experiment_id="pair", cache_dir=str(tmp_path))
        metric.add_batch(predictions=THREE[number::2], references=WANTED[number::2])
        return metric.compute()

    with ThreadPoolExecutor() as both:  # as processes, they find each other by files
        scores = list(both.map(score_every_second_sentence, (0, 1)))
    # The order of sentences differs, the corpus does not.
    assert scores == [whole(THREE[::2] + THREE[1:2], WANTED[::2] + WANTED[1:2]), None]


# Error rates against a plain count of edits, what scores ignore, and the commonest confusions.
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
    cases += [(".", r"`ignore` must leave some text in the references, but '\.' removes all")]
    assert_refused(cases, lambda ignore: score_translations(["a", "b"], ["a", ["b", "c"]], ignore=ignore))
    assert score_translations(["a", "b"], ["a", "b"], ignore="a")["exact_match"] == 100


def test_a_pattern_that_would_never_end_is_stopped(monkeypatch):
    monkeypatch.setattr("heedful.evaluation.metrics.PATIENCE", 0.1)
    endless = [("(a+)+b", r"`decoding.ignore` must need at most 0.1 seconds")]
    assert_refused(endless, lambda ignore: score_translations(["a" * 999], ["b"], ignore=ignore))


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
    predictions, references = ["t͡ʃa", "kʷa"], [["t͡sa"], ["kʷo"]]  # single words: by character
    found = commonest_confusions(predictions, references, SOURCES[:2], 9, lowercase=False)
    assert [(each["reference"], each["prediction"]) for each in found] == [("t͡s", "t͡ʃ"), ("o", "a")]
    assert found[0]["example"]["reference"] == "t͡sa"
    assert "none" in confusions_table(commonest_confusions(["a"], [["a"]], ["x"], 9, lowercase=False))


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
    assert lines[1] == "Matches of [.] are removed from predictions and references before scoring."
    assert len(lines[2:-3]) == len(METRICS)  # before the faults and a confusion
    assert [name for name in PERCENTAGES if f"| `{name}` |" not in text_of("score_and_compare")] == []
    assert lines[-1].split("  ")[-1].strip() == "1: 고양이가 잔다. | A cat sleeps | The cat sleeps"
    found = json.loads(evaluate("--ignore", "[.]", "--confusions", 1, "--json"))
    assert found["ignore"] == "[.]"
    (confusion,) = found["confusions"]
    assert (confusion["reference"], confusion["prediction"], confusion["count"]) == ("A", "The", 2)


JOINED = {"zh": ["狗在家里睡觉。", "我没有读那本书。"], "char": ["สุนัขนอนอยู่ในบ้าน", "ฉันไม่ได้อ่านหนังสือ"]}


@pytest.mark.parametrize(("tokenizer", "texts"), JOINED.items())
def test_references_without_spaces_get_a_tokenizer_that_finds_words_and_none_that_does_not(tokenizer, texts):
    wrong = [text[:-2] + text[-1] for text in texts]
    scores = score_translations(wrong, texts)
    assert 20 < scores["bleu"] < 100
    assert f"tok:{tokenizer}|" in scores["bleu_signature"]
    assert scores == score_translations(wrong, texts, tokenize=tokenizer)
    assert_refused(
        [("13a", f"`tokenize` must be {tokenizer} or .+ but is 13a")],
        lambda given: score_translations(wrong, texts, tokenize=given),
    )
    spaced = [" ".join(text) for text in texts]
    assert "tok:13a|" in score_translations(spaced, spaced)["bleu_signature"]


def test_empty_references_are_counted_and_said_and_no_resample_of_them_is_a_fault():
    scores = score_translations(["a b", "1", "c"], ["", "1", "c"], bootstrap=100, ignore="[0-9]")
    assert scores["empty_references"] == 2
    assert scores["ter_interval"][0] <= scores["ter_interval"][1]
    assert scores_table(scores).startswith("3 pairs, 2 of them with an empty reference\n")
    assert "empty" not in scores_table(score_translations(["a"], ["b"]))


def test_the_command_takes_columns_and_scoring_of_the_models_recipe_and_says_what_training_knows(
    knowing, printed, monkeypatch, caplog
):
    monkeypatch.chdir(knowing)
    data = {"train": "pairs.jsonl", "source": "ko", "target": "en", "cleaning": {"drop_duplicates": True}}
    scoring = {"bleu_tokenizer": "char", "ignore": "[.]"}
    recipe = {"name": "known", "data": data, "optimization": {"max_updates": 1}, "decoding": scoring}
    (knowing / "model" / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    rows = [{"source": source, "target": target} for source, target in PAIRS.items()]
    source_digests(rows[:3]).tofile(knowing / SOURCES_FILE)
    (knowing / "named.jsonl").write_text("".join(json.dumps({"x": "x", **row}) + "\n" for row in [*rows, rows[0]]))
    for file, repeated in (("pairs.jsonl", 0), ("named.jsonl", 1)):  # the recipe's columns, and those called so
        caplog.clear()
        scores = json.loads(printed("evaluate", "model", "--data", file, "--bootstrap", 0, "--json"))
        said = caplog.text
        assert (scores["ignore"], "tok:char|" in scores["bleu_signature"]) == ("[.]", True)
        assert "scored with `bleu_tokenizer` char, as in the model's recipe" in said
        assert f"{3 + repeated} of {len(rows) + repeated} scored pairs are with a source from" in said
        assert (f"1 of {len(rows) + 1} scored pairs are duplicate, by the rules" in said) == repeated
    asked = ["--tokenize", "13a", "--ignore", "", "--source", "ko", "--target", "en"]
    scores = json.loads(printed("evaluate", "model", "--data", "pairs.jsonl", "--json", *asked))
    assert ("ignore" in scores, "tok:13a|" in scores["bleu_signature"]) == (False, True)
