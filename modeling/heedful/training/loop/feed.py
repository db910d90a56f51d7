"""An update's micro-batches as tensors on the device."""

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import torch
from accelerate import Accelerator
from transformers import PreTrainedConfig

from heedful.configuration_base_heed import IGNORED_LABEL
from heedful.data.epochs.batching import Row
from heedful.data.epochs.micro_batches import MicroBatch, collate, laid_end_to_end, micro_batches_of_rank
from heedful.data.epochs.teacher import teacher_tensors
from heedful.fast_paths_heed import runs_known_code
from heedful.packed_rows_heed import Packing, why_padded
from heedful.protocols import TrainableModel
from heedful.training.updates.objective import Objective

logger = logging.getLogger(__name__)
Item = TypeVar("Item")
AHEAD = 2  # updates made while the GPU computes one


class MadeUpdate(NamedTuple):
    """An update, ready for training."""

    epoch: int  # from 0
    number: int  # in its epoch, from 1
    rows: list[list[Row]]  # bucket by bucket
    token_budget: int  # padded tokens per micro-batch
    parts: list[list[list[Row]]]  # the rows of each rank's micro-batches
    micro_batches: list[MicroBatch]  # this rank's micro-batches


@dataclass(frozen=True)
class Feed:
    """Makes micro-batches from rows, padded or end to end; in pinned memory for a GPU."""

    accelerator: Accelerator
    config: PreTrainedConfig  # the model's config
    token_budget: int  # padded tokens per micro-batch
    objective: Objective | None = None  # replaces the cross-entropy
    packs: bool = False  # whether rows lie end to end

    @property
    def passes(self) -> int:
        """The number of passes over a micro-batch's rows, one after the other."""
        return 1 if self.objective is None else self.objective.passes

    @property
    def is_ahead(self) -> bool:
        """Whether another thread makes updates ahead; on the CPU this would slow down training."""
        return bool(self.accelerator.device.type == "cuda")

    def micro_batches(self, parts: list[list[list[Row]]]) -> list[MicroBatch]:
        """Return this rank's micro-batches from the parts that `split_update` returned."""
        return micro_batches_of_rank(parts, self.accelerator.process_index, self.tensors)

    def tensors(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Return a micro-batch's tensors, on the CPU."""
        rows, budget, pad = [*rows] * self.passes, self.token_budget * self.passes, self.config.pad_token_id
        if self.packs:
            tensors = laid_end_to_end(rows, budget, pad, self.config.decoder_start_token_id)
        else:
            tensors = collate(rows, pad)
        if self.objective is not None:
            tensors |= teacher_tensors(rows, tensors["labels"])
        return pinned(tensors) if self.is_ahead else tensors

    def inputs(self, micro_batch: MicroBatch) -> "tuple[dict[str, Any], Objective | None]":
        """Return the model's inputs on the device, and the objective."""
        batch = on_device(micro_batch.tensors, self.accelerator.device)
        return (batch, None) if self.objective is None else self.objective.of_batch(batch)

    def full_of(self, row: Row) -> MicroBatch:
        """Fill a micro-batch with one row whose target is cut in half, so that the sides differ in size."""
        short = {"input_ids": row["input_ids"], "labels": row["labels"][: max(1, len(row["input_ids"]) // 2)]}
        return MicroBatch(self.tensors([short] * max(1, self.token_budget // sum(map(len, short.values())))))


def may_pack(model: TrainableModel, accelerator: Accelerator) -> bool:
    """Return whether rows may lie end to end, which needs flash attention in bfloat16."""
    if accelerator.device.type != "cuda":
        return False
    reason = why_padded(model.config, model.config._attn_implementation)
    if accelerator.mixed_precision != "bf16" or torch.cuda.get_device_capability(accelerator.device) < (8, 0):
        reason = "flash attention needs bfloat16 and an Ampere card or newer"
    elif not runs_known_code(model):
        reason = "the model contains code from outside Heedful"
    if reason is not None:
        logger.info("rows are padded to one length: %s", reason)
    return reason is None


def pinned(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch in pinned memory, with its label positions: a GPU would find them slowly."""
    places = (tensors["labels"].flatten() != IGNORED_LABEL).nonzero()[:, 0]
    return _moved({**tensors, "target_places": places}, torch.Tensor.pin_memory)


def on_device(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Copy a batch to a device without waiting."""
    return _moved(batch, lambda values: values.to(device, non_blocking=True))


def _moved(batch: Mapping[str, Any], move: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    return {
        name: move(values) if name != "packing" else Packing(values.states.moved(move), values.source.moved(move))
        for name, values in batch.items()
    }


def made_ahead(items: Iterator[Item]) -> Generator[Item, None, None]:
    """Yield items that another thread makes `AHEAD` items early; an error comes in place of its item."""
    end, thread = cast(Any, object()), ThreadPoolExecutor(1)
    coming = deque(thread.submit(next, items, end) for _ in range(AHEAD))
    try:
        while (item := coming.popleft().result()) is not end:
            coming.append(thread.submit(next, items, end))
            yield item
    finally:
        thread.shutdown(wait=False, cancel_futures=True)
