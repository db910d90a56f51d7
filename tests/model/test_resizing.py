"""Vocabularies that grow and shrink, whichever matrices are shared."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForSeq2SeqLM

import helpers
from heedful import HeedDecoder, HeedEncoder, HeedForConditionalGeneration, HeedModel
from heedful.data.tokenizer_training import train_tokenizers
from heedful.decoding.translation import Translator
from heedful.verification.verification import check_special_ids
from helpers import FAMILIES, SHARINGS, assert_near, assert_refused, each_once, logits_of, matrices_of, tiny_model
from memorised import PAIRS, learn_by_heart, memorised_model, saved_in

BIAS = {"transformer": {"output_bias": True}, "recurrent": {}}  # recurrent models have none
ONE_VOCABULARY = ("all_shared", "nothing_shared", "own_output")


def assert_sizes(model, source, target):
    config, encoder, decoder = model.config, model.model.encoder, model.model.decoder
    assert (config.vocab_size, config.decoder_vocab_size) == (source, target)
    assert encoder.embed_tokens.num_embeddings == encoder.embed_tokens.weight.shape[0] == source
    assert decoder.embed_tokens.num_embeddings == decoder.embed_tokens.weight.shape[0] == target
    assert model.lm_head.out_features == model.lm_head.weight.shape[0] == target
    assert model.lm_head.bias is None or model.lm_head.bias.shape == (target,)
    assert encoder.config is decoder.config is model.model.config is config
    config.validate_architecture()


@pytest.mark.parametrize(("sharing", "family"), each_once(SHARINGS, FAMILIES, SHARINGS))
def test_a_vocabulary_is_resized_in_all_its_matrices_and_saved(sharing, family, tmp_path):
    model = tiny_model(family=family, **BIAS[family], **SHARINGS[sharing])
    matrices, target, before = matrices_of(model), model.config.decoder_vocab_size, logits_of(model)
    for size in (60, 120):
        assert model.resize_token_embeddings(size, mean_resizing=False) is model.get_input_embeddings()
        assert_sizes(model, size, size if sharing in ONE_VOCABULARY else target)
        assert matrices_of(model) == matrices
    assert_near(logits_of(model)[..., :60], before[..., :60])
    if sharing not in ("all_shared", "own_output"):
        assert model.resize_decoder_token_embeddings(110) is model.model.decoder.embed_tokens
        assert_sizes(model, 120, 110)
        assert matrices_of(model) == matrices
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(logits_of(loaded), logits_of(model))
    assert matrices_of(loaded) == matrices


def test_the_target_vocabulary_is_not_resized_alone_where_it_is_the_sources():
    models = tiny_model(), tiny_model(family="recurrent"), tiny_model(tie_output_embeddings=False).model
    message = r"`share_encoder_decoder_embeddings` must be False .* `resize_token_embeddings`"
    assert_refused([(model, message) for model in models], lambda model: model.resize_decoder_token_embeddings(120))
    assert {model.get_input_embeddings().num_embeddings for model in models} == {99}


@pytest.mark.parametrize("changes", [{"share_encoder_decoder_embeddings": False}, {"tie_word_embeddings": False}])
def test_two_vocabularies_stay_two_when_their_sizes_meet(tmp_path, changes):
    model = tiny_model(**changes)
    assert model.config.has_one_vocabulary == ("tie_word_embeddings" in changes)
    model.resize_decoder_token_embeddings(120)
    model.resize_token_embeddings(120)
    model.save_pretrained(tmp_path)
    for each in (model, HeedForConditionalGeneration.from_pretrained(tmp_path)):
        each.resize_token_embeddings(130)
        assert_sizes(each, 130, 120)


LEAST = 15
SIZES = st.integers(LEAST, 150)


@settings(max_examples=25, deadline=None)
@given(
    sharing=st.sampled_from(sorted(SHARINGS)),
    output_bias=st.booleans(),
    steps=st.lists(
        st.tuples(st.sampled_from(["both", "target"]), SIZES, st.sampled_from([None, 8]), st.booleans()),
        min_size=1,
        max_size=4,
    ),
)
def test_any_series_of_resizings_keeps_the_rows_that_are_left(sharing, output_bias, steps):
    model = tiny_model(output_bias=output_bias, d_model=8, encoder_layers=1, decoder_layers=1, **SHARINGS[sharing])
    matrices, sizes = matrices_of(model), [model.config.vocab_size, model.config.decoder_vocab_size]
    is_one, left, before = sharing in ONE_VOCABULARY, list(sizes), copy.deepcopy(model.state_dict())
    for side, size, multiple, mean_resizing in steps:
        if side == "target" and matrices[1] == 0:
            continue
        new = size if multiple is None else -(-size // multiple) * multiple
        if side == "both":
            model.resize_token_embeddings(size, multiple, mean_resizing)
            sizes = [new, new] if is_one else [new, sizes[1]]
        else:
            model.resize_decoder_token_embeddings(size, multiple, mean_resizing)
            sizes, is_one = [sizes[0], new], False
        left = [min(pair) for pair in zip(left, sizes, strict=True)]  # rows that no step has cut off
        assert_sizes(model, *sizes)
        assert matrices_of(model) == matrices
    for name, value in model.state_dict().items():
        if "embed_tokens" in name or "lm_head" in name:
            kept = left[0 if "encoder" in name else 1]
            assert torch.equal(value[:kept], before[name][:kept])
    model.train()(torch.tensor([[LEAST - 1, 4]]), labels=torch.tensor([[LEAST - 1, 3]])).loss.backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


@pytest.mark.parametrize("mean_resizing", [False, True])
@pytest.mark.parametrize("sharing", ["all_shared", "nothing_shared", "own_output"])
def test_new_rows_are_drawn_as_those_of_a_new_model_or_around_the_mean_of_the_old(sharing, mean_resizing):
    torch.manual_seed(0)
    model = tiny_model(output_bias=True, **SHARINGS[sharing])
    for old in (model.lm_head.weight, model.lm_head.bias):
        torch.nn.init.normal_(old, mean=3.0, std=0.01)
    model.resize_token_embeddings(1099, mean_resizing=mean_resizing)
    weight, bias = model.lm_head.weight[99:], model.lm_head.bias[99:]
    if mean_resizing:
        for new in (weight, bias):
            assert_near(new.mean(), torch.tensor(3.0), 0.01)
    else:
        assert_near(weight.std(), torch.tensor(32**-0.5), 0.01)
        assert not bias.any()


def test_frozen_embeddings_stay_frozen_and_the_modules_stay_the_same():
    model = tiny_model(output_bias=True, tie_word_embeddings=False)
    modules = [model.get_input_embeddings(), model.get_decoder().embed_tokens, model.lm_head]
    modules[0].requires_grad_(False)
    model.lm_head.bias.requires_grad_(False)
    model.resize_token_embeddings(120)
    assert modules == [model.get_input_embeddings(), model.get_decoder().embed_tokens, model.lm_head]
    weights = [*(module.weight for module in modules), model.lm_head.bias]
    assert [weight.requires_grad for weight in weights] == [False, True, True, False]


@pytest.mark.parametrize("sharing", SHARINGS)
def test_a_model_without_its_head_and_a_stack_on_its_own_resize_what_they_have(sharing):
    model = HeedModel(helpers.tiny_config(**SHARINGS[sharing]))
    target = 120 if sharing in ONE_VOCABULARY else model.config.decoder_vocab_size
    model.resize_token_embeddings(120)
    assert model.encoder.embed_tokens.weight.shape[0] == model.config.vocab_size == 120
    assert model.decoder.embed_tokens.weight.shape[0] == model.config.decoder_vocab_size == target
    shared = model.encoder.embed_tokens.weight is model.decoder.embed_tokens.weight
    assert shared == model.config.shares_source_and_target_embeddings
    encoder, decoder = (stack(helpers.tiny_config(**SHARINGS[sharing])) for stack in (HeedEncoder, HeedDecoder))
    assert encoder.resize_token_embeddings(120).weight.shape[0] == encoder.config.vocab_size == 120
    assert decoder.resize_token_embeddings(130).weight.shape[0] == decoder.config.decoder_vocab_size == 130
    if "vocabularies" in sharing:
        assert (encoder.config.decoder_vocab_size, decoder.config.vocab_size) == (71, 99)
    decoder(torch.tensor([[129]]), encoder_hidden_states=encoder(torch.tensor([[119]])).last_hidden_state)


@pytest.mark.parametrize(("sharing", "family"), each_once(SHARINGS, FAMILIES, ["all_shared"]))
def test_a_part_of_a_model_is_not_resized_behind_its_back(sharing, family):
    model = tiny_model(family=family, **SHARINGS[sharing])
    message = r"must not be resized within a model.*resize_token_embeddings"
    parts = [(part, message) for part in (model.model, model.get_encoder(), model.get_decoder())]
    assert_refused(parts, lambda part: part.resize_token_embeddings(120))
    assert_sizes(model, 99, model.config.decoder_vocab_size)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_vocabulary_is_not_cut_below_its_special_tokens(family):
    model = tiny_model(family=family, decoder_start_token_id=50)
    before, start = logits_of(model), "`decoder_start_token_id` must be at least 0 and below 40, but is 50"
    cases = [(2, "`eos_token_id` must be at least 0 and below 2"), (0, "`vocab_size` must be at least 1, but is 0")]
    assert_refused([*cases, (40, start)], model.resize_token_embeddings)
    multiple = [(0, "`pad_to_multiple_of` must be at least 1, but is 0 instead")]
    assert_refused(multiple, lambda size: model.resize_token_embeddings(pad_to_multiple_of=size))
    assert_sizes(model, 99, 99)
    assert torch.equal(logits_of(model), before)


def test_embeddings_on_the_disk_are_not_resized(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    places = {"model.encoder": "disk", "model.decoder": "disk", "lm_head": "disk"}
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model", device_map=places, offload_folder=tmp_path)
    helpers.assert_error("must be in memory to be resized, but are offloaded", model.resize_token_embeddings, 120)


@pytest.mark.parametrize("joint", helpers.slow_but([False], [True, False]), ids=["joint", "separate"])
def test_added_tokens_are_learned_saved_loaded_and_translated(tmp_path, joint):
    sizes = {"vocab_size": 272} if joint else {"vocab_size": 267, "target_vocab_size": 267, "joint": False}
    tokenizers = train_tokenizers(list(PAIRS), list(PAIRS.values()), **sizes)
    model = memorised_model(tokenizers, PAIRS, encoder_layers=1, decoder_layers=1)
    tokenizers.source.add_tokens(["고라니"])
    tokenizers.target.add_tokens(["water deer", "riverbank"])
    helpers.assert_error("vocab_size", Translator, model, tokenizers)
    assert check_special_ids(model, tokenizers).figure > 0
    model.resize_token_embeddings(len(tokenizers.source))
    if not joint:
        assert model.config.decoder_vocab_size == 267
        model.resize_decoder_token_embeddings(len(tokenizers.target))
    assert check_special_ids(model, tokenizers).figure == 0
    pairs = {**PAIRS, "고라니가 잔다.": "The water deer sleeps."}
    learn_by_heart(model.train(), tokenizers, pairs)
    found = Translator.from_pretrained(saved_in(tmp_path, model, tokenizers)).translate(list(pairs), num_beams=3)
    assert [row[0].text for row in found] == list(pairs.values())
