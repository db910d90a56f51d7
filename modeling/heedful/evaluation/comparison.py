"""Which of several systems translates better: sacrebleu's paired tests, and the sentences that differ most."""

import json
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain, cycle, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from heedful.evaluation.metrics import (
    METRICS,
    SMALLEST_BOOTSTRAP,
    is_exact_match,
    sacrebleu_metric,
    score_translations,
)
from heedful.files import check_at_least

SEED_VARIABLE = "SACREBLEU_SEED"
TESTS = {"bootstrap": "bs", "randomization": "ar"}  # sacrebleu's names
TIE = 1e-7  # up to which two differences of scores are the same
TITLES = {"bleu": "BLEU", "chrf": "chrF", "ter": "TER", "exact_match": "exact match"}
HEADING = (
    "{count:,} pairs. After each difference from the first system, p by paired bootstrap ({resamples:,} resamples) "
    "and by approximate randomization ({trials:,} trials), seed {seed}."
)


@dataclass(frozen=True)
class ComparisonSettings:
    """How systems are compared; what is out of range, or cannot be computed here, is an error at once."""

    tokenize: str = "13a"  # sacrebleu's tokenizer for BLEU
    lowercase: bool = False  # whether case is ignored, as by TER always
    resamples: int = 1000  # of the paired bootstrap
    trials: int = 10_000  # of the approximate randomization
    seed: int = 12345  # of both; sacrebleu takes 0 for "none"
    examples: int = 3  # sentences shown in which a system wins, and in which it loses

    def __post_init__(self):
        check_at_least(SMALLEST_BOOTSTRAP, resamples=self.resamples, trials=self.trials)
        check_at_least(1, seed=self.seed)
        check_at_least(0, examples=self.examples)
        score_translations([""], [""], tokenize=self.tokenize, lowercase=self.lowercase)


def compare_translations(
    systems: Mapping[str, Sequence[Sequence[str]]],
    references: Sequence[str],
    sources: Sequence[str],
    settings: ComparisonSettings | None = None,
) -> dict[str, Any]:
    """Compare systems with the first of them, on the same sentences.

    The tests are sacrebleu's paired bootstrap (Koehn, 2004) and approximate randomization (Riezler and Maxwell, 2005),
    each a p-value for the difference in BLEU, chrF, TER and exact match. A system of several seeds has the mean of
    their scores: each resample has the same sentences for all seeds, and a trial swaps the translations of a sentence
    by all of them. So the tests ask whether these very seeds would differ on other sentences, and not whether other
    seeds would; that is what the standard deviation over the seeds tells of. Unlike sacrebleu's, a trial counts whose
    difference is as large as the systems' own, and without a difference p is 1. It keeps resamples × sentences × seeds
    × about 20 numbers in memory.

    Args:
        systems: By name, the translations of each seed, one list of sentences per seed.
        references: One reference for each sentence.
        sources: One source for each sentence, to be shown.
        settings: Tokenizer, resamples, seed and the like.

    Returns:
        `count`, `settings`, the signatures, and `systems`: for each its `seeds`, and for each metric `score`, the
        `scores` of the seeds, their standard `deviation` (of several), the 95 % `interval`, and against the first
        system `difference`, `bootstrap_p` and `randomization_p`; further `wins`, `losses` and `ties` by sentence chrF
        (means over seeds), and as `examples` those with the largest differences, in the words of the first seeds.

    Raises:
        ValueError: If there are fewer than two systems, or sentences are missing.
    """
    settings = settings or ComparisonSettings()
    _check_systems(systems, references, sources)
    # As many columns for each: fewer seeds are repeated, which leaves their mean as it is.
    width = math.lcm(*map(len, systems.values()))
    named = [(name, list(zip(*islice(cycle(seeds), width), strict=True))) for name, seeds in systems.items()]
    metrics = {name: _SeedMean(name, references, settings) for name in METRICS}
    compared: dict[str, dict[str, Any]] = {name: {"seeds": len(seeds)} for name, seeds in systems.items()}
    for name, seeds in systems.items():
        for metric, measure in metrics.items():
            scores = [measure.score(texts) for texts in seeds]
            compared[name][metric] = {"score": statistics.fmean(scores), "scores": scores}
            if len(scores) > 1:
                compared[name][metric]["deviation"] = statistics.stdev(scores)
    signatures = _test(named, metrics, settings, compared)
    baseline, *others = systems
    chrf = {name: metrics["chrf"].sentence_scores(seeds) for name, seeds in systems.items()}
    for name in others:
        differences = chrf[name] - chrf[baseline]
        compared[name] |= {"wins": int((differences > 0).sum()), "losses": int((differences < 0).sum())}
        compared[name]["ties"] = int((differences == 0).sum())
        order = np.argsort(-differences, kind="stable")
        compared[name]["examples"] = [
            {"number": int(i) + 1, "source": sources[i], "reference": references[i]}
            | {each: {"text": systems[each][0][i], "chrf": float(chrf[each][i])} for each in (baseline, name)}
            for ends in (order, order[::-1])
            for i in ends[: settings.examples]
            if (differences[i] > 0) == (ends is order) and differences[i] != 0
        ]
    return {"count": len(references), "settings": asdict(settings), **signatures, "systems": compared}


