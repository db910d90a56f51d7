"""How good a translation is likely to be, by its score: a curve that validation pairs calibrate."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from heedful.files import read_object, write_text
from heedful.inference.loading import model_folder

CONFIDENCE_FILE = "confidence.json"
MOST, FEWEST = 500, 100  # sentences to calibrate with
STEPS = 20  # of the curve, at most
BINS = 5  # of the reliability curve


@dataclass(frozen=True)
class Confidence:
    """A curve from the score of a translation to its likely quality, for one way of decoding.

    It never falls (isotonic regression: Zadrozny and Elkan, 2002), and is straight between two of its `scores`.
    """

    measure: Literal["chrf", "exact_match"]  # of the sentence, from 0 to 100; the probability that it is right
    num_beams: int
    scores: list[float]
    values: list[float]  # of the measure, in percent
    # By halves of the sentences, each with the curve of the other half: what was said on average of the sentences of a
    # bin, what they had, and how many they are.
    reliability: list[tuple[float, float, int]]

    def __post_init__(self) -> None:
        if len(self.scores) != len(self.values) or not self.scores or self.scores != sorted(self.scores):
            raise ValueError(f"`scores` of {CONFIDENCE_FILE} must rise, with a value each, but are {self.scores}.")

    @classmethod
    def of_pairs(
        cls, translations: Sequence[Any], accepted: Sequence[Sequence[str]], exact: bool, num_beams: int
    ) -> Self | None:
        """Calibrate with translations (`text` and `score`) and all that is right; `None` where they are too few."""
        if len(translations) < FEWEST:
            return None
        given = np.array([each.score for each in translations], dtype=float)
        found = np.array([quality(one.text, right, exact) for one, right in zip(translations, accepted, strict=True)])
        half = np.arange(len(given)) % 2 == 0
        said = np.where(half, *(np.interp(given, *_curve(given[one], found[one])) for one in (~half, half)))
        bins = np.array_split(np.argsort(said, kind="stable"), BINS)
        reliability = [(round(said[each].mean(), 2), round(found[each].mean(), 2), len(each)) for each in bins]
        xs, ys = ([round(float(value), 4) for value in side] for side in _curve(given, found))
        return cls("exact_match" if exact else "chrf", num_beams, xs, ys, reliability)

    @classmethod
    def from_pretrained(cls, model: str | Path, revision: str | None = None, num_beams: int | None = None) -> Self:
        """Read that of a model, in a folder or on the Hub; a `ValueError` says that it has none for these beams."""
        place = Path(model_folder(model, revision)) / CONFIDENCE_FILE
        if not place.is_file():
            which = f"a model that `heedful train` calibrated with {FEWEST} validation pairs or more"
            raise ValueError(f"`--confidence` must be asked of {which}, but {place} does not exist.")
        try:
            found = cls(**read_object(place))
        except TypeError as error:
            raise ValueError(f"{place} must be as `heedful train` writes it: {error}.") from None
        if num_beams not in (None, found.num_beams):
            must = f"{found.num_beams} with `--confidence`, which was calibrated so"
            raise ValueError(f"`--num-beams` must be {must}, but is {num_beams} instead.")
        return found

    def save(self, folder: Path) -> None:
        """Write it into a model's folder."""
        write_text(folder / CONFIDENCE_FILE, json.dumps(asdict(self), indent=2) + "\n")

    def of(self, score: float) -> float:
        """Return the likely quality of a translation with this score, in percent."""
        return float(np.interp(score, self.scores, self.values))


def quality(text: str, accepted: Sequence[str], exact: bool) -> float:
    """Return chrF of a text, or 100 and 0 for right and wrong, against all that is right."""
    if exact:
        return 100.0 * (text.strip() in (each.strip() for each in accepted))
    from sacrebleu.metrics import CHRF

    return CHRF().sentence_score(text, accepted).score


def _curve(scores: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Average neighbours by score, and pool those that fall (pool adjacent violators)."""
    steps = np.array_split(np.argsort(scores, kind="stable"), min(STEPS, len(scores) // 10))
    pools: list[list[np.ndarray]] = []
    for step in steps:
        pools.append([step])
        while len(pools) > 1 and values[np.concatenate(pools[-2])].mean() >= values[np.concatenate(pools[-1])].mean():
            pools[-2:] = [pools[-2] + pools[-1]]
    joined = [np.concatenate(pool) for pool in pools]
    return np.array([scores[pool].mean() for pool in joined]), np.array([values[pool].mean() for pool in joined])
