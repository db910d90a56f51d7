import math
import os
import signal
from dataclasses import replace

import pytest
import torch

from heedful.data.micro_batches import split_update
from heedful.fast_paths_heed import runs_known_code
from heedful.training.loop import validation
from heedful.training.loop.validation import METRICS, validation_loss
from heedful.training.preparation import prepare_corpus
from heedful.training.processes.signals import TrainingInterrupted
from heedful.training.run_folder.checkpoints import checkpoint_path, find_damage, load_progress, published_checkpoints
from tiny_runs import logged, tiny_recipe

NO_DROPOUT = {"model.options": {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0}}
NO_DROPOUT["model.options"] |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64}


def equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def updates_of_an_epoch(corpus):
    return len(list(corpus.updates(0)))


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_training_loss_falls_and_weights_are_float32(make_loop, weights_of, precision):
    loop = make_loop({"optimization.max_updates": 30, "optimization.mixed_precision": precision})
    assert loop.run().update == 30
    losses = logged(loop.recipe.folder, "train/loss")
    assert len(losses) == 30
    assert abs(losses[0] - math.log(400)) < 1.0
    assert sum(losses[-5:]) / 5 < 0.85 * losses[0]
    assert {weight.dtype for weight in weights_of(loop.recipe.folder, 30).values()} == {torch.float32}


def test_the_learning_rate_of_every_update_is_the_schedules(make_loop):
    loop = make_loop({"optimization.warmup_updates": 4})
    loop.run()
    rates = logged(loop.recipe.folder, "train/learning_rate")
    assert rates == pytest.approx([0.00075, 0.0015, 0.00225, 0.003, 0.003, 0.003])
    assert loop.engine.optimizer.param_groups[0]["lr"] == pytest.approx(0.003)


def gradient_of_one_update(make_loop, folder, token_budget):
    # With this epsilon Adam's step is nearly proportional to the gradient.
    changes = {"optimization.max_updates": 1, "optimization.epsilon": 1e3, "optimization.warmup_updates": 0}
    changes |= {"optimization.learning_rate": 1e3, "optimization.token_budget": token_budget, **NO_DROPOUT}
    loop = make_loop(changes, folder)
    before = {name: weight.detach().clone() for name, weight in loop.engine.model.named_parameters()}
    batches = len(split_update(next(iter(loop.corpus.updates(0))), loop.token_budget, 1)[0])
    loop.run()
    change = torch.cat([(weight - before[name]).flatten() for name, weight in loop.engine.model.named_parameters()])
    return logged(folder, "train/loss")[0], change.detach().double(), batches


def test_loss_and_gradient_do_not_depend_on_the_micro_batches(make_loop, tmp_path):
    loss, change, batches = gradient_of_one_update(make_loop, tmp_path / "whole", None)
    assert batches == 1
    assert change.norm() > 0.01
    for budget, at_least in ((1000, 2), (300, 7), (1, 30)):
        other_loss, other_change, batches = gradient_of_one_update(make_loop, tmp_path / str(budget), budget)
        assert batches >= at_least
        assert other_loss == pytest.approx(loss, rel=1e-6)
        assert (other_change - change).norm() / change.norm() < 2e-5


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(make_loop, tmp_path, weights_of, corpus):
    epoch, found = updates_of_an_epoch(corpus), []
    assert epoch > 3
    end = epoch + 2
    for stop in (None, 2, epoch, epoch + 1):
        folder = tmp_path / str(stop)
        if stop is not None:
            make_loop({"optimization.max_updates": stop}, folder).run()
        loop = make_loop({"optimization.max_updates": end, "resume": stop is not None}, folder)
        assert loop.progress.update == (stop or 0)
        loop.run()
        checkpoint = checkpoint_path(folder / "checkpoints", end)
        state = torch.load(checkpoint / "training_state/optimizer.pt")["state"]
        moments = {f"{number} {name}": moment for number, each in state.items() for name, moment in each.items()}
        progress = replace(load_progress(checkpoint), seconds=0)
        found.append((weights_of(folder, end), moments, (progress, logged(folder, "train/loss"))))
    for other in found[1:]:
        assert equal(other[0], found[0][0])
        assert equal(other[1], found[0][1])
        assert other[2] == found[0][2]


