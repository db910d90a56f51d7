"""The measurements of each process in test_trainer.py; each process writes a file."""

import os
from pathlib import Path
from unittest.mock import patch

import datasets
import pytest
import torch
import torch.distributed
from accelerate import Accelerator
from torch.utils.data import IterableDataset
from transformers import Seq2SeqTrainer

import contract_measures as contract
from heedful import HeedSeq2SeqTrainer
from heedful.versions_heed import CHECKPOINTING
from process_checks import message_of
from trainer_runs import logged

WHOLE = (contract.PAIRS, 1)  # pairs of a micro-batch, and micro-batches of an update
# How one process splits an update, the smoothing, and whether buckets of tokens are its micro-batches: every pair of
# choices occurs. The first two are what all others are compared to. Micro-batches of one pair are left to one process.
SPLITS = [(WHOLE, 0.0, False), (WHOLE, 0.1, False), (WHOLE, 0.1, True), ((8, 6), 0.0, True), ((8, 6), 0.1, False)]
OF_ONE_PAIR = [((1, contract.PAIRS), 0.0, False), ((1, contract.PAIRS), 0.1, True)]


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


class Sized(Stream):
    def __init__(self, rows, length=None):
        super().__init__(rows)
        self.length = len(rows) if length is None else length

    def __len__(self):
        return self.length


def streamed(column, folder: Path, make_stream) -> tuple[list[float], bool]:
    """Train for five updates of six micro-batches, eleven an epoch; return the losses, and whether resume is exact."""
    runs = []
    for checkpoint in (None, folder / "checkpoint-3"):
        split = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 6 // column.world}
        saving = {"save_strategy": "steps", "save_steps": 3}
        trainer = column.trainer(max_steps=5, learning_rate=1e-3, **split, **saving)
        trainer.args.output_dir, trainer.train_dataset = str(folder), make_stream()
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        runs.append((logged(trainer), [weight.detach().clone() for weight in trainer.model.parameters()]))
    same = runs[0][0] == runs[1][0] and all(map(torch.equal, runs[0][1], runs[1][1]))
    return runs[0][0], same


def refusal_of_a_divided_stream(column) -> str:
    """Return what is said of a stream that gives every process other pairs."""
    trainer = column.trainer(max_steps=5, per_device_train_batch_size=2)
    trainer.train_dataset = Stream(column.rows["training"][trainer.args.process_index :: column.world])
    return message_of(trainer.train)


def losses(column, folder: Path, resume_from: Path | None = None, **options) -> list[float]:
    """Train for two epochs of three updates, the last of them smaller, and return the losses of the updates."""
    arguments = {"save_strategy": "steps", "save_steps": 4} if resume_from is None else {}
    if not options:
        arguments["per_device_train_batch_size"] = 18 // column.world
    trainer = column.trainer(options=options, max_steps=6, learning_rate=1e-3, **arguments)
    trainer.args.output_dir = str(folder)
    trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))
    return logged(trainer)


def evaluation_of_few(column, count: int) -> dict:
    """Evaluate fewer pairs than there may be processes, of a dataset without a length."""
    rows = column.rows[column.model][:count]
    trainer = column.trainer(per_device_eval_batch_size=8)
    streamed = trainer.predict(Stream(rows), num_beams=4, metric_key_prefix="eval")
    listed = trainer.predict(rows, num_beams=4, metric_key_prefix="eval")
    assert streamed.predictions.tolist() == listed.predictions.tolist()
    return {"loss": streamed.metrics["eval_loss"], "tokens": streamed.predictions.tolist()}