def comparison_table(comparison: Mapping[str, Any]) -> str:
    """Write what `compare_translations` returned for people to read."""
    systems = comparison["systems"]
    lines = [HEADING.format(count=comparison["count"], **comparison["settings"])]
    for metric, title in TITLES.items():
        for name, found in systems.items():
            values = found[metric]
            spread = f" ± {values['deviation']:.2f}" if "deviation" in values else ""
            tested = ""
            if "difference" in values:
                p = (f"{values[f'{test}_p']:.4f}" for test in TESTS)
                tested = f"  {values['difference']:+.2f}  p {'  '.join(p)}"
            lines.append(f"{title:<12}{values['score']:6.2f}{spread}  {name}{tested}")
            title = ""
    baseline, *others = systems
    for name in others:
        found = systems[name]
        counts = f"{found['wins']:,} better, {found['losses']:,} worse, {found['ties']:,} equal"
        lines += ["", f"{name} against {baseline}, by sentence chrF: {counts}"]
        for example in found["examples"]:
            lines += [f"  {example['number']:>6}  source     {example['source']}"]
            lines += [f"          reference  {example['reference']}"]
            lines += [f"          {example[each]['chrf']:9.2f}  {example[each]['text']}" for each in (baseline, name)]
    return "\n".join(lines)


def read_predictions(path: Path, count: int) -> list[str]:
    """Read translations, one a line, as `heedful evaluate --predictions` writes them; other files are an error."""
    what = f"{path} must hold translations, one a line, as `heedful evaluate --predictions` writes them"
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{what}, but is no UTF-8 text: {error}.") from error
    lines = [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]
    if len(lines) != count:
        raise ValueError(f"{what}: {count} lines for {count} pairs, but has {len(lines)} instead.")
    try:
        is_json = isinstance(json.loads(lines[0]), dict | list)
    except (ValueError, RecursionError):
        is_json = False
    if is_json:
        raise ValueError(f"{what}, but line 1 is JSON instead.")
    return lines


