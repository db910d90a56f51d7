"""The loop: its schedule, its validations, what it logs, keeps and publishes, and what ends it."""

import itertools
import logging
import math
import os
import re
import signal
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from heedful import processor_heed
from heedful.checking.doctor import diagnose
from heedful.checking.estimate import dry_run
from heedful.data.sources import sample
from heedful.fast_paths_heed import runs_known_code
from heedful.training.loop import validation
from heedful.training.loop.monitoring import training_values
from heedful.training.loop.validation import METRICS, validation_loss
from heedful.training.model_of_recipe import make_engine
from heedful.training.processes.signals import TrainingInterrupted
from heedful.training.recipe import OptimizationRecipe
from heedful.training.run import train
from heedful.training.run_folder import checkpoints
from heedful.training.run_folder.checkpoints import checkpoint_path, find_damage, list_checkpoints, load_progress
from heedful.training.run_folder.progress import new_window, unfinished
from heedful.training.start_checks import check_installed
from heedful.training.updates import model_size, optimizers
from heedful.training.updates.model_size import operations_of_pairs
from heedful.training.updates.optimizers import averaged_weights, make_optimizer, orthogonal
from heedful.training.updates.schedule import learning_rate
from helpers import assert_error
from process_checks import equal, share_of_padding, weights_of
from tiny_runs import around, logged, saved_updates, tiny_recipe


def test_the_training_loss_falls_in_bf16_at_the_schedules_rates_and_weights_are_float32(make_loop):
    changes = {"optimization.max_updates": 12, "optimization.mixed_precision": "bf16"}
    loop = make_loop({**changes, "optimization.warmup_updates": 4, "optimization.learning_rate": 0.012})
    assert loop.run().update == 12
    losses, rates = (logged(loop.recipe.folder, f"train/{name}") for name in ("loss", "learning_rate"))
    assert len(losses) == 12
    assert abs(losses[0] - math.log(400)) < 1.0
    assert sum(losses[-3:]) / 3 < 0.85 * losses[0]
    assert rates == pytest.approx([0.003, 0.006, 0.009, *[0.012] * 9])
    assert loop.engine.optimizer.param_groups[0]["lr"] == pytest.approx(0.012)
    assert {weight.dtype for weight in weights_of(loop.recipe.folder, 12).values()} == {torch.float32}


def test_a_run_may_be_resumed_before_it_began_and_after_its_end(make_loop, tmp_path, caplog):
    folder, changes = tmp_path / "run", {"resume": True, "optimization.max_updates": 2}
    assert make_loop(changes).run().update == 2
    before = weights_of(folder, 2)
    with caplog.at_level(logging.INFO, logger="heedful"):
        assert make_loop(changes).run().update == 2
    assert "nothing is left to train: the run ended after 2 updates" in caplog.text
    assert saved_updates(folder) == [2]
    assert equal(weights_of(folder, 2), before)


def test_a_second_ctrl_c_stops_at_once_and_a_second_sigterm_does_not_keep_the_run_from_saving(make_loop, tmp_path):
    cases = (signal.SIGINT, KeyboardInterrupt, []), (signal.SIGTERM, TrainingInterrupted, ["update-00000001"])
    for number, error, saved in cases:
        loop = make_loop(folder=tmp_path / str(number))
        around(loop.engine, "step", before=lambda number=number: [os.kill(os.getpid(), number) for _ in range(2)])
        with pytest.raises(error):
            loop.run()
        assert [path.name for path in (tmp_path / str(number)).glob("checkpoints/*")] == saved


def test_max_epochs_ends_the_run_after_whole_epochs(make_loop, corpus):
    changes = {"optimization.max_updates": None, "optimization.max_epochs": 2}
    progress = make_loop(changes).run()
    epochs = [list(corpus.training.updates(epoch)) for epoch in (0, 1)]
    assert list(corpus.training.updates(0)) == epochs[0] != epochs[1]
    assert progress.update == len(epochs[0]) + len(epochs[1])
    labels = sum(len(row["labels"]) for update in epochs[0] for bucket in update for row in bucket)
    assert progress.target_tokens == 2 * labels


