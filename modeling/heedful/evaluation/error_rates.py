"""Error rates, for tasks with few right answers such as pronunciations, commands and spelling."""

import math
from collections.abc import Sequence

import numpy as np
import regex
from rapidfuzz.distance import Levenshtein

from heedful.symbols_heed import CHARACTER

# The units of an edit. Tokens have spaces between them. Characters are grapheme clusters (Unicode's UAX 29), several
# under a tie bar, and spaces.
UNITS = {"token_error_rate": str.split, "character_error_rate": regex.compile(CHARACTER).findall}
ERROR_RATES = tuple(UNITS)
PERCENTAGES = ("exact_match", *ERROR_RATES)


def counts_of(
    name: str, predictions: Sequence[str], references: Sequence[Sequence[str]], lowercase: bool
) -> np.ndarray:
    """Return the part and the whole of each prediction for one of the `PERCENTAGES`, `(predictions, 2)`."""
    pairs = zip(predictions, references, strict=True)
    if name == "exact_match":
        texts = (_plain([prediction, *accepted], lowercase) for prediction, accepted in pairs)
        return np.array([(int(prediction in accepted), 1) for prediction, *accepted in texts])
    found = (nearest(name, *pair, lowercase) for pair in pairs)
    return np.array([(edits, len(reference)) for edits, reference, _ in found])


def percentage(part: float, whole: float) -> float:
    """Return a share in percent; of nothing 0, or 100 if there is a part."""
    return float(100 * part / whole) if whole else 100.0 * bool(part)


def _plain(texts: Sequence[str], lowercase: bool) -> list[str]:
    return [text.strip().lower() if lowercase else text.strip() for text in texts]


def nearest(
    name: str, prediction: str, references: Sequence[str], lowercase: bool
) -> tuple[int, list[str], list[str]]:
    """Return the fewest edits relative to the length of a reference, and the units of both texts."""
    predicted, *candidates = map(UNITS[name], _plain([prediction, *references], lowercase))

    def distance(counted: tuple[int, list[str]]) -> tuple[float, int]:
        edits, length = counted[0], len(counted[1])
        return edits / length if length else (math.inf if edits else 0.0), length

    counts = [(Levenshtein.distance(candidate, predicted), candidate) for candidate in candidates]
    return *min(counts, key=distance), predicted
