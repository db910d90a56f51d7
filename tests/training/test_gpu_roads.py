"""How a GPU trains, tried on the CPU: a compiled body, rows end to end, updates made ahead, results read late."""

import logging
import math
import signal
import threading
import time
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters

from heedful.data.micro_batches import split_update
from heedful.training import model_of_recipe
from heedful.training.loop import feed
from heedful.training.loop import loop as loop_module
from heedful.training.loop.engine import Results
from heedful.training.loop.feed import Feed
from heedful.training.processes.signals import TrainingInterrupted
from heedful.training.speed import compilation
from heedful.training.speed.compilation import CompiledBody
from heedful.training.speed.made_ahead import AHEAD, made_ahead
from rows_attention import varlen_attn
from tiny_runs import logged

COMPILED = {"optimization.compile": True}
NO_DROPOUT = {"model.options.dropout": 0.0}


@pytest.fixture
def quick_compiler(monkeypatch):
    """Trace what would be compiled, and run it as it is."""
    compile_as_asked = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, dynamic, options: compile_as_asked(function, dynamic=dynamic, backend="eager"),
    )
    torch.compiler.reset()
    counters.clear()


@pytest.fixture
def packed(monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setattr(model_of_recipe, "may_pack", lambda *_: True)


def losses(folder):
    return logged(folder, "train/loss")


# The compiled step


def test_a_compiled_step_learns_what_the_plain_one_does_from_one_program(make_loop, quick_compiler, tmp_path):
    make_loop(NO_DROPOUT, folder=tmp_path / "plain").run()
    make_loop(COMPILED | NO_DROPOUT | {"optimization.token_budget": 700}).run()
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)
    assert (counters["stats"]["unique_graphs"], dict(counters["graph_break"])) == (1, {})


def test_a_compiled_step_on_rows_end_to_end_does_too(make_loop, quick_compiler, packed, tmp_path):
    make_loop(COMPILED | NO_DROPOUT | {"model.attn_implementation": "sdpa"}).run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_of_recipe, "may_pack", lambda *_: False)
        make_loop(NO_DROPOUT, folder=tmp_path / "plain").run()
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)
    assert (counters["stats"]["unique_graphs"], dict(counters["graph_break"])) == (1, {})
    padding = logged(tmp_path / "run", "train/padding_share")
    assert all(0 <= share < 0.5 for share in padding)


def test_r_drop_on_rows_end_to_end_learns_what_it_does_on_padded_ones(make_loop, packed, monkeypatch, tmp_path):
    changes = {"optimization.r_drop": 3.0, "model.attn_implementation": "sdpa", "model.options.dropout": 1e-9}
    make_loop(changes).run()
    monkeypatch.setattr(model_of_recipe, "may_pack", lambda *_: False)
    make_loop(changes, folder=tmp_path / "padded").run()
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "padded"), rel=1e-5)


def stopped_and_straight(make_loop, weights_of, tmp_path, changes):
    """Return the weights of a run that goes on, and of one that does not stop."""
    changes = {"optimization.max_updates": 4} | changes
    make_loop(changes, folder=tmp_path / "straight").run()
    make_loop(changes | {"optimization.max_updates": 2}).run()
    make_loop(changes | {"resume": True}).run()
    return [weights_of(tmp_path / name, 4) for name in ("run", "straight")]


def equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_compiled_run_that_was_stopped_goes_on_to_the_bit(make_loop, quick_compiler, weights_of, tmp_path):
    assert equal(*stopped_and_straight(make_loop, weights_of, tmp_path, COMPILED))


def test_validation_and_generation_stay_uncompiled(make_loop, quick_compiler):
    changes = {"validation.every_updates": 3, "validation.sentences": 4, "checkpoints.every_updates": 3}
    make_loop(COMPILED | changes).run()
    assert counters["stats"]["unique_graphs"] == 1


