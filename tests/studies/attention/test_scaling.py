"""The study of scaling: variance and derivative of random scores, and a run of it."""

import json
import math
from dataclasses import replace

import pytest
import torch

from heedful.studies.attention import scaling
from heedful.studies.study import Lab, run_study


@pytest.mark.parametrize("d_k", [16, 256])
def test_the_variance_of_a_product_is_d_k_and_divided_by_its_root_one(d_k):
    assert scaling.softmax_of_random(d_k, False, 1).variance == pytest.approx(d_k, rel=0.03)
    assert scaling.softmax_of_random(d_k, True, 1).variance == pytest.approx(1, rel=0.03)


def test_unscaled_weights_saturate_with_the_width_and_scaled_ones_do_not():
    narrow, wide = (scaling.softmax_of_random(d_k, False, 2) for d_k in (16, 1024))
    assert wide.largest > 0.9 > narrow.largest
    assert wide.entropy < 0.2 * narrow.entropy
    assert wide.gradient < 0.3 * narrow.gradient
    narrow, wide = (scaling.softmax_of_random(d_k, True, 2) for d_k in (16, 1024))
    assert wide.largest == pytest.approx(narrow.largest, abs=0.02)
    assert wide.gradient == pytest.approx(narrow.gradient, abs=0.02)


def test_the_derivatives_norm_is_autograds(monkeypatch):
    monkeypatch.setattr(scaling, "QUERIES", 1)
    monkeypatch.setattr(scaling, "KEYS", 5)
    found = scaling.softmax_of_random(8, True, 3)
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(1, 1, 8, generator=generator)
    keys = torch.cat([torch.randn(1, 1, 8, generator=generator) for _ in range(5)], dim=1)
    scores = (query @ keys.transpose(1, 2))[0, 0].double() / math.sqrt(8)
    derivative = torch.autograd.functional.jacobian(lambda values: values.softmax(-1), scores)
    assert found.gradient == pytest.approx(derivative.norm().item(), rel=1e-5)
    assert found.largest == pytest.approx(scores.softmax(-1).max().item(), rel=1e-5)


def test_the_study_trains_every_scoring_at_every_width(tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "D_MODEL", 16)
    monkeypatch.setattr(scaling, "TRAINED_WIDTHS", (4, 16, 256))
    monkeypatch.setattr(scaling, "QUERIES", 64)
    trained = []

    def train(self, name, changes):
        trained.append(changes)
        training = type("Training", (), {"loss": 2.0})()
        training.curve = lambda: [(1, 3.0), (2, 2.0)]
        return training

    monkeypatch.setattr(Lab, "train", train)
    folder = run_study(Lab(replace(scaling.STUDY, findings=())), tmp_path / "out")
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert [len(table["rows"]) for table in results["tables"]] == [len(scaling.WIDTHS), 9]
    found = {(c["model.options.attention_scoring"], c["model.options.encoder_attention_heads"]) for c in trained}
    assert found == {(scoring, heads) for scoring in scaling.SCORINGS for heads in (4, 1, 0)}
    assert results["values"]["loss_additive_256"] == 2.0


@pytest.mark.parametrize("d_k", scaling.TRAINED_WIDTHS)
@pytest.mark.parametrize("scoring", scaling.SCORINGS)
def test_the_trained_models_have_queries_of_the_width_and_of_variance_one(scoring, d_k):
    """Fresh ones, at inputs of variance 1: so that q·k has variance d_k."""
    from heedful import HeedConfig
    from heedful.modeling_heed import HeedForConditionalGeneration

    torch.manual_seed(0)
    heads = scaling.D_MODEL // d_k
    options = {"encoder_attention_heads": heads, "decoder_attention_heads": heads, "attention_scoring": scoring}
    sizes = {"d_model": scaling.D_MODEL, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 10}
    model = HeedForConditionalGeneration(HeedConfig(**sizes, **options))
    attention = model.get_encoder().layers[0].self_attn
    assert attention.d_k == d_k
    assert attention.scaling == (d_k**-0.5 if scoring == "scaled_dot" else 1)
    queries = attention.q_proj(torch.randn(2000, scaling.D_MODEL))
    assert queries.var().item() == pytest.approx(1, rel=0.05)
