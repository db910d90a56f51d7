"""The moving average of the weights, and what a run makes of it."""

import pytest
import torch
from safetensors.torch import load_file

from heedful.training.loop.validation import validation_loss
from heedful.training.objectives.moving_average import MovingAverage
from heedful.training.run import train
from heedful.training.run_folder.checkpoints import checkpoint_path, list_checkpoints
from tiny_runs import logged, tiny_recipe


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_is_the_weighted_sum_of_all_weights_there_were_in_float32(dtype):
    layer = torch.nn.Linear(2, 1, bias=False).to(dtype)
    average = MovingAverage(layer, decay=0.5)
    assert average.weights["weight"].dtype == torch.float32
    expected = layer.weight.detach().clone().float()
    for number in range(1, 30):
        with torch.no_grad():
            layer.weight += number
        average.update(number)
        decay = min(0.5, (1 + number) / (10 + number))
        expected = decay * expected + (1 - decay) * layer.weight.detach().float()
        torch.testing.assert_close(average.weights["weight"], expected)
    assert decay == 0.5


def test_the_first_updates_forget_the_random_start():
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(layer.weight, 100.0)
    average = MovingAverage(layer, decay=0.9999)
    torch.nn.init.zeros_(layer.weight)
    for number in range(1, 21):
        average.update(number)
    assert average.weights["weight"].item() < 0.01


def test_a_run_gives_the_average_the_number_of_its_update(make_loop):
    loop = make_loop({"optimization.ema_decay": 0.9, "checkpoints.publish": "ema", "optimization.max_updates": 1})
    before = {name: weight.detach().clone() for name, weight in loop.engine.model.named_parameters()}
    loop.run()
    averages = loop.engine.moving_average.weights
    for name, weight in loop.engine.model.named_parameters():
        torch.testing.assert_close(averages[name], 2 / 11 * before[name] + 9 / 11 * weight.detach())


AVERAGED = {"optimization.ema_decay": 0.6, "checkpoints.publish": "ema", "validation.every_updates": 3}


def test_validation_measures_the_average_and_leaves_the_weights_alone(make_loop, corpus, tmp_path):
    loop = make_loop(AVERAGED)
    loop.run()
    measured = logged(tmp_path / "run", "validation/loss")[-1]
    by_hand = validation_loss(loop.engine.model, corpus.validation, 1000, loop.accelerator)
    assert abs(measured - by_hand) > 1e-3
    plain = make_loop({"validation.every_updates": 3}, tmp_path / "plain")
    plain.run()
    assert logged(tmp_path / "plain", "validation/loss")[-1] == pytest.approx(by_hand, rel=1e-6)
    assert logged(tmp_path / "plain", "train/loss") == logged(tmp_path / "run", "train/loss")
    network = loop.engine.network
    network.load_state_dict(loop.engine.moving_average.weights, strict=False)
    again = validation_loss(network, corpus.validation, 1000, loop.accelerator)
    assert again == pytest.approx(measured, rel=1e-6)


def test_the_published_weights_are_the_moving_average_where_the_recipe_says_so(tmp_path):
    recipe = tiny_recipe(tmp_path / "run", AVERAGED)
    result = train(recipe)
    published = load_file(result.folder / "model.safetensors")
    path = checkpoint_path(tmp_path / "run/checkpoints", 6)
    average = load_file(path / "training_state/moving_average.safetensors")
    assert published.keys() == average.keys()
    assert all(torch.equal(published[name], average[name]) for name in average)
    raw = load_file(path / "model.safetensors")
    assert not all(torch.equal(raw[name], average[name]) for name in average)


def test_the_published_weights_are_the_average_of_the_best_where_the_recipe_says_so(tmp_path, monkeypatch):
    values = iter([3.0, 1.0, 4.0, 2.0, 5.0, 6.0])
    monkeypatch.setattr("heedful.training.loop.validation.validation_loss", lambda *_: next(values))
    changes = {"validation.every_updates": 1, "checkpoints.keep_best": 2, "checkpoints.keep_last": 1}
    result = train(tiny_recipe(tmp_path / "run", {**changes, "checkpoints.publish": "average_best"}))
    assert result.progress.best == [(1.0, 2), (2.0, 4)]
    assert [update for update, _ in list_checkpoints(tmp_path / "run/checkpoints")] == [2, 4, 6]
    best = [load_file(checkpoint_path(tmp_path / "run/checkpoints", n) / "model.safetensors") for n in (2, 4)]
    published = load_file(result.folder / "model.safetensors")
    for name, weight in published.items():
        torch.testing.assert_close(weight, (best[0][name] + best[1][name]) / 2)
