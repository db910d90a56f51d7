"""Time and memory by length: what is counted, in which order, and what is refused."""

import statistics
from dataclasses import replace

import pytest
import torch

from heedful.studies.complexity import measurement
from heedful.studies.complexity.counts import Sizes
from heedful.studies.complexity.layers import make_layer
from heedful.studies.complexity.measurement import KINDS, exponent, held_bytes, measure

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
