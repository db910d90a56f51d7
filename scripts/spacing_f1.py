"""Score predicted spaces against references: precision, recall and F1.

    heedful evaluate MODEL --data test.jsonl --predictions predictions.txt
    python scripts/spacing_f1.py test.jsonl predictions.txt
    python scripts/spacing_f1.py test.jsonl MODEL --num-beams 8

A space is right if the reference has a space between the same two letters. If a prediction has lost or added letters,
the smallest number of edits aligns the others. In the third form the model writes the source's letters in order, and
only decides on spaces.
"""

import argparse
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from rapidfuzz.distance import Indel

from heedful import HeedForConditionalGeneration, TokenizerPair
from heedful.data.sources import read_pairs
from heedful.decoding.engines import pad_sources
from heedful.evaluation.comparison import read_predictions

BATCH = 64  # texts


def put_spaces(model: Any, tokenizers: TokenizerPair, texts: list[str], beams: int) -> list[str]:
    """Return the texts with spaces from a character model with one vocabulary."""
    space = tokenizers.encode_target(["a b"])[0][1]
    encoded = tokenizers.source(texts, return_offsets_mapping=True)
    order = sorted(range(len(texts)), key=lambda number: len(encoded["input_ids"][number]))
    found = {}
    for first in range(0, len(order), BATCH):
        numbers = order[first : first + BATCH]
        batch = [encoded["input_ids"][number] for number in numbers]
        places = [[start for start, _ in encoded["offset_mapping"][number]] for number in numbers]

        def allowed(row: int, tokens: torch.Tensor, batch: Any = batch, places: Any = places) -> list[int]:
            written = tokens[1:].tolist()  # after the start token
            number = len(written) - written.count(space)
            if number >= len(batch[row]):  # all written: padding
                return [tokenizers.pad_token_id]
            # An unknown letter has several tokens with its place; </s> has 0.
            is_between_letters = number > 0 and places[row][number] > places[row][number - 1]
            may_be_space = is_between_letters and written[-1] != space
            return [batch[row][number], space] if may_be_space else [batch[row][number]]

        inputs = pad_sources(batch, tokenizers.pad_token_id, model.device)
        lengths = {"max_new_tokens": 2 * inputs["input_ids"].shape[1], "max_length": None}
        rows = model.generate(**inputs, **lengths, num_beams=beams, prefix_allowed_tokens_fn=allowed)
        found |= zip(numbers, tokenizers.decode_target(rows.tolist()), strict=True)
    return [found[number] for number in range(len(texts))]


def spaces_of(text: str) -> tuple[str, set[int]]:
    """Return a text without spaces, and the places of letters after a space."""
    words = text.split()
    return "".join(words), set(accumulate(map(len, words[:-1])))


def counts(prediction: str, reference: str) -> tuple[int, int, int]:
    """Return the numbers of right, predicted and expected spaces."""
    letters, predicted = spaces_of(prediction)
    right_letters, expected = spaces_of(reference)
    places = {
        block.src_start + offset: block.dest_start + offset
        for block in Indel.opcodes(letters, right_letters)
        if block.tag == "equal"
        for offset in range(1, block.src_end - block.src_start)  # between two common letters
    }
    right = expected & {places.get(place) for place in predicted}
    return len(right), len(predicted), len(expected)


def spacing_scores(pairs: Iterable[tuple[str, str]]) -> tuple[float, float, float]:
    """Return precision, recall and F1 in percent of (prediction, reference) pairs."""
    right, predicted, expected = map(sum, zip(*(counts(*pair) for pair in pairs), strict=True))
    precision, recall = right / max(1, predicted), right / max(1, expected)
    return 100 * precision, 100 * recall, 200 * precision * recall / max(1e-9, precision + recall)


def main() -> None:
    """Print the scores for a prediction file (one a line) or a model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="file of pairs (`source`, `target`) from `heedful pairs spacing`")
    parser.add_argument("predictions", type=Path, help="file of predictions, or a model's folder")
    parser.add_argument("--num-beams", type=int, default=8, help="of a model")
    arguments = parser.parse_args()
    pairs = read_pairs(arguments.data, "source", "target")
    sources, targets = pairs["source"][:], pairs["target"][:]
    if arguments.predictions.is_dir():
        model = HeedForConditionalGeneration.from_pretrained(arguments.predictions).eval()
        tokenizers = TokenizerPair.from_pretrained(arguments.predictions)
        predictions = put_spaces(model, tokenizers, sources, arguments.num_beams)
    else:
        predictions = read_predictions(arguments.predictions, len(targets))
    precision, recall, f1 = spacing_scores(zip(predictions, targets, strict=True))
    print(f"spaces: precision {precision:.2f}, recall {recall:.2f}, F1 {f1:.2f}")


if __name__ == "__main__":
    main()
