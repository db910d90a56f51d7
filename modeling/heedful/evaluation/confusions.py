"""The commonest confusions of tokens."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rapidfuzz.distance import Levenshtein

from heedful.evaluation.error_rates import nearest

NO_TOKEN = "–"  # in a table
EDITS = {"replace": "substitution", "insert": "insertion", "delete": "deletion"}  # by rapidfuzz's names


def commonest_confusions(
    predictions: Sequence[str], references: Sequence[Sequence[str]], sources: Sequence[str], most: int, lowercase: bool
) -> list[dict[str, Any]]:
    """Return the `most` frequent edits between the nearest references and the predictions, the commonest first.

    Each has its `edit`, its token in `reference` and `prediction` (or None), its `count`, and the first pair with it
    as `example`. Tokens are characters if nine of ten references have no space.
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
    """Write a result of `commonest_confusions` as text."""
    lines = ["commonest confusions: reference → prediction, and the first pair: source | reference | prediction"]
    for found in confusions:
        edit = f"{found['reference'] or NO_TOKEN} → {found['prediction'] or NO_TOKEN}"
        example = "{number}: {source} | {reference} | {prediction}".format(**found["example"])
        lines.append(f"{found['count']:>8,}  {edit:<20}  {example}")
    return "\n".join(lines if confusions else [*lines, "    none"])
