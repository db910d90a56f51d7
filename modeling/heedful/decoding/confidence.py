"""A translation's likely quality from its score: a curve calibrated on validation pairs."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from transformers import GenerationConfig

from heedful.decoding.engines import Translation
from heedful.decoding.loading import model_folder
from heedful.decoding.search_settings import asked_of
from heedful.files import read_object, write_text

CONFIDENCE_FILE = "confidence.json"
MOST, FEWEST = 500, 100  # calibration sentences
STEPS = 20  # most points of the curve
BINS = 5  # bins of the reliability curve
UNFAMILIAR = 0.01  # share of held-out sources counted as another kind of text
Numbers = Sequence[float] | np.ndarray


@dataclass(frozen=True)
class Confidence:
    """A curve from a translation's score to its likely quality, for one decoding method and kind of text.

    It never falls (isotonic regression: Zadrozny and Elkan, 2002), and is linear between its `scores`. Below the
    lowest score it falls to 0 as exp(1 - score / lowest score).
    """

    measure: Literal["chrf", "exact_match"]  # 0 to 100: the probability of being right
    num_beams: int
    scores: list[float]
    values: list[float]  # values of the measure, in percent
    # Per bin: mean prediction by the other half's curve, mean quality, and number of sentences.
    reliability: list[tuple[float, float, int]]
    settings: dict[str, Any] = field(default_factory=dict)  # search settings that change an output
    tokens: str = ""  # per source token: "0" + the bits of its training count
    familiarity: float = 0.0  # the lowest value for sources like those in training

    def __post_init__(self) -> None:
        numbers = all(isinstance(each, int | float) for each in (*self.scores, *self.values, self.familiarity))
        if not (numbers and isinstance(self.tokens, str) and isinstance(self.settings, dict)):
            raise TypeError("a field has the wrong type")
        if len(self.scores) != len(self.values) or not self.scores or self.scores != sorted(self.scores):
            raise ValueError(f"`scores` of {CONFIDENCE_FILE} must rise and have a value each, but are {self.scores}.")

    @classmethod
    def of_pairs(
        cls, translations: Sequence[Translation], accepted: Sequence[Sequence[str]], exact: bool, num_beams: int
    ) -> Self | None:
        """Calibrate on translations (`text` and `score`) and their accepted texts; `None` if too few."""
        if len(translations) < FEWEST:
            return None
        given = np.array([each.score or 0.0 for each in translations])  # a blank line has none
        found = np.array([quality(one.text, right, exact) for one, right in zip(translations, accepted, strict=True)])
        half = np.arange(len(given)) % 2 == 0
        said = np.where(half, *(_read(given, *_curve(given[one], found[one])) for one in (~half, half)))
        bins = np.array_split(np.argsort(said, kind="stable"), BINS)
        reliability = [(round(said[each].mean(), 2), round(found[each].mean(), 2), len(each)) for each in bins]
        xs, ys = ([round(float(value), 4) for value in side] for side in _curve(given, found))
        return cls("exact_match" if exact else "chrf", num_beams, xs, ys, reliability)

    def for_kind(self, settings: dict[str, Any], tokens: np.ndarray, held_out: Sequence[Sequence[int]]) -> Self:
        """Return a copy with a search's settings, all source tokens from training, and the ids of other sources."""
        digits = "".join(chr(ord("0") + int(count).bit_length()) for count in np.bincount(tokens))
        found = replace(self, settings=settings, tokens=digits)
        least = np.quantile([found.familiarity_of(ids) for ids in held_out], UNFAMILIAR)
        return replace(found, familiarity=round(float(least), 4))

    @classmethod
    def from_pretrained(cls, model: str | Path, revision: str | None = None) -> Self:
        """Load a model's confidence from a folder or the Hub; a `ValueError` if it has none."""
        place = Path(model_folder(model, revision)) / CONFIDENCE_FILE
        if not place.is_file():
            which = f"a model that `heedful train` calibrated with at least {FEWEST} validation pairs"
            raise ValueError(f"`--confidence` needs {which}, but {place} does not exist.")
        try:
            return cls(**read_object(place))
        except TypeError as error:
            raise ValueError(f"{place} must have the fields that `heedful train` writes: {error}.") from None

    def check(self, config: GenerationConfig, target_language: str | None, num_beams: int | None = None) -> None:
        """Raise a `ValueError` for an uncalibrated search setting, or other `num_beams`."""
        now, own = settings_of(config, target_language), {"num_beams": self.num_beams, **self.settings}
        now["num_beams"] = num_beams or now["num_beams"]
        for name in sorted({*now, *own}):
            if now.get(name) != own.get(name):
                must = f"{own.get(name, 'left out')} with `--confidence`, which is not calibrated for another value"
                raise ValueError(f"`{name}` must be {must}, but is {now.get(name, 'left out')} instead.")

    def save(self, folder: Path) -> None:
        """Write the curve into a model's folder."""
        write_text(folder / CONFIDENCE_FILE, json.dumps(asdict(self), indent=2) + "\n")

    def of(self, score: float) -> float:
        """Return a translation's likely quality in percent from its score."""
        return float(_read(score, self.scores, self.values))

    def of_translation(self, translation: Translation, ids: Sequence[int]) -> float | None:
        """Return a translation's likely quality; `None` if it was cut off, or its source is unlike training."""
        is_alike = not self.tokens or self.familiarity_of(ids) >= self.familiarity
        score = translation.score if translation.finished and is_alike else None
        return None if score is None else self.of(score)

    def familiarity_of(self, ids: Sequence[int]) -> float:
        """Return how often a source's tokens occurred in training: mean bits of the counts."""
        return float(np.mean([ord(self.tokens[token : token + 1] or "0") - ord("0") for token in ids]))


def settings_of(generation_config: GenerationConfig, target_language: str | None) -> dict[str, Any]:
    """Return a search's settings that change an output, always with `num_beams`."""
    language = {} if target_language is None else {"target_language": target_language}
    return asked_of(generation_config) | {"num_beams": generation_config.num_beams or 1} | language


def quality(text: str, accepted: Sequence[str], exact: bool) -> float:
    """Return a text's chrF, or 100 or 0 for right or wrong."""
    if exact:
        return 100.0 * (text.strip() in (each.strip() for each in accepted))
    from sacrebleu.metrics import CHRF

    return float(CHRF().sentence_score(text, accepted).score)


def _read(scores: np.ndarray | float, xs: Numbers, ys: Numbers) -> np.ndarray:
    """Return a curve's values at scores (at most 0). Below the lowest score, that score is the scale."""
    beyond = np.exp(np.minimum(0.0, 1 - np.asarray(scores) / min(xs[0], -1e-9)))
    return np.asarray(np.interp(scores, xs, ys) * beyond)


def _curve(scores: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Average neighbours by score, and pool falling ones (pool adjacent violators)."""
    steps = np.array_split(np.argsort(scores, kind="stable"), min(STEPS, len(scores) // 10))
    pools: list[list[np.ndarray]] = []
    for step in steps:
        pools.append([step])
        while len(pools) > 1 and values[np.concatenate(pools[-2])].mean() >= values[np.concatenate(pools[-1])].mean():
            pools[-2:] = [pools[-2] + pools[-1]]
    joined = [np.concatenate(pool) for pool in pools]
    return np.array([scores[pool].mean() for pool in joined]), np.array([values[pool].mean() for pool in joined])