EPOCH = {"optimization.max_updates": None, "optimization.max_epochs": 1}
PATIENT = {"validation.patience": 2, "validation.every_updates": 1, "optimization.max_updates": 3}


@pytest.mark.parametrize("changes", [EPOCH, PATIENT], ids=["epochs", "patience"])
def test_a_run_at_its_last_update_has_ended_by_it_whatever_else_would_end_it(make_loop, monkeypatch, changes):
    monkeypatch.setattr("heedful.training.loop.validation.validation_loss", lambda *_: 2.0)
    loop = make_loop(changes)
    last = loop.run().update
    assert loop.ended_by is None
    loop = make_loop(changes | {"resume": True, "optimization.max_minutes": 1e-6})
    assert loop.run().update == last
    assert (loop.time_is_up, loop.ended_by) == (True, None)


def test_time_is_not_up_before_the_first_update_whatever_the_clock_says(make_loop, monkeypatch):
    monkeypatch.setattr("heedful.training.loop.loop.time", SimpleNamespace(perf_counter=itertools.count().__next__))
    assert make_loop({"optimization.max_minutes": 1e-6}).run().update == 1


@pytest.mark.parametrize(
    ("limit", "last"), [({"optimization.max_updates": 5}, 5), ({"optimization.max_minutes": 1e-6}, 1)]
)
def test_the_last_weights_are_validated_before_the_best_is_chosen(make_loop, monkeypatch, tmp_path, limit, last):
    """Whatever ends the run, and again where it is resumed without anything left to train."""
    changes = {"validation.every_updates": 4, "checkpoints.publish": "best", "optimization.max_updates": 50} | limit
    monkeypatch.setattr("heedful.training.loop.validation.validation_loss", lambda *_: 1 / loop.progress.update)
    loop = make_loop(changes)
    progress = loop.run()
    assert (progress.update, progress.best) == (last, (1 / last, last))
    folder = tmp_path / "run" / "checkpoints"
    settings = loop.recipe.checkpoints
    assert checkpoints.published_checkpoints(folder, settings, progress) == [checkpoint_path(folder, last)]
    assert load_progress(checkpoint_path(folder, last)).best != progress.best
    loop = make_loop(changes | {"resume": True})
    assert loop.run().best == progress.best


@pytest.mark.parametrize(("select", "best"), [("chrf++", (30.0, 2)), ("token_error_rate", (10.0, 1))])
def test_scores_are_better_when_higher_and_error_rates_when_lower(make_loop, monkeypatch, select, best):
    changes = {"validation.every_updates": 1, "validation.sentences": 2, "validation.select": select}
    loop, values, scored = make_loop({"optimization.max_updates": 3, **changes}), iter([10.0, 30.0, 20.0]), []

    def score_pairs(translator, pairs, *_, **__):
        scored.append(pairs)
        return {**dict.fromkeys(METRICS, 1.0), select: next(values)}

    monkeypatch.setattr(validation, "score_pairs", score_pairs)
    assert loop.run().best == best
    pairs = loop.corpus.validation_pairs
    assert scored == [sample(pairs, 2)] * 3 != [pairs[:2]] * 3  # drawn, for a file may be sorted
    assert loop.engine.model.training


def test_the_validation_loss_does_not_depend_on_the_token_budget(make_loop, corpus, monkeypatch):
    loop, read, item = make_loop(), [], torch.Tensor.item
    model = loop.engine.network
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: read.append(tensor) or item(tensor))
    losses = [validation_loss(model, corpus.validation, budget, loop.accelerator) for budget in (10_000, 200, 1)]
    monkeypatch.undo()
    assert len([tensor for tensor in read if tensor.is_floating_point()]) == 3  # each waits once for the device
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=1e-6)
    model.eval()
    total = count = 0.0
    for index in range(len(corpus.validation)):
        row = corpus.validation[index]
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
        logits = model(input_ids=ids, labels=labels).logits
        total += torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum").item()
        count += labels.numel()
    assert losses[0] == pytest.approx(total / count, rel=1e-5)


