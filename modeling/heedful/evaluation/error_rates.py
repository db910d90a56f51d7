"""Scores for tasks with few right answers, such as pronunciations, commands and spelling; the commonest confusions.

`score_translations` says what an error rate is. rapidfuzz counts the edits.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import regex
from rapidfuzz.distance import Levenshtein

# What an edit changes. A token is what is between spaces: a word, a phoneme, a command. A character is what a
# reader takes for one, with its accents (a grapheme cluster, Unicode's UAX 29); spaces inside a text are some too.
UNITS = {"token_error_rate": str.split, "character_error_rate": regex.compile(r"\X").findall}
ERROR_RATES = tuple(UNITS)
PERCENTAGES = ("exact_match", *ERROR_RATES)
NO_TOKEN = "–"  # in a table, where one side has none
EDITS = {"replace": "substitution", "insert": "insertion", "delete": "deletion"}  # by rapidfuzz's names


def counts_of(
    name: str, predictions: Sequence[str], references: Sequence[Sequence[str]], lowercase: bool
) -> np.ndarray:
    """Return for each prediction the part and the whole that one of the `PERCENTAGES` adds up, `(predictions, 2)`."""
    pairs = zip(predictions, references, strict=True)
    if name == "exact_match":
        texts = (_plain([prediction, *accepted], lowercase) for prediction, accepted in pairs)
        return np.array([(int(prediction in accepted), 1) for prediction, *accepted in texts])
    nearest = (_nearest(name, *pair, lowercase) for pair in pairs)
    return np.array([(edits, len(reference)) for edits, reference, _ in nearest])


def percentage(part: float, whole: float) -> float:
    """Return a share in percent; of an empty whole, 0 or, if there is a part, 100."""
    return float(100 * part / whole) if whole else 100.0 * bool(part)


def _plain(texts: Sequence[str], lowercase: bool) -> list[str]:
    return [text.strip().lower() if lowercase else text.strip() for text in texts]


def _nearest(
    name: str, prediction: str, references: Sequence[str], lowercase: bool
) -> tuple[int, list[str], list[str]]:
    """Return the fewest edits for the length of a reference, the units of that reference, and of the prediction."""
    predicted, *candidates = map(UNITS[name], _plain([prediction, *references], lowercase))

    def distance(counted: tuple[int, list[str]]) -> tuple[float, int]:
        edits, length = counted[0], len(counted[1])
        return edits / length if length else (math.inf if edits else 0.0), length

    counts = [(Levenshtein.distance(candidate, predicted), candidate) for candidate in candidates]
    return *min(counts, key=distance), predicted


def commonest_confusions(
    predictions: Sequence[str], references: Sequence[Sequence[str]], sources: Sequence[str], most: int, lowercase: bool
) -> list[dict[str, Any]]:
    """Return the commonest edits between the tokens of nearest references and predictions, at most `most`.

    Each has its `edit` (substitution, insertion or deletion), its token in the `reference` and in the `prediction`
    (None where there is none), its `count`, and as `example` the first pair that has it: `number`, from 1, `source`,
    `reference` and `prediction`. The commonest is first; of equally common ones, that of the first pair.
    """
    counts: Counter[tuple] = Counter()
    examples: dict[tuple, dict[str, Any]] = {}
    texts = zip(predictions, references, sources, strict=True)
    for number, (prediction, alternatives, source) in enumerate(texts, start=1):
        _, reference, predicted = _nearest("token_error_rate", prediction, alternatives, lowercase)
        sides = {"reference": " ".join(reference), "prediction": " ".join(predicted)}
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
    """Write what `commonest_confusions` returned for people to read."""
    lines = ["commonest confusions: reference → prediction, and the first pair: source | reference | prediction"]
    for found in confusions:
        edit = f"{found['reference'] or NO_TOKEN} → {found['prediction'] or NO_TOKEN}"
        example = "{number}: {source} | {reference} | {prediction}".format(**found["example"])
        lines.append(f"{found['count']:>8,}  {edit:<20}  {example}")
    return "\n".join(lines if confusions else [*lines, "    none"])
