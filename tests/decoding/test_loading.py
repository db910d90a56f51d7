"""Models from folders: what a user can get wrong, said in one sentence."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from heedful.decoding.loading import load_model, resolve_device
from heedful.decoding.native.engine import NativeDecoder
from heedful.decoding.translation import Translator
from helpers import assert_error, assert_refused, change_json, tiny_model
from memorised import saved_in


@pytest.fixture
def folder(model, tokenizers, tmp_path):
    return saved_in(tmp_path / "model", model, tokenizers)


def test_a_saved_model_translates_as_before_and_what_is_missing_is_named(folder, model, tokenizers, pairs, tmp_path):
    loaded = Translator.from_pretrained(folder, device="cpu")
    assert not loaded.model.training
    assert loaded.translate(list(pairs)) == Translator(model, tokenizers).translate(list(pairs))
    cases = {
        "tokenizer_config.json": "tokenizer",
        "model.safetensors": r"has none of model\.safetensors",
        "config.json": r"model must hold a model, but has no config\.json",
    }
    for name, message in cases.items():
        (folder / name).unlink()
        assert_error(message, Translator.from_pretrained, folder, error=FileNotFoundError)
    with pytest.raises(FileNotFoundError, match="nowhere must be a folder with a model, or a model's id"):
        Translator.from_pretrained(tmp_path / "nowhere")


WRONG_CONFIGS = [
    ("{", "must be JSON"),
    ("[]", "config.json must be a JSON object, but is list"),
    ("{}", "has no `model_type`"),
    ('{"model_type": "no-such-model"}', "cannot be loaded: .*no-such-model"),
]


def test_tokenizers_and_configs_that_are_wrong_and_a_model_without_an_encoder_are_named(folder, tmp_path):
    change_json(folder / "config.json", eos_token_id=3)
    assert_error(r"tokenizers in .*`eos_token_id` must be 2, but is 3", Translator.from_pretrained, folder)
    (folder / "tokenizer.json").write_text("{", encoding="utf-8")
    assert_error(f"tokenizers in {folder} cannot be used", Translator.from_pretrained, folder)
    path = folder / "config.json"
    assert_refused(WRONG_CONFIGS, lambda text: load_model(path.write_text(text, encoding="utf-8") and folder))
    GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=20)).save_pretrained(tmp_path)
    assert_error(f"The model in {tmp_path} cannot be loaded: .*GPT2Config", load_model, tmp_path)


WRONG_IDS = [("pad_token_id", 5_000_000), ("pad_token_id", -1), ("eos_token_id", [2, 290]), ("bos_token_id", "x")]
WRONG_IDS += [("decoder_start_token_id", -(10**12)), ("decoder_start_token_id", [1, True]), ("eos_token_id", 2.0)]
WRONG_IDS += [("forced_bos_token_id", 290), ("forced_eos_token_id", [10**30]), ("bad_words_ids", [[3], [4, 290]])]
WRONG_IDS += [("suppress_tokens", [-1]), ("begin_suppress_tokens", [3, 290])]


def test_an_id_of_the_generation_config_outside_of_the_vocabulary_is_named_before_anything_reads_it(folder):
    path, message = folder / "generation_config.json", "of the generation config must be in the target vocabulary"
    saved = path.read_text()
    for name, value in WRONG_IDS:
        change_json(path, **{name: value})
        assert_error(f"`{name}` {message}, from 0 to 289", load_model, folder)
        path.write_text(saved)
    decoder = NativeDecoder(load_model(folder))
    given = decoder.encoded(torch.tensor([[5, 2], [6, 2]]))
    for beams in (1, 2):
        search = {"custom_generate": decoder, "num_beams": beams, "pad_token_id": 2**40}
        assert_error("`pad_token_id` must be at least 0", decoder.model.generate, **given, **search)


def test_a_device_that_is_not_here_or_of_no_known_name_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_error(r"'cuda' instead .*0 cuda devices", resolve_device, "cuda")
    assert resolve_device().type == "cpu"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert resolve_device("cuda:0") == torch.device("cuda:0")
    assert_error(r"'cuda:1' instead .*1 cuda devices", resolve_device, "cuda:1")
    for name in ("gpu", "meta", "cpu:x"):
        assert_error(f"`device` must be cpu, cuda, cuda:N or mps, but is '{name}'", resolve_device, name)


def test_settings_of_heedfuls_own_search_are_read_however_they_came_into_the_generation_config(tmp_path):
    model = tiny_model()
    for name, value in {"length_penalty_form": "gnmt", "tokens_beyond_source": 3, "num_beams": 2}.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(tmp_path)
    config = load_model(tmp_path).generation_config
    assert (config.length_penalty_form, config.tokens_beyond_source, config.num_beams) == ("gnmt", 3, 2)
    assert config.eos_token_id == model.generation_config.eos_token_id
