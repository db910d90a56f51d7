"""CTranslate2: the tokens of `generate()`, and what it cannot do is refused by name."""

import copy
import random
import re
import shutil
import sys
import tempfile
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from guides import printing_of, text_of
from heedful import HeedConfig, TokenizerPair
from heedful.data.tokenizer_training import train_tokenizers
from heedful.decoding.engines import GenerateEngine
from heedful.decoding.translation import Translator
from heedful.export.comparison import compare, encode, refuse
from heedful.export.ctranslate2 import ctranslate2_export as exporter
from heedful.export.ctranslate2.ctranslate2_export import export_ctranslate2
from heedful.export.ctranslate2.engine import CTranslate2Engine, check_compute_type, check_settings
from heedful.export.ctranslate2.specification import TABLE_ROWS, obstacle, positions_of_table, save_model
from heedful.files import new_folder
from helpers import assert_error, assert_refused, shake, tiny_model
from memorised import PAIRS, SHOWN, saved_in, saved_model

ctranslate2 = pytest.importorskip("ctranslate2")
pytestmark = pytest.mark.filterwarnings("ignore:.*cut off:UserWarning")
WORDS = ["the", "a", "man", "dog", "runs", "sleeps", "park", "boy", "girl", "two", "red", "blue", "car", "near", "big"]
DRAW = random.Random(0)
SENTENCES = [" ".join(DRAW.choices(WORDS, k=DRAW.randint(1, 9))) for _ in range(400)]
SOURCES = SENTENCES[:14]
# Each is an option, or a combination of options, that CTranslate2 has another name or another place for.
EXPRESSIBLE = {
    "default": {},
    "pre_norm": {"norm_placement": "pre"},
    "rmsnorm": {"norm_type": "rmsnorm", "layer_norm_eps": 0.05},
    "rmsnorm_before": {"norm_type": "rmsnorm", "norm_placement": "pre"},
    "layer_norm_eps": {"layer_norm_eps": 0.05},
    **{name: {"activation_function": name} for name in ("gelu", "gelu_new", "silu", "quick_gelu", "tanh", "sigmoid")},
    **{name: {"activation_function": name} for name in ("swiglu", "geglu", "reglu")},
    "rotary": {"position_encoding": "rotary"},
    "learned": {"position_encoding": "learned"},
    "no_positions": {"position_encoding": "none"},
    "shaw": {"position_encoding": "shaw", "relative_attention_max_distance": 3},
    "t5": {"position_encoding": "t5", "relative_attention_max_distance": 17, "decoder_attention_heads": 2},
    "umt5": {"position_encoding": "t5", "relative_bias_in_each_layer": True},
    "shared_layers": {"share_layers": True, "decoder_layers": 3},
    "concatenated": {"sinusoid_layout": "concatenated"},
    "tensor2tensor": {"sinusoid_layout": "tensor2tensor", "position_offset": 2},
    "embedding_norm": {"embedding_norm": True, "output_bias": True, "attention_bias": True},
    "no_feed_forward_bias": {"feed_forward_bias": False},
    "unscaled_embedding": {"scale_embedding": False},
    "dot": {"attention_scoring": "dot"},
    "nothing_shared": {"tie_word_embeddings": False},
    "own_source": {"share_encoder_decoder_embeddings": False},
    "own_output": {"tie_output_embeddings": False},
    "grouped_decoder": {"decoder_key_value_heads": 2},
    "grouped_encoder": {"encoder_key_value_heads": 1, "attention_bias": True},
    "grouped_rotary": {"encoder_key_value_heads": 2, "decoder_key_value_heads": 2, "position_encoding": "rotary"},
    "unequal_stacks": {"decoder_layers": 3, "decoder_attention_heads": 2, "decoder_ffn_dim": 48},
    "narrow_heads": {"d_k": 6, "d_v": 6},
    "wide_heads": {"d_k": 12, "d_v": 12, "decoder_key_value_heads": 2},
    "separate_vocabularies": {"share_encoder_decoder_embeddings": False},
    "separate_vocabularies_untied": {"tie_word_embeddings": False, "norm_placement": "pre"},
}
OTHERS = {"attention_scoring": "additive", "activation_function": "mish", "encoder_neighbourhood": 2}
INEXPRESSIBLE = {name: {name: value} for name, value in (OTHERS | {"decoder_neighbourhood": 3}).items()}
INEXPRESSIBLE["d_v"] = {"d_k": 6}


@pytest.fixture(scope="module")
def tokenizers():
    return train_tokenizers(SENTENCES, SENTENCES, vocab_size=300)


@pytest.fixture(scope="module")
def separate_tokenizers():
    return train_tokenizers(SENTENCES, SENTENCES[::-1], vocab_size=300, target_vocab_size=285, joint=False)


