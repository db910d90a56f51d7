"""Translations that any system has made, several for a source: one of them is chosen as the target of a pair."""

import math
import re
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import groupby, islice, tee
from typing import Any

from heedful.data.cleaning import CleaningRules, Judge
from heedful.data.scripts import SCRIPTS_OF_LANGUAGES, lacks_script
from heedful.data.sources import read_rows
from heedful.files import quoted, shortened
from heedful.inference.strategies.minimum_bayes_risk import Utility, character_f_score, expected_utilities
from heedful.inference.translation import Translator

# Why candidates are left out, with the names that cleaning rules have for it, and at the end sources and pairs.
REASONS = {
    "empty": "empty",
    "ratio": "of a length too far from the source's",
    "identical": "copies of the source",
    "duplicate": "repeated",
    "script": "in another script",
    "too_long": "too long for the reverse model",
    "none": "sources without another candidate",
    "again": "pairs that came before",
}


@dataclass(frozen=True)
class Candidates:
    """A source and its candidates, with as many scores or none, and whether they were all in one row."""

    source: str
    texts: tuple[str, ...]
    scores: tuple[float, ...] = ()
    is_list: bool = True


def read_candidates(location: str, source: str, target: str, with_scores: bool = False) -> Iterator[Candidates]:
    """Yield the candidates of each source of a corpus, row by row.

    A row holds all candidates of its source (in the columns `candidates` and perhaps `scores`), or one of them
    (`candidate`, or what `target` names, and perhaps `score`); then those of a source are rows one behind the other.
    `source` names the column of the sources, and `location` is one place of `read_pairs`. A `ValueError` names the row
    with another column, a value that is no text or number, an empty source, no candidates, another number of scores
    than of candidates, or, `with_scores`, without scores.
    """
    records = read_rows(location, (source, target))
    rows = (
        _checked(cells, (source, target), with_scores, f"row {number} of {file}") for file, number, cells in records
    )
    groups = groupby(enumerate(rows), lambda row: row[0] if row[1].is_list else row[1].source)
    for first, *others in ([row for _, row in group] for _, group in groups):
        texts, scores = ([*first.texts], [*first.scores])
        for row in others:
            texts += row.texts
            scores += row.scores
        yield replace(first, texts=tuple(texts), scores=tuple(scores))


def _checked(cells: Mapping[str, Any], columns: tuple[str, str], with_scores: bool, place: str) -> Candidates:
    source, target = columns
    is_list = "candidates" in cells
    name = "candidates" if is_list else "candidate" if "candidate" in cells else target
    score = "scores" if is_list else "score"
    if not {source, name} <= {*cells} <= {source, name, score}:
        one = f"{target!r} or 'candidate' and perhaps 'score'"
        must = f"the columns {source!r} and either 'candidates' and perhaps 'scores', or {one}"
        raise ValueError(f"{place.capitalize()} must have {must}, but has {quoted(cells)} instead.")
    text, texts = cells[source], cells[name] if is_list else [cells[name]]
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{source!r} must be a text with words, but is {shortened(text)} instead in {place}.")
    if not isinstance(texts, list) or not texts or not all(isinstance(each, str) for each in texts):
        must = "a list of one text or more" if is_list else "text"
        raise ValueError(f"{name!r} must be {must}, but is {shortened(cells[name])} instead in {place}.")
    given = cells.get(score)
    if with_scores and given is None:
        raise ValueError(f"{score!r} must be in every row to choose by it, but is missing in {place}.")
    scores = given if is_list and isinstance(given, list) else [given]
    if given is not None and len(scores) != len(texts):
        must = f"as many as the candidates, {len(texts)}"
        raise ValueError(f"{score!r} must be {must}, but are {len(scores)} instead in {place}.")
    numbers = tuple(map(_number, scores)) if given is not None else ()
    if any(map(math.isnan, numbers)):
        raise ValueError(f"{score!r} must hold numbers, but is {shortened(given)} instead in {place}.")
    texts = (" ".join(unicodedata.normalize("NFC", each).split()) for each in texts)
    return Candidates(unicodedata.normalize("NFC", text), tuple(texts), numbers if with_scores else (), is_list)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def check_candidates(rows: Iterable[Candidates]) -> None:
    """Read all candidates, so that what is wrong is known before a model runs; warn of rows that are not in order."""
    seen: set[bytes] = set()  # 16 bytes for each source, not its text
    again = 0
    for row in rows:
        if not row.is_list:
            digest = blake2b(row.source.encode(), digest_size=16).digest()
            again += digest in seen
            seen.add(digest)
    if again:
        must = "the rows of a source must be one behind the other to be chosen from together"
        warnings.warn(f"{again:,} sources come again in later rows: {must}", stacklevel=2)


def _sentence_bleu() -> Utility:
    from sacrebleu import sentence_bleu

    return lambda hypothesis, reference: sentence_bleu(hypothesis, [reference]).score


UTILITIES: dict[str, Callable[[], Utility]] = {"chrf": character_f_score, "bleu": _sentence_bleu}
METHODS = (*UTILITIES, "reverse", "score")


