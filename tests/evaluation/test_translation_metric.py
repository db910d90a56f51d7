"""The `evaluate.Metric`: batches, nested references, several processes, no network."""

import multiprocessing

import pytest

from heedful.evaluation.metrics import score_translations
from heedful.evaluation.translation_metric import TranslationMetric
from helpers import assert_refused

PREDICTIONS = ["The cat sat on the mat.", "A dog runs in the park.", "고양이가 매트 위에 앉았다."]
REFERENCES = ["The cat sat on the mat.", "The dog runs through the park.", "고양이는 매트에 앉았다."]


@pytest.fixture
def metric(tmp_path):
    return TranslationMetric(cache_dir=str(tmp_path))


def whole(*given, **settings):
    scores = score_translations(*given, **settings)
    return scores | {"score": scores["bleu"]}  # as sacrebleu's own metric calls it


def test_batches_give_the_scores_of_the_whole_and_references_may_be_nested_and_mixed(metric):
    metric.add_batch(predictions=PREDICTIONS[:2], references=REFERENCES[:2])
    metric.add(prediction=PREDICTIONS[2], reference=REFERENCES[2])
    assert metric.compute() == whole(PREDICTIONS, REFERENCES)
    nested = [[REFERENCES[0], "A cat."], [REFERENCES[1]], [REFERENCES[2], "고양이"]]
    metric.add_batch(predictions=PREDICTIONS[:1], references=nested[:1])
    metric.add_batch(predictions=PREDICTIONS[1:], references=[REFERENCES[1], nested[2]])
    assert metric.compute() == whole(PREDICTIONS, nested)


def test_settings_reach_the_scores(metric):
    chosen = ("bleu", "token_error_rate")
    settings = {"tokenize": "char", "lowercase": True, "bootstrap": 40, "metrics": chosen, "ignore": "[.]"}
    scores = metric.compute(predictions=PREDICTIONS, references=REFERENCES, **settings)
    assert scores == whole(PREDICTIONS, REFERENCES, **settings)
    # Without BLEU there is no `score`; and what was computed before is forgotten.
    scores = metric.compute(predictions=PREDICTIONS[:1], references=REFERENCES[:1], metrics=["chrf"])
    assert set(scores) == {"chrf", "chrf_signature", "count"}
    assert scores["count"] == 1


def test_a_wrong_batch_is_named_and_an_empty_one_changes_nothing(metric):
    metric.add_batch(predictions=[], references=[])
    cases = [((["a", "b"], ["a"]), "2 predictions and 1 references")]
    cases += [(("a", ["a"]), "must be lists"), ((["a"], "a"), "must be lists")]
    assert_refused(cases, lambda given: metric.add_batch(predictions=given[0], references=given[1]))
    metric.add_batch(predictions=PREDICTIONS, references=REFERENCES)
    assert metric.compute()["count"] == 3


def _score_every_second_sentence(process_id, folder, barrier):
    metric = TranslationMetric(num_process=2, process_id=process_id, experiment_id="pair", cache_dir=folder)
    metric.add_batch(predictions=PREDICTIONS[process_id::2], references=REFERENCES[process_id::2])
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
    assert scores == whole(PREDICTIONS[::2] + PREDICTIONS[1:2], REFERENCES[::2] + REFERENCES[1:2])
