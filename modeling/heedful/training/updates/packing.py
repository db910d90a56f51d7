"""Rows laid end to end: the tensors of a micro-batch in few shapes, as `packed_rows_heed.py` reads them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from heedful.configuration_base_heed import IGNORED_LABEL
from heedful.packed_rows_heed import EndToEnd, Packing

SHORTEST_LIMIT = 256  # tokens: rows up to this length share a program
# Each side is filled up to a multiple of a step: a sixteenth of the token budget, in units for fast matrix products.
STEPS, UNIT, LARGEST_STEP = 16, 64, 2048
# Added rows at most, and tokens at least on each side: each row needs a token, as attention to no key is not a number.
FILLING_ROWS = 16


def laid_end_to_end(
    rows: Sequence[Mapping[str, Sequence[int]]], token_budget: int, pad_token_id: int, start_token_id: int
) -> dict[str, Any]:
    """Make a micro-batch's tensors of at least one row of token ids.

    They are `input_ids` `(1, source tokens)`, filled up with padding, `decoder_input_ids` and `labels`
    `(1, target tokens)`, filled up with -100, all int64, and `packing`.
    """
    lengths = np.array([(len(row["input_ids"]), len(row["labels"])) for row in rows])  # (rows, 2)
    step = min(max(token_budget // STEPS // UNIT, 1) * UNIT, LARGEST_STEP)
    known = lengths.sum(0)
    filled = -(-(known + FILLING_ROWS) // step) * step
    longest = max(SHORTEST_LIMIT, 1 << int(lengths.max() - 1).bit_length())
    more = -(-int((filled - known).max()) // longest)  # rows to add
    source, target = (_side(lengths[:, side], int(filled[side]), more, longest) for side in range(2))
    ids = np.full(filled[0], pad_token_id, np.int64)
    ids[: known[0]] = np.concatenate([row["input_ids"] for row in rows])
    labels = np.full(filled[1], IGNORED_LABEL, np.int64)
    labels[: known[1]] = np.concatenate([row["labels"] for row in rows])
    # The input at each label: the label before it, and the start token at the start of a row.
    shifted = np.full(filled[1], pad_token_id, np.int64)
    shifted[1 : known[1]] = labels[: known[1] - 1]
    shifted[target.bounds[: len(rows)].numpy()] = start_token_id
    named = {"input_ids": ids, "decoder_input_ids": shifted, "labels": labels}
    tensors: dict[str, Any] = {name: torch.from_numpy(values)[None] for name, values in named.items()}
    return tensors | {"packing": Packing(target, source)}


def _side(lengths: np.ndarray, filled: int, more: int, longest: int) -> EndToEnd:
    """Return the places of rows with `(rows,)` lengths, and of `more` rows that fill them up to `filled` tokens."""
    left = filled - int(lengths.sum())
    lengths = np.concatenate([lengths, np.diff(np.arange(more + 1) * left // more)])
    starts = np.concatenate([[0], lengths.cumsum()])
    positions = np.arange(filled) - np.repeat(starts[:-1], lengths)
    # Empty rows at the end, because the number of rows is in a batch's shape too.
    bounds = np.full(1 + (1 << (len(lengths) - 1).bit_length()), filled, np.int32)
    bounds[: len(starts)] = starts
    return EndToEnd(torch.from_numpy(bounds), torch.from_numpy(positions)[None], longest)