@pytest.fixture(scope="module")
def memorised_folder(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("memorised") / "model", encoder_layers=1, decoder_layers=1)


@pytest.fixture(scope="module")
def exported(memorised_folder, tmp_path_factory):
    return export_ctranslate2(memorised_folder, tmp_path_factory.mktemp("exported") / "out", list(PAIRS)).folder


def make_model(tokenizers, seed: int = 1, **changes):
    """Return a tiny model whose outputs depend on everything it reads, and which ends at a token that it likes."""
    sizes = {"vocab_size": len(tokenizers.source), "decoder_vocab_size": len(tokenizers.target)}
    model = tiny_model(seed=seed, **{**sizes, **tokenizers.special_ids(), **changes})
    # Larger embeddings would drown the positions, and repeat whatever was read last.
    for matrix in (model.model.encoder.embed_tokens, model.model.decoder.embed_tokens, model.lm_head):
        torch.nn.init.normal_(matrix.weight, std=model.config.d_model**-0.5)
    model.generation_config.update(eos_token_id=[], no_repeat_ngram_size=None)
    settings = {"num_beams": 1, "max_new_tokens": 12, "target_language": next(iter(tokenizers.languages), None)}
    translated = Translator(model, tokenizers, "generate").translate(SOURCES, **settings)
    rows = [best.token_ids for best, *_ in translated]
    places = {token: {row.index(token) if token in row else 12 for row in rows} for row in rows for token in row}
    model.generation_config.eos_token_id = max(places, key=lambda token: len(places[token]))
    return model


def both(model, tokenizers, texts=SOURCES, language=None, **settings):
    """Return the tokens of `generate()` and of CTranslate2, `(texts, hypotheses)` tuples each."""
    config = copy.deepcopy(model.generation_config)
    asked = {"num_return_sequences": 1, "max_new_tokens": 12, "max_length": None, "early_stopping": True, **settings}
    config.update(**asked)
    check_settings(config, model.config)
    sources = tokenizers.encode_source(texts, language)
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, tokenizers, Path(folder), "float32")
        engines = GenerateEngine(model), CTranslate2Engine(Path(folder), model, tokenizers, "float32")
        found = [engine.search(sources, config, 8192) for engine in engines]
    return [[[each.token_ids for each in row] for row in rows] for rows in found]


@pytest.mark.parametrize("name", EXPRESSIBLE)
def test_each_option_gives_the_tokens_of_generate(name, tokenizers, separate_tokenizers):
    pair = separate_tokenizers if name.startswith("separate") else tokenizers
    model = make_model(pair, **EXPRESSIBLE[name])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for beams in (1, 3):
        expected, found = both(model, pair, num_beams=beams)
        assert expected == found
        lengths = {len(best) for best, *_ in expected}
        assert len(lengths) > 1 or beams > 1, "the sentences must end at different steps to show anything"
    # CTranslate2's own optimizations write into what they are given.
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_ctranslate2_cannot_express_is_refused_by_the_name_of_the_field(tokenizers, tmp_path):
    cases = [(make_model(tokenizers, **changes), f"`{field}` must ") for field, changes in INEXPRESSIBLE.items()]
    saved_in(tmp_path / "model", cases[-1][0], tokenizers)
    hooked = make_model(tokenizers)
    hooked.model.decoder.layers[0].register_forward_hook(lambda module, given, output: output * 0)
    hooks = (hooked, r"must have no forward hooks .* model.decoder.layers.0 has one")
    for model, message in [*cases, hooks]:
        assert re.search(message, obstacle(model))
    assert_error(cases[-1][1], export_ctranslate2, tmp_path / "model", tmp_path / "out", SOURCES)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_every_field_of_the_config_is_expressed_refused_or_for_training_alone():
    tried = {field for changes in (*EXPRESSIBLE.values(), *INEXPRESSIBLE.values()) for field in changes}
    others = """
        vocab_size decoder_vocab_size d_model encoder_layers encoder_attention_heads encoder_ffn_dim
        max_position_embeddings depth_scaled_init dropout attention_dropout activation_dropout label_smoothing
        source_word_dropout target_word_dropout pad_token_id bos_token_id eos_token_id decoder_start_token_id
        use_cache is_encoder_decoder format_version config_class
    """
    assert set(HeedConfig.__annotations__) - tried <= set(others.split())


def test_n_best_lists_are_those_of_generate(tokenizers):
    model = make_model(tokenizers, seed=3)
    for length_penalty, (beams, returned) in product([1.0, 0.0, 2.0, -0.5], [(4, 4), (5, 2)]):
        settings = {"num_beams": beams, "num_return_sequences": returned, "length_penalty": length_penalty}
        expected, found = both(model, tokenizers, **settings)
        assert expected == found
    # Without a length penalty both rules of ending agree; else another one is refused.
    expected, found = both(model, tokenizers, num_beams=4, length_penalty=0.0, early_stopping=False)
    assert expected == found
    for early_stopping in (False, None, "never"):
        named = "`early_stopping` must be True in CTranslate2's beam search"
        assert_error(named, both, model, tokenizers, num_beams=3, early_stopping=early_stopping)


