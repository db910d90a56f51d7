"""How often the rows of each part of a mixture come in an epoch."""

import numpy as np

from heedful.data.epochs.encoding import EncodedPairs

DRAW = 0x5A3  # separates these draws from others of the same seed and epoch


class Sampling:
    """Draws rows of parts for an epoch with the number of all rows.

    A part of n rows gets a share proportional to n^(1/T) (Arivazhagan et al., 2019, arXiv 1907.05019): each row as
    often as possible, and the rest drawn anew in every epoch. A temperature T above 1 repeats small parts and thins
    large ones. `parts` `(rows,)` are the numbers of the parts, which all have rows.
    """

    def __init__(self, parts: np.ndarray, temperature: float, seed: int):
        self._parts, self._seed = parts, seed
        weights = np.bincount(parts) ** (1 / temperature)
        wanted = weights / weights.sum() * len(parts)
        self.counts = wanted.astype(np.int64)  # rows of each part in an epoch
        largest_rests = np.argsort(self.counts - wanted, kind="stable")
        self.counts[largest_rests[: len(parts) - self.counts.sum()]] += 1

    def rows(self, rows: EncodedPairs, epoch: int) -> EncodedPairs:
        """Return the rows of an epoch, from 0."""
        chosen = []
        for part, count in enumerate(self.counts.tolist()):
            numbers = np.flatnonzero(self._parts == part)
            # Raw output, which numpy promises never to change.
            generator = np.random.PCG64(np.random.SeedSequence([self._seed, epoch, part, DRAW]))
            order = np.argsort(generator.random_raw(len(numbers)), kind="stable")
            whole, rest = divmod(count, len(numbers))
            chosen += [np.repeat(numbers, whole), numbers[order[:rest]]]
        return rows.chosen(np.sort(np.concatenate(chosen)))