def test_dropout_is_at_work_in_the_resume_test(make_loop, tmp_path, weights_of, monkeypatch):
    for name, seed in (("one", 1), ("other", 2)):
        loop = make_loop({"optimization.max_updates": 1}, tmp_path / name)
        monkeypatch.setattr("heedful.training.loop.loop.seed_of_update", lambda *_, seed=seed: seed)
        loop.run()
    assert not equal(weights_of(tmp_path / "one", 1), weights_of(tmp_path / "other", 1))


def test_a_run_may_be_resumed_before_it_began_and_after_its_end(make_loop, tmp_path, weights_of, saved_updates):
    folder = tmp_path / "run"
    assert make_loop({"resume": True}).run().update == 6
    before = weights_of(folder, 6)
    loop = make_loop({"resume": True})
    assert loop.run().update == 6
    assert saved_updates(folder) == [6]
    assert equal(weights_of(folder, 6), before)


def test_a_damaged_newest_checkpoint_is_replaced_by_the_resumed_run(make_loop, tmp_path, weights_of):
    folder = tmp_path / "run"
    make_loop({"checkpoints.every_updates": 3}).run()
    expected = weights_of(folder, 6)
    damaged = checkpoint_path(folder / "checkpoints", 6)
    content = bytearray((damaged / "model.safetensors").read_bytes())
    content[-5] ^= 0x40
    (damaged / "model.safetensors").write_bytes(content)
    half_written = folder / "checkpoints" / ".update-00000007.abcdefgh.partial"
    half_written.mkdir()
    loop = make_loop({"checkpoints.every_updates": 3, "resume": True})
    assert loop.progress.update == 3
    loop.run()
    assert find_damage(damaged) is None
    assert equal(weights_of(folder, 6), expected)
    assert not half_written.exists()


def signal_in_update(loop, monkeypatch, number, *signals):
    """Send signals while a loop takes its update of this number."""
    step = loop.engine.step

    def step_and_be_stopped(*given):
        for each in signals if loop.progress.update + 1 == number else ():
            os.kill(os.getpid(), each)
        return step(*given)

    monkeypatch.setattr(loop.engine, "step", step_and_be_stopped)


def test_a_signal_ends_the_run_after_its_update_and_it_can_be_resumed(
    make_loop, tmp_path, weights_of, saved_updates, monkeypatch
):
    make_loop(folder=tmp_path / "straight").run()
    for number in (signal.SIGINT, signal.SIGTERM):
        folder = tmp_path / str(number)
        loop = make_loop(folder=folder)
        signal_in_update(loop, monkeypatch, 2, number)
        handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
        with pytest.raises(TrainingInterrupted, match=r"after update 2.*resume=true"):
            loop.run()
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
        assert saved_updates(folder) == [2]
        assert make_loop({"resume": True}, folder).run().update == 6
        assert equal(weights_of(folder, 6), weights_of(tmp_path / "straight", 6))


