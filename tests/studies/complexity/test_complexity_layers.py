"""The layers of Table 1: the convolutional blocks against their equations, attention against the model's own."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.studies.complexity.layers import (
    ConvolutionalDecoderLayer,
    ConvolutionalEncoderLayer,
    GatedConvolution,
    RecurrentLayer,
    SelfAttentionLayer,
)
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
def test_a_gated_convolution_is_torch_s_convolution_and_a_gate(width, dilation, is_causal):
    layer = made(GatedConvolution, width, dilation, is_causal)
    given = states(2, 11)
    reach = dilation * (width - 1)
    weight, bias = layer.convolution.weight, layer.convolution.bias
    both_sides = F.conv1d(given.transpose(1, 2), weight, bias, padding=reach, dilation=dilation)  # 11 + reach
    start = 0 if is_causal else reach // 2
    value, gate = both_sides[..., start : start + 11].transpose(1, 2).chunk(2, dim=-1)
    assert_near(layer(given), value * gate.sigmoid(), 1e-12)


@torch.no_grad()
def test_a_causal_convolution_may_have_an_even_width():
    layer = made(GatedConvolution, 2, 1, True)
    weight, bias = layer.convolution.weight, layer.convolution.bias
    given = states(1, 5)
    now = given[0, 3] @ weight[:, :, 1].T + given[0, 2] @ weight[:, :, 0].T + bias
    assert_near(layer(given)[0, 3], now[:WIDTH] * now[WIDTH:].sigmoid(), 1e-12)


@torch.no_grad()
def test_fresh_weights_keep_the_variance():
    layer = GatedConvolution(64, 5)
    inner = layer(torch.randn(1, 400, 64))[:, 2:-2]
    assert 0.8 < inner.std() < 1.25
    assert layer.convolution.bias.count_nonzero() == 0


@torch.no_grad()
def test_an_encoder_layer_scales_the_sum_of_input_and_convolution():
    layer = made(ConvolutionalEncoderLayer, 3, 2)
    given = states(2, 9)
    assert_near(layer(given), (given + layer.convolution(given)) / math.sqrt(2), 1e-12)


@torch.no_grad()
def test_a_decoder_layer_is_what_its_equations_say_position_by_position():
    layer = made(ConvolutionalDecoderLayer, 3)
    target, embedded, source, source_embedded = states(1, 6), states(1, 6), states(1, 4), states(1, 4)
    found, weights = layer(target, embedded, source, source_embedded)
    for i in range(6):
        hidden = layer.convolution(target[:, : i + 1])[0, i]  # nothing later is there
        query = (layer.query.weight @ hidden + layer.query.bias + embedded[0, i]) / math.sqrt(2)
        attention = torch.stack([query @ source[0, j] for j in range(4)]).softmax(0)
        assert_near(weights[0, i], attention, 1e-12)
        context = sum(attention[j] * (source[0, j] + source_embedded[0, j]) / math.sqrt(2) for j in range(4))
        context = 4 * math.sqrt(1 / 4) * context
        hidden = (hidden + layer.output.weight @ context + layer.output.bias) / math.sqrt(2)
        assert_near(found[0, i], (hidden + target[0, i]) / math.sqrt(2), 1e-12)


@pytest.mark.parametrize(("width", "dilation"), [(2, 1), (3, 1), (3, 3)])
def test_a_decoder_layer_looks_at_earlier_states_alone(width, dilation):
    layer = made(ConvolutionalDecoderLayer, width, dilation)
    target = states(1, 10).requires_grad_()
    source = states(1, 3).requires_grad_()
    outputs = layer(target, target.detach(), source, source)[0]
    distance = torch.arange(10)[:, None] - torch.arange(10)
    seen = (distance >= 0) & (distance % dilation == 0) & (distance <= dilation * (width - 1))
    assert torch.equal(reached(outputs, target), seen)
    assert reached(outputs, source).all()


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


@torch.no_grad()
@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm"])
def test_a_recurrent_layer_read_token_by_token_is_the_same(cell):
    layer = made(RecurrentLayer, cell)
    given, memory, outputs = states(2, 6), None, []
    for position in range(6):
        output, memory = layer.step(given[:, position : position + 1], memory)
        outputs.append(output)
    assert_near(torch.cat(outputs, 1), layer(given), 1e-12)
