"""Positions: sinusoids (section 3.5), learned and rotary ones, and the scale of the embeddings (3.4)."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful import HeedEncoder
from heedful.attention_heed import HeedAttention
from heedful.positions_heed import positions_of, sinusoids
from helpers import assert_near, padded, sentences, tiny_config, tiny_model


def sinusoid_of_the_paper(position: int, feature: int, width: int) -> float:
    angle = position / 10000 ** (2 * (feature // 2) / width)
    return math.sin(angle) if feature % 2 == 0 else math.cos(angle)


@pytest.mark.parametrize("layout", ["interleaved", "concatenated"])
@given(position=st.integers(0, 100_000), half_width=st.integers(1, 16))
@settings(max_examples=40, deadline=None)
def test_sinusoids_are_those_of_section_3_5_at_any_position(layout, position, half_width):
    width = 2 * half_width
    expected = torch.tensor([sinusoid_of_the_paper(position, feature, width) for feature in range(width)])
    if layout == "concatenated":
        expected = torch.cat([expected[0::2], expected[1::2]])
    ours = sinusoids(torch.tensor([[position]]), width, layout)
    # The angle is a float32, so its error grows with the position.
    torch.testing.assert_close(ours[0, 0], expected, rtol=0, atol=1e-6 + 3e-7 * position)


def test_sinusoids_of_a_sentence_are_exact_to_float32():
    ours = sinusoids(torch.arange(64)[None], 32, "interleaved")[0]
    expected = [[sinusoid_of_the_paper(position, feature, 32) for feature in range(32)] for position in range(64)]
    torch.testing.assert_close(ours, torch.tensor(expected), rtol=0, atol=1e-5)


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


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_is_not_counted(side):
    _, mask = padded(sentences(5, 3), side)
    positions = positions_of(5, 0, mask, "cpu")
    assert positions[0].tolist() == [0, 1, 2, 3, 4]
    assert positions[1][mask[1] == 1].tolist() == [0, 1, 2]


def test_new_tokens_are_numbered_after_those_in_the_cache():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    assert positions_of(2, 3, mask, "cpu").tolist() == [[1, 2], [3, 4]]
    assert positions_of(2, 3, None, "cpu").tolist() == [[3, 4]]


def rotary_attention():
    attention = HeedAttention(tiny_config(position_encoding="rotary"), "encoder").eval()
    states = torch.randn(1, 6, 32)
    return lambda positions: attention(states, positions=positions, attn_implementation="eager")[0]


@given(shift=st.integers(1, 300))
@settings(max_examples=10, deadline=None)
def test_rotary_attention_depends_only_on_relative_positions(shift):
    attend = rotary_attention()
    positions = torch.arange(6)[None]
    assert_near(attend(positions + shift), attend(positions), 1e-4)


def test_rotary_attention_depends_on_relative_positions_at_all():
    attend = rotary_attention()
    assert (attend(2 * torch.arange(6)[None]) - attend(torch.arange(6)[None])).abs().max() > 1e-3


def test_rotary_positions_leave_cross_attention_alone():
    attention = HeedAttention(tiny_config(position_encoding="rotary"), "decoder").eval()
    source, target = torch.randn(1, 4, 32), torch.randn(1, 6, 32)
    one, two = (
        attention(target, None, source, positions=positions, attn_implementation="eager")[0]
        for positions in (torch.arange(6)[None], torch.arange(6).flip(0)[None])
    )
    assert torch.equal(one, two)


@pytest.mark.parametrize("encoding", ["sinusoidal", "learned", "rotary", "shaw", "t5"])
def test_swapping_two_source_tokens_changes_the_encoding_of_a_third(encoding):
    model = tiny_model(position_encoding=encoding)
    one, two = (model.model.encoder(torch.tensor([ids])).last_hidden_state for ids in ([5, 6, 7, 8], [6, 5, 7, 8]))
    assert (one[0, 3] - two[0, 3]).abs().max() > 1e-3


def test_without_positions_the_encoder_reads_a_bag_of_tokens():
    model = tiny_model(position_encoding="none")
    one, two = (model.model.encoder(torch.tensor([ids])).last_hidden_state for ids in ([5, 6, 7, 8], [6, 5, 7, 8]))
    assert_near(one[0, 3], two[0, 3])
