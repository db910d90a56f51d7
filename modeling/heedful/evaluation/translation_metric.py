"""The scores of `heedful.evaluation.metrics` as an `evaluate.Metric` that needs no network.

Importing `evaluate` takes seconds, so import this module only where the class is used.
"""

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate

from heedful.evaluation.metrics import as_list, check_equally_many, nested, score_translations

CITATION = "Matt Post (2018). A Call for Clarity in Reporting BLEU Scores. WMT 2018, pages 186–191."


class TranslationMetric(evaluate.Metric):
    """The scores of `score_translations` with the interface of Hugging Face's `evaluate`.

    Unlike `evaluate.load("sacrebleu")` it needs no network. `score` is BLEU once more, as sacrebleu's metric names it,
    so that scripts such as transformers' run_translation.py read it. Several processes work as with every metric of
    `evaluate`: each makes the metric with `num_process`, `process_id` and a common `experiment_id`, and only process 0
    gets the scores.

        metric = TranslationMetric()
        metric.add_batch(predictions=["A house."], references=["A house."])
        metric.compute(tokenize="13a", bootstrap=1000)["bleu"]
    """

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description="BLEU, chrF and TER of sacrebleu with their signatures, exact match and error rates.",
            citation=CITATION,
            inputs_description=str(score_translations.__doc__),
            features=datasets.Features({"predictions": text, "references": datasets.List(text)}),
            homepage="https://github.com/mjpost/sacrebleu",
        )

    def add(self, *, prediction: str, reference: str | Sequence[str], **kwargs: Any) -> None:
        """Add one prediction and its reference or references, as `add_batch` does with several."""
        self.add_batch(predictions=[prediction], references=[reference], **kwargs)

    def add_batch(
        self, *, predictions: Sequence[str], references: Sequence[str | Sequence[str]], **kwargs: Any
    ) -> None:
        """Add detokenized predictions, and for each its reference or the list of its references."""
        given = as_list(predictions, "predictions"), nested(references)
        check_equally_many(*given)
        evaluate.Metric.add_batch(self, predictions=given[0], references=given[1], **kwargs)

    def _compute(
        self, predictions: Sequence[str], references: Sequence[Sequence[str]], **settings: Any
    ) -> dict[str, Any]:
        scores = score_translations(predictions, references, **settings)
        return scores | ({"score": scores["bleu"]} if "bleu" in scores else {})