def test_settings_of_greedy_search_are_those_of_generate(tokenizers):
    model = make_model(tokenizers, seed=5)
    rows = [best for best, *_ in both(model, tokenizers, num_beams=1)[0]]
    longest, end = max(rows, key=len), model.generation_config.eos_token_id
    cases = [
        *({"min_new_tokens": 6}, {"min_length": 5}, {"no_repeat_ngram_size": 2}, {"repetition_penalty": 1.6}),
        {"suppress_tokens": [rows[0][0], rows[1][0]]},
        # An end token alone is not a bad word, in generate() either.
        {"bad_words_ids": [list(longest[1:3]), [longest[0]], [end]]},
        {"eos_token_id": sorted({end, *(token for row in rows for token in row[2:])})},
    ]
    for settings in cases:
        expected, found = both(model, tokenizers, num_beams=1, **settings)
        assert expected == found
        assert [best for best, *_ in expected] != rows, settings
    assert len({best[-1] for best, *_ in expected}) > 1


def test_a_setting_that_ctranslate2_cannot_express_is_refused_by_name(tokenizers):
    model = make_model(tokenizers)
    greedily = {"do_sample": True, "penalty_alpha": 0.6, "forced_bos_token_id": 9, "forced_eos_token_id": 2}
    greedily |= {"encoder_no_repeat_ngram_size": 2, "sequence_bias": [[[5], 1.0]], "guidance_scale": 2.0}
    greedily |= {"eos_token_id": None, "decoder_start_token_id": 5, "max_time": 3.0}
    with_beams = {"eos_token_id": [2, 3], "early_stopping": "never", "no_repeat_ngram_size": 2}
    with_beams |= {"repetition_penalty": 1.2, "min_new_tokens": 3, "diversity_penalty": 1.0}
    for beams, cases in ((1, greedily), (3, with_beams)):
        for name, value in cases.items():
            config = copy.deepcopy(model.generation_config)
            config.update(num_beams=beams, early_stopping=beams > 1)
            setattr(config, name, value)
            assert_error(f"`{name}` must ", check_settings, config, model.config)


def test_longer_sequences_than_there_are_positions_are_refused_and_a_source_is_never_cut(tokenizers):
    for encoding, said, limit in (("learned", 20, 20), ("sinusoidal", 20, 20), ("sinusoidal", 512, TABLE_ROWS)):
        model = make_model(tokenizers, position_encoding=encoding, max_position_embeddings=said)
        assert positions_of_table(model.config) == limit
        assert_error(f"Sentence 2 must have at most {limit} tokens", encode, tokenizers, ["a", "near " * limit], limit)
    model = make_model(tokenizers, seed=10, max_position_embeddings=512)
    text = " ".join(DRAW.choices(WORDS, k=1000))  # CTranslate2's own limit is 1,024 tokens
    assert len(tokenizers.encode_source([text])[0]) > 1024
    expected, found = both(model, tokenizers, [text], num_beams=1)
    assert expected == found


def test_the_target_language_is_told(tmp_path):
    pair = train_tokenizers(list(PAIRS), list(PAIRS.values()), vocab_size=272, languages=["en", "de"])
    model, texts = make_model(pair, seed=2), list(PAIRS)
    (expected, found), (_, english) = (both(model, pair, texts, to, num_beams=1) for to in ("de", "en"))
    assert expected == found != english
    result = export_ctranslate2(saved_in(tmp_path / "model", model, pair), tmp_path / "out", texts)
    assert result.comparisons["greedy"].sentences == len(texts)


def test_separate_tokenizers_are_exported(separate_tokenizers, tmp_path):
    model = make_model(separate_tokenizers, seed=2, share_encoder_decoder_embeddings=False)
    found = export_ctranslate2(saved_in(tmp_path / "model", model, separate_tokenizers), tmp_path / "out", SOURCES)
    assert found.comparisons["greedy"].sentences == len(SOURCES)
    assert TokenizerPair.from_pretrained(tmp_path / "out").vocabularies() == separate_tokenizers.vocabularies()


def test_the_command_exports_and_tells_how_it_compared(memorised_folder, tmp_path, heedful_command):
    (tmp_path / "sentences.txt").write_text("".join(f"{text}\n" for text in PAIRS), encoding="utf-8")
    words = ["--quantization", "int8", "--sentences", tmp_path / "sentences.txt"]
    _, output, errors = heedful_command("export", "ctranslate2", memorised_folder, tmp_path / "out", *words)
    assert re.match(r"greedy: \d of 6 sentences differ", output), errors
    assert "in int8" in output
    assert ctranslate2.Translator(str(tmp_path / "out"), device="cpu").compute_type.startswith("int8")