def stops_at_a_loss_that_is_not_finite(column, folder: Path) -> bool:
    """Have the last process meet a NaN in the third update; return whether all stop, their weights as they were."""
    trainer = column.trainer(max_steps=6, learning_rate=1e-3, save_strategy="steps", save_steps=1)
    trainer.args.output_dir = str(folder)
    compute, rank = HeedSeq2SeqTrainer.compute_loss, trainer.args.process_index
    seen = []

    def compute_or_fail(self, *args, **kwargs):
        loss = compute(self, *args, **kwargs)
        is_bad = self.state.global_step == 2 and rank == self.args.world_size - 1
        seen.append([weight.detach().clone() for weight in self.model.parameters()])
        return loss * float("nan") if is_bad else loss

    with (
        patch.object(HeedSeq2SeqTrainer, "compute_loss", compute_or_fail),
        pytest.raises(FloatingPointError, match="diverged near update 3"),
    ):
        trainer.train()
    same = all(map(torch.equal, seen[-1], (weight.detach() for weight in trainer.model.parameters())))
    return same and sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]


def measure_column(column) -> dict:
    """Measure updates, evaluations and resumed runs of the loop or of the trainer."""
    world = column.world
    updates = []
    for (pairs, parts), smoothing, by_tokens in SPLITS + (OF_ONE_PAIR if world == 1 else []):
        split = (pairs, parts // world) if parts > 1 else (pairs // world, 1)
        updates.append((smoothing, column.update(*split, smoothing, by_tokens)))
    orders = (False, True) if type(column) is contract.WithTrainer else (False,)  # random, and by length
    return {
        "updates": updates,
        "evaluations": {size: column.evaluate(size) for size in ((1, 8, 48) if world == 1 else (8,))},
        "resumed": [column.resume(by_length) for by_length in orders],
    }


def measure(folder: Path) -> dict:
    """Return all that must not depend on the number of processes."""
    Accelerator(cpu=True)
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    assert world == int(os.environ.get("WORLD_SIZE", "1"))
    found = {name: measure_column(contract.column(name, folder)) for name in ("loop", "trainer")}
    heedful, found["world"] = contract.column("trainer", folder), world
    found["losses"] = losses(heedful, folder / f"across-{world}")
    tokens = contract.tokens_per_update(heedful.rows["training"]) // 3
    by_tokens = {"tokens_per_update": tokens, "buckets_per_update": 2}
    found["losses by tokens"] = losses(heedful, folder / f"tokens-{world}", **by_tokens)
    found["losses after one process"] = losses(heedful, folder / "unused", folder / "across-1" / "checkpoint-4")
    rows = heedful.rows["training"][:22]
    shuffled = datasets.Dataset.from_list(rows).to_iterable_dataset().shuffle(seed=3, buffer_size=22)
    for kind, make_stream in (("shuffled", lambda: shuffled), ("sized", lambda: Sized(rows))):
        found[f"streamed, {kind}"] = streamed(heedful, folder / f"{kind}-{world}", make_stream)
    settled = [{CHECKPOINTING: True}, {"ddp_find_unused_parameters": False}]
    found["resumed with settled buckets"] = [heedful.resume(False, **more) for more in settled if world > 1]
    found["divided stream"] = refusal_of_a_divided_stream(heedful)
    found["few"] = {count: evaluation_of_few(heedful, count) for count in (1, 2)}
    found["stops"] = stops_at_a_loss_that_is_not_finite(heedful, folder / f"nan-{world}")
    marian = contract.WithTrainer(folder, HeedSeq2SeqTrainer, "marian")
    found["marian"] = {
        "updates": [
            (smoothing, marian.update(micro, accumulation, smoothing, False))
            for micro, accumulation in ((contract.PAIRS // world, 1), (8, 6 // world))
            for smoothing in (0.0, 0.1)
        ],
        "evaluations": [marian.evaluate(size) for size in ((1, 8) if world == 1 else (8,))],
    }
    found["stock predictions"] = len(contract.WithTrainer(folder, Seq2SeqTrainer, "marian").evaluate(8)["predictions"])
    return found


def main(folder: Path) -> None:
    measured = measure(folder)
    torch.save(measured, folder / f"found-{measured['world']}-{torch.distributed.get_rank()}.pt")