def test_a_validation_in_mixed_precision_runs_the_model_as_it_was_made_under_one_autocast(make_loop, monkeypatch):
    monkeypatch.setattr(processor_heed, "has_bfloat16", lambda: True)
    loop, seen = make_loop({"optimization.mixed_precision": "bf16", "validation.sentences": 4}), []
    network = loop.engine.network

    def fail(translator, *_, **__):
        model = translator.model
        assert model is network
        seen.append((runs_known_code(model), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        raise torch.OutOfMemoryError

    monkeypatch.setattr(validation, "score_pairs", fail)
    with pytest.raises(torch.OutOfMemoryError):
        validation.validate(loop.recipe.validation, loop.recipe.decoding, loop.corpus, loop.engine)
    assert seen == [(True, True, torch.bfloat16)]


def test_the_loop_asks_for_no_logits(make_loop):
    loop, kept = make_loop({"optimization.max_updates": 1}), []
    around(loop.engine.network, "_loss_of_states", before=lambda: kept.append(True))
    loop.run()
    assert kept


def test_what_is_validated_and_kept_is_the_average_of_the_optimizer(make_loop, corpus, tmp_path):
    pytest.importorskip("schedulefree")
    loop = make_loop({"optimization.optimizer": "schedule_free", "validation.every_updates": 3})
    loop.run()
    network, of_all = loop.engine.network, (corpus.validation, 1000)
    saved = load_file(checkpoint_path(tmp_path / "run/checkpoints", loop.progress.update) / "model.safetensors")
    trained = validation_loss(network, *of_all, loop.accelerator)
    network.load_state_dict(saved, strict=False)
    measured = logged(tmp_path / "run", "validation/loss")[-1]
    assert validation_loss(network, *of_all, loop.accelerator) == pytest.approx(measured, rel=1e-6)
    assert abs(trained - measured) > 1e-3


def test_the_last_checkpoints_and_the_best_are_kept_and_those_published_that_the_recipe_says(tmp_path, monkeypatch):
    values = itertools.chain([5.0, 4.0, 1.0, 6.0, 2.0, 7.0], itertools.repeat(8.0))
    monkeypatch.setattr("heedful.training.loop.validation.validation_loss", lambda *_: next(values))
    changes = {"optimization.max_updates": 7, "validation.every_updates": 1, "checkpoints.every_updates": 2}
    changes |= {"checkpoints.keep_last": 2}
    result = train(tiny_recipe(tmp_path / "run", changes))
    assert result.progress.best == (1.0, 3)
    folder = tmp_path / "run/checkpoints"
    paths = dict(list_checkpoints(folder))
    # The two newest are the regular one of update 6 and the end of the run; update 3 had the best loss.
    assert list(paths) == [3, 6, 7]
    assert [find_damage(path) for path in paths.values()] == [None] * 3
    for publish, updates in {"average": (6, 7), "best": (3,), "last": (7,)}.items():
        settings = replace(result.recipe.checkpoints, publish=publish)
        found = checkpoints.published_checkpoints(folder, settings, result.progress)
        assert sorted(found) == [paths[update] for update in updates]
    weights = [load_file(paths[update] / "model.safetensors") for update in (6, 7)]
    for name, weight in load_file(result.folder / "model.safetensors").items():
        torch.testing.assert_close(weight, sum(each[name] for each in weights) / 2)


def settings(schedule, **changes):
    return OptimizationRecipe(**{"schedule": schedule, "max_updates": 1000, "warmup_updates": 100, **changes})


@given(st.integers(1, 10**6), st.integers(1, 4096), st.integers(1, 20_000), st.floats(1e-3, 10))
def test_the_papers_schedule_is_equation_3(update, d_model, warmup, factor):
    paper = settings("paper", warmup_updates=warmup, learning_rate=factor)
    expected = factor * d_model**-0.5 * min(update**-0.5, update * warmup**-1.5)
    assert learning_rate(update, paper, d_model) == pytest.approx(expected, rel=1e-12)


def test_the_papers_base_model_peaks_at_update_4000_with_seven_ten_thousandths():
    paper = OptimizationRecipe(max_updates=100_000)
    rates = {update: learning_rate(update, paper, 512) for update in range(1, 12_001)}
    assert max(rates, key=rates.get) == 4000
    assert rates[4000] == pytest.approx(6.98771e-4, rel=1e-5)
    assert rates[1] == pytest.approx(rates[4000] / 4000)


SHAPES = {  # 300 updates after the warm-up, and at the end
    "inverse_sqrt": (0.5, math.sqrt(0.1)),
    "constant": (1.0, 1.0),
    "linear": (2 / 3, 0.0),
    "cosine": (0.75, 0.0),
}


def test_all_other_schedules_rise_linearly_and_have_their_own_shapes_after_the_warm_up():
    for schedule, (after, end) in SHAPES.items():
        rates = [learning_rate(update, settings(schedule, learning_rate=0.5), 512) for update in (1, 50, 99, 100)]
        assert rates == pytest.approx([0.005, 0.25, 0.495, 0.5])
        rates = [learning_rate(update, settings(schedule), 512) for update in (400, 1000, 5000)]
        assert rates[:2] == pytest.approx([after, end], abs=1e-12)
        assert rates[2] <= end + 1e-12
    for schedule in ("paper", *SHAPES):  # without warm-up the first update has the highest rate
        rates = [learning_rate(update, settings(schedule, warmup_updates=0), 1) for update in range(1, 1000)]
        assert rates[0] == max(rates) == pytest.approx(1.0, abs=2e-3)
        assert min(rates) >= 0


def test_adam_has_the_papers_constants():
    model = torch.nn.Linear(3, 2)
    model.weight.requires_grad_(False)
    optimizer = make_optimizer(model, OptimizationRecipe(max_updates=1))
    assert type(optimizer) is torch.optim.Adam
    (group,) = optimizer.param_groups
    assert (group["betas"], group["eps"]) == ((0.9, 0.98), 1e-9)
    assert group["params"] == [model.bias]  # frozen weights are left out


def test_adamw_decays_matrices_and_no_vector():
    model = torch.nn.Linear(3, 2)
    optimizer = make_optimizer(model, OptimizationRecipe(optimizer="adamw", weight_decay=0.1, max_updates=1))
    assert type(optimizer) is torch.optim.AdamW
    decays = {parameter: group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]}
    assert decays == {model.weight: 0.1, model.bias: 0.0}


def test_the_average_of_schedule_free_is_where_its_package_evaluates():
    pytest.importorskip("schedulefree")
    model = torch.nn.Linear(3, 2)
    settings = OptimizationRecipe(optimizer="schedule_free", beta1=0.9, weight_decay=0.1, max_updates=9)
    optimizer = make_optimizer(model, settings)
    for rate in (0.1, 0.2, 0.2):
        model.weight.grad, model.bias.grad = model.weight.detach() ** 2 - 1, torch.ones(2)
        optimizers.set_learning_rate(optimizer, rate)
        optimizer.step()
    trained, average = model.weight.detach().clone(), averaged_weights(optimizer, dict(model.named_parameters()))
    optimizer.eval()
    torch.testing.assert_close(average, {name: weight.detach() for name, weight in model.named_parameters()})
    assert (average["weight"] - trained).norm() > 0.01


def test_muon_takes_the_matrices_of_layers_and_adamw_all_else(make_loop):
    changes = {"optimization.optimizer": "muon", "optimization.embedding_learning_rate": 0.02}
    changes |= {"optimization.learning_rate": 0.004, "optimization.schedule": "constant"}
    changes |= {"model.options.position_encoding": "shaw"}  # a table of distances is no matrix of a layer
    loop = make_loop({**changes, "optimization.warmup_updates": 0, "optimization.max_updates": 1})
    loop.run()
    optimizer = loop.engine.optimizer.optimizer
    muon, *others = optimizer.param_groups
    names = {weight: name for name, weight in loop.engine.network.named_parameters()}
    taken = {names[weight] for weight in muon["params"]}
    assert {name.split(".")[-2] for name in taken} == {"q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"}
    assert optimizer.adamw.param_groups == others
    assert names.keys() == {weight for group in (muon, *others) for weight in group["params"]}
    tables = {names[weight] for weight in others[0]["params"]}
    assert {name.split(".")[-2] for name in tables} == {"embed_tokens", "relative_keys", "relative_values"}
    assert [group["lr"] for group in (muon, *others)] == [0.004, 0.02, 0.004]


@pytest.mark.parametrize("is_rounded", [False, True])
@pytest.mark.parametrize(("shape", "at_once"), [((8, 8), 128), ((6, 20), 1 << 24), ((20, 6), 120)])
def test_muon_is_torchs_but_for_its_rounding(shape, at_once, is_rounded, monkeypatch):
    monkeypatch.setattr(optimizers, "AT_ONCE", at_once)
    counts = []
    seen = lambda stack, is_rounded: counts.append(len(stack)) or orthogonal(stack, is_rounded)  # noqa: E731
    monkeypatch.setattr(optimizers, "orthogonal", seen)
    torch.manual_seed(1)
    start = [torch.randn(shape), torch.randn(shape)]  # which are multiplied together
    ours, theirs = ([torch.nn.Parameter(each.clone()) for each in start] for _ in range(2))
    adamw = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=0.02)
    one = optimizers.MuonWithAdamW(ours, adamw, weight_decay=0.1, is_rounded=is_rounded)
    one.param_groups[0]["lr"] = 0.02
    other = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for size, *weights in zip((1, 100), ours, theirs, strict=True):
            gradient = size * torch.randn(shape)
            for weight in weights:
                weight.grad = gradient.clone()
        one.step()
        other.step()
    assert all((weight - before).norm() > 0.05 for weight, before in zip(ours, start, strict=True))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-3)
    assert counts == ([1] * 6 if at_once == 120 else [2] * 3)


