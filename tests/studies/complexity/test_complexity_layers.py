"""The layers of Table 1 against their equations and the model's own attention, and their time and memory by length."""

import math
import statistics
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.studies.complexity import measurement
from heedful.studies.complexity.counts import Sizes
from heedful.studies.complexity.layers import ConvolutionalLayer, SelfAttentionLayer, make_layer
from heedful.studies.complexity.measurement import KINDS, exponent, held_bytes, measure
from helpers import assert_near, sentences, shake, tiny_model

WIDTH = 8


@torch.no_grad()
@pytest.mark.parametrize(
    ("width", "dilation", "is_causal"),
    [
        (2, 1, True),
        *((*kernel, is_causal) for kernel in ((1, 1), (3, 1), (3, 4), (5, 2)) for is_causal in (False, True)),
    ],
)
def test_a_convolutional_layer_is_torch_s_convolution_a_gate_and_a_scaled_sum(width, dilation, is_causal):
    layer = ConvolutionalLayer(WIDTH, width, dilation, is_causal).double().eval()
    shake(layer)
    given = torch.randn(2, 11, WIDTH, dtype=torch.float64)
    reach = dilation * (width - 1)
    weight, bias = layer.convolution.weight, layer.convolution.bias
    both_sides = F.conv1d(given.transpose(1, 2), weight, bias, padding=reach, dilation=dilation)  # 11 + reach
    start = 0 if is_causal else reach // 2
    value, gate = both_sides[..., start : start + 11].transpose(1, 2).chunk(2, dim=-1)
    assert_near(layer(given), (given + value * gate.sigmoid()) / math.sqrt(2), 1e-12)


@torch.no_grad()
def test_fresh_weights_keep_the_variance():
    layer = ConvolutionalLayer(64, 5)
    inner = layer(torch.randn(1, 400, 64))[:, 2:-2]
    assert 0.9 < inner.std() < 1.1
    assert layer.convolution.bias.count_nonzero() == 0


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


TINY = Sizes(d_model=16, heads=2, neighbourhood=16, kernel_width=3, cell="lstm")
LENGTHS = (8, 16, 32)


def test_memory_grows_with_the_length_and_with_its_square_where_all_pairs_are_held():
    for kind in KINDS:
        layer = make_layer(kind, TINY)
        short, long = (held_bytes(layer, torch.randn(1, length, 16)) for length in (1024, 2048))
        least, most = (3.8, 4.2) if kind in ("plain", "masked", "additive") else (1.9, 2.05)
        assert least < long / short < most, kind


def test_additive_scores_are_measured_as_far_as_they_fit(monkeypatch):
    monkeypatch.setattr(measurement, "MOST_ADDITIVE_BYTES", 16**2 * 16 * 4)
    found = measure(TINY, (4, *LENGTHS), 1, 0)
    assert list(found["additive"]) == [4, 8, 16]
    assert list(found["plain"]) == [4, 8, 16, 32]
    assert all(min(cost) > 0 for costs in found.values() for cost in costs.values())


def test_the_exponent_is_that_of_the_upper_half():
    above = [(n, 3 * n**1.5) for n in (256, 512, 1024)]
    assert exponent([(64, 100.0), (128, 1.0), *above]) == pytest.approx(1.5)
    assert exponent([(64, 100.0), (128, 1.0), *above[:2]]) == pytest.approx(1.5)
    assert exponent([(10, 5.0), (20, 5.0), (30, 60.0), (40, 80.0)]) == pytest.approx(1.0)
    assert exponent(above[:2]) is None


def test_layers_take_turns_and_medians_are_given(monkeypatch):
    order = []

    def seconds_of(layer, states):
        assert torch.get_num_threads() == 1
        order.append((id(layer), states.shape[1]))
        return float(len(order))

    monkeypatch.setattr(measurement, "seconds_of", seconds_of)
    monkeypatch.setattr(measurement, "held_bytes", lambda layer, states: 3)
    torch.set_num_threads(2)
    found = measure(TINY, LENGTHS, 3, 0)
    assert torch.get_num_threads() == 2
    assert len({layer for layer, _ in order[: len(KINDS)]}) == len(KINDS)
    assert [length for _, length in order] == [n for n in LENGTHS for _ in KINDS] * 3
    whole = len(order) // 3
    for place, kind in enumerate(KINDS):
        for number, length in enumerate(LENGTHS):
            seconds = [1 + place + number * len(KINDS) + turn * whole for turn in range(3)]
            summaries = [1000 * summary(seconds) for summary in (statistics.median, min, max)]
            assert found[kind][length] == (*summaries, 3)


def test_threads_come_back_after_an_error(monkeypatch):
    def fail(layer, states):
        raise MemoryError

    monkeypatch.setattr(measurement, "held_bytes", fail)
    torch.set_num_threads(2)
    with pytest.raises(MemoryError):
        measure(TINY, LENGTHS, 1, 0)
    assert torch.get_num_threads() == 2


def test_the_same_seed_measures_the_same_weights_of_the_cell_that_is_asked_for():
    for cell, kind in (("rnn", torch.nn.RNN), ("gru", torch.nn.GRU), ("lstm", torch.nn.LSTM)):
        weights = []
        for _ in range(2):
            torch.manual_seed(4)
            layer = make_layer("recurrent", replace(TINY, cell=cell)).cells
            assert type(layer) is kind
            weights.append(layer.weight_hh_l0)
        assert torch.equal(*weights)


def test_a_call_is_timed_in_seconds_of_one_call(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(measurement.time, "process_time", lambda: next(clock) / 200)  # each look takes 5 ms
    calls = []
    seconds = measurement.seconds_of(lambda states: calls.append(states), torch.zeros(1))
    # Looks after the 1st, 2nd, 3rd and 4th call, which is the first at 20 ms; one more when it has ended.
    assert len(calls) == 4
    assert seconds == pytest.approx(0.025 / 4)
