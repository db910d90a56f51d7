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


def test_padding_on_either_side_is_not_counted_and_new_tokens_go_on_from_the_cache():
    for side in ("left", "right"):
        _, mask = padded(sentences(5, 3), side)
        positions = positions_of(5, 0, mask, "cpu")
        assert positions[0].tolist() == [0, 1, 2, 3, 4]
        assert positions[1][mask[1] == 1].tolist() == [0, 1, 2]
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    assert positions_of(2, 3, mask, "cpu").tolist() == [[1, 2], [3, 4]]
    assert positions_of(2, 3, None, "cpu").tolist() == [[3, 4]]


@given(shift=st.integers(1, 300))
@settings(max_examples=10, deadline=None)
def test_rotary_attention_depends_only_on_relative_positions(shift):
    attention, states = HeedAttention(tiny_config(position_encoding="rotary"), "encoder").eval(), torch.randn(1, 6, 32)

    def attend(positions, source=None):
        return attention(states, None, source, positions=positions, attn_implementation="eager")[0]

    positions, source = torch.arange(6)[None], torch.randn(1, 4, 32)
    assert_near(attend(positions + shift), attend(positions), 1e-4)
    assert (attend(2 * positions) - attend(positions)).abs().max() > 1e-3
    assert torch.equal(attend(positions, source), attend(positions.flip(1), source))


def test_swapping_two_source_tokens_changes_the_encoding_of_a_third_unless_there_are_no_positions():
    for encoding in ("sinusoidal", "learned", "rotary", "shaw", "t5", "none"):
        encoder = tiny_model(position_encoding=encoding).model.encoder
        one, two = (encoder(torch.tensor([ids])).last_hidden_state for ids in ([5, 6, 7, 8], [6, 5, 7, 8]))
        if encoding == "none":
            assert_near(one[0, 3], two[0, 3])  # a bag of tokens
        else:
            assert (one[0, 3] - two[0, 3]).abs().max() > 1e-3


@pytest.mark.parametrize(("layout", "pair"), [("interleaved", (0, 1)), ("concatenated", (0, 16))])
@pytest.mark.parametrize("offset", [1, 7, 100])
def test_the_encoding_of_a_position_further_on_is_a_linear_function_of_it(layout, pair, offset):
    # Section 3.5: for a fixed offset k, PE(pos + k) is a linear function of PE(pos): a rotation of each pair.
    positions, step = torch.arange(50)[None], 1 if layout == "concatenated" else 2
    here, there = (sinusoids(positions + shift, 32, layout)[0] for shift in (0, offset))
    rotation = torch.zeros(32, 32)
    for number in range(16):
        sine, cosine = pair[0] + number * step, pair[1] + number * step
        angle = offset / 10000 ** (2 * number / 32)
        rotation[sine, sine] = rotation[cosine, cosine] = math.cos(angle)
        rotation[sine, cosine], rotation[cosine, sine] = math.sin(angle), -math.sin(angle)
    assert_near(here @ rotation.T, there, 2e-5)
    assert (here - there).abs().max() > 0.1


def test_wavelengths_are_a_geometric_progression_from_two_pi_to_ten_thousand_times_that():
    # Section 3.5. Sine i has its angle at position 1, and its wavelength is 2π / angle; the last stays just below.
    angles = sinusoids(torch.tensor([1]), 512, "interleaved")[0, 0::2].double().asin()
    wavelengths = 2 * math.pi / angles
    assert wavelengths[0].item() == pytest.approx(2 * math.pi, rel=1e-5)
    assert (wavelengths[1:] / wavelengths[:-1]).tolist() == pytest.approx([10000 ** (1 / 256)] * 255, rel=1e-5)
    assert wavelengths[-1].item() == pytest.approx(10000 * 2 * math.pi / 10000 ** (1 / 256), rel=1e-5)