def test_where_nothing_can_be_compiled_a_run_goes_on_with_one_warning(make_loop, monkeypatch, caplog, tmp_path):
    def fail(self, **_):
        raise RuntimeError("no C++ compiler\nwas found")

    monkeypatch.setattr(CompiledBody, "__call__", fail)
    assert make_loop(COMPILED).run().update == 6
    told = [record.message for record in caplog.records if "uncompiled" in record.message]
    assert told == ["training goes on uncompiled: its step cannot be compiled here: RuntimeError: no C++ compiler"]
    make_loop(folder=tmp_path / "plain").run()
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")


def test_graphs_that_cannot_be_recorded_are_found_out_before_the_first_update(make_loop, monkeypatch, caplog):
    calls = []

    def fail_when_recorded(self, **inputs):
        calls.append(inputs)
        if len(calls) == 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return self._model(**inputs)

    monkeypatch.setattr(compilation, "body_of", lambda model, *_: CompiledBody(model.model, uses_graphs=True))
    monkeypatch.setattr(CompiledBody, "__call__", fail_when_recorded)
    assert make_loop(COMPILED).run().update == 6
    assert len(calls) == 2
    assert "its step cannot be compiled here: RuntimeError: operation not permitted" in caplog.text


@pytest.mark.parametrize("error", [KeyboardInterrupt(), torch.OutOfMemoryError("CUDA out of memory.")])
def test_ctrl_c_and_too_little_memory_end_compiling(make_loop, monkeypatch, error):
    def fail(self, **_):
        raise error

    monkeypatch.setattr(CompiledBody, "__call__", fail)
    with pytest.raises((KeyboardInterrupt, MemoryError)):
        make_loop(COMPILED).run()


def test_a_signal_while_compiling_ends_the_run_after_its_first_update(make_loop, monkeypatch, saved_updates, tmp_path):
    loop = make_loop()
    warm_up = loop.engine.warm_up
    monkeypatch.setattr(loop.engine, "warm_up", lambda row: signal.raise_signal(signal.SIGINT) or warm_up(row))
    with pytest.raises(TrainingInterrupted):
        loop.run()
    assert saved_updates(tmp_path / "run") == [1]


def test_what_cannot_be_compiled_is_refused(make_loop):
    for changes, reason in (
        ({"model.options": {"model_type": "heed_rnn", "d_model": 8}}, "the model is recurrent"),
        ({"model.gradient_checkpointing": True}, "`model.gradient_checkpointing` is true"),
        ({"model.options.position_encoding": "learned"}, "`model.options.position_encoding` is learned"),
        ({"model.options.position_encoding": "t5"}, "`model.options.position_encoding` is t5"),
    ):
        with pytest.raises(ValueError, match=f"`optimization.compile` must be auto or false where {reason}"):
            make_loop(COMPILED | changes)


class FakeGpu(SimpleNamespace):
    """What is asked of an accelerator that has a GPU."""

    def __init__(self, processes: int = 1):
        super().__init__(device=torch.device("cuda", 0), num_processes=processes, mixed_precision="bf16")


def body_of(make_loop, changes, processes=1, is_sharded=False, packs=True):
    loop = make_loop(changes)
    network = loop.engine.network
    network.__dict__.pop("forward", None)  # of Accelerate's
    return compilation.body_of(network, loop.settings, FakeGpu(processes), is_sharded, packs)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"optimization.max_updates": 100}, "the run may take 3 seconds, too few"),
        ({"optimization.max_minutes": 1}, "the run may take 0 seconds, too few"),
        ({"optimization.max_updates": 20_000, "optimization.max_minutes": 3}, "the run may take 180 seconds"),
        ({"optimization.max_updates": 20_000}, "the step is compiled into CUDA graphs"),
        ({"optimization.max_updates": None, "optimization.max_epochs": 9}, "the step is compiled into CUDA graphs"),
        ({"optimization.max_updates": 20_000, "optimization.tokens_per_update": 10**9}, "the step is compiled, which"),
    ],
)
def test_auto_compiles_on_a_gpu_where_a_run_is_long_enough(make_loop, monkeypatch, caplog, changes, told):
    monkeypatch.setattr(compilation, "peak_operations", lambda device: 989e12)
    with caplog.at_level(logging.INFO):
        body = body_of(make_loop, changes)
    assert told in caplog.text
    assert (body is not None) == ("the step is compiled" in told)