class _SeedMean:
    """A metric as sacrebleu's tests call it, for tuples of a sentence's translations: the mean over their places."""

    def __init__(self, name: str, references: Sequence[str], settings: ComparisonSettings):
        self.name, self.references, self.lowercase = name, [list(references)], settings.lowercase
        self.metric = None if name == "exact_match" else sacrebleu_metric(name, settings.tokenize, settings.lowercase)
        self._known: dict[tuple[str, ...], list[list[float]]] = {}

    def score(self, texts: Sequence[str]) -> float:
        """Return the score of one seed."""
        return self._score(np.sum(self._statistics(texts), axis=0))

    def sentence_scores(self, seeds: Sequence[Sequence[str]]) -> np.ndarray:
        """Return the mean over the seeds of each sentence's score, `(sentences,)`."""
        return np.mean([[self._score(row) for row in self._statistics(texts)] for texts in seeds], axis=0)

    def _statistics(self, texts: Sequence[str]) -> list[list[float]]:
        """Return the counts that a score is made of, `(sentences, counts)`; they take long, and are kept."""
        texts = tuple(texts)
        if texts not in self._known:
            if self.metric is None:
                pairs = zip(texts, self.references[0], strict=True)
                found = [[float(is_exact_match(text, [other], self.lowercase)), 1.0] for text, other in pairs]
            else:
                found = self.metric._extract_corpus_statistics(texts, self.references)
            self._known[texts] = found
        return self._known[texts]

    def _score(self, counts: Any) -> float:
        if self.metric is None:
            return float(100 * counts[0] / counts[1])
        return float(self.metric._compute_score_from_stats(counts).score)

    def _extract_corpus_statistics(self, hypotheses: Sequence[tuple[str, ...]], _: Any) -> list[list[float]]:
        seeds = [self._statistics(texts) for texts in zip(*hypotheses, strict=True)]
        return [list(chain.from_iterable(rows)) for rows in zip(*seeds, strict=True)]

    def _compute_score_from_stats(self, counts: Any) -> Any:
        places = len(counts) // len(next(iter(self._known.values()))[0])
        return SimpleNamespace(name=self.name, score=np.mean([self._score(each) for each in np.split(counts, places)]))

    def _aggregate_and_compute(self, rows: Any) -> Any:
        found = self._compute_score_from_stats(np.sum(rows, axis=0))
        if len(rows) > 1:
            # The systems' own scores, not a trial's. sacrebleu counts trials whose difference is larger than theirs.
            # Those with the same belong to them: else what differs in one sentence would differ significantly.
            found.score *= 1 - TIE
        return found

    def get_signature(self) -> Any:
        """Return sacrebleu's signature, of which exact match has none but what the tests add."""
        from sacrebleu.metrics.base import Signature

        return Signature({"num_refs": 1}) if self.metric is None else self.metric.get_signature()


def _test(
    named: list[tuple[str, list[tuple[str, ...]]]],
    metrics: dict[str, _SeedMean],
    settings: ComparisonSettings,
    compared: dict[str, dict[str, Any]],
) -> dict[str, str]:
    """Add intervals, differences and p-values to the metrics of each system, and return the signatures."""
    from sacrebleu import significance

    paired: Any = significance.PairedTest
    signatures: dict[str, str] = {}
    samples = {"bootstrap": settings.resamples, "randomization": settings.trials}
    for test, kind in TESTS.items():
        with _seeded(settings.seed):
            signed, results = paired(named, metrics, None, kind, samples[test])()
        for name in metrics:
            signatures.setdefault(f"{name}_signature", str(signed[name]))
            for (system, _), result in zip(named, results[name], strict=True):
                values = compared[system][name]
                if result.ci is not None:
                    highest = math.inf if name == "ter" else 100.0
                    low, high = float(result.mean - result.ci), float(result.mean + result.ci)
                    values["interval"] = max(0.0, low), min(highest, high)
                if result.p_value is not None:
                    values["difference"] = values["score"] - compared[named[0][0]][name]["score"]
                    values[f"{test}_p"] = result.p_value if abs(values["difference"]) > TIE else 1.0
    return signatures


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Give sacrebleu a seed, which it reads in the environment."""
    before = os.environ.get(SEED_VARIABLE)
    os.environ[SEED_VARIABLE] = str(seed)
    try:
        yield
    finally:
        os.environ.pop(SEED_VARIABLE)
        if before is not None:
            os.environ[SEED_VARIABLE] = before


def _check_systems(systems: Mapping[str, Any], references: Sequence[str], sources: Sequence[str]) -> None:
    if len(systems) < 2:
        raise ValueError(f"`systems` must be at least two, but are {len(systems)} instead.")
    if len(references) < 2 or len(sources) != len(references):
        raise ValueError(
            f"`references` must be at least two, and as many as `sources`, but are {len(references)} and "
            f"{len(sources)} instead."
        )
    for name, seeds in systems.items():
        if isinstance(seeds, str) or not len(seeds) or any(isinstance(texts, str) for texts in seeds):
            raise ValueError(f"`systems[{name!r}]` must be a list with the list of translations of each seed.")
        for texts in seeds:
            if len(texts) != len(references):
                raise ValueError(
                    f"`systems[{name!r}]` must have {len(references)} translations, one for each reference, but has "
                    f"{len(texts)} instead."
                )
