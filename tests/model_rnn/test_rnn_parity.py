"""Attention by its formulas, and whole models put together from torch's own recurrent modules."""

import pytest
import torch
from torch import nn

from heedful.modeling_heed_rnn import HeedRNNAttention
from helpers import ATTENTIONS, CELLS, assert_near, loss_and_gradients, masked_batch, pairwise, tiny_rnn

THEIRS = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}


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


def with_weights_of(module: nn.Module, cells: list[list[nn.Module]]) -> nn.Module:
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
        context = nn.functional.scaled_dot_product_attention(read, outputs, outputs)
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


@pytest.mark.parametrize("input_feeding", [True, False])
@pytest.mark.parametrize("cell", CELLS)
def test_fused_cells_give_the_loss_and_gradients_of_the_equations(cell, input_feeding):
    given, options = masked_batch((7, 3, 5), (4, 2, 3)), {"cell": cell, "input_feeding": input_feeding}
    models = [tiny_rnn(use_fused_cells=is_fused, **options).train() for is_fused in (True, False)]
    assert_near(*(loss_and_gradients(model, given) for model in models))


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
