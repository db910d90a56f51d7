"""What is particular to a recurrent model: its attention, states and masks, and Heed's own searches with it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutput

import helpers
from heedful import BeamSearch, HeedRNNModel
from heedful.cells_heed import RecurrentCache
from heedful.versions_heed import CACHE
from helpers import RECURRENT_VARIANTS as VARIANTS
from helpers import SUTSKEVER, assert_near, assert_refused, generated, padded, sentences, tiny_model, tiny_rnn

LENGTHS = (9, 2, 6)


@given(
    source=st.lists(st.booleans(), min_size=6, max_size=6).filter(any),
    target=st.lists(st.booleans(), min_size=5, max_size=5).filter(any),
    variant=st.sampled_from(sorted(VARIANTS)),
)
@settings(max_examples=20, deadline=None)
@torch.no_grad()
def test_padding_anywhere_in_source_and_target_changes_nothing(source, target, variant):
    model, ids, words = tiny_rnn(**VARIANTS[variant]), torch.stack(sentences(6, 6)), torch.stack(sentences(5, 5))
    source_mask, target_mask = torch.tensor([source, [True] * 6]).long(), torch.tensor([target, [True] * 5]).long()
    masks = {"attention_mask": source_mask, "decoder_attention_mask": target_mask}
    together = model(ids, decoder_input_ids=words, **masks).logits
    for row in range(2):
        tokens, places = ids[row, source_mask[row] == 1], target_mask[row] == 1
        alone = model(tokens[None], decoder_input_ids=words[row, places][None]).logits
        assert_near(together[row, places], alone[0])


@torch.no_grad()
@pytest.mark.parametrize("input_feeding", [True, False])
@pytest.mark.parametrize("attention", helpers.ATTENTIONS)
def test_attention_comes_out_as_cross_attentions(attention, input_feeding):
    model = tiny_rnn(attention=attention, input_feeding=input_feeding)
    source, mask = padded(sentences(*LENGTHS), "left")
    inputs = {"input_ids": source, "attention_mask": mask, "decoder_input_ids": torch.randint(3, 99, (3, 4))}
    outputs = model(**inputs, output_attentions=True)
    (weights,) = outputs.cross_attentions
    assert weights.shape == (3, 1, 4, 9)
    assert_near(weights.sum(-1), torch.ones(3, 1, 4))
    assert (weights.masked_select(mask[:, None, None] == 0) == 0).all()
    assert torch.equal(outputs.logits, model(**inputs).logits)
    assert outputs.decoder_attentions is None
    assert outputs.encoder_attentions is None
    asked = {"output_attentions": True, "return_dict_in_generate": True, "do_sample": False, "max_length": 6}
    steps = model.generate(source, attention_mask=mask, eos_token_id=None, **asked).cross_attentions
    assert [step[0].shape for step in steps] == [(3, 1, 1, 9)] * 5


@torch.no_grad()
def test_hidden_states_are_what_each_layer_reads_and_gives():
    model = tiny_rnn(encoder_layers=3)
    source, target = torch.randint(3, 99, (2, 5)), torch.randint(3, 99, (2, 4))
    outputs = model(source, decoder_input_ids=target, output_hidden_states=True)
    assert [state.shape for state in outputs.encoder_hidden_states] == [(2, 5, 12), *[(2, 5, 16)] * 3]
    assert [state.shape for state in outputs.decoder_hidden_states] == [(2, 4, 12), *[(2, 4, 16)] * 2]
    assert torch.equal(outputs.encoder_hidden_states[-1], outputs.encoder_last_hidden_state)
    assert torch.equal(outputs.decoder_hidden_states[0], model.model.decoder.embed_tokens(target))


def test_assisted_decoding_is_refused():
    message = "assisted generation is not supported with stateful models"
    cases = [({"assistant_model": tiny_rnn()}, message), ({"prompt_lookup_num_tokens": 2}, message)]
    assert_refused(cases, lambda options: tiny_rnn().generate(torch.tensor([[5, 6]]), max_length=9, **options))


def test_what_a_recurrent_model_cannot_read_is_refused_by_name():
    model, source = tiny_rnn(), torch.tensor([[5, 6, 7]])
    encoded, wide, whole = model.model.encoder(source), torch.ones(1, 4), {"input_ids": source}
    cases = [
        (whole | {"past_key_values": DynamicCache()}, f"`{CACHE}` must be a RecurrentCache, but is a DynamicCache"),
        ({"encoder_outputs": BaseModelOutput(encoded.last_hidden_state)}, "must hold the `final_state`"),
        ({"encoder_outputs": encoded, "attention_mask": wide}, "must cover 3 tokens"),
    ]
    assert_refused(cases, lambda given: model(**given, decoder_input_ids=source))
    cases = [(True, "`output_attentions` must be False if the config's `attention` is none")]
    assert_refused(cases, lambda asked: tiny_rnn(**SUTSKEVER)(source, labels=source, output_attentions=asked))
    assert_refused([(3, "cannot be cropped")], RecurrentCache().crop)
    expected = model(source, decoder_input_ids=source).logits
    base = HeedRNNModel(model.config)
    base.load_state_dict(model.model.state_dict())
    assert_near(model.lm_head(base.eval()(source, decoder_input_ids=source).last_hidden_state), expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_heeds_beam_search_finds_what_transformers_finds(variant):
    model, rows = tiny_rnn(**VARIANTS[variant]), sentences(*LENGTHS)
    settings = {"num_beams": 3, "num_return_sequences": 2, "do_sample": False}
    assert generated(model, rows, custom_generate=BeamSearch(), **settings) == generated(model, rows, **settings)


def test_a_transformer_and_a_recurrent_model_vote_together():
    rows, members = sentences(*LENGTHS), [tiny_model(), tiny_rnn(), tiny_rnn(seed=1, **VARIANTS["no_feeding"])]
    settings = {"num_beams": 3, "do_sample": False}
    searches = [BeamSearch(models=members[:first] + members[first + 1 :]) for first in range(3)]
    found = [generated(members[at], rows, custom_generate=search, **settings) for at, search in enumerate(searches)]
    assert found[0] == found[1] == found[2]
    assert all(found[0] != generated(member, rows, **settings) for member in members)
    uncached = generated(members[0], rows, custom_generate=searches[0], use_cache=False, **settings)
    assert found[0] == uncached
