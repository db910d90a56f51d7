"""The cells' equations are torch's, and padding is as if it were not there."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from heedful import HeedRNNForConditionalGeneration
from heedful.cells_heed import CELLS as CLASSES
from heedful.cells_heed import LSTMCell
from helpers import CELLS, assert_near, tiny_rnn, tiny_rnn_config

THEIRS = {"rnn": torch.nn.RNN, "lstm": torch.nn.LSTM, "gru": torch.nn.GRU}
SIZES = st.integers(1, 7)


def cell_of(kind: str, input_size: int, hidden_size: int):
    """Return a cell whose weights and biases are all random; `relu` is a plain one."""
    activation = {"activation": "relu"} if kind == "relu" else {}
    cell = CLASSES.get(kind, CLASSES["rnn"])(input_size, hidden_size, batch_first=True, **activation)
    for weight in cell.parameters():
        torch.nn.init.normal_(weight, std=0.7)
    return cell


def state_of(cell, batch: int):
    """Return a random state to begin with."""
    parts = 2 if isinstance(cell, LSTMCell) else 1
    return tuple(torch.randn(batch, cell.hidden_size) for _ in range(parts))


def differentiated(outputs, state, cell, inputs):
    """Return outputs, last state, and the gradients of weights and inputs of a sum that weighs every number."""
    numbers = [outputs, *state]
    total = sum((part * torch.linspace(-1, 1, part.numel()).view(part.shape)).sum() for part in numbers)
    return [*numbers, *torch.autograd.grad(total, [inputs, *cell.parameters()])]


@given(sizes=st.tuples(SIZES, SIZES, SIZES, SIZES), seed=st.integers(0, 99), begins=st.booleans())
@settings(max_examples=10, deadline=None)
@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("kind", [*CELLS, "relu"])
def test_a_cell_is_torchs_in_outputs_last_state_and_gradients(kind, is_fused, sizes, seed, begins):
    batch, length, input_size, hidden = sizes
    torch.manual_seed(seed)
    cell = cell_of(kind, input_size, hidden)
    relu = {"nonlinearity": "relu"} if kind == "relu" else {}
    theirs = THEIRS.get(kind, torch.nn.RNN)(input_size, hidden, batch_first=True, **relu)
    theirs.load_state_dict(cell.state_dict())
    inputs = torch.randn(batch, length, input_size, requires_grad=True)
    state = state_of(cell, batch) if begins else None
    given_state = None if state is None else tuple(part[None] for part in state)
    outputs, last = theirs(inputs, given_state if kind == "lstm" or state is None else given_state[0])
    expected = differentiated(outputs, last if kind == "lstm" else (last,), theirs, inputs)
    found = differentiated(*cell(inputs, state, is_fused=is_fused), cell, inputs)
    for ours, other in zip(found, expected, strict=True):
        assert_near(ours, other.view(ours.shape), 1e-5)


@torch.no_grad()
@pytest.mark.parametrize("cell", CELLS)
def test_the_equations_run_where_somebody_has_replaced_the_product_of_torch(cell, monkeypatch):
    tokens, plain, counts = torch.randint(14, 90, (2, 5)), F.linear, []
    for use_fused_cells in (False, True):
        model, calls = tiny_rnn(cell=cell, use_fused_cells=use_fused_cells), []
        with monkeypatch.context() as patch:
            patch.setattr(F, "linear", lambda *args, calls=calls: calls.append(1) or plain(*args))
            model(tokens, decoder_input_ids=tokens)
        counts.append(len(calls))
    assert counts[0] == counts[1] > 40


@torch.no_grad()
@pytest.mark.parametrize(("name", "activation"), [("sigmoid", torch.sigmoid), ("linear", lambda x: x)])
def test_an_activation_that_torch_has_no_cell_of_goes_by_the_equations_unasked(name, activation):
    model = tiny_rnn(cell="rnn", activation_function=name, bidirectional=False, encoder_layers=1)
    encoder = model.get_encoder()
    cell, source = encoder.layers[0].first_cell, torch.tensor([[5, 6, 7, 8]])
    state = torch.zeros(1, cell.hidden_size)
    for token in encoder.embed_tokens(source)[0]:
        read = cell.weight_ih_l0 @ token + cell.bias_ih_l0
        state = activation(read + state @ cell.weight_hh_l0.T + cell.bias_hh_l0)
    assert_near(encoder(source).last_hidden_state[:, -1], state)
    other = tiny_rnn(cell="rnn", bidirectional=False, encoder_layers=1)
    other.load_state_dict(model.state_dict())
    assert (model(source, labels=source).logits - other(source, labels=source).logits).abs().max() > 0.01


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("kind", [*CELLS, "relu"])
def test_token_by_token_a_cell_comes_to_the_same_state(kind, is_fused):
    torch.manual_seed(0)
    cell, inputs = cell_of(kind, 5, 4), torch.randn(3, 6, 5)
    state = state_of(cell, 3)
    outputs, last = cell(inputs, state, is_fused=is_fused)
    for place in range(6):
        state = cell(inputs[:, place], state, is_fused=is_fused)
        assert_near(state[0], outputs[:, place])
    torch.testing.assert_close(state, last, rtol=0, atol=1e-5)


@given(
    mask=st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=4),
    is_reversed=st.booleans(),
    begins=st.booleans(),
)
@settings(max_examples=12, deadline=None)
@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("kind", CELLS)
def test_padding_anywhere_is_as_if_it_were_not_there(kind, is_fused, mask, is_reversed, begins):
    torch.manual_seed(0)
    cell, tokens = cell_of(kind, 3, 4), torch.tensor(mask)
    inputs = torch.randn(*tokens.shape, 3)
    state = state_of(cell, len(tokens)) if begins else None
    outputs, last = cell(inputs, state, tokens, is_reversed, is_fused)
    assert (outputs[~tokens] == 0).all()
    for row, is_token in enumerate(tokens):
        before = None if state is None else tuple(part[row : row + 1] for part in state)
        expected = before or tuple(torch.zeros(1, 4) for _ in last)
        if is_token.any():
            alone, expected = cell(inputs[row : row + 1, is_token], before, None, is_reversed, is_fused)
            assert_near(outputs[row, is_token], alone[0])
        torch.testing.assert_close([part[row] for part in last], [part[0] for part in expected], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", CELLS)
def test_the_equations_can_be_differentiated_twice(kind):
    torch.manual_seed(0)
    cell = cell_of(kind, 2, 3).double()
    inputs = torch.randn(1, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda read: cell(read, is_fused=False)[0], inputs)
    model = tiny_rnn(cell=kind, use_fused_cells=False).train()
    loss = model(torch.tensor([[5, 6, 7]]), labels=torch.tensor([[8, 9]])).loss
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    sum(gradient.square().sum() for gradient in gradients).backward()
    assert model.model.encoder.layers[0].first_cell.weight_hh_l0.grad.abs().max() > 0


@pytest.mark.parametrize("kind", CELLS)
def test_initial_weights_are_orthogonal_gate_by_gate_and_an_lstm_remembers(kind):
    torch.manual_seed(0)
    model = HeedRNNForConditionalGeneration(tiny_rnn_config(cell=kind))
    cell = model.model.decoder.layers[1]
    for block in cell.weight_hh_l0.split(cell.hidden_size):
        assert_near(block @ block.T, torch.eye(16))
    biases = cell.bias_ih_l0.unflatten(0, (-1, 16))
    expected = torch.zeros_like(biases)
    if kind == "lstm":
        expected[1] = 1  # torch's order of gates: input, forget, candidate, output
    assert torch.equal(biases, expected)
    assert not cell.bias_hh_l0.any()


def test_a_loaded_weight_is_not_drawn_anew_because_another_is_missing(tmp_path):
    tiny_rnn().save_pretrained(tmp_path)
    weights, name = load_file(tmp_path / "model.safetensors"), "model.decoder.layers.0.bias_hh_l0"
    del weights[name]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, report = HeedRNNForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert report["missing_keys"] == {name}
    found = loaded.state_dict()
    assert all(torch.equal(found[other], weight) for other, weight in weights.items())
    assert not found[name].any()


@torch.no_grad()
@pytest.mark.parametrize("kind", CELLS)
def test_a_model_runs_in_16_bits_and_in_mixed_precision(kind):
    source, target = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[1, 13, 14]])
    for dtype in (torch.bfloat16, torch.float16):
        model = HeedRNNForConditionalGeneration._from_config(tiny_rnn_config(cell=kind), dtype=dtype)
        assert {weight.dtype for weight in model.parameters()} == {dtype}
        outputs = model(source, labels=target)
        assert outputs.logits.dtype == dtype
        assert outputs.loss.isfinite()
    model = tiny_rnn(cell=kind)
    whole = model(source, decoder_input_ids=target).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_near(model(source, decoder_input_ids=target).logits.float(), whole, 0.05)