def test_muon_multiplies_in_bfloat16_only_if_the_run_and_the_processor_do(monkeypatch):
    matrices = torch.randn(1, 8, 8)
    found = {}
    for is_rounded, has in itertools.product((False, True), repeat=2):
        monkeypatch.setattr(processor_heed, "has_bfloat16", lambda has=has: has)
        found[is_rounded, has] = orthogonal(matrices, is_rounded)
        assert found[is_rounded, has].dtype == torch.float32
    exact = found.pop((False, False))
    different = [key for key, each in found.items() if not torch.equal(each, exact)]
    assert different == [(True, True)]


def test_optimizers_that_cannot_be_had_are_refused_by_name(tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    from heedful.proposals.tuning import tune

    sharded, must = SimpleNamespace(distributed_type=DistributedType.FSDP), "`optimization.optimizer` must be "
    muon = OptimizationRecipe(optimizer="muon", max_updates=1)
    assert_error(f"{must}another one .* but is muon instead", make_optimizer, torch.nn.Embedding(3, 2), muon)
    apart = OptimizationRecipe(embedding_learning_rate=0.1, max_updates=1)
    empty = "`optimization.embedding_learning_rate` must be empty for a model without .* but is 0.1"
    assert_error(empty, make_optimizer, torch.nn.Linear(3, 2), apart)
    assert_error(f"{must}another one if weights are sharded", make_engine, sharded, torch.nn.Linear(3, 2), muon)
    monkeypatch.setitem(sys.modules, "schedulefree", None)
    free = tiny_recipe(tmp_path, {"optimization.optimizer": "schedule_free"})
    must += r"installed \(.*pip install 'heedful\[optimizers\]'\), but is sc"
    assert_error(must, check_installed, free.optimization, None, [])
    assert_error(must, dry_run, free)
    vary = {"optimization.optimizer": ["adam", "schedule_free"]}
    assert_error(must, tune, tiny_recipe(tmp_path), tmp_path / "search", 1, vary)
    assert not [*tmp_path.iterdir()]
    assert diagnose(free).findings[-1].where == "optimization.optimizer"


def test_logged_values_are_those_of_all_tokens_and_the_gradients_norm_is_that_before_clipping(make_loop, tmp_path):
    norms, changes = {}, {"optimization.token_budget": 500, "optimization.max_updates": 3}
    for limit in (0.01, None):
        loop = make_loop(changes | {"optimization.max_grad_norm": limit}, tmp_path / str(limit))
        found = norms[limit] = []
        norm = lambda weights=loop.engine.parameters: torch.cat([w.grad.flatten() for w in weights]).norm()  # noqa: E731
        around(loop.engine.optimizer, "step", before=lambda found=found, norm=norm: found.append(norm().item()))
        loop.run()
    assert norms[0.01] == pytest.approx([0.01] * 3, rel=1e-3)
    free, clipped = (logged(tmp_path / name, "train/gradient_norm") for name in ("None", "0.01"))
    assert free == pytest.approx(norms[None], rel=1e-5)
    assert clipped[0] == pytest.approx(free[0], rel=1e-6)
    losses = logged(tmp_path / "None", "train/loss")
    assert logged(tmp_path / "None", "train/perplexity") == pytest.approx([math.exp(loss) for loss in losses])
    # And of several updates those of all their tokens.
    updates = list(loop.corpus.training.updates(0))[:3]
    counts = [sum(len(row["labels"]) for bucket in update for row in bucket) for update in updates]
    make_loop(changes | {"logging.every_updates": 3}, tmp_path / "several").run()
    mean = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    assert len(set(counts)) > 1
    assert logged(tmp_path / "several", "train/loss") == [pytest.approx(mean, rel=1e-9)]
    padding = share_of_padding(loop, 3)
    assert padding > 0.01
    assert logged(tmp_path / "several", "train/padding_share") == [pytest.approx(padding)]


def test_a_line_of_the_log_without_any_update_says_nothing_of_losses():
    values = training_values(new_window())
    assert "train/target_tokens_per_s" in values
    assert not {"train/loss", "train/perplexity", "train/gradient_norm"} & values.keys()
    assert all(math.isfinite(value) for value in values.values())


def test_a_run_that_still_learns_at_its_end_says_so_with_the_key_to_raise():
    falling = [(60 * n, 1 / n) for n in range(1, 11)]
    updates = OptimizationRecipe(max_updates=600, max_minutes=5)
    (told,) = unfinished(falling, None, updates)
    assert "still fell at the end of the run, from 0.12 to 0.10 in its last fifth" in told
    assert told.endswith("Raise `optimization.max_updates` and `optimization.max_minutes`.")
    (told,) = unfinished(falling, "optimization.max_minutes", updates)
    assert told.endswith("Raise `optimization.max_minutes`.")
    flat = [(60 * n, 1.0 - 0.002 * n) for n in range(1, 11)]
    for losses, by in ((flat, None), (falling[:4], None), (falling, "validation.patience"), ([], None)):
        assert unfinished(losses, by, updates) == []
    assert unfinished([*falling[:5], (330, 0.01), *falling[5:]], None, updates) == []


def test_a_gpu_s_share_of_its_peak_and_its_memory_are_in_the_log_and_the_bar(make_loop, monkeypatch, tmp_path):
    monkeypatch.setattr(model_size, "peak_operations", lambda device: 1e12)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1.25 * 2**30)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    loop, gpu = make_loop({"optimization.max_updates": 2}), torch.device("cuda")
    loop.log.accelerator = SimpleNamespace(device=gpu, num_processes=1, is_main_process=True, trackers=[])
    write, told = loop.log.write_training, []
    monkeypatch.setattr(loop.log, "write_training", lambda *given: told.append(write(*given)) or told[-1])
    loop.run()
    shares, speeds, memory = (
        logged(tmp_path / "run", f"train/{name}")
        for name in ("model_flops_utilization", "target_tokens_per_s", "peak_memory_gib")
    )
    per_token = operations_of_pairs(loop.engine.network, 0, 1)
    assert all(share > speed * per_token / 1e12 for share, speed in zip(shares, speeds, strict=True))
    assert memory == [1.25] * 2
    assert re.fullmatch(
        r"train loss \d.\d+, [\d,]+ target tokens/s, \d+% of the card's peak, 1.2 GiB, \d+% waiting for data", told[-1]
    )
