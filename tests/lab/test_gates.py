"""The gates that are recorded make the states that the model has, by the equations of its cells."""

import pytest
import torch

from heedful_lab.course.gates import record_gates
from helpers import assert_error, assert_near, tiny_model, tiny_rnn

SOURCE, FED = [5, 6, 7, 8, 2], [1, 9, 10]
NAMES = {"lstm": ["forget", "input", "output", "candidate"], "gru": ["reset", "update", "candidate"]}


def states_of(kind, gates, places):
    """Return a cell's states `(length, hidden)` by Gers et al. (2000) or Cho et al. (2014), read in this order."""
    assert list(gates) == NAMES[kind]
    states = torch.zeros_like(gates["candidate"])
    hidden = memory = torch.zeros(states.shape[1])
    for place in places:
        now = {name: rows[place] for name, rows in gates.items()}
        if kind == "lstm":
            memory = now["forget"] * memory + now["input"] * now["candidate"]
            hidden = now["output"] * memory.tanh()
        else:
            hidden = now["update"] * hidden + (1 - now["update"]) * now["candidate"]
        states[place] = hidden
    return states


@torch.no_grad()
@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("kind", NAMES)
def test_the_gates_of_the_encoder_make_its_states_in_both_directions(kind, is_fused):
    model = tiny_rnn(cell=kind, use_fused_cells=is_fused, encoder_layers=1)
    found = record_gates(model, SOURCE)
    assert list(found) == ["encoder.layers.0.first_cell", "encoder.layers.0.second_cell"]
    orders = range(len(SOURCE)), range(len(SOURCE) - 1, -1, -1)
    states = [states_of(kind, gates, order) for gates, order in zip(found.values(), orders, strict=True)]
    assert_near(torch.cat(states, dim=1), model.get_encoder()(torch.tensor([SOURCE])).last_hidden_state[0])
    if kind == "gru":  # whose states say nothing of this gate
        cell, token = (
            model.get_encoder().layers[0].first_cell,
            model.get_encoder().embed_tokens(torch.tensor(SOURCE[0])),
        )
        reset = (cell.weight_ih_l0 @ token + cell.bias_ih_l0 + cell.bias_hh_l0)[: cell.hidden_size].sigmoid()
        assert_near(found["encoder.layers.0.first_cell"]["reset"][0], reset)


@torch.no_grad()
@pytest.mark.parametrize("input_feeding", [True, False])
@pytest.mark.parametrize("kind", NAMES)
def test_the_gates_of_the_decoder_make_its_states(kind, input_feeding):
    model = tiny_rnn(cell=kind, input_feeding=input_feeding, bridge="none").train()
    found = record_gates(model, SOURCE, FED)
    assert model.training
    assert [name for name in found if "decoder" in name] == ["decoder.layers.0", "decoder.layers.1"]
    asked = {"decoder_input_ids": torch.tensor([FED]), "output_hidden_states": True}
    states = model.eval()(torch.tensor([SOURCE]), **asked).decoder_hidden_states[1:]
    for number, expected in enumerate(states):
        assert_near(states_of(kind, found[f"decoder.layers.{number}"], range(len(FED))), expected[0])


def test_models_without_gates_are_refused_by_name():
    for model, told in ((tiny_rnn(cell="rnn"), "rnn"), (tiny_model(), "none")):
        assert_error(f"`cell` must be lstm or gru, .* but is {told} instead", record_gates, model, SOURCE)
