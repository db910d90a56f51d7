"""Comparison of systems: sacrebleu's paired tests, and the sentences with the largest differences."""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from heedful.evaluation import metrics
from heedful.evaluation.metrics import SMALLEST_BOOTSTRAP, TITLE_WIDTH, comparable
from heedful.files import check_at_least, read_lines
from heedful.messages_heed import wrong

TIE = 1e-7  # smaller score differences count as equal
HEADING = (
    "{count:,} pairs. After the difference from the first system: p by paired bootstrap ({resamples:,} resamples) "
    "and by approximate randomization ({trials:,} trials), seed {seed}."
)
TESTED = "  {difference:+.2f}  p {bootstrap_p:.4f}  {randomization_p:.4f}"


@dataclass(frozen=True)
class ComparisonSettings:
    """Comparison settings, checked at once."""

    tokenize: str | None = None  # for BLEU; None chooses by the references
    lowercase: bool = False  # ignore case; TER always does
    resamples: int = 1000  # in the paired bootstrap
    trials: int = 10_000  # in the approximate randomization
    seed: int = 12345  # for both tests; 0 means "none" to sacrebleu
    examples: int = 3  # shown from each system's wins, and from its losses
    ignore: str | None = None  # a regular expression for text that is not scored
    ter: bool | None = None  # compute TER; None: if it takes at most two minutes

    def __post_init__(self) -> None:
        check_at_least(SMALLEST_BOOTSTRAP, resamples=self.resamples, trials=self.trials)
        check_at_least(1, seed=self.seed)
        check_at_least(0, examples=self.examples)
        metrics.score_translations([""], [""], tokenize=self.tokenize, lowercase=self.lowercase, ignore=self.ignore)


