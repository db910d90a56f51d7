"""HeedSeq2SeqTrainer's updates: the same for any number of processes, and after a resume."""

import inspect
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from torch.utils.data import DataLoader, IterableDataset
from transformers import Seq2SeqTrainer
from transformers.trainer_utils import RemoveColumnsCollator, has_length, seed_worker, unwrap_peft_model
from transformers.utils import logging

from heedful.data.epochs.micro_batches import Tensors
from heedful.messages_heed import wrong
from heedful.training.trainer import batches as of_lists
from heedful.training.trainer.batches import is_list

logger = logging.get_logger(__name__)

FILE = "stream.json"  # in a checkpoint

Count = torch.Tensor | int | None  # the number of an update's labels


class StreamedBatches(IterableDataset[Tensors]):
    """One process's share in a stream that all processes read; `copies` processes have the same share."""

    def __init__(self, batches: DataLoader[Any], parts: int, copies: int, accelerator: Accelerator):
        self.batches, self.rows, self.accelerator = batches, batches.dataset, accelerator
        self.processes, self.process = accelerator.num_processes // copies, accelerator.process_index // copies
        self.parts = parts * self.processes
        self.epoch, self.is_over = 0, False  # `is_over`: the epoch has no further update
        self.first_update: int | None = None  # finished updates when the epoch began
        self.marks: list[float] = []  # label sums in this epoch up to each update
        self.expected: dict[str, Any] = {}  # where the resumed run stopped
        self.left_over: list[Tensors] = []  # at an epoch's end, for the next epoch's first update

    def __len__(self) -> int:
        return int(-(-len(self.batches) // self.processes))

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch."""
        if epoch != self.epoch:
            self.epoch, self.first_update, self.is_over = epoch, None, False
        getattr(self.rows, "set_epoch", lambda _: None)(epoch)

    def __iter__(self) -> Iterator[Tensors]:
        for update in self._updates():
            yield from update[self.process :: self.processes]
            if self.process >= len(update) % self.processes > 0:
                yield of_lists.without_labels(update[0])

    def _updates(self) -> Iterator[list[Tensors]]:
        size = len(self.batches) if has_length(self.batches) else None
        update, self.left_over, self.marks, read = self.left_over, [], [], 0
        for read, batch in enumerate(self.batches, start=1):
            if read - 1 == size:
                break
            update.append(batch)
            if len(update) == self.parts:
                self._note(update)
                yield update
                update = []
        if not read:
            raise ValueError(f"`train_dataset` must hold at least one pair, but is empty in epoch {self.epoch + 1}.")
        if size not in (None, read):
            must = f"have {size} batches, its length"
            raise wrong("train_dataset", must, "more" if read > size else read, verb="has")
        if update and size is not None:
            self._note(update)
            yield update
            update = []
        self._check_agreement(-1.0)
        if update and not self.marks and not self.epoch:
            size_of_one = f"`gradient_accumulation_steps` × processes ({self.parts}) batches"
            must = f"hold enough pairs for one update, which has {size_of_one}"
            raise wrong("train_dataset", must, len(update), verb="has")
        self.left_over = update

    def _note(self, update: list[Tensors]) -> None:
        """Add up an update's labels, and compare the sum with other processes and the resumed run."""
        labels = [batch["labels"] for batch in update if isinstance(batch.get("labels"), torch.Tensor)]
        mark = float(sum((values + 1).clamp(min=0).sum() for values in labels))
        self._check_agreement(mark)
        self.marks.append(sum(self.marks[-1:]) + mark)
        place = {"epoch": self.epoch, "updates": len(self.marks)}
        if self.expected.items() >= place.items() and self.expected["labels"] != self.marks[-1]:
            must = "repeat the resumed run's pairs, in updates of the same size"
            advice = "seed its shuffling, or start it again with `ignore_data_skip`"
            raise ValueError(f"`train_dataset` must {must}, but has others in epoch {self.epoch + 1}: {advice}.")

    def _check_agreement(self, mark: float) -> None:
        if self.accelerator.num_processes == 1:
            return
        marks = self.accelerator.gather(torch.tensor([mark], dtype=torch.float64, device=self.accelerator.device))
        if (marks != marks[0]).any():
            must = "have the same pairs in every process, but has others in one"
            advice = "do not split it (this trainer does that), and seed its shuffling"
            raise ValueError(f"`train_dataset` must {must}: {advice}.")

    def save(self, folder: Path, finished: int) -> None:
        """Write the stream's place after the run's `finished` updates into a checkpoint."""
        updates = 0 if self.first_update is None else finished - self.first_update
        labels = self.marks[updates - 1] if updates else None
        place = {"epoch": self.epoch, "updates": updates, "labels": labels, "is_over": self.is_over}
        (folder / FILE).write_text(json.dumps(place))

    def seek(self, checkpoint: Path, finished: int, updates_per_epoch: int) -> tuple[int, int]:
        """Return the epoch after `finished` updates, and its finished updates."""
        if not (checkpoint / FILE).is_file():
            found = f"{checkpoint} does not; `ignore_data_skip` starts the stream again"
            must = f"hold {FILE} if `train_dataset` is a stream"
            raise ValueError(f"`resume_from_checkpoint` must {must}, but {found}.")
        self.expected = json.loads((checkpoint / FILE).read_text())
        epoch, updates = self.expected["epoch"], self.expected["updates"]
        if self.expected["is_over"] or updates == updates_per_epoch:
            epoch, updates = epoch + 1, 0
        for earlier in range(0 if has_length(self) else epoch):  # to get their left-over batches
            self.set_epoch(earlier)
            for _ in self._updates():
                pass
        self.set_epoch(epoch)
        self.first_update = finished - updates
        return epoch, updates


class SharedUpdates(Seq2SeqTrainer):
    """The trainer's methods that load its data."""

    # transformers' own annotations are narrower (model) or wider (arguments).
    args: Any
    model: Any
    tokens_per_update: int | None
    buckets_per_update: int
    _stream: StreamedBatches | None = None  # `None` for a dataset with a length

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return this process's micro-batches, equally many in every process."""
        rows, self._stream = self.train_dataset, None
        if rows is None:
            return super().get_train_dataloader()  # it reports the missing dataset
        if not is_list(rows):
            return self._loader_of_stream(rows)
        if not len(rows):
            raise wrong("train_dataset", "hold at least one pair", "empty")
        batches = of_lists.micro_batches(rows, self.args, self.tokens_per_update, self.buckets_per_update)
        epoch = of_lists.Epoch(len(batches), lambda: self.state.global_step * batches.parts // len(batches))
        seed = partial(seed_worker, num_workers=self.args.dataloader_num_workers, rank=self.args.process_index)
        # Accelerate gives each process one micro-batch in turn.
        loader = DataLoader(batches, sampler=epoch, worker_init_fn=seed, **self._loading())
        return cast("DataLoader[Any]", self.accelerator.prepare(loader))

    def _loading(self) -> dict[str, Any]:
        collate, args = self.data_collator, self.args
        if args.remove_unused_columns:
            taken = inspect.signature(unwrap_peft_model(self.model).forward).parameters
            columns = [*taken, "labels", "label", "label_ids"]
            collate = RemoveColumnsCollator(collate, columns, logger, description="training")
        names = ("num_workers", "pin_memory", "persistent_workers", "multiprocessing_context", "prefetch_factor")
        settings = {name: getattr(args, f"dataloader_{name}") for name in names}
        return {"collate_fn": partial(of_lists.collate_micro_batch, collate), **settings}

    def _loader_of_stream(self, rows: object) -> DataLoader[Any]:
        """Return this process's micro-batches from a stream; every process reads the whole stream."""
        if self.tokens_per_update is not None:
            raise ValueError("`train_dataset` must have a length with `tokens_per_update`, but has none.")
        if not isinstance(rows, IterableDataset):
            raise wrong("train_dataset", "have a length or be an IterableDataset", type(rows).__name__)
        args, copies = self.args, self.get_tp_size()
        loading = self._loading() | {"num_workers": min(1, args.dataloader_num_workers)}
        if args.dataloader_num_workers > 1:
            logger.warning("Only one of `dataloader_num_workers` reads a stream: several would each read it all.")
        batches = DataLoader(rows, batch_size=args.per_device_train_batch_size, **loading)
        self._stream = StreamedBatches(batches, args.gradient_accumulation_steps, copies, self.accelerator)
        # Its own generator leaves dropout's random numbers as they are.
        own = {"collate_fn": lambda batch: batch, "generator": torch.Generator(), "device": self.accelerator.device}
        return cast("DataLoader[Any]", DataLoaderShard(self._stream, batch_size=None, **own))

    def _init_training_state(self, max_steps: int, updates_per_epoch: int, epochs: int, *args: Any) -> tuple[int, int]:
        """Return a run's first epoch, and its finished micro-batches."""
        found = super()._init_training_state(max_steps, updates_per_epoch, epochs, *args)
        checkpoint, _ = args
        if checkpoint is None or self.args.ignore_data_skip:
            return found
        if self.state.global_step >= max_steps:
            return epochs, 0  # nothing is left to train
        if self._stream is None:
            return found
        epoch, updates = self._stream.seek(Path(checkpoint), self.state.global_step, updates_per_epoch)
        return epoch, updates * self.args.gradient_accumulation_steps

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Tensors], Count]:
        """Return an update's micro-batches and number of labels."""
        batches, count = super().get_batch_samples(*args, **kwargs)
        if (stream := self._stream) is not None:
            stream.is_over = not batches
            if batches and stream.first_update is None:
                stream.first_update = self.state.global_step
        return batches, count

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Return the number of pairs."""
        dataset: Any = getattr(dataloader, "dataset", None)
        is_ours = isinstance(dataset, of_lists.MicroBatches | StreamedBatches)
        return len(dataset.rows) if is_ours else super().num_examples(dataloader)
