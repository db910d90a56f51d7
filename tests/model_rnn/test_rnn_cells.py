"""Cells, attention and whole models are those of the papers and of torch, and padding is as if it were not there."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from heedful import HeedRNNForConditionalGeneration
from heedful.cells_heed import CELLS as CLASSES
from heedful.cells_heed import LSTMCell
from heedful.modeling_heed_rnn import HeedRNNAttention
from helpers import ATTENTIONS, CELLS, assert_near, pairwise, tiny_rnn, tiny_rnn_config

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
    for token in inputs.unbind(1):
        state = cell(token, state, is_fused=is_fused)
    for ours, other in zip(state, found[1:], strict=False):
        assert_near(ours, other)


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


# Whole models


def score(kind: str, attention: HeedRNNAttention, query, key) -> torch.Tensor:
    """Return the score of one query and one key as the papers write it."""
    if kind == "dot":
        return query @ key
    if kind == "scaled_dot":
        return query @ key / len(key) ** 0.5
    if kind == "general":
        return query @ attention.k_proj.weight @ key
    return attention.weight @ torch.tanh(attention.q_proj.weight @ query + attention.k_proj.weight @ key)


@torch.no_grad()
@pytest.mark.parametrize("kind", ATTENTIONS)
def test_attention_is_a_softmax_over_the_scores_of_tokens(kind):
    attention = tiny_rnn(attention=kind).model.decoder.cross_attn
    queries, states = torch.randn(2, 3, 16), torch.randn(2, 5, 16)
    tokens = torch.tensor([[True, False, True, True, False], [True] * 5])
    context, weights = attention(queries, attention.project_source(states), states, tokens)
    for row in range(2):
        places = tokens[row].nonzero().flatten()
        for place in range(3):
            scores = torch.stack([score(kind, attention, queries[row, place], states[row, key]) for key in places])
            expected = torch.zeros(5).index_copy(0, places, scores.softmax(0))
            assert_near(weights[row, 0, place], expected)
            assert_near(context[row, place], expected @ states[row])


def with_weights_of(module: torch.nn.Module, cells: list[list[torch.nn.Module]]) -> torch.nn.Module:
    """Copy the weights of our cells, `[layer][direction]`, into a torch module of several layers."""
    with torch.no_grad():
        for layer, directions in enumerate(cells):
            for cell, suffix in zip(directions, ("", "_reverse"), strict=False):
                for name, weight in cell.named_parameters():
                    getattr(module, f"{name.removesuffix('_l0')}_l{layer}{suffix}").copy_(weight)
    return module


def encoded_by_torch(model, source):
    """Return the encoder's outputs and its last states `(layers, parts, batch, hidden)`."""
    config, encoder = model.config, model.model.encoder
    cells = [[cell for cell in (layer.first_cell, layer.second_cell) if cell is not None] for layer in encoder.layers]
    width = config.hidden_size // 2 if config.bidirectional else config.hidden_size
    theirs = THEIRS[config.cell](
        config.embedding_size, width, config.encoder_layers, batch_first=True, bidirectional=config.bidirectional
    )
    theirs = with_weights_of(theirs, cells)
    embeddings = encoder.embed_tokens(source.flip(1) if config.reverse_source else source)
    outputs, last = theirs(embeddings)
    outputs = outputs.flip(1) if config.reverse_source else outputs
    parts = last if config.cell == "lstm" else (last,)
    # torch has the directions of a layer one after the other.
    joined = [part.unflatten(0, (config.encoder_layers, -1)).transpose(1, 2).flatten(2) for part in parts]
    return outputs, torch.stack(joined, dim=1)


def first_states(model, last):
    """Return the decoder's first state `(layers, parts, batch, hidden)`, by its bridge."""
    config, bridge = model.config, model.model.decoder.bridge
    count, parts = config.decoder_layers, last.shape[1]
    if config.bridge == "none":
        return torch.zeros(count, *last.shape[1:])
    beside = [last[max(0, len(last) - count + layer)] for layer in range(count)]
    if config.bridge == "copy":
        return torch.stack(beside)
    projected = [
        torch.stack([bridge.projections[layer * parts + part](beside[layer][part]) for part in range(parts)])
        for layer in range(count)
    ]
    return torch.stack([torch.cat([states[:1].tanh(), states[1:]]) for states in projected])


