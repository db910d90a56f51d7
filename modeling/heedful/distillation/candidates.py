"""Choose one of a source's translations, from any system, as the pair's target."""

import math
import unicodedata
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby, islice, tee
from operator import itemgetter
from statistics import fmean
from typing import Any

from heedful.data.cleaning import Judge
from heedful.data.data_recipe import CleaningRules
from heedful.data.languages import SCRIPTS_OF_LANGUAGES, code_of, lacks_script
from heedful.data.sources import reading, row_reader
from heedful.decoding.strategies.minimum_bayes_risk import character_f_score, expected_utilities
from heedful.files import quoted
from heedful.messages_heed import shortened, wrong

Candidates = tuple[str, list[tuple[str, float]]]  # a source, and its texts with scores or 0
METHODS = ("chrf", "reverse", "score")
REVERSE_WEIGHT = 0.25  # of the source's log-probability per token: see docs/records/log.md
JUDGED = 100  # sources that show whether a reverse model translates in the reverse direction


def read_candidates(location: str, source: str, target: str, with_scores: bool = False) -> Iterator[Candidates]:
    """Yield each source's candidates from a corpus, row by row.

    A row has all candidates of its source (`candidates`, perhaps `scores`), or only one (`candidate` or the column
    `target`, perhaps `score`); then a source's rows are adjacent. A `ValueError` names any other row.
    """
    with reading("candidates"):
        given = row_reader(location, (source, target), "train", streaming=True)
    rows = (
        (*_checked(cells, source, target, with_scores, f"row {number} of {file}"), "candidates" in cells, number)
        for file, number, cells in given()
    )
    for (text, _), group in groupby(rows, lambda row: (row[0], row[3] if row[2] else 0)):
        yield text, [candidate for row in group for candidate in row[1]]


def _checked(cells: Mapping[str, Any], source: str, target: str, with_scores: bool, place: str) -> Candidates:
    is_list = "candidates" in cells
    name = "candidates" if is_list else "candidate" if "candidate" in cells else target
    score = "scores" if is_list else "score"
    if not {source, name} <= {*cells} <= {source, name, score}:
        must = f"the columns {source!r} and {target!r}, 'candidate' or 'candidates', and perhaps {score!r}"
        raise ValueError(f"{place.capitalize()} must have {must}, but has {quoted(cells)} instead.")
    texts = cells[name] if is_list else [cells[name]]
    if not isinstance(cells[source], str) or not cells[source].strip():
        raise ValueError(f"{source!r} must be a text, but is {shortened(cells[source])} instead in {place}.")
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{name!r} must hold at least one text, but is {shortened(cells[name])} instead in {place}.")
    scores = cells.get(score)
    try:
        given: Any = [0] * len(texts) if scores is None and not with_scores else scores if is_list else [scores]
        numbers = [float(value) for value in given] if isinstance(given, list) else []
    except (TypeError, ValueError, OverflowError):
        numbers = [math.nan]
    if len(numbers) != len(texts) or any(map(math.isnan, numbers)):
        must = "a list of one number for each candidate" if is_list else "a number"
        raise ValueError(f"{score!r} must be {must}, but is {shortened(scores)} instead in {place}.")
    texts = (unicodedata.normalize("NFC", text).strip() for text in texts)
    return unicodedata.normalize("NFC", cells[source]), list(zip(texts, numbers, strict=True))


