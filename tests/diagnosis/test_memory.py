"""The meter of memory: what is held at once, in any computation, forwards and backwards."""

import torch

from heedful.diagnosis.memory import HeldBytes


def test_bytes_are_those_held_at_once():
    with HeldBytes() as memory:
        first = torch.zeros(100)  # 400 bytes
        view = first.view(10, 10)
        second = torch.zeros(50, dtype=torch.float64)  # 400
        del second
        third = torch.zeros(25)  # 100
    assert memory.peak == 800
    assert memory.now == 500
    del first, third
    assert memory.now == 400  # the view holds it
    del view
    assert memory.now == 0


def test_what_was_there_before_does_not_count():
    before = torch.zeros(1000)
    with HeldBytes() as memory:
        before.view(10, 100).t().add_(1)
        assert memory.peak == 0
        total = torch.cat([before, before]).sum()
    assert memory.peak == 2 * 4000 + 4
    assert memory.now == 4
    assert total == 2000


def test_bytes_of_a_layer_forwards_and_backwards_are_what_its_formula_says():
    layer = torch.nn.Sequential(torch.nn.Linear(100, 400), torch.nn.Sigmoid(), torch.nn.Linear(400, 100))
    inputs = torch.randn(50, 100)
    layer(inputs).sum().backward()  # gradients are there from here on
    with HeldBytes() as memory:
        layer(inputs).sum().backward()
    hidden, outer, weight = 4 * 50 * 400, 4 * 50 * 100, 4 * 400 * 100
    # Saved: the sigmoid's output. At worst: its gradient and the linear layer's before it, or a weight's.
    assert hidden + outer <= memory.peak <= 4 * hidden + 2 * outer + 2 * weight
    assert memory.now == 0
