"""Error rates and confusions, for tasks with few right answers, such as pronunciation, commands and spelling."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import regex
from rapidfuzz.distance import Levenshtein

from heedful.symbols_heed import CHARACTER

# An edit's units: tokens between spaces; characters (grapheme clusters, or several under a tie bar, and spaces).
UNITS = {"token_error_rate": str.split, "character_error_rate": regex.compile(CHARACTER).findall}
ErrorRate = Literal["token_error_rate", "character_error_rate"]
ERROR_RATES: tuple[str, ...] = get_args(ErrorRate)
PERCENTAGES = ("exact_match", *ERROR_RATES)
NO_TOKEN = "–"  # in tables
EDITS = {"replace": "substitution", "insert": "insertion", "delete": "deletion"}  # keys: rapidfuzz's names


def counts_of(
    name: str, predictions: Sequence[str], references: Sequence[Sequence[str]], lowercase: bool
) -> np.ndarray:
    """Return each prediction's part and whole for one of the `PERCENTAGES`, `(predictions, 2)`."""
    pairs = zip(predictions, references, strict=True)
    if name == "exact_match":
        texts = (_plain([prediction, *accepted], lowercase) for prediction, accepted in pairs)
        return np.array([(int(prediction in accepted), 1) for prediction, *accepted in texts])
    found = (nearest(name, *pair, lowercase) for pair in pairs)
    return np.array([(edits, len(reference)) for edits, reference, _ in found])


def percentage(part: float, whole: float) -> float:
    """Return a share in percent; if the whole is 0, return 0, or 100 if there is a part."""
    return float(100 * part / whole) if whole else 100.0 * bool(part)


def _plain(texts: Sequence[str], lowercase: bool) -> list[str]:
    return [text.strip().lower() if lowercase else text.strip() for text in texts]


def nearest(
    name: str, prediction: str, references: Sequence[str], lowercase: bool
) -> tuple[int, list[str], list[str]]:
    """Return the fewest edits, relative to the reference's length, and both texts' units."""
    predicted, *candidates = map(UNITS[name], _plain([prediction, *references], lowercase))

    def distance(counted: tuple[int, list[str]]) -> tuple[float, int]:
        edits, length = counted[0], len(counted[1])
        return edits / length if length else (math.inf if edits else 0.0), length

    counts = [(Levenshtein.distance(candidate, predicted), candidate) for candidate in candidates]
    return *min(counts, key=distance), predicted


def commonest_confusions(
    predictions: Sequence[str], references: Sequence[Sequence[str]], sources: Sequence[str], most: int, lowercase: bool
) -> list[dict[str, Any]]:
    """Return the `most` frequent edits between the nearest references and the predictions, the commonest first.

    Each has `edit`, the tokens in `reference` and `prediction` (or None), `count`, and as `example` the first pair
    with it. Tokens are characters if nine of ten references have no space.
    """
    are_words = sum(len(accepted[0].split()) < 2 for accepted in references) > 0.9 * len(references)
    unit, space = ("character_error_rate", "") if are_words else ("token_error_rate", " ")
    counts: Counter[tuple[str | None, ...]] = Counter()
    examples: dict[tuple[str | None, ...], dict[str, Any]] = {}
    texts = zip(predictions, references, sources, strict=True)
    for number, (prediction, alternatives, source) in enumerate(texts, start=1):
        _, reference, predicted = nearest(unit, prediction, alternatives, lowercase)
        sides = {"reference": space.join(reference), "prediction": space.join(predicted)}
        for found in Levenshtein.editops(reference, predicted):
            wanted = None if found.tag == "insert" else reference[found.src_pos]
            edit = EDITS[found.tag], wanted, None if found.tag == "delete" else predicted[found.dest_pos]
            counts[edit] += 1
            examples.setdefault(edit, {"number": number, "source": source, **sides})
    names = "edit", "reference", "prediction"
    return [
        dict(zip(names, edit, strict=True)) | {"count": count, "example": examples[edit]}
        for edit, count in counts.most_common(most)
    ]


def confusions_table(confusions: Sequence[dict[str, Any]]) -> str:
    """Write the result from `commonest_confusions` as text."""
    lines = ["commonest confusions: reference → prediction, and the first pair: source | reference | prediction"]
    for found in confusions:
        edit = f"{found['reference'] or NO_TOKEN} → {found['prediction'] or NO_TOKEN}"
        example = "{number}: {source} | {reference} | {prediction}".format(**found["example"])
        lines.append(f"{found['count']:>8,}  {edit:<20}  {example}")
    return "\n".join(lines if confusions else [*lines, "    none"])