@dataclass
class CandidateChoice:
    """Settings to choose one candidate per source as its target.

    `chrf` chooses the candidate most like the others (minimum Bayes risk: Kumar and Byrne, 2004; Finkelstein and
    Freitag, 2023, arXiv 2309.10966). `reverse` adds to the score, a log-probability per token, a quarter of the
    source's by a reverse model (a noisy channel: Yee et al., 2019, arXiv 1908.05731). `score` chooses the highest
    score. Ties go to the higher score, then to the first. Before the choice, candidates that break a cleaning rule or
    are not in the script of `language` (a code such as ko) are dropped; after it, repeated pairs.
    """

    method: str = "chrf"
    max_ratio: float | None = None
    language: str | None = None
    left_out: Counter[str] = field(default_factory=Counter, init=False)  # by reason
    repeated: int = field(default=0, init=False)  # sources that occurred again

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"`method` must be one of {', '.join(METHODS)}, but is {self.method!r} instead.")
        self._script = SCRIPTS_OF_LANGUAGES.get(code_of(self.language or "") or "")
        if self.language is not None and self._script is None:
            raise wrong("language", "be a language with one script, such as ko or Korean", repr(self.language))
        self._judge = Judge(CleaningRules(max_ratio=self.max_ratio, drop_duplicates=True, drop_identical=True))

    def check(self, rows: Iterable[Candidates]) -> None:
        """Read all rows, and refuse scores that `reverse` cannot add to a log-probability."""
        for source, candidates in rows:
            if self.method == "reverse" and (largest := max(score for _, score in candidates)) > 0:
                where = f"for reverse, but one is {largest:g} for {shortened(source)}"
                raise ValueError(f"'scores' must be log-probabilities per token, at most 0, {where}.")

    def pairs(self, rows: Iterable[Candidates], reverse: Any = None, **settings: Any) -> Iterator[dict[str, str]]:
        """Yield a `source` and a `target` for each source, in order. `reverse` is the reverse `Translator`."""
        if (reverse is None) == (self.method == "reverse"):
            found = f"{type(reverse).__name__} for {self.method}"
            raise ValueError(f"`reverse` must be a model for reverse, and None for others, but is {found} instead.")
        utility = character_f_score() if self.method == "chrf" else None
        kept = ((source, self._kept(source, candidates)) for source, candidates in rows)
        seen: set[bytes] = set()
        sources: set[int] = set()  # hashes, to save memory
        count = 0
        for source, candidates in kept if reverse is None else self._scored(kept, reverse, settings):
            plain = " ".join(source.split())  # for the rules; the pair keeps its own spaces
            self.repeated += hash(plain) in sources
            sources.add(hash(plain))
            texts = [text for text, _ in candidates]
            worth = expected_utilities(texts, utility) if utility else [score for _, score in candidates]
            target = max(zip(worth, texts, strict=True), key=itemgetter(0), default=(0, ""))[1]
            if self._judge.reason_to_drop(plain, " ".join(target.split()), 0, seen) is None:
                count += 1
                yield {"source": source, "target": target}
            else:
                self.left_out["pairs that came before" if texts else "sources without another"] += 1
        if not count:
            raise ValueError(f"`candidates` or `data` must give a usable candidate, but does not: {self.summary()}.")

    def _kept(self, source: str, candidates: list[tuple[str, float]]) -> list[tuple[str, float]]:
        seen: set[bytes] = set()
        kept = []
        for text, score in sorted(candidates, key=lambda candidate: -candidate[1]):  # the best of those repeated
            reason = self._judge.reason_to_drop(" ".join(source.split()), " ".join(text.split()), 0, seen)
            if reason is None and self._script is not None and lacks_script(text, self._script):
                reason = "language"
            if reason is None:
                kept.append((text, score))
            else:
                self.left_out[reason] += 1
        return kept

    def _scored(self, rows: Iterable[Candidates], reverse: Any, settings: dict[str, Any]) -> Iterator[Candidates]:
        """Add the weighted log-probability of the source to each candidate's score, and leave out long candidates."""
        rows, copies = tee(rows)
        given = ((text, source) for source, candidates in copies for text, _ in candidates)
        scores = reverse.score_pairs(given, keep_going=True, **settings)
        nats: list[float] = []
        for source, candidates in rows:
            found = zip(candidates, islice(scores, len(candidates)), strict=True)
            kept = [(text, own, score.per_token) for (text, own), score in found if score is not None]
            self.left_out["too long"] += len(candidates) - len(kept)
            if kept and len(nats) < JUDGED:
                nats.append(-kept[0][2])
                if len(nats) == JUDGED and (mean := fmean(nats)) > math.log(len(reverse.tokenizers.target)) / 2:
                    must = f"`reverse` must translate targets into sources, but the first {JUDGED} sources"
                    warnings.warn(f"{must} are improbable: {mean:.1f} nats a token.", stacklevel=2)
            yield source, [(text, own + REVERSE_WEIGHT * back) for text, own, back in kept]
        next(scores, None)  # it warns at its end

    def summary(self) -> str:
        """Return a line with the dropped candidates by cleaning rule, and the repeated sources."""
        found = ", ".join(f"{count:,} {why}" for why, count in self.left_out.items() if count) or "none"
        again = f"; {self.repeated:,} sources occurred again, each with a separate choice" if self.repeated else ""
        return f"left out: {found}{again}"
