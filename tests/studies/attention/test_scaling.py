"""The study of scaling: variance and derivative of random scores, and a run of it."""

import math

import pytest
import torch

from heedful import HeedConfig, HeedForConditionalGeneration
from heedful.studies.attention import scaling


def test_products_have_the_variance_d_k_and_saturate_with_the_width_and_scaled_ones_have_one_and_do_not():
    narrow, wide = (scaling.softmax_of_random(d_k, False, 2) for d_k in (16, 1024))
    assert (narrow.variance, wide.variance) == (pytest.approx(16, rel=0.03), pytest.approx(1024, rel=0.03))
    assert wide.largest > 0.9 > narrow.largest
    assert wide.entropy < 0.2 * narrow.entropy
    assert wide.gradient < 0.3 * narrow.gradient
    narrow, wide = (scaling.softmax_of_random(d_k, True, 2) for d_k in (16, 1024))
    assert (narrow.variance, wide.variance) == (pytest.approx(1, rel=0.03), pytest.approx(1, rel=0.03))
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


@pytest.mark.parametrize("d_k", scaling.TRAINED_WIDTHS)
@pytest.mark.parametrize("scoring", scaling.SCORINGS)
def test_the_trained_models_have_queries_of_the_width_and_of_variance_one(scoring, d_k):
    """Fresh ones, at inputs of variance 1: so that q·k has variance d_k."""
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), scaling.D_MODEL // d_k)
    sizes = {"d_model": scaling.D_MODEL, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 10}
    model = HeedForConditionalGeneration(HeedConfig(**sizes, **heads, attention_scoring=scoring))
    attention = model.get_encoder().layers[0].self_attn
    assert attention.d_k == d_k
    assert attention.scaling == (d_k**-0.5 if scoring == "scaled_dot" else 1)
    queries = attention.q_proj(torch.randn(2000, scaling.D_MODEL))
    assert queries.var().item() == pytest.approx(1, rel=0.05)
