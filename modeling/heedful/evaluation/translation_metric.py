"""`score_translations` as an `evaluate.Metric`, in a separate file because `evaluate` takes seconds to import."""

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate

from heedful.evaluation.metrics import as_list, check_equally_many, nested, score_translations

CITATION = "Matt Post (2018). A Call for Clarity in Reporting BLEU Scores. WMT 2018, pages 186–191."


class TranslationMetric(evaluate.Metric):
    """`score_translations` with the interface of `evaluate`; unlike `evaluate.load("sacrebleu")` it needs no network.

    `score` repeats BLEU under the name in sacrebleu's metric, for scripts such as transformers' run_translation.py.
    Several processes all pass `num_process`, `process_id` and a common `experiment_id`; process 0 gets the scores.

        metric = TranslationMetric()
        metric.add_batch(predictions=["A house."], references=["A house."])
        metric.compute(tokenize="13a", bootstrap=1000)["bleu"]
    """

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description="BLEU, chrF and TER by sacrebleu with their signatures, exact match and error rates.",
            citation=CITATION,
            inputs_description=str(score_translations.__doc__),
            features=datasets.Features({"predictions": text, "references": datasets.List(text)}),
            homepage="https://github.com/mjpost/sacrebleu",
        )

    def add(self, *, prediction: str, reference: str | Sequence[str], **kwargs: Any) -> None:
        """Add one prediction with its references."""
        self.add_batch(predictions=[prediction], references=[reference], **kwargs)

    def add_batch(
        self, *, predictions: Sequence[str], references: Sequence[str | Sequence[str]], **kwargs: Any
    ) -> None:
        """Add detokenized predictions, each with its reference or list of references."""
        given = as_list(predictions, "predictions"), nested(references)
        check_equally_many(*given)
        evaluate.Metric.add_batch(self, predictions=given[0], references=given[1], **kwargs)

    def _compute(
        self, predictions: Sequence[str], references: Sequence[Sequence[str]], **settings: Any
    ) -> dict[str, Any]:
        scores = score_translations(predictions, references, **settings)
        return scores | ({"score": scores["bleu"]} if "bleu" in scores else {})
