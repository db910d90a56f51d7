"""The layers of Table 1: the convolutional blocks against their equations, attention against the model's own."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.studies.complexity.layers import ConvolutionalLayer, SelfAttentionLayer
from heedful.studies.complexity.reach import reached
from helpers import assert_near, sentences, shake, tiny_model

WIDTH = 8


def states(*shape):
    return torch.randn(*shape, WIDTH, dtype=torch.float64)


def made(kind, *arguments, **options):
    layer = kind(WIDTH, *arguments, **options).double().eval()
    shake(layer)
    return layer


@torch.no_grad()
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("width", "dilation"), [(1, 1), (3, 1), (3, 4), (5, 2)])
def test_a_convolutional_layer_is_torch_s_convolution_a_gate_and_a_scaled_sum(width, dilation, is_causal):
    layer = made(ConvolutionalLayer, width, dilation, is_causal)
    given = states(2, 11)
    reach = dilation * (width - 1)
    weight, bias = layer.convolution.weight, layer.convolution.bias
    both_sides = F.conv1d(given.transpose(1, 2), weight, bias, padding=reach, dilation=dilation)  # 11 + reach
    start = 0 if is_causal else reach // 2
    value, gate = both_sides[..., start : start + 11].transpose(1, 2).chunk(2, dim=-1)
    assert_near(layer(given), (given + value * gate.sigmoid()) / math.sqrt(2), 1e-12)


@torch.no_grad()
def test_a_causal_convolution_may_have_an_even_width():
    layer = made(ConvolutionalLayer, 2, 1, True)
    weight, bias = layer.convolution.weight, layer.convolution.bias
    given = states(1, 5)
    now = given[0, 3] @ weight[:, :, 1].T + given[0, 2] @ weight[:, :, 0].T + bias
    assert_near(layer(given)[0, 3], (given[0, 3] + now[:WIDTH] * now[WIDTH:].sigmoid()) / math.sqrt(2), 1e-12)


@torch.no_grad()
def test_fresh_weights_keep_the_variance():
    layer = ConvolutionalLayer(64, 5)
    inner = layer(torch.randn(1, 400, 64))[:, 2:-2]
    assert 0.9 < inner.std() < 1.1
    assert layer.convolution.bias.count_nonzero() == 0


@pytest.mark.parametrize(("width", "dilation"), [(2, 1), (3, 1), (3, 3)])
def test_a_causal_layer_looks_at_earlier_states_alone(width, dilation):
    layer = made(ConvolutionalLayer, width, dilation, True)
    given = states(1, 10).requires_grad_()
    distance = torch.arange(10)[:, None] - torch.arange(10)
    seen = (distance >= 0) & (distance % dilation == 0) & (distance <= dilation * (width - 1))
    assert torch.equal(reached(layer(given), given), seen)


@torch.no_grad()
@pytest.mark.parametrize("radius", [None, 3])
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_self_attention_is_that_of_the_model_s_encoder(radius, kernel):
    model = tiny_model(attention=kernel, encoder_neighbourhood=radius)
    seen = []
    attention = model.model.encoder.layers[1].self_attn
    hook = attention.register_forward_hook(lambda module, args, output: seen.append((args[0], output[0])))
    model.model.encoder(sentences(90)[0][None])
    hook.remove()
    layer = SelfAttentionLayer(32, 4, radius, kernel=kernel).eval()
    layer.attention.load_state_dict(attention.state_dict())
    ((given, expected),) = seen
    assert torch.equal(layer(given), expected)


@torch.no_grad()
@settings(deadline=None, max_examples=40)
@given(radius=st.integers(1, 40), length=st.integers(1, 150), kernel=st.sampled_from(["eager", "sdpa"]))
def test_windows_give_what_a_mask_of_all_pairs_gives(radius, length, kernel):
    torch.manual_seed(radius)
    windows, masked = (SelfAttentionLayer(WIDTH, 2, radius, way, kernel).eval() for way in (True, False))
    masked.load_state_dict(windows.state_dict())
    given = torch.randn(2, length, WIDTH)
    assert_near(windows(given), masked(given))
    everything = SelfAttentionLayer(WIDTH, 2, kernel=kernel).eval()
    everything.load_state_dict(windows.state_dict())
    assert torch.allclose(windows(given), everything(given), atol=1e-5) == (radius >= length - 1)
