"""HeedSeq2SeqTrainer's micro-batches in an epoch, and its predictions without padding."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler
from transformers import PreTrainedConfig, Seq2SeqTrainingArguments
from transformers.trainer_utils import has_length

from heedful.configuration_base_heed import IGNORED_LABEL
from heedful.data.epochs.batching import BatchingSettings, UpdateBatches
from heedful.data.epochs.micro_batches import Tensors, assign, by_length, sorted_lengths


class EmptyBatch(list[Any]):
    """Rows whose labels do not count, for a process without a micro-batch."""


def without_labels(batch: Tensors) -> Tensors:
    """Return a collated batch with all its labels ignored."""
    return {**batch, "labels": torch.full_like(batch["labels"], IGNORED_LABEL)} if "labels" in batch else batch


def with_a_column(batch: Mapping[str, Any], config: PreTrainedConfig) -> Tensors:
    """Return a collated batch, with one column of padding if all rows on a side are empty."""
    held = {name: values for name, values in batch.items() if values is not None}
    fillers = {"input_ids": config.pad_token_id or 0, "attention_mask": 0, "labels": IGNORED_LABEL}
    for name, filler in (fillers | {"decoder_input_ids": getattr(config, "decoder_start_token_id", 0) or 0}).items():
        if getattr(held.get(name), "shape", ())[1:] == (0,):
            held[name] = held[name].new_full((len(held[name]), 1), filler, dtype=torch.long)
    return held


def collate_micro_batch(collate: Callable[[list[Any]], Tensors], rows: list[Any]) -> Tensors:
    """Make tensors from a micro-batch's rows; an `EmptyBatch` gets ignored labels."""
    batch = collate(list(rows))
    return without_labels(batch) if isinstance(rows, EmptyBatch) else batch


class MicroBatches(Dataset[Any]):
    """The micro-batches of all processes, `parts` per update; `plan` lists each one's rows for an epoch.

    A micro-batch's number, `epoch × len + place`, carries the epoch to worker processes.
    """

    def __init__(self, rows: Sequence[Any], plan: Callable[[int], list[list[int]]], parts: int, filler: int):
        self.rows, self.plan, self.parts, self.filler = rows, plan, parts, filler
        self.epoch, self.batches = 0, plan(0)
        self.length = -(-len(self.batches) // parts) * parts

    def __len__(self) -> int:
        return self.length

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        """Return one micro-batch's rows; `numbers` has one element."""
        ((epoch, place),) = (divmod(number, self.length) for number in numbers)
        if epoch != self.epoch:
            self.epoch, self.batches = epoch, self.plan(epoch)
        batch = self.batches[place] if place < len(self.batches) else []
        return [self.rows[number] for number in batch] if batch else EmptyBatch([self.rows[self.filler]])


@dataclass
class Epoch(Sampler[int]):
    """An epoch's micro-batch numbers, in order."""

    size: int  # in micro-batches
    number: Callable[[], int]  # returns the epoch's number

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        start = self.number() * self.size
        return iter(range(start, start + self.size))


def is_list(rows: object) -> TypeGuard[Sequence[Any]]:
    """Return whether a dataset has a length, and rows in any order."""
    return has_length(rows) and not isinstance(rows, IterableDataset)


def micro_batches(
    rows: Sequence[Any], args: Seq2SeqTrainingArguments, tokens_per_update: int | None, buckets_per_update: int
) -> MicroBatches:
    """Plan updates with equally many pairs, or with `tokens_per_update`."""
    parts = args.gradient_accumulation_steps * args.world_size
    seed = args.seed if args.data_seed is None else args.data_seed
    if tokens_per_update is None:
        shuffles = args.train_sampling_strategy == "random"
        plan = partial(_batches_of_rows, len(rows), args.per_device_train_batch_size, seed if shuffles else None)
        return MicroBatches(rows, plan, parts, filler=0)
    try:
        lengths = np.array([(len(row["input_ids"]), len(row["labels"])) for row in rows])  # (rows, 2)
    except (KeyError, TypeError, IndexError) as error:
        must = "have rows with `input_ids` and `labels`, because `tokens_per_update` counts their tokens"
        kind = type(rows[0]).__name__
        raise ValueError(f"`train_dataset` must {must}, but has a row of type {kind} without them instead.") from error
    source, target = lengths.T
    updates = UpdateBatches(source, target, BatchingSettings(tokens_per_update, buckets_per_update, seed))
    plan = partial(_batches_of_tokens, updates, lengths, parts)
    return MicroBatches(rows, plan, parts, filler=int(lengths.sum(1).argmin()))


def _batches_of_rows(rows: int, size: int, seed: int | None, epoch: int) -> list[list[int]]:
    order = np.arange(rows)
    if seed is not None:
        draws = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(rows)
        order = np.argsort(draws, kind="stable")
    return [order[start : start + size].tolist() for start in range(0, rows, size)]


def _batches_of_tokens(updates: UpdateBatches, lengths: np.ndarray, parts: int, epoch: int) -> list[list[int]]:
    return [part for update in updates.epoch(epoch) for part in divide_update(update, lengths, parts)]


def divide_update(update: list[list[int]], lengths: np.ndarray, parts: int) -> list[list[int]]:
    """Divide an update's row numbers by `(rows, 2)` lengths into micro-batches with equal tokens."""
    buckets = sorted_lengths(update, lengths[:, 0], lengths[:, 1])
    if len(buckets) > parts:  # otherwise they stay apart
        buckets = [sorted((row for bucket in buckets for row in bucket), key=by_length)]
    return [[row for _, _, row in part] for (part,) in assign(buckets, [1] * len(buckets), 1, parts)]


def without_padding(tokens: torch.Tensor, prompt: int, pads: list[int | None], ends: list[int | None]) -> torch.Tensor:
    """Put -100 after each end in `(batch, length)` generated tokens, and cut them to the longest."""
    is_pad, is_end = (torch.isin(tokens, tokens.new_tensor([i for i in ids if i is not None])) for ids in (pads, ends))
    is_end[:, :prompt] = False  # an end token there does not end the sentence
    places = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    lengths = (~is_pad * places).amax(1, keepdim=True)  # (B, 1)
    first_end = places.where(is_end, tokens.shape[1]).amin(1, keepdim=True)
    lengths = torch.minimum(lengths, first_end)
    return tokens.masked_fill(places > lengths, IGNORED_LABEL)[:, : int(lengths.max())]