def test_plain_ctranslate2_gives_the_same_and_a_translator_says_whose_the_folder_is(exported):
    tokenizer, engine = AutoTokenizer.from_pretrained(exported), ctranslate2.Translator(str(exported), device="cpu")
    sources = [tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) for text in PAIRS]
    results = engine.translate_batch(sources, beam_size=1, min_decoding_length=0)
    ids = [tokenizer.convert_tokens_to_ids(result.hypotheses[0]) for result in results]
    assert tokenizer.batch_decode(ids, skip_special_tokens=True) == list(PAIRS.values())
    with pytest.raises(ValueError, match="for transformers, but holds one for CTranslate2, which runs it"):
        Translator.from_pretrained(exported)


def test_the_guide_runs_as_it_is_written(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "runs" / "quickstart"
    model = saved_model(folder / "model", SHOWN, encoder_layers=1, decoder_layers=1)
    export_ctranslate2(model, folder / "ctranslate2", list(SHOWN))
    monkeypatch.chdir(tmp_path)
    section = text_of("serve").split("\n## CTranslate2\n")[1].split("\n## ")[0]
    blocks, names = printing_of(section), {}
    assert len(blocks) == section.count("```python") == 1
    for code, printed in blocks:
        exec(code, names)
        assert capsys.readouterr().out == printed


def test_an_export_that_differs_or_loses_the_model_is_refused_and_leaves_nothing(
    memorised_folder, tmp_path, monkeypatch
):
    save = exporter.save_model

    def save_another(model, *arguments, change):
        other = copy.deepcopy(model)
        change(other)
        save(other, *arguments)

    def negate(model):
        model.model.decoder.layers[0].feed_forward.fc2.weight.data.neg_()

    for change, quantization, message in (
        (negate, "float32", r"differs from generate\(\)'s for \d of 6 sentences.* The first is sentence"),
        (shake, "int8", "`quantization` int8 loses the model"),
    ):
        monkeypatch.setattr(exporter, "save_model", partial(save_another, change=change))
        assert_error(message, export_ctranslate2, memorised_folder, tmp_path / "out", list(PAIRS), quantization)
    assert list(tmp_path.iterdir()) == []


def test_a_type_a_device_or_a_package_that_is_not_there_is_refused_by_name(memorised_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(ctranslate2, "get_supported_compute_types", lambda *device: {"float32", "int8"})
    types = [("int16", r"`quantization` must be one of float32, int8, .*'int16'"), ("int4", r"float32, .*'int4'")]
    assert_refused(types, lambda each: export_ctranslate2(memorised_folder, tmp_path / "out", list(PAIRS), each))
    with pytest.raises(ValueError, match="`device` must be cpu or cuda for CTranslate2, but is 'mps'"):
        check_compute_type("float32", torch.device("mps"), "quantization")
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    extra = r"pip install 'heedful\[ctranslate2\]'"
    assert_error(extra, export_ctranslate2, tmp_path, tmp_path / "out", ["a"], error=ImportError)
    assert list(tmp_path.iterdir()) == []


def test_a_comparison_names_the_first_sentence_that_differs_and_a_folder_appears_whole_or_not_at_all(tmp_path):
    refuse({"greedy": compare(["one"], [(1, 2)], [[1, 2]])}, "it", "float32")
    comparison = compare(["one", "two", "three"], [(1, 2), (3, 2), (4, 2)], [[1, 2], [5, 2], [6, 2]])
    message = r"2 of 3 sentences.* is sentence 2, 'two': .* \[3, 2\], it \(greedy\) tokens"
    assert_error(message, refuse, {"greedy": comparison}, "it", "float32")
    with pytest.raises(FileNotFoundError), new_folder(tmp_path / "out") as folder:
        shutil.copy(tmp_path / "none", folder)
    assert list(tmp_path.iterdir()) == []
    with new_folder(tmp_path / "a" / "out") as folder:
        (folder / "file").write_text("whole")
        assert not (tmp_path / "a" / "out").exists()
    assert (tmp_path / "a" / "out" / "file").read_text() == "whole"
    cases = [
        (tmp_path / "a", "`target` must be a folder that does not exist yet"),
        (tmp_path / "a" / "out" / "file" / "b", "`target` must be where you can write"),
    ]
    assert_refused(cases, lambda target: new_folder(target).__enter__())
    with pytest.raises(ValueError, match="`target` must be a folder that does not exist yet"):
        export_ctranslate2(tmp_path / "none", tmp_path, ["a"])  # before anything is loaded
