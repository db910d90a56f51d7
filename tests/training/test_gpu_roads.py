"""How a GPU trains, tried on the CPU: a compiled body, rows end to end, updates made ahead, results read late."""

import logging
import random
import signal
import threading
import time
from collections import deque
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters

from heedful.data.epochs.batching import BatchingSettings, UpdateBatches
from heedful.data.epochs.micro_batches import laid_end_to_end, split_update
from heedful.training import model_of_recipe
from heedful.training.loop import feed
from heedful.training.loop import loop as loop_module
from heedful.training.loop.feed import AHEAD, Feed, made_ahead
from heedful.training.processes.signals import TrainingInterrupted
from heedful.training.updates import compilation
from heedful.training.updates.compilation import CompiledBody
from heedful.training.updates.engine import Results
from helpers import assert_error
from process_checks import equal, spoil, weights_of
from rows_attention import varlen_attn
from tiny_runs import around, logged, saved_updates

COMPILED = {"optimization.compile": True}
NO_DROPOUT = {"model.options.dropout": 0.0}


@pytest.fixture
def quick_compiler(monkeypatch):
    """Trace what would be compiled, and run it as it is."""
    compiled = torch.compile
    quick = lambda function, dynamic, options: compiled(function, dynamic=dynamic, backend="eager")  # noqa: E731
    monkeypatch.setattr(torch, "compile", quick)
    torch.compiler.reset()
    counters.clear()


@pytest.fixture
def ahead(monkeypatch):
    """Make updates ahead, as for a GPU; the names of the threads that make them."""
    threads = set()
    monkeypatch.setattr(Feed, "is_ahead", True)
    monkeypatch.setattr(feed, "pinned", lambda tensors: threads.add(threading.current_thread().name) or tensors)
    return threads


def losses(folder):
    return logged(folder, "train/loss")


def test_a_compiled_step_learns_what_the_plain_one_does_from_one_program(make_loop, quick_compiler, tmp_path):
    # Validation and generation stay uncompiled.
    changes = NO_DROPOUT | {"validation.every_updates": 3, "validation.sentences": 4, "optimization.max_updates": 3}
    make_loop(changes, folder=tmp_path / "plain").run()
    make_loop(COMPILED | changes | {"optimization.token_budget": 700}).run()
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)
    assert (counters["stats"]["unique_graphs"], dict(counters["graph_break"])) == (1, {})


R_DROP = {"optimization.r_drop": 3.0, "model.options.dropout": 1e-9}


@pytest.mark.parametrize("changes", [COMPILED | NO_DROPOUT, R_DROP], ids=["compiled", "r_drop"])
def test_rows_end_to_end_teach_what_padded_ones_do(make_loop, quick_compiler, monkeypatch, tmp_path, changes):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setattr(model_of_recipe, "may_pack", lambda *_: True)
    changes |= {"model.attn_implementation": "sdpa", "optimization.max_updates": 3}
    make_loop(changes).run()
    graphs = 1 if "optimization.compile" in changes else 0
    assert (counters["stats"]["unique_graphs"], dict(counters["graph_break"])) == (graphs, {})
    monkeypatch.setattr(model_of_recipe, "may_pack", lambda *_: False)
    make_loop(changes | {"optimization.compile": False}, folder=tmp_path / "padded").run()
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "padded"), rel=1e-5)
    assert all(0 <= share < 0.5 for share in logged(tmp_path / "run", "train/padding_share"))


def test_a_compiled_run_stopped_with_updates_made_ahead_goes_on_to_the_bit(make_loop, monkeypatch, request, tmp_path):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # to trace each run takes seconds
    changes = COMPILED | {"optimization.max_epochs": 2, "optimization.max_updates": 99}
    make_loop(changes, folder=tmp_path / "straight").run()
    threads = request.getfixturevalue("ahead")
    make_loop(changes | {"optimization.max_updates": 2}).run()
    progress = make_loop(changes | {"resume": True}).run()
    assert threads - {"MainThread"}  # which the first micro-batch is for, to warm up
    assert (progress.epoch, progress.update_in_epoch) == (2, 0)
    assert equal(*(weights_of(tmp_path / name, progress.update) for name in ("straight", "run")))


def fail_to_compile(monkeypatch, error):
    monkeypatch.setattr(CompiledBody, "__call__", Mock(side_effect=error))


def test_where_nothing_can_be_compiled_a_run_goes_on_with_one_warning(make_loop, monkeypatch, caplog, tmp_path):
    changes = {"optimization.max_updates": 2}
    make_loop(changes, folder=tmp_path / "plain").run()
    fail_to_compile(monkeypatch, RuntimeError("no C++ compiler\nwas found"))
    make_loop(COMPILED | changes).run()
    told = [record.message for record in caplog.records if "uncompiled" in record.message]
    assert told == ["training goes on uncompiled: the step cannot be compiled here: RuntimeError: no C++ compiler"]
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")