def test_a_second_ctrl_c_stops_at_once_and_a_second_sigterm_does_not_keep_the_run_from_saving(
    make_loop, monkeypatch, saved_updates, tmp_path
):
    loop = make_loop()
    signal_in_update(loop, monkeypatch, 1, signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    assert not (tmp_path / "run" / "checkpoints").exists()
    loop = make_loop(folder=tmp_path / "other")
    signal_in_update(loop, monkeypatch, 1, signal.SIGTERM, signal.SIGTERM)
    with pytest.raises(TrainingInterrupted):
        loop.run()
    assert saved_updates(tmp_path / "other") == [1]


def test_max_epochs_ends_the_run_after_whole_epochs(make_loop, corpus):
    loop = make_loop({"optimization.max_updates": None, "optimization.max_epochs": 2})
    progress = loop.run()
    assert progress.update == sum(len(list(corpus.updates(epoch))) for epoch in (0, 1))
    labels = sum(len(row["labels"]) for update in corpus.updates(0) for bucket in update for row in bucket)
    assert progress.target_tokens == 2 * labels


def test_max_minutes_ends_the_run_at_the_first_update_past_them(make_loop):
    loop = make_loop({"optimization.max_updates": 50, "optimization.max_minutes": 1e-6})
    assert loop.run().update == 1


def test_a_validation_without_ter_says_nothing_of_it(monkeypatch, caplog):
    texts = [" ".join(map(str, range(250)))] * 40
    monkeypatch.setattr(validation, "translate_on_ranks", lambda *_, **__: [text[::-1] for text in texts])
    pairs = [{"source": "", "target": text} for text in texts]
    caplog.set_level("INFO", "heedful")
    assert "ter" not in validation.score_pairs(None, pairs, None, {"metrics": ("bleu",)})
    assert caplog.text == ""
    assert "ter" not in validation.score_pairs(None, pairs, None, {})
    assert "TER is left out" in caplog.text


@pytest.mark.parametrize("limit", [{"optimization.max_updates": 5}, {"optimization.max_minutes": 1e-6}], ids=str)
def test_the_last_weights_are_validated_before_the_best_is_chosen(make_loop, monkeypatch, tmp_path, limit):
    """Whatever ends the run, and again where it is resumed without anything left to train."""
    changes = {"validation.every_updates": 4, "checkpoints.publish": "best", "optimization.max_updates": 50} | limit
    monkeypatch.setattr("heedful.training.loop.validation.validation_loss", lambda *_: 1 / loop.progress.update)
    loop = make_loop(changes)
    progress = loop.run()
    assert progress.best == [(1 / progress.update, progress.update)]
    folder = tmp_path / "run" / "checkpoints"
    settings = loop.recipe.checkpoints
    assert published_checkpoints(folder, settings, progress) == [checkpoint_path(folder, progress.update)]
    assert load_progress(checkpoint_path(folder, progress.update)).best != progress.best
    loop = make_loop(changes | {"resume": True})
    assert loop.run().best == progress.best


def test_patience_ends_the_run_after_so_many_validations_without_improvement(make_loop, monkeypatch):
    loop = make_loop(
        {"optimization.max_updates": 50, "validation.every_updates": 2, "validation.patience": 2},
    )
    values = iter([3.0, 2.0, 2.5, 2.1, 1.0])
    monkeypatch.setattr("heedful.training.loop.validation.validation_loss", lambda *_: next(values))
    progress = loop.run()
    assert (progress.update, progress.best) == (8, [(2.0, 4)])


@pytest.mark.parametrize(("select", "best"), [("chrf", (30.0, 2)), ("token_error_rate", (10.0, 1))])
def test_scores_are_better_when_higher_and_error_rates_when_lower(make_loop, monkeypatch, select, best):
    changes = {"validation.every_updates": 1, "validation.sentences": 2, "validation.select": select}
    loop = make_loop({"optimization.max_updates": 3, **changes})
    values = iter([10.0, 30.0, 20.0])
    scored = dict.fromkeys(METRICS, 1.0)
    monkeypatch.setattr(
        "heedful.training.loop.validation.score_pairs", lambda *_, **__: {**scored, select: next(values)}
    )
    progress = loop.run()
    assert progress.best == [best]
    assert loop.engine.model.training


def spoil_update(loop, monkeypatch, number):
    """Make the loss of an update not a number."""
    forward = loop.engine.model.forward

    def spoilt(**batch):
        output = forward(**batch)
        if loop.progress.update + 1 == number:
            output.loss = output.loss * float("nan")
        return output

    monkeypatch.setattr(loop.engine.model, "forward", spoilt)


@pytest.mark.parametrize("log_every", [1, 100])
def test_a_loss_that_is_not_a_number_ends_the_run_and_leaves_the_last_checkpoint(
    make_loop, monkeypatch, saved_updates, tmp_path, log_every
):
    loop = make_loop({"checkpoints.every_updates": 2, "logging.every_updates": log_every})
    spoil_update(loop, monkeypatch, 3)
    with pytest.raises(FloatingPointError, match="learning rate may be too high"):
        loop.run()
    assert saved_updates(tmp_path / "run") == [2]
    assert make_loop({"checkpoints.every_updates": 2, "resume": True}).run().update == 6


def test_the_validation_loss_does_not_depend_on_the_token_budget(make_loop, corpus):
    loop = make_loop()
    given = loop.engine.model, corpus.validation
    losses = [validation_loss(*given, budget, loop.accelerator) for budget in (10_000, 200, 1)]
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=1e-6)
    loop.engine.model.eval()
    total = count = 0.0
    for index in range(len(corpus.validation)):
        row = corpus.validation[index]
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
        logits = loop.engine.model(input_ids=ids, labels=labels).logits
        total += torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum").item()
        count += labels.numel()
    assert losses[0] == pytest.approx(total / count, rel=1e-5)


