"""A teacher's probabilities for given targets: the `heedful distill-tokens` folder, and its rows in training.

This is word-level distillation (Kim and Rush, 2016, "Sequence-Level Knowledge Distillation", section 3.1), with only
the k most probable tokens (Tan et al., 2019, "Multilingual Neural Machine Translation with Knowledge Distillation").
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from heedful.checksums_heed import checksum
from heedful.configuration_base_heed import IGNORED_LABEL
from heedful.data.epochs.encoding import EncodedPairs
from heedful.data.tokenization import TokenizerPair
from heedful.files import first_line, read_object

FACTS = "distillation.json"
# For R rows with N target tokens: `(R)` sorted keys and row starts, `(N, k)` tokens and probabilities.
ARRAYS = ("keys", "starts", "tokens", "probabilities")
# Additional columns of rows and batches, with an entry for each label.
TEACHER_COLUMNS = ("teacher_tokens", "teacher_probabilities")


def key_of(input_ids: Sequence[int], labels: Sequence[int]) -> int:
    """Return 64 bits that identify a row."""
    ids = np.array([*input_ids, IGNORED_LABEL, *labels], np.int32)
    return int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest(), "little", signed=True)


class TeacherTokens:
    """A teacher's tokens in a folder, mapped into memory."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        try:
            self._facts = read_object(self.folder / FACTS)
            arrays = (np.load(self.folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS)
            self._keys, self._starts, self._tokens, self._probabilities = arrays
        except (OSError, ValueError, EOFError) as error:
            raise self._mistake(f"a folder of `heedful distill-tokens`, but is not: {first_line(error)}") from error

    def _mistake(self, must: str) -> ValueError:
        return ValueError(f"`optimization.distillation` ({self.folder}) must be {must}")

    def check(self, tokenizers: TokenizerPair, rows: EncodedPairs | tuple[()] = ()) -> str:
        """Return a checksum; raise a `ValueError` for other tokenizers, changed files or missing rows."""
        if self._facts.get("tokenizer") != tokenizers.fingerprint():
            raise self._mistake("made with this tokenizer, but is not: set `tokenizer.path` to the teacher's.")
        checksums, fingerprint = self._facts.get("checksums"), checksum(self.folder / FACTS)
        if len(rows) and {name: checksum(self.folder / f"{name}.npy") for name in ARRAYS} != checksums:
            raise self._mistake("unchanged, but is damaged or changed.")
        for row in map(rows.__getitem__, range(len(rows))):
            if self._place(**row) is None:
                source = tokenizers.source.decode(row["input_ids"], skip_special_tokens=True)
                (target,) = tokenizers.decode_target([row["labels"]])
                raise self._mistake(f"made from all training pairs, but lacks {source!r} with {target!r}.")
        return fingerprint

    def _place(self, input_ids: Sequence[int], labels: Sequence[int]) -> slice | None:
        key = key_of(input_ids, labels)
        number = int(np.searchsorted(self._keys, key))
        if number == len(self._keys) or self._keys[number] != key:
            return None
        return slice(self._starts[number], self._starts[number] + len(labels))

    def with_tokens(self, row: Mapping[str, list[int]]) -> dict[str, Any]:
        """Return a row with `TEACHER_COLUMNS`, `(length, k)` each."""
        place = self._place(row["input_ids"], row["labels"])
        return {**row, **dict(zip(TEACHER_COLUMNS, (self._tokens[place], self._probabilities[place]), strict=True))}


def teacher_tensors(rows: Sequence[Mapping[str, Any]], labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return tokens and probabilities `(…, k)` at each label, which sum to 1, or nothing without a teacher."""
    tensors: dict[str, torch.Tensor] = {}
    if TEACHER_COLUMNS[0] not in rows[0]:
        return tensors
    for name, kind in zip(TEACHER_COLUMNS, (np.int64, np.float32), strict=True):
        values = np.concatenate([row[name] for row in rows]).astype(kind)
        values = values / values.sum(-1, keepdims=True) if kind is np.float32 else values
        tensors[name] = torch.zeros((*labels.shape, values.shape[-1]), dtype=getattr(torch, kind.__name__))
        tensors[name][labels != IGNORED_LABEL] = torch.from_numpy(values)
    return tensors
