"""The native decoder gives the tokens of generate(), whatever the model, the batch and the settings."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import LogitsProcessor, MaxTimeCriteria
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from heedful import HeedConfig, HeedForConditionalGeneration
from heedful.decoding.native.engine import NativeDecoder
from heedful.decoding.native.network import best_tokens
from heedful.modeling_heed import HeedFeedForward
from helpers import assert_error

TINY = {
    **{"vocab_size": 90, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 64},
    **{"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
}
OPTIONS = [
    {},
    {"norm_placement": "pre", "norm_type": "rmsnorm", "attention_bias": True},
    {"position_encoding": "learned", "sinusoid_layout": "concatenated", "embedding_norm": True},
    {"position_encoding": "rotary", "activation_function": "swiglu"},
    {"share_layers": True, "decoder_layers": 3},
    {"position_encoding": "none", "activation_function": "gelu", "attention_scoring": "dot"},
    {"d_k": 3, "d_v": 5, "output_bias": True},
    {"encoder_key_value_heads": 2, "decoder_key_value_heads": 1, "scale_embedding": False},
    {"encoder_neighbourhood": 2, "decoder_neighbourhood": 3},
    {"decoder_vocab_size": 141, "share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
    {"encoder_layers": 1, "decoder_layers": 3, "decoder_attention_heads": 2},
]


def make_model(options, seed=0, spread=3.0):
    """Return a random model whose tokens differ from step to step and that ends its sentences now and then."""
    torch.manual_seed(seed)
    model = HeedForConditionalGeneration(HeedConfig(**TINY | options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(spread)
    model.generation_config.max_length = 14
    return model


def make_batch(seed, sentences=7, side="right"):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (sentences,), generator=generator)
    width = int(lengths.max())
    tokens = torch.randint(4, 90, (sentences, width), generator=generator)
    places = torch.arange(width)
    mask = places < lengths[:, None] if side == "right" else places >= width - lengths[:, None]
    return {"input_ids": tokens.masked_fill(~mask, 0), "attention_mask": mask.long()}


def both(model, batch, precision="float32", **arguments):
    decoder = NativeDecoder(model, precision)
    ours = model.generate(**decoder.encoded(**batch), custom_generate=decoder, **arguments)
    return ours, model.generate(**batch, **arguments)


class RowBias(LogitsProcessor):
    """Gives each row a token of its own, and ends every fourth at once, its neighbours later."""

    def __call__(self, input_ids, scores):
        rows = torch.arange(len(scores))
        scores = scores.clone()
        scores[rows, 10 + rows] += 20.0
        scores[:, 2] += 99.0 * (input_ids.shape[1] > 1 + rows % 4)
        return scores


@pytest.fixture(scope="module")
def model():
    return make_model({})


PENALTIES, ENDS = st.sampled_from([-1.0, 0.0, 0.6, 1.0, 2.0]), st.sampled_from([True, False, "never"])
SEARCH = st.fixed_dictionaries({"length_penalty": PENALTIES, "early_stopping": ENDS})


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(1, 6), st.integers(1, 3), st.integers(1, 20), SEARCH)
def test_every_search_finds_what_generate_finds(seed, sentences, beams, returned, max_new_tokens, search):
    model = make_model({}, seed=seed % 3)
    arguments = {"num_beams": beams, "max_new_tokens": max_new_tokens, "return_dict_in_generate": True}
    if beams > 1:
        arguments |= search | {"num_return_sequences": min(returned, beams), "output_scores": False}
    ours, theirs = both(model, make_batch(seed, sentences), **arguments)
    assert torch.equal(ours.sequences, theirs.sequences)
    if beams > 1:
        theirs = model.generate(**make_batch(seed, sentences), **arguments | {"output_scores": True})
        torch.testing.assert_close(ours.sequences_scores, theirs.sequences_scores, rtol=1e-4, atol=1e-4)


SETTINGS = [
    {"forced_bos_token_id": 9},
    {"forced_eos_token_id": 2},
    {"min_new_tokens": 6},
    {"repetition_penalty": 1.7},
    {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[5], [6], [7, 8]]},
    {"eos_token_id": [2, 30, 31, 32, 33, 34, 35, 36]},
    {"decoder_input_ids": torch.tensor([[0, 11, 12]] * 7)},
    {"prefix_allowed_tokens_fn": lambda row, tokens: [2, 10 + row, 20 + row, 30 + row]},
    {"logits_processor": [RowBias()]},
]


def test_what_generate_does_to_the_next_token_happens_here_too(model):
    for beams, arguments in product((1, 3), SETTINGS):
        assert torch.equal(*both(model, make_batch(3), num_beams=beams, **arguments)), arguments


UNREAD = [
    ({"do_sample": True}, "do_sample"),
    ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
    ({"return_dict_in_generate": True, "output_attentions": True}, "output_attentions"),
    ({"max_time": 10.0}, "max_time"),
    ({"stopping_criteria": [MaxTimeCriteria(10.0)]}, "stopping_criteria"),
    ({"decoder_attention_mask": torch.ones(7, 1, dtype=torch.long)}, "decoder_attention_mask"),
    ({"penalty_alpha": 0.6}, "penalty_alpha"),
    ({"encoder_no_repeat_ngram_size": 2}, "encoder_no_repeat_ngram_size"),
    ({"encoder_repetition_penalty": 1.5}, "encoder_repetition_penalty"),
]


def test_what_it_cannot_do_is_refused_by_name(model):
    decoder = NativeDecoder(model)
    for arguments, name in UNREAD:
        why = ", which has no source tokens, but" if name.startswith("encoder") else ""
        with pytest.raises(ValueError, match=f"`{name}` must .* with the native decoder{why}"):
            model.generate(**make_batch(7), custom_generate=decoder, **arguments)
    additive = make_model({"attention_scoring": "additive"})
    assert_error("`attention_scoring` must be scaled_dot or dot", NativeDecoder, additive)
    assert_error("`precision` must be one of float32, int8", NativeDecoder, model, "bfloat16")
    decoder = NativeDecoder(make_model({}, seed=1))
    message = "must be the one given to NativeDecoder"
    assert_error(message, model.generate, **make_batch(8), custom_generate=decoder)
    model = make_model({})
    model(**make_batch(1), labels=make_batch(1)["input_ids"], output_attentions=True)  # leaves transformers' own hooks
    NativeDecoder(model)


def test_sources_and_prompts_are_checked_as_the_model_does(model):
    decoder, batch = NativeDecoder(model), make_batch(1)
    search = partial(model.generate, custom_generate=decoder)
    message = "Token ids must be at least 0 and below 90, but one is 95"
    assert_error(message, decoder.encoded, torch.tensor([[95]]))
    assert_error(message, search, **batch, decoder_input_ids=torch.tensor([[1, 95]] * 7))
    message = r"`attention_mask` must have the shape of `input_ids`, \(2, 2\)"
    assert_error(message, decoder.encoded, torch.tensor([[5, 6], [7, 8]]), torch.ones(1, 2, dtype=torch.long))
    encoded, message = model.model.encoder(**batch), "`attention_mask` must leave a token in each source"
    batch["attention_mask"][2] = 0
    assert_error(message, decoder.encoded, **batch)
    assert_error(message, search, encoder_outputs=encoded, attention_mask=batch["attention_mask"])
    model = make_model({"position_encoding": "learned", "max_position_embeddings": 12})
    decoder, message = NativeDecoder(model), r"must have at most 12 tokens .* but it has 13 instead"
    for beams, decoding in product((1, 3), ({}, {"custom_generate": decoder})):
        search = partial(model.generate, num_beams=beams, max_new_tokens=20, eos_token_id=None, **decoding)
        assert_error(message, search, **make_batch(1))
    assert_error(message, decoder.encoded, torch.full((1, 13), 5))


def test_autocast_changes_nothing_and_there_may_be_more_beams_than_tokens(model):
    batch = make_batch(2)
    with torch.autocast("cpu", torch.bfloat16):  # as in a validation in mixed precision
        decoder = NativeDecoder(model)
        tokens = model.generate(**decoder.encoded(**batch), custom_generate=decoder, num_beams=3)
    assert torch.equal(tokens, model.generate(**batch, num_beams=3))
    batch = {"input_ids": torch.tensor([[4, 5, 4], [5, 5, 5]])}
    assert torch.equal(*both(make_model({"vocab_size": 6}), batch, num_beams=8))


def train_with_a_fused_optimizer(model, patch):
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(**make_batch(9), labels=make_batch(9)["input_ids"]).loss.backward()
    optimizer.step()


WEIGHTS = {
    "in place": torch.no_grad()(lambda model, patch: model.lm_head.weight[0, 0].add_(1)),
    "by a fused optimizer": train_with_a_fused_optimizer,
    "through .data": lambda model, patch: model.lm_head.weight.data.mul_(2),
}
REPLACED = {
    "a hook": lambda model, patch: model.model.decoder.layers[0].register_forward_hook(lambda *given: given[-1] * 0),
    "attention": lambda model, patch: patch.setitem(
        ALL_ATTENTION_FUNCTIONS._local_mapping,
        model.config._attn_implementation,
        lambda *args, **kwargs: pytest.fail("is called"),
    ),
    "F.linear": lambda model, patch: patch.setattr(F, "linear", lambda *args: torch._C._nn.linear(*args)),
    "nn.Linear": lambda model, patch: patch.setattr(nn.Linear, "forward", lambda module, states: states),
    "a class": lambda model, patch: patch.setattr(HeedFeedForward, "forward", lambda module, states: states),
    "a subclass": lambda model, patch: setattr(model, "__class__", type("Own", (type(model),), {"__module__": "own"})),
    "an activation": lambda model, patch: setattr(
        model.model.encoder.layers[0].feed_forward, "activation", type("Own", (nn.Module,), {"__module__": "own"})()
    ),
}


@pytest.mark.parametrize("what", WEIGHTS | REPLACED)
def test_changed_weights_are_noticed_and_code_of_a_user_that_would_not_run_is_refused_too(what, monkeypatch):
    model = make_model({})
    decoder = NativeDecoder(model)
    assert not decoder.fingerprint.has_changed
    (WEIGHTS | REPLACED)[what](model, monkeypatch)
    assert decoder.fingerprint.has_changed
    if what in REPLACED:
        assert_error(r"must (be|have no)", NativeDecoder, model)
    else:
        assert_error("weights or modules have changed since", model.generate, **make_batch(9), custom_generate=decoder)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 300), st.integers(1, 12), st.integers(0, 1000))
def test_the_best_tokens_are_those_of_a_full_sort(sentences, beams, vocabulary, count, seed):
    torch.manual_seed(seed)
    logits, scores = torch.randn(sentences * beams, vocabulary), torch.randn(sentences, beams)
    totals, hypotheses, tokens = best_tokens(logits, scores, count)
    plain = (logits.view(sentences, beams, vocabulary) + scores[..., None]).flatten(1)
    wanted = plain.topk(min(count, beams * vocabulary))
    assert totals.tolist() == wanted.values.tolist()
    assert (hypotheses * vocabulary + tokens).tolist() == wanted.indices.tolist()