def decoded_by_torch(model, states, outputs, target):
    """Return the logits of a decoder that is fed nothing, or the encoder's last state."""
    config, decoder = model.config, model.model.decoder
    embeddings, summary = decoder.embed_tokens(target), None
    if config.input_feeding:
        uppermost = outputs[:, 0] if config.reverse_source else outputs[:, -1]
        summary = uppermost[:, None].expand(-1, target.shape[1], -1)
        embeddings = torch.cat([embeddings, summary], dim=-1)
    width = embeddings.shape[-1]
    theirs = THEIRS[config.cell](width, config.hidden_size, config.decoder_layers, batch_first=True)
    theirs = with_weights_of(theirs, [[cell] for cell in decoder.layers])
    parts = tuple(states.transpose(0, 1).contiguous())
    read, _ = theirs(embeddings, parts if config.cell == "lstm" else parts[0])
    if summary is not None:
        read = torch.cat([read, summary], dim=-1)
    if config.attention == "scaled_dot":
        context = F.scaled_dot_product_attention(read, outputs, outputs)
        read = torch.cat([read, context], dim=-1)
    return model.lm_head(decoder.out_proj(read).tanh())


WHOLE = {
    "sutskever": {"attention": "none", "bidirectional": False, "bridge": "copy", "reverse_source": True},
    "cho": {"attention": "none", "input_feeding": True, "bidirectional": False, "bridge": "linear"},
    "cho_reversed": {"attention": "none", "input_feeding": True, "bidirectional": False, "reverse_source": True},
    "bidirectional": {"attention": "scaled_dot", "bridge": "linear"},
    "without_a_bridge": {"attention": "scaled_dot", "bridge": "none"},
    "copied_bidirectional": {"attention": "none", "bridge": "copy"},
    "fewer_in_the_decoder": {"attention": "scaled_dot", "encoder_layers": 3, "decoder_layers": 1, "bridge": "copy"},
    "more_in_the_decoder": {"attention": "none", "encoder_layers": 1, "decoder_layers": 3, "bridge": "linear"},
}


@torch.no_grad()
@pytest.mark.parametrize(("kind", "cell", "is_fused"), pairwise(WHOLE, CELLS, [True, False]))
def test_a_model_equals_one_of_torchs_modules_with_the_same_weights(kind, cell, is_fused):
    model = tiny_rnn(**{"cell": cell, "input_feeding": False, "use_fused_cells": is_fused, **WHOLE[kind]})
    source, target = torch.randint(3, 99, (3, 6)), torch.randint(3, 99, (3, 4))
    outputs, last = encoded_by_torch(model, source)
    expected = decoded_by_torch(model, first_states(model, last), outputs, target)
    found = model(source, decoder_input_ids=target)
    assert_near(found.encoder_last_hidden_state, outputs)
    assert_near(found.logits, expected)


@torch.no_grad()
@pytest.mark.parametrize("cell", CELLS)
def test_input_feeding_equals_luongs_equations_step_by_step(cell):
    model = tiny_rnn(cell=cell, attention="general", decoder_layers=1)
    source, target = torch.randint(3, 99, (2, 6)), torch.randint(3, 99, (2, 4))
    outputs, last = encoded_by_torch(model, source)
    state = first_states(model, last)[0].unsqueeze(1)  # (parts, 1, B, H)
    decoder = model.model.decoder
    theirs = with_weights_of(THEIRS[cell](24, 16, batch_first=True), [[decoder.layers[0]]])
    fed, logits = torch.zeros(2, 12), []
    for place in range(4):
        inputs = torch.cat([decoder.embed_tokens(target[:, place]), fed], dim=-1)
        read, after = theirs(inputs[:, None], tuple(state) if cell == "lstm" else state[0])
        state = torch.stack(after) if cell == "lstm" else after[None]
        scores = torch.einsum("bqh,hi,bki->bqk", read, decoder.cross_attn.k_proj.weight, outputs)
        fed = decoder.out_proj(torch.cat([read, scores.softmax(-1) @ outputs], dim=-1)).tanh()[:, 0]
        logits.append(model.lm_head(fed))
    assert_near(model(source, decoder_input_ids=target).logits, torch.stack(logits, dim=1))


@torch.no_grad()
def test_columns_of_attention_are_source_tokens_in_their_order_when_the_source_is_read_from_its_end():
    torch.manual_seed(0)
    options = {"bidirectional": False, "attention": "general"}
    forwards, backwards = (tiny_rnn(**options, reverse_source=is_reversed) for is_reversed in (False, True))
    backwards.load_state_dict(forwards.state_dict())
    source, target = torch.tensor([[5, 6, 7, 8, 2]]), torch.tensor([[9, 10, 2]])
    found = backwards(source, labels=target, output_attentions=True)
    expected = forwards(source.flip(1), labels=target, output_attentions=True)
    assert_near(found.logits, expected.logits)
    assert_near(found.cross_attentions[0], expected.cross_attentions[0].flip(-1))
    assert_near(found.encoder_last_hidden_state, expected.encoder_last_hidden_state.flip(1))
