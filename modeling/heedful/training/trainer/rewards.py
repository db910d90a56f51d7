"""Rewards in HeedSeq2SeqTrainer: a batch's sampled outputs as more rows, and the loss of both."""

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F

from heedful.configuration_base_heed import IGNORED_LABEL, special_token
from heedful.data.epochs.micro_batches import Tensors, collate
from heedful.training.loop.feed import on_device
from heedful.training.updates.rewards import Rewards, sums_of

TOKEN_BUDGET = 8192  # padded tokens of sources in a batch of samples
Batch = tuple[Tensors, torch.Tensor, Counter[str]]


def with_samples(inputs: Tensors, rewards: Rewards, model: Any, update: int) -> Batch:
    """Return a batch of pairs and sampled outputs `(rows, …)`, their weights `(rows)`, and sums over all outputs."""
    rows = [
        {"input_ids": ids[kept].tolist(), "labels": labels[labels != IGNORED_LABEL].tolist()}
        for ids, kept, labels in zip(inputs["input_ids"], inputs["attention_mask"] != 0, inputs["labels"], strict=True)
    ]
    with torch.autocast(model.device.type, enabled=False):
        samples = rewards.samples(model, rows, update, TOKEN_BUDGET)
    found = [row for bucket in rewards.weighted([rows], samples) for row in bucket]
    batch = on_device(collate(found, special_token(model, "pad_token_id")), model.device)
    return batch, torch.tensor([row["weight"] for row in found], device=model.device), Counter(sums_of(samples))


def weighted_loss(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Return the summed loss of rows with weights."""
    given: Any = {"ignore_index": IGNORED_LABEL, "reduction": "none", "label_smoothing": smoothing}
    losses = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), **given)
    return (weights[:, None] * losses.view_as(labels)).sum()
