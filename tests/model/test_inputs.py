"""Roads that lead to the same result, and wrong input that is refused by name."""

import pytest
import torch

from heedful.versions_heed import cache_of
from helpers import FAMILIES, assert_error, assert_near, assert_refused, padded, sentences, tiny_model

SOURCE = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
TARGET = torch.tensor([[1, 13, 14], [1, 15, 16]])


@pytest.fixture
def model():
    return tiny_model()


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_and_encoder_outputs_given_by_hand_equal_tokens_and_a_tuple_the_outputs(family):
    model = tiny_model(family=family)
    source, mask = padded(sentences(6, 3), "left")
    given, embed = {"attention_mask": mask, "labels": TARGET}, model.model.decoder.embed_tokens
    expected = model(source, decoder_input_ids=TARGET, **given)
    embeddings = {"inputs_embeds": embed(source), "decoder_inputs_embeds": embed(TARGET)}
    encoded = model.model.encoder(source, attention_mask=mask)
    for inputs in (embeddings, *({"encoder_outputs": each} for each in (encoded, encoded.to_tuple()))):
        target = {} if "inputs_embeds" in inputs else {"decoder_input_ids": TARGET}
        assert torch.equal(model(**inputs, **target, **given).logits, expected.logits)
    assert isinstance(model.model(source, decoder_input_ids=TARGET, return_dict=False), tuple)
    loss, logits, *_ = model(source, decoder_input_ids=TARGET, **given, return_dict=False)
    assert torch.equal(loss, expected.loss)
    assert torch.equal(logits, expected.logits)
    model.config.return_dict = False
    assert torch.equal(model(source, decoder_input_ids=TARGET, **given)[1], expected.logits)


@torch.no_grad()
@pytest.mark.parametrize("kept", [1, 2, torch.tensor([0, 2])])
def test_logits_to_keep_gives_those_positions_of_all_logits(model, kept):
    every = model(SOURCE, decoder_input_ids=TARGET).logits
    some = model(SOURCE, decoder_input_ids=TARGET, logits_to_keep=kept).logits
    assert_near(some, every[:, -kept:] if isinstance(kept, int) else every[:, kept])


REFUSED = [
    ({"input_ids": SOURCE, "attention_mask": torch.ones(2, 5)}, "must cover 4 tokens.* 5"),
    ({"input_ids": SOURCE, "decoder_attention_mask": torch.ones(2, 2)}, "must cover 3 tokens.* 2"),
    (
        {"encoder_outputs": (torch.zeros(2, 4, 32),), "attention_mask": torch.ones(2, 5)},
        "must cover 4 tokens of the source, but it covers 5",
    ),
    ({"input_ids": SOURCE + 90}, "below 99, but one is 102"),
    ({"input_ids": SOURCE - 6}, "at least 0 and below 99, but one is -1"),
    ({"input_ids": SOURCE, "decoder_input_ids": TARGET + 90}, "below 99, but one is 106"),
    ({"input_ids": SOURCE, "inputs_embeds": torch.zeros(2, 4, 32)}, "`input_ids` and `inputs_embeds`.* both"),
    ({}, "`input_ids` and `inputs_embeds`.* neither"),
    ({"input_ids": SOURCE, "decoder_input_ids": None}, "neither"),
    ({"input_ids": SOURCE, "decoder_inputs_embeds": torch.zeros(2, 3, 32)}, "both"),
    ({"input_ids": SOURCE, "labels": torch.full((2, 3), -100)}, "at least one label other than -100"),
    ({"input_ids": SOURCE, "labels": TARGET[:, 1:]}, r"the shape of the logits, \(2, 3\), but have \(2, 2\)"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_input_is_refused_with_what_is_expected_and_what_is_given(family):
    model = tiny_model(family=family)
    assert_refused(REFUSED, lambda arguments: model(**{"decoder_input_ids": TARGET, **arguments}))
    new = {"past_key_values": cache_of(model(SOURCE, decoder_input_ids=TARGET, use_cache=True))}
    with pytest.raises(ValueError, match=r"must cover 4 tokens.* 1"):
        model(SOURCE, decoder_input_ids=TARGET[:, :1], decoder_attention_mask=torch.ones(2, 1), **new)
    model = tiny_model(family=family, decoder_vocab_size=71, share_encoder_decoder_embeddings=False)
    model(torch.tensor([[90]]), decoder_input_ids=torch.tensor([[70]]))
    assert_error("below 71, but one is 71", model, SOURCE, decoder_input_ids=torch.tensor([[71], [1]]))


def test_a_prompt_in_chunks_is_named_where_it_cuts_the_mask_of_the_source(model):
    mask = torch.ones_like(SOURCE)
    whole = {"decoder_input_ids": TARGET, "max_new_tokens": 3}
    in_chunks = model.generate(SOURCE, attention_mask=mask, prefill_chunk_size=2, **whole)
    assert torch.equal(in_chunks, model.generate(SOURCE, **whole))
    mask[0, -1] = 0
    assert_error("`prefill_chunk_size`", model.generate, SOURCE, attention_mask=mask, prefill_chunk_size=2, **whole)


@torch.no_grad()
def test_learned_positions_refuse_a_longer_sequence_with_both_numbers():
    model = tiny_model(position_encoding="learned", max_position_embeddings=4)
    cache = cache_of(model(SOURCE, decoder_input_ids=TARGET, use_cache=True))
    with pytest.raises(ValueError, match=r"at most 4 tokens .*`max_position_embeddings`.* has 5"):
        model(torch.full((1, 5), 9), decoder_input_ids=TARGET[:1])
    assert_error(r"at most 4 tokens .* has 6", model, SOURCE, decoder_input_ids=TARGET, past_key_values=cache)
