"""A stream as HeedSeq2SeqTrainer reads it: the same updates for any number of processes, and found again at resume."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers.trainer_utils import has_length

from heedful.training.trainer.batches import without_labels

FILE = "stream.json"  # in a checkpoint


class StreamedBatches(IterableDataset):
    """One process's micro-batches of a stream, an epoch each time that it is iterated over.

    Every process reads the whole stream and takes its share of every update, which has `parts` micro-batches over all
    `processes`. Those left over at the end of an epoch begin the next epoch's first update; of a stream with a length
    they are the epoch's last update. `agree` is called with the sum of the labels of every update, and raises an error
    if it is another in another process.
    """

    def __init__(self, batches: DataLoader, parts: int, processes: int, process: int, agree: Callable[[float], None]):
        self.batches, self.agree = batches, agree
        self.rows: Any = batches.dataset
        self.parts, self.processes, self.process = parts, processes, process
        self.epoch, self.is_over = 0, False  # whether no update of the epoch is to come
        self.first_update: int | None = None  # the number of finished updates when the epoch began
        self.marks: list[float] = []  # the sums of all labels of this epoch up to each update
        self.expected: dict[str, Any] = {}  # how far the run was that is resumed
        self.left_over: list[Any] = []

    def __len__(self) -> int:
        return -(-len(self.batches) // self.processes)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch."""
        if epoch != self.epoch:
            self.epoch, self.first_update, self.is_over = epoch, None, False
        if hasattr(self.rows, "set_epoch"):
            self.rows.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        for update in self._updates():
            yield from update[self.process :: self.processes]
            if self.process >= len(update) % self.processes > 0:
                yield without_labels(update[0])

    def _updates(self) -> Iterator[list[Any]]:
        """Read an epoch and yield its updates."""
        size = len(self.batches) if has_length(self.batches) else None
        update, self.left_over, self.marks, read = self.left_over, [], [], 0
        for read, batch in enumerate(self.batches, start=1):
            self._check_size(size, read, is_end=False)
            update.append(batch)
            if len(update) == self.parts:
                self._note(update)
                yield update
                update = []
        self._check_size(size, read, is_end=True)
        if update and size is not None:
            self._note(update)
            yield update
            update = []
        self.agree(-1.0)
        if update and not self.marks and not self.epoch:
            raise ValueError(
                "`train_dataset` must hold enough pairs for one update, which has `gradient_accumulation_steps` × "
                f"processes ({self.parts}) batches, but has {len(update)} instead."
            )
        self.left_over = update

    def _check_size(self, size: int | None, read: int, is_end: bool) -> None:
        if size is not None and (read > size or (is_end and read < size)):
            raise ValueError(
                f"`train_dataset` must have the length that it says, which is {size} batches, but has "
                f"{'more' if read > size else read} instead."
            )

    def _note(self, update: list[Any]) -> None:
        """Add up the labels of an update, and compare them with those of other processes and of an earlier run."""
        labels = [batch["labels"] for batch in update if isinstance(batch.get("labels"), torch.Tensor)]
        mark = float(sum((values + 1).clamp(min=0).sum() for values in labels))
        self.agree(mark)
        self.marks.append(sum(self.marks[-1:]) + mark)
        place = {"epoch": self.epoch, "updates": len(self.marks)}
        if self.expected.items() >= place.items() and self.expected["labels"] != self.marks[-1]:
            raise ValueError(
                "`train_dataset` must be a stream that gives the pairs of the run that is resumed once more, in "
                f"updates of as many, but gives others in epoch {self.epoch + 1}: give its shuffling a seed, or begin "
                "again at its start with `ignore_data_skip`."
            )

    def save(self, folder: Path, finished: int) -> None:
        """Note in the checkpoint after so many finished updates how far the stream was trained on."""
        updates = 0 if self.first_update is None else finished - self.first_update
        labels = self.marks[updates - 1] if updates else None
        place = {"epoch": self.epoch, "updates": updates, "labels": labels, "is_over": self.is_over}
        (folder / FILE).write_text(json.dumps(place))

    def seek(self, checkpoint: Path, finished: int, updates_per_epoch: int) -> tuple[int, int]:
        """Return the epoch of the update after so many finished ones, and the number of finished ones in that epoch.

        What an earlier epoch has left over is only found by reading the earlier epochs again.
        """
        if not (checkpoint / FILE).is_file():
            raise ValueError(
                f"`resume_from_checkpoint` must hold {FILE} where `train_dataset` is a stream, but {checkpoint} does "
                "not; `ignore_data_skip` begins again at the start of the stream."
            )
        self.expected = json.loads((checkpoint / FILE).read_text())
        epoch, updates = self.expected["epoch"], self.expected["updates"]
        if self.expected["is_over"] or updates == updates_per_epoch:
            epoch, updates = epoch + 1, 0
        for earlier in range(0 if has_length(self) else epoch):
            self.set_epoch(earlier)
            for _ in self._updates():
                pass
        self.set_epoch(epoch)
        self.first_update = finished - updates
        return epoch, updates
