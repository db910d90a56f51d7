"""The gates that are recorded are those of the equations, and make the states that the model has."""

import pytest
import torch

from heedful.attention.recording import record_gates
from helpers import assert_error, assert_near, tiny_model, tiny_rnn

SOURCE, FED = [5, 6, 7, 8, 2], [1, 9, 10]
NAMES = {"lstm": ["forget", "input", "output", "candidate"], "gru": ["reset", "update", "candidate"]}


def sums_of(cell, token, hidden):
    """Return W x + b and U h + d of a cell, in blocks of its gates, as torch orders them."""
    read = cell.weight_ih_l0 @ token + cell.bias_ih_l0
    return read.view(-1, cell.hidden_size), (cell.weight_hh_l0 @ hidden + cell.bias_hh_l0).view(-1, cell.hidden_size)


def by_hand(kind, cell, tokens):
    """Return the gates of a cell at each token, by the equations of Gers et al. (2000) and Cho et al. (2014)."""
    hidden = memory = torch.zeros(cell.hidden_size)
    rows = []
    for token in tokens:
        read, kept = sums_of(cell, token, hidden)
        if kind == "lstm":
            opened, forget, _, output = (read + kept).sigmoid()
            candidate = (read + kept)[2].tanh()
            rows.append({"forget": forget, "input": opened, "output": output, "candidate": candidate})
            memory = forget * memory + opened * candidate
            hidden = output * memory.tanh()
        else:
            reset, update = (read + kept)[:2].sigmoid()
            candidate = (read[2] + reset * kept[2]).tanh()
            rows.append({"reset": reset, "update": update, "candidate": candidate})
            hidden = update * hidden + (1 - update) * candidate
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


@torch.no_grad()
@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("kind", NAMES)
def test_the_gates_of_the_encoder_are_those_of_the_equations_in_both_directions(kind, is_fused):
    model = tiny_rnn(cell=kind, use_fused_cells=is_fused, encoder_layers=1)
    encoder = model.get_encoder()
    tokens = encoder.embed_tokens(torch.tensor(SOURCE))
    found = record_gates(model, SOURCE)
    assert list(found) == ["encoder.layers.0.first_cell", "encoder.layers.0.second_cell"]
    first, second = encoder.layers[0].first_cell, encoder.layers[0].second_cell
    backwards = {name: rows.flip(0) for name, rows in by_hand(kind, second, tokens.flip(0)).items()}
    for gates, expected in zip(found.values(), (by_hand(kind, first, tokens), backwards), strict=True):
        assert list(gates) == NAMES[kind]
        for name, rows in gates.items():
            assert_near(rows, expected[name])


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
        gates = found[f"decoder.layers.{number}"]
        hidden = memory = torch.zeros(16)
        for place in range(len(FED)):
            now = {name: rows[place] for name, rows in gates.items()}
            if kind == "lstm":
                memory = now["forget"] * memory + now["input"] * now["candidate"]
                hidden = now["output"] * memory.tanh()
            else:
                hidden = now["update"] * hidden + (1 - now["update"]) * now["candidate"]
            assert_near(hidden, expected[0, place])


def test_models_without_gates_are_refused_by_name():
    for model, told in ((tiny_rnn(cell="rnn"), "rnn"), (tiny_model(), "none")):
        assert_error(f"`cell` must be lstm or gru, .* but is {told} instead", record_gates, model, SOURCE)
