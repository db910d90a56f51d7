"""Sentences of *Attention Is All You Need* that are neither an equation nor a table, checked on the layers."""

import math

import pytest
import torch

from heedful.attention_heed import HeedAttention
from heedful.positions_heed import sinusoids
from helpers import assert_near, tiny_config


@torch.no_grad()
@pytest.mark.parametrize("d_k", [4, 64, 512])
def test_the_scale_of_equation_1_undoes_the_growth_of_dot_products_with_d_k(d_k):
    # Section 3.2.1, footnote 4: of independent features of mean 0 and variance 1, q · k has mean 0 and variance d_k.
    attention = HeedAttention(tiny_config(d_k=d_k, d_v=8), "encoder")
    products = (torch.randn(20_000, d_k) * torch.randn(20_000, d_k)).sum(-1)
    assert products.mean().abs() < 0.05 * math.sqrt(d_k)
    assert products.var().item() == pytest.approx(d_k, rel=0.08)
    assert (products * attention.scaling).var().item() == pytest.approx(1, rel=0.08)


@pytest.mark.parametrize(("layout", "pair"), [("interleaved", (0, 1)), ("concatenated", (0, 16))])
@pytest.mark.parametrize("offset", [1, 7, 100])
def test_the_encoding_of_a_position_further_on_is_a_linear_function_of_it(layout, pair, offset):
    # Section 3.5: for a fixed offset k, PE(pos + k) is a linear function of PE(pos): a rotation of each pair.
    positions, step = torch.arange(50)[None], 1 if layout == "concatenated" else 2
    here, there = (sinusoids(positions + shift, 32, layout)[0] for shift in (0, offset))
    rotation = torch.zeros(32, 32)
    for number in range(16):
        sine, cosine = pair[0] + number * step, pair[1] + number * step
        angle = offset / 10000 ** (2 * number / 32)
        rotation[sine, sine] = rotation[cosine, cosine] = math.cos(angle)
        rotation[sine, cosine], rotation[cosine, sine] = math.sin(angle), -math.sin(angle)
    assert_near(here @ rotation.T, there, 2e-5)
    assert (here - there).abs().max() > 0.1


def test_wavelengths_are_a_geometric_progression_from_two_pi_to_ten_thousand_times_that():
    # Section 3.5. Sine i has its angle at position 1, and its wavelength is 2π / angle; the last stays just below.
    angles = sinusoids(torch.tensor([1]), 512, "interleaved")[0, 0::2].double().asin()
    wavelengths = 2 * math.pi / angles
    assert wavelengths[0].item() == pytest.approx(2 * math.pi, rel=1e-5)
    assert (wavelengths[1:] / wavelengths[:-1]).tolist() == pytest.approx([10000 ** (1 / 256)] * 255, rel=1e-5)
    assert wavelengths[-1].item() == pytest.approx(10000 * 2 * math.pi / 10000 ** (1 / 256), rel=1e-5)
