"""Scores of translations: the numbers, their signatures and intervals, and the mistakes that are caught."""

import multiprocessing
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sacrebleu.metrics import BLEU, CHRF, TER

from heedful.evaluation import metrics
from heedful.evaluation.metrics import METRICS, affordable_metrics, score_translations, scores_table, wilson_interval
from heedful.evaluation.translation_metric import TranslationMetric
from helpers import assert_refused

PREDICTIONS = ["The cat sat on the mat.", "A dog runs in the park today.", "고양이가 매트 위에 앉았다.", "Yes"]
REFERENCES = ["The cat sat on the mat.", "The dog runs through the park today.", "고양이는 매트에 앉았다.", " Yes "]


def test_the_scores_are_those_of_sacrebleu_and_exact_match_forgives_blanks_around_a_sentence():
    scores = score_translations(PREDICTIONS, REFERENCES)
    for name, metric in {"bleu": BLEU, "chrf": CHRF, "ter": TER}.items():
        assert 0 < scores[name] == metric().corpus_score(PREDICTIONS, [REFERENCES]).score < 100
    assert (scores["exact_match"], scores["count"]) == (50.0, 4)
    # Without bootstrap there are no intervals.
    assert sorted(scores) == sorted([*METRICS, "bleu_signature", "chrf_signature", "ter_signature", "count"])
    chosen = score_translations(PREDICTIONS, REFERENCES, metrics=("chrf", "exact_match"), bootstrap=40)
    names = ["chrf", "chrf_signature", "chrf_interval", "exact_match", "exact_match_interval", "count"]
    assert sorted(chosen) == sorted(names)
    lines = scores_table(score_translations(PREDICTIONS, REFERENCES, metrics=("bleu", "exact_match"))).split("\n")
    assert [line.split()[0] for line in lines[1:]] == ["BLEU", "exact"]


def test_signatures_tell_the_tokenizer_and_the_case_which_counts_for_bleu_chrf_and_exact_match():
    scores = score_translations(PREDICTIONS, REFERENCES, tokenize="char", lowercase=True)
    parts = {"bleu": ["tok:char", "case:lc"], "chrf": ["nrefs:1", "nc:6"], "ter": ["case:lc"]}
    assert all(part in scores[f"{name}_signature"] for name, some in parts.items() for part in some)
    plain, lowered = (
        score_translations(["THE CAT SAT THERE"], ["the cat sat there"], lowercase=on) for on in (False, True)
    )
    assert (plain["bleu"], plain["exact_match"]) == (0.0, 0.0)
    assert [lowered[name] for name in ("bleu", "chrf", "exact_match")] == pytest.approx([100, 100, 100])


def test_intervals_surround_the_scores_and_repeat_and_are_those_that_sacrebleu_prints_within_the_scale():
    predictions, references = PREDICTIONS * 25, REFERENCES * 25
    scores = score_translations(predictions, references, bootstrap=100)
    for name in METRICS:
        low, high = scores[f"{name}_interval"]
        assert low < scores[name] < high
    assert "bs:100" in scores["bleu_signature"]
    assert "seed:12345" in scores["bleu_signature"]
    assert scores == score_translations(predictions, references, bootstrap=100)
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
        ({"metrics": ("chrf",), "tokenize": "char"}, "`tokenize` is BLEU's"),
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


def test_the_function_does_without_the_evaluate_library():
    code = "import sys; import heedful.evaluation.metrics as m; m.score_translations(['a'], ['a']);"
    code += " assert 'evaluate' not in sys.modules and 'datasets' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


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


def test_a_bar_counts_the_sentences_of_ter(monkeypatch):
    counted = []

    def bar(texts, total, **_):
        return (counted.append((text, total)) or text for text in texts)

    monkeypatch.setattr(metrics, "tqdm", bar)
    score_translations(PREDICTIONS, REFERENCES, metrics=("ter",))
    assert counted[-len(PREDICTIONS) :] == [(text, len(PREDICTIONS)) for text in PREDICTIONS]


# As an `evaluate.Metric`


THREE, WANTED = PREDICTIONS[:3], REFERENCES[:3]


@pytest.fixture
def metric(tmp_path):
    return TranslationMetric(cache_dir=str(tmp_path))


def whole(*given, **settings):
    scores = score_translations(*given, **settings)
    return scores | {"score": scores["bleu"]}  # as sacrebleu's own metric calls it


def test_batches_give_the_scores_of_the_whole_and_references_may_be_nested_and_mixed(metric):
    metric.add_batch(predictions=THREE[:2], references=WANTED[:2])
    metric.add(prediction=THREE[2], reference=WANTED[2])
    assert metric.compute() == whole(THREE, WANTED)
    nested = [[WANTED[0], "A cat."], [WANTED[1]], [WANTED[2], "고양이"]]
    metric.add_batch(predictions=THREE[:1], references=nested[:1])
    metric.add_batch(predictions=THREE[1:], references=[WANTED[1], nested[2]])
    assert metric.compute() == whole(THREE, nested)


def test_settings_reach_the_scores(metric):
    chosen = ("bleu", "token_error_rate")
    settings = {"tokenize": "char", "lowercase": True, "bootstrap": 40, "metrics": chosen, "ignore": "[.]"}
    scores = metric.compute(predictions=THREE, references=WANTED, **settings)
    assert scores == whole(THREE, WANTED, **settings)
    # Without BLEU there is no `score`; and what was computed before is forgotten.
    scores = metric.compute(predictions=THREE[:1], references=WANTED[:1], metrics=["chrf"])
    assert set(scores) == {"chrf", "chrf_signature", "count"}
    assert scores["count"] == 1


def test_a_wrong_batch_is_named_and_an_empty_one_changes_nothing(metric):
    metric.add_batch(predictions=[], references=[])
    cases = [((["a", "b"], ["a"]), "2 predictions and 1 references")]
    cases += [(("a", ["a"]), "must be lists"), ((["a"], "a"), "must be lists")]
    assert_refused(cases, lambda given: metric.add_batch(predictions=given[0], references=given[1]))
    metric.add_batch(predictions=THREE, references=WANTED)
    assert metric.compute()["count"] == 3


def _score_every_second_sentence(process_id, folder, barrier):
    metric = TranslationMetric(num_process=2, process_id=process_id, experiment_id="pair", cache_dir=folder)
    metric.add_batch(predictions=THREE[process_id::2], references=WANTED[process_id::2])
    barrier.wait(timeout=200)
    return metric.compute()


def _expect_no_scores(*arguments):
    assert _score_every_second_sentence(*arguments) is None


@pytest.mark.slow  # a new process imports for half a minute
@pytest.mark.multiprocess
def test_two_processes_give_the_scores_of_one(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    other = context.Process(target=_expect_no_scores, args=(1, str(tmp_path), barrier))
    other.start()
    scores = _score_every_second_sentence(0, str(tmp_path), barrier)
    other.join(timeout=60)
    assert other.exitcode == 0
    # The order of sentences differs, the corpus does not.
    assert scores == whole(THREE[::2] + THREE[1:2], WANTED[::2] + WANTED[1:2])