def test_graphs_that_cannot_be_recorded_are_found_out_before_the_first_update(make_loop, monkeypatch, caplog):
    calls = []

    def fail_when_recorded(self, **inputs):
        calls.append(inputs)
        if len(calls) == 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return self._model(**inputs)

    monkeypatch.setattr(model_of_recipe, "body_of", lambda model, *_: CompiledBody(model.model, uses_graphs=True))
    monkeypatch.setattr(CompiledBody, "__call__", fail_when_recorded)
    assert make_loop(COMPILED | {"optimization.max_updates": 1}).run().update == 1
    assert len(calls) == 2
    assert "the step cannot be compiled here: RuntimeError: operation not permitted" in caplog.text


@pytest.mark.parametrize("error", [KeyboardInterrupt(), torch.OutOfMemoryError("CUDA out of memory.")])
def test_ctrl_c_and_too_little_memory_end_compiling(make_loop, monkeypatch, error):
    fail_to_compile(monkeypatch, error)
    with pytest.raises((KeyboardInterrupt, MemoryError)):
        make_loop(COMPILED).run()


def test_a_signal_while_compiling_ends_the_run_after_its_first_update(make_loop, tmp_path):
    loop = make_loop()
    around(loop.engine, "warm_up", before=lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(TrainingInterrupted):
        loop.run()
    assert saved_updates(tmp_path / "run") == [1]


def fake_gpu(processes: int = 1) -> SimpleNamespace:
    """Return what is asked of an accelerator that has a GPU."""
    return SimpleNamespace(device=torch.device("cuda", 0), num_processes=processes, mixed_precision="bf16")


def body_of(make_loop, changes, processes=1, is_sharded=False, packs=True):
    loop = make_loop(changes)
    network = loop.engine.network
    return compilation.body_of(network, loop.settings, fake_gpu(processes), is_sharded, packs)


def test_auto_compiles_where_a_run_is_long_enough_and_into_graphs_in_one_process(make_loop, monkeypatch, caplog):
    monkeypatch.setattr(compilation, "peak_operations", lambda device: 989e12)
    caplog.set_level(logging.INFO)
    for changes, message in (
        ({"max_updates": 100}, "the run may take 3 seconds, too few"),
        ({"max_updates": 20_000, "max_minutes": 3}, "the run may take 180 seconds"),
        ({"max_updates": 20_000}, "the step is compiled into CUDA graphs"),
        ({"max_updates": None, "max_epochs": 9}, "the step is compiled into CUDA graphs"),
        ({"max_updates": 20_000, "tokens_per_update": 10**9}, "the step is compiled, which"),
    ):
        caplog.clear()
        body = body_of(make_loop, {f"optimization.{name}": value for name, value in changes.items()})
        assert message in caplog.text
        assert (body is not None) == ("the step is compiled" in message)
    monkeypatch.setattr(compilation, "peak_operations", lambda device: None)
    long = {"optimization.max_updates": 20_000}
    assert not body_of(make_loop, long, processes=2).uses_graphs
    for more, reason in (({"is_sharded": True}, "weights are sharded"), ({"packs": False}, "rows are padded")):
        assert body_of(make_loop, long, **more) is None
        assert f"the step is not compiled: {reason}" in caplog.text


def test_a_hook_keeps_a_model_from_compiling_and_packing_and_an_old_card_from_packing(make_loop, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    loop = make_loop({"model.attn_implementation": "sdpa"})
    network = loop.engine.network
    assert feed.may_pack(network, fake_gpu())
    hook = network.model.encoder.layers[0].register_forward_hook(lambda *_: None)
    assert compilation.body_of(network, loop.settings, fake_gpu(), is_sharded=False, packs=False) is None
    assert not feed.may_pack(network, fake_gpu())
    assert caplog.text.count("the model contains code from outside Heedful") == 2
    hook.remove()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not feed.may_pack(network, fake_gpu())
    assert "flash attention needs bfloat16 and an Ampere card" in caplog.text


def test_a_budget_that_shrank_divides_updates_anew_that_were_made_ahead(make_loop, monkeypatch, ahead):
    loop = make_loop({"optimization.shrink_token_budget": True})
    accumulate, sizes = loop.engine.accumulate, []

    def run_out_of_memory_once(micro_batches, *args, **kwargs):
        sizes.append(max(micro_batch.padded_tokens for micro_batch in micro_batches))
        if len(sizes) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return accumulate(micro_batches, *args, **kwargs)

    monkeypatch.setattr(loop.engine, "accumulate", run_out_of_memory_once)
    assert loop.run().token_budget == 1000
    assert sizes[0] > 1000
    assert all(size <= 1000 for size in sizes[1:])


def test_a_budget_that_shrinks_while_an_update_is_made_is_not_taken_for_its_own(make_loop, monkeypatch):
    made_by = make_loop({"optimization.shrink_token_budget": True, "optimization.token_budget": 700})

    def split_and_shrink(update, token_budget, processes):
        made_by.progress.token_budget = 350
        return split_update(update, token_budget, processes)

    monkeypatch.setattr(loop_module, "split_update", split_and_shrink)
    assert next(made_by._updates()).token_budget == 700


def test_what_is_made_ahead_comes_in_order_and_ends_with_its_reader_who_does_not_wait_for_it():
    begun, free, made, before = threading.Event(), threading.Event(), [], threading.active_count()

    def items():
        while True:
            made.append(len(made))
            yield made[-1]
            if len(made) == 1 + AHEAD:
                begun.set()
                free.wait(5)

    ahead = made_ahead(items())
    assert [next(ahead), next(ahead)] == [0, 1]
    begun.wait()
    ahead.close()
    assert len(made) == 1 + AHEAD
    free.set()
    for _ in range(500):
        if threading.active_count() <= before:
            break
        time.sleep(0.01)
    assert threading.active_count() <= before
    assert len(made) <= 2 + AHEAD
    found = map(int, ["0", "1", "the third"])
    assert_error("the third", deque, map(made.append, made_ahead(found)), maxlen=0)  # where its item would have come
    assert made[-2:] == [0, 1]


def late(loop):
    loop.engine.decides_on_device = True
    return loop


def test_the_device_leaves_weights_and_moments_where_a_gradient_is_not_finite(make_loop, tmp_path, caplog):
    changes = {"optimization.skip_nonfinite_updates": 1, "logging.every_updates": 2, "optimization.max_updates": 4}
    loops = make_loop(changes, folder=tmp_path / "waiting"), late(make_loop(changes))
    for loop in loops:
        spoil(loop, {1, 3})
        progress = loop.run()
        assert (progress.skipped_updates, progress.update) == (2, 4)
    assert caplog.text.count("update 3 is skipped: its gradient norm is nan") == 2
    assert equal(*(weights_of(tmp_path / name, 4) for name in ("waiting", "run")))
    assert losses(tmp_path / "waiting") == losses(tmp_path / "run")


def test_a_run_that_diverges_is_stopped_at_the_line_of_the_log_and_nothing_of_it_is_saved(make_loop, tmp_path):
    loop = late(make_loop({"checkpoints.every_updates": 2, "logging.every_updates": 10}))
    spoil(loop, {3})
    assert_error("diverged at update 3 ", loop.run, error=FloatingPointError)
    assert saved_updates(tmp_path / "run") == [2]


def test_results_are_read_once_for_each_line_of_the_log(make_loop, monkeypatch):
    loop, read, stacks = late(make_loop({"logging.every_updates": 3})), Results.read, []
    monkeypatch.setattr(Results, "read", lambda self, keep=0: stacks.append(read(self, keep)) or stacks[-1])
    loop.run()
    assert [len(found) for found in stacks if found] == [3, 3]


def test_without_a_gpu_nothing_is_made_ahead_compiled_or_read_late(make_loop):
    loop = make_loop()
    assert loop.engine.body is None
    assert not any((loop.engine.decides_on_device, loop.engine.feed.is_ahead, loop.engine.feed.packs))


def test_many_models_of_one_process_are_compiled(quick_compiler):
    class Doubling(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = self.decoder = SimpleNamespace(embed_tokens=torch.nn.Embedding(5, 3))

        def forward(self, inputs_embeds, decoder_inputs_embeds):
            return 2 * inputs_embeds + decoder_inputs_embeds

    ids = torch.ones(2, 4, dtype=torch.long)
    for _ in range(20):
        CompiledBody(Doubling())(input_ids=ids, decoder_input_ids=ids.clone())
    assert counters["stats"]["unique_graphs"] == 20


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
    sides = (packing.source, batch["input_ids"], real[0]), (packing.states, batch["labels"], real[1])
    for side, ids, count in sides:
        lengths = side.bounds.diff()
        assert side.positions.shape == ids.shape
        assert (side.bounds[-1], side.bounds.dtype) == (ids.shape[1], torch.int32)
        assert 0 <= lengths.min() <= lengths.max() <= side.longest
        assert ids.shape[1] % 64 == 0
        assert 16 <= ids.shape[1] - count < 2048 + 16
    # Where a row has a token on one side it has one on the other: no query is without a key.
    assert ((packing.source.bounds.diff() > 0) == (packing.states.bounds.diff() > 0)).all()


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
