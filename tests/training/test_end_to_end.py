"""Rows laid end to end."""

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.data.batching import BatchingSettings, UpdateBatches
from heedful.training.speed.end_to_end import laid_end_to_end

PAD, START = 0, 1
TOKENS = st.lists(st.integers(3, 99), min_size=1, max_size=300)


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=20), budget=st.sampled_from([8, 2000, 100_000]))
def test_each_row_is_there_with_its_positions_and_what_stands_before_its_labels(rows, budget):
    batch = laid_end_to_end([{"input_ids": source, "labels": target} for source, target in rows], budget, PAD, START)
    packing, real = batch["packing"], [sum(map(len, side)) for side in zip(*rows, strict=True)]
    bounds = packing.source.bounds.tolist(), packing.states.bounds.tolist()
    for number, (source, target) in enumerate(rows):
        own, other = (slice(*each[number : number + 2]) for each in bounds)
        assert batch["input_ids"][0, own].tolist() == source
        assert batch["labels"][0, other].tolist() == target
        assert batch["decoder_input_ids"][0, other].tolist() == [START, *target[:-1]]
        assert packing.source.positions[0, own].tolist() == list(range(len(source)))
        assert packing.states.positions[0, other].tolist() == list(range(len(target)))
    assert (batch["input_ids"][0, real[0] :] == PAD).all()
    assert (batch["labels"][0, real[1] :] == -100).all()
    for side, ids, count in (
        (packing.source, batch["input_ids"], real[0]),
        (packing.states, batch["labels"], real[1]),
    ):
        lengths = side.bounds.diff()
        assert side.shape == ids.shape
        assert (side.bounds[-1], side.bounds.dtype) == (ids.shape[1], torch.int32)
        assert 0 <= lengths.min() <= lengths.max() <= side.longest
        assert ids.shape[1] % 64 == 0
        assert 16 <= ids.shape[1] - count < 2048 + 16
    # Where a row has a token on one side it has one on the other: no query is without a key.
    assert ((bounds_of(packing.source) > 0) == (bounds_of(packing.states) > 0)).all()


def bounds_of(side):
    return side.bounds.diff()


def test_an_epoch_has_few_shapes_and_little_that_fills_up():
    draw = random.Random(0)
    source = [max(2, int(draw.lognormvariate(2.6, 0.5))) for _ in range(20_000)]
    target = [max(2, int(length * draw.uniform(0.7, 1.4))) for length in source]
    shapes, computed, padded = set(), 0, set()
    batches = UpdateBatches(source, target, BatchingSettings(8192))
    for epoch in range(3):
        for (bucket,) in batches.epoch(epoch):
            rows = [{"input_ids": [5] * source[row], "labels": [6] * target[row]} for row in bucket]
            batch = laid_end_to_end(rows, 8192, PAD, START)
            shapes.add((batch["input_ids"].shape[1], batch["labels"].shape[1], len(batch["packing"].source.bounds)))
            computed += batch["input_ids"].numel() + batch["labels"].numel()
            padded.add((len(bucket), max(source[row] for row in bucket), max(target[row] for row in bucket)))
    assert computed < 1.1 * 3 * (sum(source) + sum(target))
    assert 4 * len(shapes) < len(padded)