def test_the_last_checkpoints_and_the_best_are_kept(make_loop, monkeypatch, saved_updates, tmp_path):
    changes = {"checkpoints.every_updates": 2, "checkpoints.keep_last": 2, "validation.every_updates": 1}
    loop = make_loop({"optimization.max_updates": 9, **changes})
    values = iter([5.0, 4.0, 1.0, *[2.0] * 6])
    monkeypatch.setattr("heedful.training.loop.validation.validation_loss", lambda *_: next(values))
    loop.run()
    # The two newest are the regular one of update 8 and the end of the run; update 3 had the best loss.
    assert saved_updates(tmp_path / "run") == [3, 8, 9]
    for publish, expected in (("average", [8, 9]), ("best", [3]), ("last", [9]), ("average_best", [3])):
        settings = replace(loop.recipe.checkpoints, publish=publish)
        paths = published_checkpoints(loop.checkpoints.folder, settings, loop.progress)
        assert paths == [checkpoint_path(loop.checkpoints.folder, update) for update in expected]
        assert all(find_damage(path) is None for path in paths)


def test_a_stream_gives_every_pair_once_an_epoch_and_trains(make_loop, corpus, tmp_path):
    folder = tmp_path / "run"
    changes = {"data.streaming": True, "data.pool_size": 70, "tokenizer.path": None}
    recipe = tiny_recipe(folder, changes)
    streamed = prepare_corpus(recipe, tmp_path / "tokenizer")

    def rows_of(data, epoch):
        rows = [row for update in data.updates(epoch) for bucket in update for row in bucket]
        return sorted((*row["input_ids"], -1, *row["labels"]) for row in rows)

    assert streamed.pairs is None
    assert len(rows_of(streamed, 0)) == corpus.pairs
    assert rows_of(streamed, 0) == rows_of(streamed, 1) == rows_of(corpus, 0)
    loop = make_loop({**changes, "optimization.max_updates": 25}, folder, streamed)
    assert loop.run().update == 25
    losses = logged(folder, "train/loss")
    assert losses[-1] < 0.85 * losses[0]


@pytest.mark.parametrize(("norm", "scale"), [(1.0, 128.0), (math.inf, 64.0), (math.nan, 64.0)])
def test_a_gradient_that_is_not_finite_halves_the_scale_of_fp16_and_changes_no_weight(
    make_loop, monkeypatch, norm, scale
):
    engine = make_loop({}).engine
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    scaler.scale(torch.ones(1))
    monkeypatch.setattr(engine.accelerator, "scaler", scaler)
    before = [weight.detach().clone() for weight in engine.parameters]
    for weight in engine.parameters:
        weight.grad = torch.ones_like(weight)
    engine.step(0.1, torch.tensor(norm), 1)
    assert scaler.get_scale() == scale
    unchanged = [torch.equal(*pair) for pair in zip(before, engine.parameters, strict=True)]
    assert all(unchanged) if norm != 1 else not any(unchanged)


def test_a_validation_in_mixed_precision_runs_the_model_as_it_was_made_under_one_autocast(make_loop, monkeypatch):
    loop, seen = make_loop({"optimization.mixed_precision": "bf16", "validation.sentences": 4}), []
    network = loop.engine.network
    wrapper = vars(network)["forward"]

    def fail(translator, *_, **__):
        model = translator.model
        assert model is network
        seen.append((runs_known_code(model), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        raise torch.OutOfMemoryError

    monkeypatch.setattr(validation, "score_pairs", fail)
    monkeypatch.setattr(validation, "COMPILED_DEVICES", ("cpu",))
    with pytest.raises(torch.OutOfMemoryError):
        validation.validate(loop.recipe, loop.corpus, loop.engine)
    assert seen == [(True, True, torch.bfloat16)]
    assert vars(network)["forward"] is wrapper


def test_a_validation_loss_waits_for_the_device_once(make_loop, corpus, monkeypatch):
    loop, read = make_loop(NO_DROPOUT), []
    model = loop.engine.model
    losses = []
    model.register_forward_hook(lambda module, inputs, outputs: losses.append(outputs.loss))
    item = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: read.append(tensor) or item(tensor))
    loss = validation_loss(model, corpus.validation, 200, loop.accelerator)
    assert len([tensor for tensor in read if tensor.is_floating_point()]) == 1
    assert len(losses) > 2
    assert loss == sum(map(item, losses)) / int(corpus.validation.target_lengths.sum())


def test_the_loop_asks_for_no_logits(make_loop):
    loop, kept = make_loop({"optimization.max_updates": 1}), []
    loop.engine.network.register_forward_hook(
        lambda module, inputs, outputs: kept.append("logits" in outputs) if module.training else None
    )
    loop.run()
    assert set(kept) == {False}
