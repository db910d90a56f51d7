"""What a teacher says of given targets: the folder that `heedful distill-tokens` writes, and its rows in training.

Kim and Rush, "Sequence-Level Knowledge Distillation", 2016, section 3.1 (there word-level). Only the k most probable
tokens are kept, as by Tan et al., "Multilingual Neural Machine Translation with Knowledge Distillation", 2019.
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
# Of R rows with N target tokens: `(R)` keys, sorted, and where the tokens of each row start; `(N, k)` the teacher's.
ARRAYS = ("keys", "starts", "tokens", "probabilities")
# What a row has besides its ids, an entry for each label, and a batch likewise.
TEACHER_COLUMNS = ("teacher_tokens", "teacher_probabilities")


def key_of(input_ids: Sequence[int], labels: Sequence[int]) -> int:
    """Return 64 bits by which a row is known."""
    ids = np.array([*input_ids, IGNORED_LABEL, *labels], np.int32)
    return int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest(), "little", signed=True)


class TeacherTokens:
    """A teacher's tokens in a folder, mapped into memory and not read as a whole; a `ValueError` if it holds none."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        try:
            self._facts = read_object(self.folder / FACTS)
            arrays = (np.load(self.folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS)
            self._keys, self._starts, self._tokens, self._probabilities = arrays
        except (OSError, ValueError, EOFError) as error:
            raise self._mistake(f"what `heedful distill-tokens` wrote, but is not: {first_line(error)}") from error

    def _mistake(self, must: str) -> ValueError:
        return ValueError(f"`optimization.distillation` ({self.folder}) must be {must}")

    def check(self, tokenizers: TokenizerPair, rows: EncodedPairs | tuple[()] = ()) -> str:
        """Return a checksum; other tokenizers, a change of the files or a row that they lack are a `ValueError`."""
        if self._facts.get("tokenizer") != tokenizers.fingerprint():
            raise self._mistake("of the student's tokenizer, but is not: set `tokenizer.path` to the teacher's.")
        checksums = self._facts.get("checksums")
        if len(rows) and {name: checksum(self.folder / f"{name}.npy") for name in ARRAYS} != checksums:
            raise self._mistake("as it was written, but is damaged or changed.")
        for row in map(rows.__getitem__, range(len(rows))):
            if self._place(**row) is None:
                source = tokenizers.source.decode(row["input_ids"], skip_special_tokens=True)
                (target,) = tokenizers.decode_target([row["labels"]])
                raise self._mistake(f"of all training pairs, but lacks {source!r} with {target!r}.")
        return checksum(self.folder / FACTS)

    def _place(self, input_ids: Sequence[int], labels: Sequence[int]) -> slice | None:
        key = key_of(input_ids, labels)
        number = int(np.searchsorted(self._keys, key))
        if number == len(self._keys) or self._keys[number] != key:
            return None
        return slice(self._starts[number], self._starts[number] + len(labels))

    def with_tokens(self, row: Mapping[str, list[int]]) -> dict[str, Any]:
        """Return a row that `check` has seen with `TEACHER_COLUMNS`, `(length, k)` each."""
        place = self._place(row["input_ids"], row["labels"])
        return {**row, **dict(zip(TEACHER_COLUMNS, (self._tokens[place], self._probabilities[place]), strict=True))}


def teacher_tensors(rows: Sequence[Mapping[str, Any]], labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what a teacher says at each of a batch's labels, `(…, k)`, and nothing for rows without a teacher.

    The probabilities of a label sum to 1.
    """
    tensors: dict[str, torch.Tensor] = {}
    if TEACHER_COLUMNS[0] not in rows[0]:
        return tensors
    for name, kind in zip(TEACHER_COLUMNS, (np.int64, np.float32), strict=True):
        values = np.concatenate([row[name] for row in rows]).astype(kind)
        values = values / values.sum(-1, keepdims=True) if kind is np.float32 else values
        tensors[name] = torch.zeros((*labels.shape, values.shape[-1]), dtype=getattr(torch, kind.__name__))
        tensors[name][labels != IGNORED_LABEL] = torch.from_numpy(values)
    return tensors