def compare_translations(
    systems: Mapping[str, Sequence[Sequence[str]]],
    references: Sequence[str] | Sequence[Sequence[str]],
    sources: Sequence[str],
    settings: ComparisonSettings | None = None,
) -> dict[str, Any]:
    """Compare systems with the first system on the same sentences, by sacrebleu's paired tests.

    Paired bootstrap (Koehn, 2004) and approximate randomization (Riezler and Maxwell, 2005) give p-values for each
    score difference. A system with several seeds has their mean score; resamples and trials take a sentence from all
    seeds together. The tests are about other sentences, the deviation is about other seeds. Unlike in sacrebleu, a
    trial with an equal difference counts, and p is 1 without a difference.

    Args:
        systems: By name, a list with each seed's list of translations.
        references: For each sentence a reference, or a list of references.
        sources: Source sentences, to be shown.
        settings: Tokenizer, resamples, seed and others.

    Returns:
        `count`, `settings`, signatures, and `systems`, each with `seeds` and for each metric `score`, `scores` and
        `deviation` of the seeds, 95 % `interval`, and against the first system `difference`, `bootstrap_p` and
        `randomization_p`. Also `wins`, `losses`, `ties` by mean sentence chrF, and `examples` that differ most.

    Raises:
        ValueError: If there are fewer than two systems, sentences are missing, or `ignore` matches all references.
    """
    settings = settings or ComparisonSettings()
    accepted = metrics.references_left(settings.ignore, metrics.nested(references))
    _check_systems(systems, accepted, sources)
    settings = replace(settings, tokenize=metrics.fitting_tokenizer(settings.tokenize, accepted))
    systems = {name: [comparable(texts, settings.ignore) for texts in seeds] for name, seeds in systems.items()}
    # Repeating seeds gives all systems one width and keeps their means.
    width = math.lcm(*map(len, systems.values()))
    compared: dict[str, dict[str, Any]] = {name: {"seeds": len(seeds)} for name, seeds in systems.items()}
    signatures, chrf = {}, {}
    every = [texts for seeds in systems.values() for texts in seeds]
    for metric in metrics.affordable_metrics(settings.ter, list(chain(*every)), accepted * len(every)):
        measure = metrics.Measure(metric, accepted, str(settings.tokenize), settings.lowercase)
        counts = {name: [measure.counts(texts) for texts in seeds] for name, seeds in systems.items()}
        wide = [np.stack(seeds * (width // len(seeds)), axis=1) for seeds in counts.values()]
        for (name, seeds), tested in zip(counts.items(), _tests(measure, wide, settings), strict=True):
            scores = [measure.score(texts.sum(axis=0)) for texts in seeds]
            spread = {"deviation": statistics.stdev(scores)} if len(scores) > 1 else {}
            compared[name][metric] = {"score": statistics.fmean(scores), "scores": scores, **spread, **tested}
        signatures[f"{metric}_signature"] = measure.signature(bs=settings.resamples, seed=settings.seed)
        if metric == "chrf":
            chrf = {name: np.mean([list(map(measure.score, texts)) for texts in counts[name]], 0) for name in counts}
    baseline, *others = systems
    for name in others:
        differences = chrf[name] - chrf[baseline]
        differences[np.abs(differences) <= TIE] = 0  # means over different numbers of seeds round differently
        signs = np.sign(differences)
        compared[name] |= {key: int((signs == sign).sum()) for key, sign in (("wins", 1), ("losses", -1), ("ties", 0))}
        order = np.argsort(-differences, kind="stable")
        compared[name]["examples"] = [
            {"number": int(i) + 1, "source": sources[i], "reference": " / ".join(accepted[i])}
            | {each: {"text": systems[each][0][i], "chrf": float(chrf[each][i])} for each in (baseline, name)}
            for sign, ends in ((1, order), (-1, order[::-1]))
            for i in ends[: settings.examples]
            if signs[i] == sign
        ]
    return {"count": len(references), "settings": asdict(settings), **signatures, "systems": compared}


def comparison_table(comparison: Mapping[str, Any]) -> str:
    """Write the result from `compare_translations` as text."""
    systems = comparison["systems"]
    lines = [HEADING.format(count=comparison["count"], **comparison["settings"])]
    if comparison["settings"]["ignore"] is not None:
        lines.append(metrics.IGNORED.format(comparison["settings"]["ignore"]))
    computed = next(iter(systems.values()))
    for metric, title in ((metric, title) for metric, title in metrics.TITLES.items() if metric in computed):
        for name, found in systems.items():
            values = found[metric]
            spread = f" ± {values['deviation']:.2f}" if "deviation" in values else ""
            tested = TESTED.format(**values) if "difference" in values else ""
            lines.append(f"{title:<{TITLE_WIDTH}}{values['score']:6.2f}{spread}  {name}{tested}")
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


def directions_table(comparisons: Mapping[str | None, Mapping[str, Any]]) -> str:
    """Write results from `compare_translations`, by target language, as a table."""
    name, *_ = next(iter(comparisons.values()))["systems"]
    tested = "  ".join(f"{'before':>6} {title:>6}  {'diff.':>6} {'p':>6}" for title in ("chrF", "BLEU"))
    lines = [f"Before each score the score of {name}; after it the difference, and p by paired bootstrap."]
    width = max(map(len, ("into", *map(str, comparisons))))
    lines.append(f"{'into':<{width}}  {'pairs':>6}  {tested}")
    for language, comparison in comparisons.items():
        baseline, *others = comparison["systems"].items()
        for other, found in others:
            cells = []
            for metric in ("chrf", "bleu"):
                row = {**found[metric], "before": baseline[1][metric]["score"]}
                cells.append("{before:6.2f} {score:6.2f}  {difference:+6.2f} {bootstrap_p:6.4f}".format(**row))
            lines.append(f"{language:<{width}}  {comparison['count']:>6}  {'  '.join(cells)}  {other}")
    return "\n".join(lines)


def read_predictions(path: Path, count: int, references: Sequence[Sequence[str]] = ()) -> list[str]:
    """Load `count` translations, one per line; JSON is an error unless references are JSON."""
    what = f"{path} must hold translations, one a line, as `heedful evaluate --predictions` writes them"
    lines = read_lines(path, "systems")
    if len(lines) != count:
        place = f"line {len(lines) + 1} is missing" if len(lines) < count else f"line {count + 1} has no pair"
        raise ValueError(f"{what}: {count} lines for {count} pairs, but has {len(lines)} instead: {place}.")
    if _is_json(lines[0]) and not any(_is_json(text) for texts in references for text in texts):
        raise ValueError(f"{what}, but line 1 is JSON instead.")
    return lines


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict | list)
    except (ValueError, RecursionError):
        return False


def _tests(
    metric: metrics.Measure, systems: list[np.ndarray], settings: ComparisonSettings
) -> Iterator[dict[str, Any]]:
    """Yield each system's interval, and its difference from the first with p, from `(sentences, seeds, counts)`."""
    count = len(systems[0])  # the draws are those of sacrebleu's paired tests
    drawn = np.random.default_rng(settings.seed).choice(count, (settings.resamples, count))
    kept = np.random.default_rng(settings.seed).integers(2, size=(settings.trials, count), dtype=bool)
    resampled = [np.array([metric.score(counts[rows].sum(axis=0)) for rows in drawn]) for counts in systems]
    for counts, scores in zip(systems, resampled, strict=True):
        found: dict[str, Any] = {"interval": metric.interval(scores)}
        if counts is not systems[0]:
            difference = metric.score(counts.sum(axis=0)) - metric.score(systems[0].sum(axis=0))
            moved = np.abs(scores - resampled[0])
            ones = np.tensordot(kept, systems[0], 1) + np.tensordot(~kept, counts, 1)  # (trials, seeds, counts)
            others = (systems[0] + counts).sum(axis=0) - ones
            swapped = [abs(metric.score(one) - metric.score(other)) for one, other in zip(ones, others, strict=True)]
            found |= {"difference": difference, "bootstrap_p": _p_value(moved - moved.mean(), difference)}
            found["randomization_p"] = _p_value(np.array(swapped), difference)
        yield found


def _p_value(differences: np.ndarray, difference: float) -> float:
    if abs(difference) <= TIE:
        return 1.0
    return (1 + int((differences >= abs(difference) - TIE).sum())) / (1 + len(differences))


def _check_systems(systems: Mapping[str, Any], references: Sequence[Any], sources: Sequence[str]) -> None:
    if len(systems) < 2:
        raise wrong("systems", "be at least two", len(systems), verb="are")
    if len(references) < 2 or len(sources) != len(references):
        counts = f"{len(references)} and {len(sources)}"
        raise wrong("references", "be at least two, and as many as `sources`", counts, verb="are")
    for name, seeds in systems.items():
        if isinstance(seeds, str) or not len(seeds) or any(isinstance(texts, str) for texts in seeds):
            raise ValueError(f"`systems[{name!r}]` must be a list with each seed's list of translations.")
        for texts in seeds:
            metrics.check_equally_many(texts, references)