def test_graphs_are_for_one_process_and_few_shapes_and_shards_are_not_compiled(make_loop, monkeypatch, caplog):
    monkeypatch.setattr(compilation, "peak_operations", lambda device: None)
    long = {"optimization.max_updates": 20_000}
    assert not body_of(make_loop, long, processes=2).uses_graphs
    with caplog.at_level(logging.INFO):
        assert body_of(make_loop, {}, is_sharded=True) is None
        assert body_of(make_loop, long, packs=False) is None
    assert "the step is not compiled: weights are sharded" in caplog.text
    assert "the step is not compiled: rows are padded" in caplog.text


def test_a_hook_keeps_a_model_from_being_compiled_and_packed_and_an_old_card_from_packing(
    make_loop, monkeypatch, caplog
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    loop = make_loop({"model.attn_implementation": "sdpa"})
    network = loop.engine.network
    network.__dict__.pop("forward", None)
    assert feed.may_pack(network, FakeGpu())
    hook = network.model.encoder.layers[0].register_forward_hook(lambda *_: None)
    with caplog.at_level(logging.INFO):
        assert compilation.body_of(network, loop.settings, FakeGpu()) is None
        assert not feed.may_pack(network, FakeGpu())
        assert caplog.text.count("code that is not Heedful's runs within the model") == 2
        hook.remove()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert not feed.may_pack(network, FakeGpu())
    assert "flash attention computes in bfloat16 on cards since Ampere" in caplog.text


# Updates made ahead


def test_updates_that_are_made_ahead_are_the_same(make_loop, monkeypatch, weights_of, tmp_path):
    changes = {"optimization.max_epochs": 2, "optimization.max_updates": None, "optimization.tokens_per_update": 4000}
    make_loop(changes, folder=tmp_path / "straight").run()
    threads = set()
    monkeypatch.setattr(Feed, "is_ahead", True)
    monkeypatch.setattr(feed, "pinned", lambda tensors: threads.add(threading.current_thread().name) or tensors)
    ahead = make_loop(changes).run()
    assert threads
    assert "MainThread" not in threads
    assert ahead.epoch == 2
    assert ahead.update_in_epoch == 0
    assert equal(*(weights_of(tmp_path / name, ahead.update) for name in ("straight", "run")))


def test_a_run_that_was_stopped_while_updates_were_made_ahead_goes_on_to_the_bit(
    make_loop, monkeypatch, weights_of, tmp_path
):
    monkeypatch.setattr(Feed, "is_ahead", True)
    monkeypatch.setattr(feed, "pinned", lambda tensors: tensors)
    assert equal(*stopped_and_straight(make_loop, weights_of, tmp_path, {}))


def test_a_budget_that_shrank_divides_updates_anew_that_were_made_ahead(make_loop, monkeypatch):
    monkeypatch.setattr(Feed, "is_ahead", True)
    monkeypatch.setattr(feed, "pinned", lambda tensors: tensors)
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


def test_items_come_in_order_and_an_error_where_its_item_would_have_come():
    def items():
        yield from range(5)
        raise ValueError("the sixth")

    found = []
    with pytest.raises(ValueError, match="the sixth"):
        deque(map(found.append, made_ahead(items())), maxlen=0)
    assert found == [0, 1, 2, 3, 4]
    assert list(made_ahead(iter(range(7)))) == list(range(7))
    assert list(made_ahead(iter(()))) == []


def test_what_is_made_ahead_ends_with_its_reader():
    asked, before = [], threading.active_count()
    items = made_ahead(iter(lambda: asked.append(1) or len(asked), None))
    assert [next(items), next(items)] == [1, 2]
    items.close()
    for _ in range(500):
        if threading.active_count() == before:
            break
        time.sleep(0.01)
    assert threading.active_count() == before
    assert len(asked) <= 2 + AHEAD


def test_what_is_being_made_when_a_run_ends_is_not_waited_for():
    begun, free, made = threading.Event(), threading.Event(), []

    def items():
        yield 1
        begun.set()
        free.wait(5)
        made.append(2)
        yield 2

    ahead = made_ahead(items())
    assert next(ahead) == 1
    begun.wait()
    ahead.close()
    assert made == []
    free.set()


# Results that the device knows first


@pytest.fixture
def late(make_loop):
    """Make a loop whose device decides whether a gradient is finite."""

    def make(changes=None, **settings):
        loop = make_loop(changes, **settings)
        loop.engine.decides_on_device = True
        return loop

    return make


def spoil(loop, monkeypatch, updates):
    accumulate = loop.engine.accumulate

    def accumulate_and_spoil(*args, **kwargs):
        sums = accumulate(*args, **kwargs)
        if loop.progress.update + 1 in updates:
            next(iter(loop.engine.parameters)).grad[0, 0] = math.nan
        return sums

    monkeypatch.setattr(loop.engine, "accumulate", accumulate_and_spoil)


def test_the_device_leaves_weights_and_moments_where_a_gradient_is_not_finite(
    make_loop, late, monkeypatch, weights_of, tmp_path, caplog
):
    changes = {"optimization.skip_nonfinite_updates": 1, "logging.every_updates": 3}
    for make, name in ((make_loop, "waiting"), (late, "run")):
        loop = make(changes, folder=tmp_path / name)
        spoil(loop, monkeypatch, {2, 5})
        progress = loop.run()
        assert (progress.skipped_updates, progress.update) == (2, 6)
    assert caplog.text.count("update 5 is skipped: the norm of its gradient is nan") == 2
    assert equal(*(weights_of(tmp_path / name, 6) for name in ("waiting", "run")))
    assert losses(tmp_path / "waiting") == losses(tmp_path / "run")


def test_a_run_that_diverges_is_stopped_at_the_line_of_the_log_and_nothing_of_it_is_saved(
    late, monkeypatch, saved_updates, tmp_path
):
    loop = late({"checkpoints.every_updates": 2, "logging.every_updates": 10})
    spoil(loop, monkeypatch, {3})
    with pytest.raises(FloatingPointError, match="diverged at update 3 "):
        loop.run()
    assert saved_updates(tmp_path / "run") == [2]


def test_results_are_read_once_for_each_line_of_the_log(late, monkeypatch, tmp_path):
    loop = late({"logging.every_updates": 3})
    read, stacks = Results.read, []
    monkeypatch.setattr(
        Results, "read", lambda self, keep=0: stacks.append(found) or found if (found := read(self, keep)) else found
    )
    loop.run()
    assert [len(found) for found in stacks] == [3, 3]


def test_a_result_that_is_kept_back_is_read_one_update_later():
    accelerator = SimpleNamespace(device=torch.device("cpu"), num_processes=1)
    results = Results(accelerator)
    for number in (1, 2):
        results.add((number, 10, 20), torch.tensor([6.0, 1.0, 2.0]), (30, False, True), torch.tensor(0.5))
        found = results.read(keep=1)
    assert [(each.update, each.loss, each.late_ranks) for each in found] == [(1, 3.0, 1.0)]
    assert [each.update for each in results.read()] == [2]


def test_weights_are_rounded_once_for_all_micro_batches(make_loop, monkeypatch):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Casts(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.weights = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten._to_copy.default and isinstance(args[0], torch.nn.Parameter):
                self.weights.append(args[0].data_ptr())
            return function(*args, **(kwargs or {}))

    loop = make_loop({"optimization.mixed_precision": "bf16", "optimization.token_budget": 500})
    update = next(loop._updates())
    assert len(update.micro_batches) > 2
    loop.engine.model.train()
    with Casts() as casts:
        loop.engine.accumulate(update.micro_batches, 100)
    assert casts.weights
    assert len(casts.weights) == len(set(casts.weights))


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

    for _ in range(20):
        CompiledBody(Doubling())(
            input_ids=torch.ones(2, 4, dtype=torch.long), decoder_input_ids=torch.ones(2, 4).long()
        )
    assert counters["stats"]["unique_graphs"] == 20
