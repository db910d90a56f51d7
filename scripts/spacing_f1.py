"""Score spaces: precision, recall and F1 of those in predictions, among the letters of the references.

    heedful evaluate MODEL --data test.jsonl --predictions predictions.txt
    python scripts/spacing_f1.py test.jsonl predictions.txt

A space counts as right if the reference has one between the same two letters. Where a prediction has lost or added
letters, the others are found by the fewest edits.
"""

import argparse
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

from rapidfuzz.distance import Indel

from heedful.data.sources import read_pairs
from heedful.evaluation.comparison import read_predictions


def spaces_of(text: str) -> tuple[str, set[int]]:
    """Return a text without its spaces, and before which of its letters they were."""
    words = text.split()
    return "".join(words), set(accumulate(map(len, words[:-1])))


def counts(prediction: str, reference: str) -> tuple[int, int, int]:
    """Return how many spaces are right, how many were predicted, and how many there should be."""
    letters, predicted = spaces_of(prediction)
    right_letters, expected = spaces_of(reference)
    places = {
        block.src_start + offset: block.dest_start + offset
        for block in Indel.opcodes(letters, right_letters)
        if block.tag == "equal"
        for offset in range(1, block.src_end - block.src_start)  # between two letters that both texts have
    }
    right = expected & {places.get(place) for place in predicted}
    return len(right), len(predicted), len(expected)


def spacing_scores(pairs: Iterable[tuple[str, str]]) -> tuple[float, float, float]:
    """Return precision, recall and F1 in percent of (prediction, reference) pairs."""
    right, predicted, expected = map(sum, zip(*(counts(*pair) for pair in pairs), strict=True))
    precision, recall = right / max(1, predicted), right / max(1, expected)
    return 100 * precision, 100 * recall, 200 * precision * recall / max(1e-9, precision + recall)


def main() -> None:
    """Print the scores of a file of predictions, one a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "data", help="pairs with the columns source and target, as `heedful pairs spacing` writes them"
    )
    parser.add_argument("predictions", type=Path)
    arguments = parser.parse_args()
    targets = read_pairs(arguments.data, "source", "target")["target"][:]
    predictions = read_predictions(arguments.predictions, len(targets))
    precision, recall, f1 = spacing_scores(zip(predictions, targets, strict=True))
    print(f"spaces: precision {precision:.2f}, recall {recall:.2f}, F1 {f1:.2f}")


if __name__ == "__main__":
    main()
