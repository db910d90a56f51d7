"""Positions: sinusoids (section 3.5), learned, rotary and relative ones, and the scale of the embeddings (3.4).

Relative ones are the vectors of Shaw et al. and T5's bias, as their papers and transformers compute them.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from heedful import HeedEncoder
from heedful.attention_heed import HeedAttention
from heedful.positions_heed import RelativePositions, positions_of, sinusoids
from heedful.versions_heed import cache_of
from helpers import assert_near, attend, padded, sentences, shake, tiny_config, tiny_model


@pytest.mark.parametrize("layout", ["interleaved", "concatenated"])
@given(position=st.integers(0, 100_000), half_width=st.integers(1, 16))
@settings(max_examples=40, deadline=None)
def test_sinusoids_are_those_of_section_3_5_at_any_position(layout, position, half_width):
    width = 2 * half_width
    angles = [position / 10000 ** (2 * pair / width) for pair in range(half_width)]
    expected = torch.tensor([[math.sin(angle), math.cos(angle)] for angle in angles])
    expected = (expected if layout == "interleaved" else expected.T).flatten()
    ours = sinusoids(torch.tensor([[position]]), width, layout)
    # The angle is a float32, so its error grows with the position.
    torch.testing.assert_close(ours[0, 0], expected, rtol=0, atol=1e-6 + 3e-7 * position)


@pytest.mark.parametrize("encoding", ["sinusoidal", "rotary", "shaw", "t5", "none"])
def test_unlearned_positions_reach_beyond_max_position_embeddings(encoding):
    model = tiny_model(position_encoding=encoding, max_position_embeddings=4)
    logits = model(torch.randint(3, 99, (1, 30)), decoder_input_ids=torch.randint(3, 99, (1, 20))).logits
    assert logits.isfinite().all()


@pytest.mark.parametrize(("scaled", "factor"), [(True, math.sqrt(32)), (False, 1.0)])
def test_embeddings_are_scaled_by_the_root_of_the_width_before_positions_are_added(scaled, factor):
    encoder = HeedEncoder(tiny_config(scale_embedding=scaled)).eval()
    ids = torch.tensor([[5, 6, 7]])
    positions = positions_of(3, 0, None, "cpu")
    ours = encoder.add_positions(encoder.embed(ids, None), positions)
    assert_near(ours, encoder.embed_tokens.weight[ids] * factor + sinusoids(positions, 32, "interleaved"))


def test_learned_positions_are_a_trained_row_each():
    encoder = HeedEncoder(tiny_config(position_encoding="learned")).eval()
    added = encoder.add_positions(torch.zeros(1, 3, 32), positions_of(3, 2, None, "cpu"))
    assert torch.equal(added[0], encoder.embed_positions.weight[2:5])


@given(shift=st.integers(1, 300))
@settings(max_examples=10, deadline=None)
def test_rotary_attention_depends_only_on_relative_positions(shift):
    config, states, positions = tiny_config(position_encoding="rotary"), torch.randn(1, 6, 32), torch.arange(6)[None]
    own, cross = (HeedAttention(config, "decoder", is_cross=is_cross).eval() for is_cross in (False, True))

    def at(positions):
        return attend(own, states, positions=positions)[0]

    assert_near(at(positions + shift), at(positions), 1e-4)
    assert (at(2 * positions) - at(positions)).abs().max() > 1e-3
    source = torch.randn(1, 4, 32)
    found = [attend(cross, states, positions=each, source=source)[0] for each in (positions, positions.flip(1))]
    assert torch.equal(*found)


# Relative ones

ENCODINGS = ("shaw", "t5")


def equations_3_and_4(attention, states, clip):
    """Attend from `(1, length, d_model)` states, head by head and pair by pair, in float64."""
    attention, states, length = attention.double(), states[0].double(), states.shape[1]
    parts = ("q", attention.d_k), ("k", attention.d_k), ("v", attention.d_v)
    query, key, value = (getattr(attention, f"{name}_proj")(states).view(length, -1, width) for name, width in parts)
    a_k, a_v = attention.relative_keys.weight, attention.relative_values.weight
    rows = [[max(-clip, min(clip, j - i)) + clip for j in range(length)] for i in range(length)]
    outputs = torch.zeros(length, query.shape[1], attention.d_v, dtype=torch.float64)
    for head in range(query.shape[1]):
        for i in range(length):
            e = [query[i, head] @ (key[j, head] + a_k[rows[i][j]]) / math.sqrt(attention.d_k) for j in range(length)]
            alpha = torch.stack(e).softmax(0)
            outputs[i, head] = sum(alpha[j] * (value[j, head] + a_v[rows[i][j]]) for j in range(length))
    return attention.out_proj(outputs.flatten(1))[None]


@torch.no_grad()
@pytest.mark.parametrize("clip", [1, 3, 16])
def test_shaws_attention_is_equations_3_and_4(clip):
    config = tiny_config(position_encoding="shaw", relative_attention_max_distance=clip, d_k=6, d_v=10)
    attention, states = HeedAttention(config, "encoder").eval(), torch.randn(1, 9, 32)
    shake(attention)
    (distances,) = RelativePositions(config, "encoder")(positions_of(9, 0, None, "cpu"), None)
    ours = attend(attention, states, relative=distances)[0]
    assert_near(ours.double(), equations_3_and_4(attention, states, clip))


@torch.no_grad()
@pytest.mark.parametrize("max_distance", [17, None])
@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_t5s_bias_gives_what_attention_of_transformers_t5_gives(stack, max_distance):
    sizes = {"d_model": 32, "d_kv": 8, "num_heads": 4, "is_decoder": stack == "decoder"}
    settings = T5Config(**sizes, relative_attention_max_distance=max_distance or 128)  # as by default
    settings._attn_implementation = "eager"
    theirs = T5Attention(settings, has_relative_attention_bias=True, layer_idx=0).eval()
    shake(theirs)
    options = {"position_encoding": "t5", "attention_scoring": "dot", "relative_attention_max_distance": max_distance}
    config = tiny_config(**options)
    ours, positions = HeedAttention(config, stack).eval(), RelativePositions(config, stack)
    for name, other in (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("out_proj", "o")):
        getattr(ours, name).weight.copy_(getattr(theirs, other).weight)
    positions.bias.weight.copy_(theirs.relative_attention_bias.weight)
    states, mask = torch.randn(1, 300, 32), torch.zeros(1, 1, 300, 300)
    if stack == "decoder":
        mask.masked_fill_(torch.ones(300, 300).triu(1).bool(), torch.finfo(torch.float32).min)
    (bias,) = positions(positions_of(300, 0, None, "cpu"), None)
    expected, their_bias = theirs(states, mask=mask)[:2]
    seen = mask == 0
    assert torch.equal(bias.masked_select(seen), (their_bias - mask).masked_select(seen))
    assert_near(attend(ours, states, mask=mask, relative=bias)[0], expected)


@torch.no_grad()
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_distances_count_tokens_and_no_padding_between_them(encoding, side):
    """A sentence with padding in its middle is encoded like the sentence without, and unlike it from behind."""
    encoder = tiny_model(position_encoding=encoding, attention="eager").model.encoder
    ids, mask = padded(sentences(7, 5), side)
    gap = torch.zeros(2, 2, dtype=torch.long)
    with_gap, mask_with_gap = (torch.cat([part[:, :3], gap, part[:, 3:]], 1) for part in (ids, mask))
    whole = encoder(ids, attention_mask=mask).last_hidden_state
    found = encoder(with_gap, attention_mask=mask_with_gap).last_hidden_state
    assert_near(found[mask_with_gap.bool()], whole[mask.bool()])
    assert (whole[0, 0] - encoder(ids[:1].flip(1)).last_hidden_state[0, -1]).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_sequences_longer_than_any_distance_are_decoded_with_a_cache_as_without(encoding):
    model = tiny_model(position_encoding=encoding, decoder_key_value_heads=2)
    source, target = torch.randint(14, 71, (1, 200)), torch.randint(14, 71, (1, 150))
    whole = model(source, decoder_input_ids=target).logits
    encoded, cache, logits = model.model.encoder(source), None, []
    for part in target.split([100, 1, 1, 40, 1, 7], dim=1):  # prefill in chunks, and single steps
        step = model(encoder_outputs=encoded, decoder_input_ids=part, past_key_values=cache, use_cache=True)
        logits.append(step.logits)
        cache = cache_of(step)
    assert whole.isfinite().all()
    assert_near(torch.cat(logits, 1), whole)