@dataclass
class CandidateChoice:
    """How one candidate of each source is chosen as its target, and which candidates are left out before.

    `chrf` and `bleu` take the one most like all the others by this measure (minimum Bayes risk: Kumar and Byrne, 2004;
    of targets to learn from: Finkelstein and Freitag, 2023, arXiv 2309.10966); `reverse` the one from which a model of
    the other direction finds the source most probable (as in noisy channel reranking: Ng et al., 2019, arXiv
    1907.06616, section 3.4); `score` the one with the highest score. Of equals the first is taken.

    Left out and counted are, in this order, candidates that are empty, more than `max_ratio` times as long or short in
    characters as the source, the same as the source, repeated, or hardly in the script of `language`, a code such as
    ko. Sources without any other, and pairs that came before, are left out too.
    """

    method: str = "chrf"
    max_ratio: float | None = None
    language: str | None = None
    left_out: Counter[str] = field(default_factory=Counter, init=False)  # by the names in `REASONS`

    def __post_init__(self):
        if self.method not in METHODS:
            raise ValueError(f"`method` must be one of {', '.join(METHODS)}, but is {self.method!r} instead.")
        rules = CleaningRules(max_ratio=self.max_ratio, drop_duplicates=True, drop_identical=True, drop_overlap=False)
        self._judge = Judge(rules)
        self._script = SCRIPTS_OF_LANGUAGES.get(re.split("[-_]", self.language or "")[0])
        if self.language is not None and self._script is None:
            known = ", ".join(SCRIPTS_OF_LANGUAGES)
            raise ValueError(f"`language` must be one of {known}, but is {self.language!r} instead.")
        self._utility = UTILITIES[self.method]() if self.method in UTILITIES else None

    def pairs(
        self, rows: Iterable[Candidates], reverse: Translator | None = None, **settings: Any
    ) -> Iterator[dict[str, str]]:
        """Yield a `source` and a `target` for each source, in order, without those that are left out.

        `reverse` is the model of the method of that name, and `settings` are keywords of `Translator.score_pairs`. A
        `ValueError` says why if no pair is left.
        """
        if (reverse is None) == (self.method == "reverse"):
            must = "a model if it is the method, and None otherwise"
            raise ValueError(f"`reverse` must be {must}, but is {reverse!r} with the method {self.method}.")
        kept = map(self._kept, rows)
        return self._chosen(kept if reverse is None else self._scored(kept, reverse, settings))

    def _kept(self, row: Candidates) -> Candidates:
        """Return the row without the candidates that are left out; with scores, the highest first."""
        if self.method == "score" and len(row.scores) != len(row.texts):
            raise ValueError(f"`rows` must have scores for the method score, but {shortened(row.source)} has none.")
        order = sorted(range(len(row.texts)), key=lambda place: -row.scores[place] if row.scores else 0)
        seen: set[bytes] = set()
        places = []
        for place in order:
            text = row.texts[place]
            reason = self._judge.reason_to_drop(row.source.strip(), text, 0, seen)
            if reason is None and self._script is not None and lacks_script(text, self._script):
                reason = "script"
            if reason is None:
                places.append(place)
            else:
                self.left_out[reason] += 1
        scores = tuple(row.scores[place] for place in places) if row.scores else ()
        return replace(row, texts=tuple(row.texts[place] for place in places), scores=scores)

    def _scored(self, rows: Iterable[Candidates], reverse: Translator, settings: Any) -> Iterator[Candidates]:
        """Give each candidate the log-probability of its source; one that is too long is left out."""
        rows, copies = tee(rows)
        pairs = ((text, row.source) for row in copies for text in row.texts)
        found = reverse.score_pairs(pairs, keep_going=True, **settings)
        for row in rows:
            scores = {text: score for text, score in zip(row.texts, islice(found, len(row.texts)), strict=True)}
            known = {text: score.log_probability for text, score in scores.items() if score is not None}
            self.left_out["too_long"] += len(scores) - len(known)
            yield replace(row, texts=tuple(known), scores=tuple(known.values()))

    def _chosen(self, rows: Iterable[Candidates]) -> Iterator[dict[str, str]]:
        seen: set[bytes] = set()
        is_empty = True
        for row in rows:
            if not row.texts:
                self.left_out["none"] += 1
                continue
            worth = expected_utilities([*row.texts], self._utility) if self._utility else row.scores
            target = row.texts[max(range(len(worth)), key=worth.__getitem__)]
            # Of all rules it has not passed this one yet.
            if self._judge.reason_to_drop(row.source.strip(), target, 0, seen):
                self.left_out["again"] += 1
            else:
                is_empty = False
                yield {"source": row.source, "target": target}
        if is_empty:
            raise ValueError(f"`candidates` must hold some that are good enough, but has none: {self.summary()}.")

    def summary(self) -> str:
        """Say in a line how many candidates, sources and pairs were left out, and why."""
        counts = [f"{self.left_out[name]:,} {why}" for name, why in REASONS.items() if self.left_out[name]]
        return f"candidates left out: {', '.join(counts) or 'none'}"
