"""Time and memory by length: what is counted, in which order, and what is refused."""

import statistics

import pytest
import torch

from heedful.studies.complexity import measurement
from heedful.studies.complexity.layers import make_layer
from heedful.studies.complexity.measurement import KINDS, exponent, held_bytes, machine, measure
from heedful.studies.complexity.settings import ComplexitySettings, numbers_of

TINY = {"d_model": 16, "heads": 2, "neighbourhood": 16, "lengths": (8, 16, 32), "rounds": 3}


@pytest.mark.parametrize("kind", KINDS)
def test_memory_grows_with_the_length_and_with_its_square_where_all_pairs_are_held(kind):
    settings = ComplexitySettings(**TINY)
    layer = make_layer(kind, settings)
    short, long = (held_bytes(layer, torch.randn(1, length, 16)) for length in (1024, 2048))
    growth = long / short
    assert 3.8 < growth < 4.2 if kind in ("plain", "masked", "additive") else 1.9 < growth < 2.05


def test_additive_scores_are_measured_as_far_as_they_fit(monkeypatch):
    settings = ComplexitySettings(**TINY | {"rounds": 1, "lengths": (4, 8, 16, 32)})
    monkeypatch.setattr(measurement, "MOST_ADDITIVE_BYTES", 16**2 * 16 * 4)
    found = measure(settings)
    for column in ("milliseconds", "bytes"):
        assert found["additive"][column][3] is None
        assert all(value > 0 for value in found["additive"][column][:3] + found["plain"][column])
    assert exponent([4, 8, 16, 32], [9.0, 2.0, 8.0, None]) == pytest.approx(2)
    monkeypatch.setattr(measurement, "MOST_ADDITIVE_BYTES", 8**2 * 16 * 4)
    assert "additive" not in measure(settings)


def test_no_tensor_of_restricted_self_attention_is_as_large_as_all_pairs():
    layer = make_layer("restricted", ComplexitySettings(**TINY))
    assert held_bytes(layer, torch.randn(1, 8192, 16)) < 8192**2 / 8  # a bit for each pair


def test_the_exponent_is_that_of_the_upper_half():
    lengths = [64, 128, 256, 512, 1024]
    costs = [100.0, 1.0, 3 * 256**1.5, 3 * 512**1.5, 3 * 1024**1.5]
    assert exponent(lengths, costs) == pytest.approx(1.5)
    assert exponent(lengths[1:], [7.0, 2 * 256**2, 2 * 512**2, 2 * 1024**2][:4]) != pytest.approx(1.5)
    assert exponent([10, 20, 30, 40], [5.0, 5.0, 60.0, 80.0]) == pytest.approx(1.0)


def test_layers_take_turns_and_medians_are_given(monkeypatch):
    order, settings = [], ComplexitySettings(**TINY)

    def seconds_of(layer, states):
        assert torch.get_num_threads() == 1
        order.append((id(layer), states.shape[1]))
        return float(len(order))

    monkeypatch.setattr(measurement, "seconds_of", seconds_of)
    monkeypatch.setattr(measurement, "held_bytes", lambda layer, states: 3)
    torch.set_num_threads(2)
    found = measure(settings)
    assert torch.get_num_threads() == 2
    turn = order[: len(KINDS)]
    assert [length for _, length in turn] == [8] * len(KINDS)
    assert len({layer for layer, _ in turn}) == len(KINDS)
    assert [length for _, length in order] == [n for n in (8, 16, 32) for _ in KINDS] * 3
    whole = len(order) // 3
    for place, kind in enumerate(KINDS):
        for number in range(3):
            seconds = [1 + place + number * len(KINDS) + turn * whole for turn in range(3)]
            assert found[kind]["milliseconds"][number] == 1000 * statistics.median(seconds)
            assert found[kind]["fastest"][number] == 1000 * min(seconds)
            assert found[kind]["slowest"][number] == 1000 * max(seconds)
    assert found["plain"]["bytes"] == [3.0] * 3


def test_threads_come_back_after_an_error(monkeypatch):
    def fail(layer, states):
        raise MemoryError

    monkeypatch.setattr(measurement, "held_bytes", fail)
    torch.set_num_threads(2)
    with pytest.raises(MemoryError):
        measure(ComplexitySettings(**TINY))
    assert torch.get_num_threads() == 2


def test_the_same_seed_measures_the_same_weights():
    torch.manual_seed(4)
    first = make_layer("recurrent", ComplexitySettings(**TINY)).cells.weight_hh_l0
    torch.manual_seed(4)
    assert torch.equal(first, make_layer("recurrent", ComplexitySettings(**TINY)).cells.weight_hh_l0)


def test_the_recurrent_cell_is_the_one_asked_for():
    for cell, kind in (("rnn", torch.nn.RNN), ("gru", torch.nn.GRU), ("lstm", torch.nn.LSTM)):
        assert type(make_layer("recurrent", ComplexitySettings(**TINY, cell=cell)).cells) is kind


def test_a_call_is_timed_in_seconds_of_one_call(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(measurement.time, "process_time", lambda: next(clock) / 200)  # each look takes 5 ms
    calls = []
    seconds = measurement.seconds_of(lambda states: calls.append(states), torch.zeros(1))
    # Looks after the 1st, 2nd, 3rd and 4th call, which is the first at 20 ms; one more when it has ended.
    assert len(calls) == 4
    assert seconds == pytest.approx(0.025 / 4)


def test_the_machine_is_told():
    told = machine()
    assert told["torch"] == torch.__version__
    assert told["cores"] >= 1
    assert told["processor"]


OUT_OF_RANGE = {
    "d_model": [0],
    "heads": [0, 3],
    "neighbourhood": [0],
    "rounds": [0],
    "kernel_width": [1, 4, -3],
    "lengths": [(8, 16), (8, 8, 16), (16, 8, 32), (1, 2, 3)],
    "reach_lengths": [(), (1,), (9, 5), (9, 257)],
    "cell": ["transformer"],
}


def test_a_setting_out_of_range_is_an_error_that_names_it():
    for name, values in OUT_OF_RANGE.items():
        for value in values:
            with pytest.raises(ValueError, match=rf"`{name}` must .* instead\."):
                ComplexitySettings(**{**TINY, name: value})


def test_text_that_holds_no_numbers_is_an_error():
    for text in ("", "a", "1,,2", "1.5", "1 2"):
        with pytest.raises(ValueError, match="`lengths` must be whole numbers with commas between, but is "):
            numbers_of("lengths", text)


def test_numbers_are_read():
    assert numbers_of("lengths", "64, 128,256") == (64, 128, 256)
