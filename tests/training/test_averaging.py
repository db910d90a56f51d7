"""The moving average of the weights, and what a run makes of it."""

import itertools

import pytest
import torch
from safetensors.torch import load_file

from heedful.training.loop.validation import validation_loss
from heedful.training.objectives.moving_average import MovingAverage
from heedful.training.run import train
from heedful.training.run_folder.checkpoints import checkpoint_path, find_damage, list_checkpoints
from process_checks import equal
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


def test_a_run_gives_the_average_the_number_of_its_update(make_loop):
    loop = make_loop({"optimization.ema_decay": 0.9, "checkpoints.publish": "ema", "optimization.max_updates": 1})
    before = {name: weight.detach().clone() for name, weight in loop.engine.model.named_parameters()}
    loop.run()
    averages = loop.engine.moving_average.weights
    for name, weight in loop.engine.model.named_parameters():
        torch.testing.assert_close(averages[name], 2 / 11 * before[name] + 9 / 11 * weight.detach())


AVERAGED = {"optimization.ema_decay": 0.6, "checkpoints.publish": "ema", "validation.every_updates": 3}


def test_validation_measures_the_average_and_leaves_the_weights_alone(make_loop, corpus, tmp_path):
    loop, plain = make_loop(AVERAGED), make_loop({"validation.every_updates": 3}, tmp_path / "plain")
    loop.run()
    plain.run()
    network, given = loop.engine.network, (corpus.validation, 1000)
    measured = logged(tmp_path / "run", "validation/loss")[-1]
    by_hand = validation_loss(network, *given, loop.accelerator)
    assert abs(measured - by_hand) > 1e-3
    assert logged(tmp_path / "plain", "validation/loss")[-1] == pytest.approx(by_hand, rel=1e-6)
    assert logged(tmp_path / "plain", "train/loss") == logged(tmp_path / "run", "train/loss")
    network.load_state_dict(loop.engine.moving_average.weights, strict=False)
    assert validation_loss(network, *given, loop.accelerator) == pytest.approx(measured, rel=1e-6)


def test_the_published_weights_are_the_moving_average_where_the_recipe_says_so(tmp_path):
    recipe = tiny_recipe(tmp_path / "run", AVERAGED)
    result = train(recipe)
    published = load_file(result.folder / "model.safetensors")
    path = checkpoint_path(tmp_path / "run/checkpoints", 6)
    average = load_file(path / "training_state/moving_average.safetensors")
    assert equal(published, average)
    assert not equal(load_file(path / "model.safetensors"), average)


def test_the_last_checkpoints_and_the_best_are_kept_and_those_published_that_the_recipe_says(tmp_path, monkeypatch):
    values = itertools.chain([5.0, 4.0, 1.0, 6.0, 2.0, 7.0], itertools.repeat(8.0))
    monkeypatch.setattr("heedful.training.loop.validation.validation_loss", lambda *_: next(values))
    changes = {"optimization.max_updates": 7, "validation.every_updates": 1, "checkpoints.every_updates": 2}
    changes |= {"checkpoints.keep_best": 2, "checkpoints.keep_last": 2}
    for publish, updates in {"average_best": (3, 5), "average": (6, 7), "best": (3,), "last": (7,)}.items():
        changes |= {"checkpoints.publish": publish, "resume": publish != "average_best"}
        result = train(tiny_recipe(tmp_path / "run", changes))
        assert result.progress.best == [(1.0, 3), (2.0, 5)]
        paths = dict(list_checkpoints(tmp_path / "run/checkpoints"))
        # The two newest are the regular one of update 6 and the end of the run; two others had the best losses.
        assert list(paths) == [3, 5, 6, 7]
        assert [find_damage(path) for path in paths.values()] == [None] * 4
        weights = [load_file(paths[update] / "model.safetensors") for update in updates]
        exact = {"rtol": 0, "atol": 0} if len(updates) == 1 else {}
        for name, weight in load_file(result.folder / "model.safetensors").items():
            torch.testing.assert_close(weight, sum(each[name] for each in weights) / len(weights), **exact)
