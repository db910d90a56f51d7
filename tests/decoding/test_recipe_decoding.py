"""The decoding of section 6.1 by a model's own generation config: GNMT's penalty, a limit by the source's length."""

import warnings
from functools import partial

import pytest
import torch
from transformers import GenerationConfig

from heedful import BeamSearch, HeedConfig, Translator
from heedful.decoding.engines import pad_sources
from heedful.training.publication import with_decoding
from heedful.training.recipe import DecodingRecipe
from helpers import assert_error

PAPER = DecodingRecipe(num_beams=4, length_penalty=0.6, length_penalty_form="gnmt", tokens_beyond_source=50)


@pytest.fixture
def paper(model, tokenizers, monkeypatch):
    """The model with the paper's decoding, as a published folder has it."""
    config = with_decoding(model.generation_config, PAPER)
    monkeypatch.setattr(model, "generation_config", config)
    return Translator(model, tokenizers)


def asked_directly(translator, source, **strategy):
    """Return what the strategy finds where the generation config says nothing of it."""
    inputs = pad_sources(translator.tokenizers.encode_source([source]), 0, translator.model.device)
    plain = GenerationConfig(eos_token_id=2, pad_token_id=0, decoder_start_token_id=1, max_length=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(translator.model, "generation_config", plain)
        return translator.model.generate(
            **inputs,
            custom_generate=BeamSearch(**strategy),
            **{"num_beams": 4, "num_return_sequences": 4, "length_penalty": 0.6, "max_new_tokens": 255},
            **{"return_dict_in_generate": True, "output_scores": True},
        )


def test_a_translator_scores_by_the_penalty_of_the_generation_config_which_is_not_the_power(paper, pairs):
    for source in pairs:
        found = paper.translate([source], num_return_sequences=4)[0]
        expected = asked_directly(paper, source, length_penalty_form="gnmt", tokens_beyond_source=50)
        assert [one.score for one in found] == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)
        ended = [row[1 : 1 + len(one.token_ids)] for row, one in zip(expected.sequences.tolist(), found, strict=True)]
        assert [list(one.token_ids) for one in found] == ended
    power = asked_directly(paper, next(iter(pairs)), tokens_beyond_source=50)
    found = paper.translate([next(iter(pairs))])[0][0]
    assert abs(found.score - power.sequences_scores[0].item()) > 1e-3


@pytest.mark.parametrize("num_beams", [1, 4])
def test_each_sentence_ends_at_its_own_limit_whatever_stands_beside_it(paper, pairs, num_beams, monkeypatch):
    config = paper.model.generation_config
    monkeypatch.setattr(config, "tokens_beyond_source", 1)
    monkeypatch.setattr(config, "suppress_tokens", [config.eos_token_id])  # nothing ends by itself
    texts = list(pairs)
    lengths = [len(ids) for ids in paper.tokenizers.encode_source(texts)]
    assert len(set(lengths)) > 2
    with pytest.warns(UserWarning, match=r"8 outputs were cut off at 255 tokens, or 1 beyond the source length,"):
        found = [row[0] for row in paper.translate(texts, num_beams=num_beams)]
    assert [len(one.token_ids) for one in found] == [length + 1 for length in lengths]
    assert not any(one.finished for one in found)


def test_engines_that_cannot_read_the_settings_refuse_them_or_warn(paper, tokenizers, pairs):
    generate = partial(paper.model.generate, torch.tensor([[15, 16, 17]]), max_new_tokens=2)
    with pytest.warns(UserWarning, match="ignores `length_penalty_form` and `tokens_beyond_source`.*BeamSearch"):
        generate()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        generate(max_length=None, custom_generate=BeamSearch())
    native = Translator(paper.model, tokenizers, engine="native")
    assert_error("`length_penalty_form` must not be set with the native decoder", native.translate, list(pairs))
    message = r"`length_penalty_form` must be given once, but is 'power'.*'gnmt'"
    assert_error(message, generate, custom_generate=BeamSearch(length_penalty_form="power"))


def test_settings_of_an_earlier_model_go_with_the_next_recipe(tmp_path):
    config = GenerationConfig.from_model_config(HeedConfig())
    config = with_decoding(config, PAPER)
    config.save_pretrained(tmp_path)
    config = GenerationConfig.from_pretrained(tmp_path)
    assert (config.length_penalty_form, config.tokens_beyond_source, config.length_penalty) == ("gnmt", 50, 0.6)
    config = with_decoding(config, DecodingRecipe())
    assert "length_penalty_form" not in config.to_dict()
    assert "tokens_beyond_source" not in config.to_dict()
