"""COMET's score is what its papers' formulas give, on a model of its architecture made at random."""

import json

import pytest
import torch

from comet_checkpoint import LAYERS, SETTINGS, WORDS, comet_checkpoint
from heedful.cli.evaluate import learned_metric
from heedful_lab.metrics.comet import Comet, sparsemax
from helpers import assert_error

TEXTS = ["eine Katze", "schläft", "eine"], ["a cat", "sleeps the Dog a", "the"], ["the cat", "sleeps", "a"]


def encoded(encoder, others, shares, text):
    """Return the mean of a text's vectors, layer by layer and token by token."""
    ids = [0, *(4 + WORDS.index(word) for word in text.split()), 2]
    with torch.no_grad():
        layers = encoder(torch.tensor([ids]), output_hidden_states=True).hidden_states
    mixed = sum(share * layer[0] for share, layer in zip(shares, layers, strict=True))
    return others["layerwise_attention.gamma"] * sum(mixed) / len(ids)


@pytest.mark.parametrize("kind", ["regression_metric", "referenceless_regression_metric"])
@pytest.mark.parametrize("transformation", ["softmax", "sparsemax"])
def test_scores_are_those_of_the_formulas_whatever_is_in_the_batch(kind, transformation, tmp_path):
    encoder, others = comet_checkpoint(tmp_path, class_identifier=kind, layer_transformation=transformation)
    scalars = torch.cat([others[f"layerwise_attention.scalar_parameters.{n}"] for n in range(LAYERS + 1)])
    shares = scalars.softmax(0) if transformation == "softmax" else sparsemax(scalars)
    expected = []
    for source, text, reference in zip(*TEXTS, strict=True):
        s, t, r = (encoded(encoder, others, shares, each) for each in (source, text, reference))
        parts = [t, s, t * s, (t - s).abs()]
        if kind == "regression_metric":
            parts = [t, r, t * r, (t - r).abs(), t * s, (t - s).abs()]
        hidden = torch.cat(parts)
        for number in (0, 3):
            weight, bias = (others[f"estimator.ff.{number}.{name}"] for name in ("weight", "bias"))
            hidden = torch.tanh(weight @ hidden + bias)
        expected.append((others["estimator.ff.6.weight"] @ hidden + others["estimator.ff.6.bias"]).item())
    metric = Comet(tmp_path, "cpu")
    for batch_size in (1, 2, 16):
        assert metric.scores(*TEXTS, batch_size=batch_size) == pytest.approx(expected, abs=1e-5)


def test_sparsemax_is_a_projection_onto_the_simplex():
    assert sparsemax(torch.tensor([0.1, 1.1, 0.2])).tolist() == pytest.approx([0, 0.95, 0.05], abs=1e-6)
    assert sparsemax(torch.tensor([5.0, 0.0])).tolist() == [1, 0]
    assert sparsemax(torch.zeros(4)).tolist() == [0.25] * 4


def test_what_is_no_such_model_is_refused_by_name(tmp_path):
    good = tmp_path / "good"
    settings, weights, encoder = good / "hparams.yaml", good / "checkpoints/model.ckpt", good / "encoder"
    comet_checkpoint(good)

    def refuses(message, metric=f"comet:{good}", error=ValueError):
        assert_error(message, learned_metric, metric, error=error)

    refuses("`--metric` must be comet:FOLDER, but is bleurt:x", "bleurt:x")
    refuses("folder with hparams.yaml", f"comet:{tmp_path}", FileNotFoundError)
    wrong = {"class_identifier": "unified_metric", "pool": "max", "layer_norm": True, "activations": "Foo"}
    for name, value in (wrong | {"layer": 99}).items():
        settings.write_text(json.dumps(SETTINGS | {name: value}))
        refuses(f"`{name}` of .* must be .*, but is {value}")
    unsaid = {name: value for name, value in SETTINGS.items() if name != "layer_norm"}  # which COMET takes for true
    settings.write_text(json.dumps(unsaid))
    refuses("`layer_norm` of .* must be False, but is True")
    settings.write_text(json.dumps(SETTINGS | {"pretrained_model": str(tmp_path / "other")}))
    encoder.rename(tmp_path / "other")
    refuses("`pretrained_model` of .* must be a name on the Hub, but")
    encoder.symlink_to(tmp_path / "other")
    refuses("encoder must be a file in the model's folder, but is a link")
    encoder.unlink()
    (tmp_path / "other").rename(encoder)
    settings.write_text(json.dumps(SETTINGS))
    whole = torch.load(weights, weights_only=True)["state_dict"]
    for lost in ("encoder.model.embeddings.word_embeddings", "layerwise_attention.gamma", "estimator"):
        left = {name: value for name, value in whole.items() if not name.startswith(lost)}
        torch.save({"state_dict": left}, weights)
        refuses(f"model.ckpt must have the weights of hparams.yaml's model: .*{lost[:12]}")
    torch.save({"state_dict": whole | {"estimator.ff.3.bias": whole["estimator.ff.3.bias"][:-1]}}, weights)
    refuses("model.ckpt must have the weights of hparams.yaml's model: RuntimeError: .*size")
    for file in (weights, settings):
        file.write_text("[: no")
        refuses("must be a model that `unbabel-comet` saved")
