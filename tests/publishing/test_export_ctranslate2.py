"""CTranslate2: the tokens and scores of `generate()`, and what it cannot do is refused by name."""

import copy
import json
import pickle
import random
import re
import shutil
import sys
from functools import partial
from itertools import product

import pytest
import torch
from transformers import AutoTokenizer

from guides import printing_of, text_of
from heedful import HeedConfig, HeedForConditionalGeneration, TokenizerPair
from heedful.checksums_heed import CHECKSUMS_FILE
from heedful.data.tokenizer_training import train_tokenizers
from heedful.files import new_folder
from heedful.inference.attention.maps import attention_map
from heedful.inference.ctranslate2.engine import ExportedModel
from heedful.inference.ctranslate2.specification import TABLE_ROWS
from heedful.inference.translation import Translator
from heedful.publishing.exports import ctranslate2_export as exporter
from heedful.publishing.exports.comparison import compare, refuse
from heedful.publishing.exports.ctranslate2_export import export_ctranslate2
from helpers import assert_error, assert_refused, change_json, shake, tiny_model
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
def memorised(memorised_folder):
    """A model that ends its translations by itself, and its tokenizers."""
    model = HeedForConditionalGeneration.from_pretrained(memorised_folder).eval()
    return model, TokenizerPair.from_pretrained(memorised_folder)


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


def both(model, tokenizers, texts=SOURCES, early_stopping=True, **settings):
    """Translate by `generate()` and by CTranslate2."""
    model.generation_config.early_stopping = early_stopping
    settings = {"max_new_tokens": 12, **settings}
    engines = ("generate", "ctranslate2")
    results = [Translator(model, tokenizers, engine).translate(texts, **settings) for engine in engines]
    model.generation_config.early_stopping = False  # or it could not be saved without beams
    return results


def assert_equal(expected, found):
    for ours, theirs in zip(expected, found, strict=True):
        assert [each.token_ids for each in ours] == [each.token_ids for each in theirs]
        assert [each.text for each in ours] == [each.text for each in theirs]
        assert [each.finished for each in ours] == [each.finished for each in theirs]
        scores = [each.score for each in theirs]
        assert [each.score for each in ours] == pytest.approx(scores, abs=1e-4, rel=1e-4)


@pytest.mark.parametrize("name", EXPRESSIBLE)
def test_each_option_gives_the_tokens_and_scores_of_generate(name, tokenizers, separate_tokenizers):
    pair = separate_tokenizers if name.startswith("separate") else tokenizers
    model = make_model(pair, **EXPRESSIBLE[name])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for beams in (1, 3):
        expected, found = both(model, pair, num_beams=beams)
        assert_equal(expected, found)
        lengths = {len(best.token_ids) for best, *_ in expected}
        assert len(lengths) > 1 or beams > 1, "the sentences must end at different steps to show anything"
    # CTranslate2's own optimizations write into what they are given.
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_ctranslate2_cannot_express_is_refused_by_the_name_of_the_field(tokenizers, tmp_path):
    cases = [(make_model(tokenizers, **changes), f"`{field}` must ") for field, changes in INEXPRESSIBLE.items()]
    saved_in(tmp_path / "model", cases[-1][0], tokenizers)
    hooked = make_model(tokenizers)
    hooked.model.decoder.layers[0].register_forward_hook(lambda module, given, output: output * 0)
    hooks = (hooked, r"must have no forward hooks .* model.decoder.layers.0 has one")
    assert_refused([*cases, hooks], lambda model: Translator(model, tokenizers, "ctranslate2"))
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
        model.generation_config.length_penalty = length_penalty
        assert_equal(*both(model, tokenizers, num_beams=beams, num_return_sequences=returned))
    model.generation_config.length_penalty = 0.0  # with which both rules of ending agree
    assert_equal(*both(model, tokenizers, early_stopping=False, num_beams=4))
    # A forced end is the last token, and ends no sentence by itself.
    model.generation_config.update(forced_eos_token_id=model.generation_config.eos_token_id)
    expected, found = both(model, tokenizers, num_beams=3, max_new_tokens=3)
    assert_equal(expected, found)
    assert not all(row[0].finished for row in expected)


def test_another_end_of_beam_search_is_refused_with_the_ways_out(tokenizers):
    model = make_model(tokenizers, seed=4)
    translator = Translator(model, tokenizers, "ctranslate2")
    named = "`early_stopping` must be True .* early_stopping=True.*--early-stopping.*another engine"
    for early_stopping in (False, None, "never"):
        model.generation_config.early_stopping = early_stopping
        assert_error(named, translator.translate, SOURCES, num_beams=3)
    settings = {"num_beams": 3, "early_stopping": True, "max_new_tokens": 12}
    found = translator.translate(SOURCES, **settings)
    assert_equal(Translator(model, tokenizers, "generate").translate(SOURCES, **settings), found)
    assert model.generation_config.early_stopping == "never"
    translator.translate(SOURCES, num_beams=1)


def test_settings_of_greedy_search_are_those_of_generate(tokenizers):
    model = make_model(tokenizers, seed=5)
    plain, config = both(model, tokenizers, num_beams=1)[0], model.generation_config
    rows = [row[0].token_ids for row in plain]
    longest, end = max(rows, key=len), config.eos_token_id
    cases = [
        *({"min_new_tokens": 6}, {"min_length": 5}, {"no_repeat_ngram_size": 2}, {"repetition_penalty": 1.6}),
        *({"suppress_tokens": [rows[0][0], rows[1][0]]}, {"forced_eos_token_id": 2}),
        # An end token alone is not a bad word, in generate() either.
        {"bad_words_ids": [list(longest[1:3]), [longest[0]], [end]]},
        {"eos_token_id": sorted({end, *(token for row in rows for token in row[2:])})},
    ]
    for settings in cases:
        model.generation_config = copy.deepcopy(config)
        model.generation_config.update(**settings)
        expected, found = both(model, tokenizers, num_beams=1)
        assert_equal(expected, found)
        assert [row[0].token_ids for row in expected] != rows, settings
    assert len({row[0].token_ids[-1] for row in expected}) > 1


def test_a_setting_that_ctranslate2_cannot_express_is_refused_by_name(tokenizers):
    model = make_model(tokenizers)
    translator, config = Translator(model, tokenizers, "ctranslate2"), model.generation_config
    greedily = {"do_sample": True, "penalty_alpha": 0.6, "forced_bos_token_id": 9, "max_time": 3.0}
    greedily |= {"encoder_no_repeat_ngram_size": 2, "sequence_bias": [[[5], 1.0]], "guidance_scale": 2.0}
    greedily |= {"eos_token_id": None, "decoder_start_token_id": 5}
    with_beams = {"eos_token_id": [2, 3], "early_stopping": "never", "no_repeat_ngram_size": 2}
    with_beams |= {"repetition_penalty": 1.2, "min_new_tokens": 3, "diversity_penalty": 1.0}
    for beams, cases in ((1, greedily), (3, with_beams)):
        for name, value in cases.items():
            model.generation_config = copy.deepcopy(config)
            setattr(model.generation_config, name, value)
            for translate in (translator.translate, translator.translate_lines):
                assert_error(f"`{name}` must ", translate, SOURCES, num_beams=beams)


def test_an_exported_folder_translates_as_the_model_does_and_empty_lines_stay_empty(memorised, exported, monkeypatch):
    model, pair = memorised
    lines = [f"{line}\n" for line in ["", *PAIRS, "   ", next(iter(PAIRS))]]
    expected, found = (
        list(Translator(model, pair, engine).translate_lines(lines, num_beams=1, chunk_size=3))
        for engine in ("generate", "ctranslate2")
    )
    assert_equal(expected, found)
    assert [best.text for best, *_ in found] == ["", *PAIRS.values(), "", next(iter(PAIRS.values()))]
    for beams, returned in ((1, 1), (3, 3)):
        monkeypatch.setattr(model.generation_config, "early_stopping", True)
        translator = Translator.from_pretrained(exported, device="cpu")
        assert translator.engine == "ctranslate2"
        settings = {"num_beams": beams, "num_return_sequences": returned}
        expected = Translator(model, pair, "generate").translate(list(PAIRS), **settings)
        assert_equal(expected, translator.translate(list(PAIRS), **settings))
        assert_equal(expected, pickle.loads(pickle.dumps(translator)).translate(list(PAIRS), **settings))


def test_the_batches_do_not_change_what_is_translated_and_changed_weights_are_copied_anew(tokenizers):
    model = make_model(tokenizers, seed=9)
    translator = Translator(model, tokenizers, "ctranslate2")
    settings = {"num_beams": 3, "max_new_tokens": 12, "early_stopping": True}
    before, *others = (translator.translate(SOURCES, **settings, token_budget=budget) for budget in (8192, 100, 1))
    engine = translator._engines["ctranslate2"]
    for other in others:
        assert_equal(before, other)
    translator.translate(SOURCES[:1], **settings)
    assert translator._engines["ctranslate2"] is engine
    with torch.no_grad():
        model.model.decoder.layers[0].feed_forward.fc1.weight.mul_(-1.0)
    after = translator.translate(SOURCES, **settings)
    assert_equal(Translator(model, tokenizers, "generate").translate(SOURCES, **settings), after)
    assert [row[0].token_ids for row in before] != [row[0].token_ids for row in after]


def test_longer_sequences_than_there_are_positions_are_refused_and_a_source_is_never_cut(tokenizers):
    for encoding, said, limit in (("learned", 20, 20), ("sinusoidal", 20, 20), ("sinusoidal", 512, TABLE_ROWS)):
        model = make_model(tokenizers, position_encoding=encoding, max_position_embeddings=said)
        translator = Translator(model, tokenizers, "ctranslate2")
        with pytest.raises(ValueError, match=f"Sentence 2 must have at most {limit} tokens"):
            translator.translate(["the man", "near " * (limit + 1)], num_beams=1)
        with pytest.raises(ValueError, match=f"`max_new_tokens` must be at most {limit}"):
            translator.translate(["the man"], num_beams=1, max_new_tokens=limit + 1)
    model = make_model(tokenizers, seed=10, max_position_embeddings=512)
    text = " ".join(DRAW.choices(WORDS, k=1000))  # CTranslate2's own limit is 1,024 tokens
    assert len(tokenizers.encode_source([text])[0]) > 1024
    assert_equal(*both(model, tokenizers, [text], num_beams=1))


def test_the_target_language_is_told(tmp_path):
    pair = train_tokenizers(list(PAIRS), list(PAIRS.values()), vocab_size=272, languages=["en", "de"])
    model, texts = make_model(pair, seed=2), list(PAIRS)
    german, english = (both(model, pair, texts, num_beams=1, target_language=to) for to in ("de", "en"))
    assert_equal(*german)
    assert_equal(*english)
    assert [row[0].token_ids for row in german[1]] != [row[0].token_ids for row in english[1]]
    assert_error("`target_language` must be one of en, de", Translator(model, pair, "ctranslate2").translate, texts)
    result = export_ctranslate2(saved_in(tmp_path / "model", model, pair), tmp_path / "out", texts)
    assert result.comparisons["greedy"].sentences == len(texts)


def test_an_exported_folder_of_separate_tokenizers_translates(separate_tokenizers, tmp_path):
    model = make_model(separate_tokenizers, seed=2, share_encoder_decoder_embeddings=False)
    folder, settings = saved_in(tmp_path / "model", model, separate_tokenizers), {"num_beams": 1, "max_new_tokens": 9}
    export_ctranslate2(folder, tmp_path / "out", SOURCES)
    found = Translator.from_pretrained(tmp_path / "out", device="cpu").translate(SOURCES, **settings)
    expected = Translator.from_pretrained(folder, device="cpu", engine="generate").translate(SOURCES, **settings)
    assert_equal(expected, found)


def test_an_exported_folder_runs_in_the_command(exported, heedful_command):
    def translated(*options):
        code, output, errors = heedful_command("translate", exported, *PAIRS, "--device", "cpu", *options)
        return code, output.splitlines(), errors

    assert translated("--num-beams", 1)[:2] == (0, list(PAIRS.values()))
    code, _, errors = translated("--num-beams", 3, "--no-early-stopping")
    assert (code, "heedful translate --early-stopping" in " ".join(errors.split())) == (2, True)
    found = Translator.from_pretrained(exported, device="cpu").translate([*PAIRS], num_beams=3, early_stopping=True)
    assert translated("--num-beams", 3)[:2] == (0, [best.text for best, *_ in found])


def test_the_command_exports_and_tells_how_it_compared(memorised_folder, tmp_path, heedful_command):
    (tmp_path / "sentences.txt").write_text("".join(f"{text}\n" for text in PAIRS), encoding="utf-8")
    words = ["--quantization", "int8", "--sentences", tmp_path / "sentences.txt"]
    _, output, errors = heedful_command("export", "ctranslate2", memorised_folder, tmp_path / "out", *words)
    assert re.match(r"greedy: \d of 6 sentences differ", output), errors
    assert "in int8" in output
    metadata = json.loads((tmp_path / "out" / "heed.json").read_text(encoding="utf-8"))
    assert metadata["quantization"] == "int8"
    translator = Translator.from_pretrained(tmp_path / "out", device="cpu")
    assert translator._engines["ctranslate2"]._translator.compute_type.startswith("int8")
    assert [best.text for best, *_ in translator.translate(list(PAIRS))] == list(PAIRS.values())


def test_plain_ctranslate2_gives_the_same_and_an_exported_folder_has_no_attention_to_show(exported):
    tokenizer, engine = AutoTokenizer.from_pretrained(exported), ctranslate2.Translator(str(exported), device="cpu")
    sources = [tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) for text in PAIRS]
    results = engine.translate_batch(sources, beam_size=1, min_decoding_length=0)
    ids = [tokenizer.convert_tokens_to_ids(result.hypotheses[0]) for result in results]
    assert tokenizer.batch_decode(ids, skip_special_tokens=True) == list(PAIRS.values())
    translator = Translator.from_pretrained(exported)
    with pytest.raises(ValueError, match="exported for another engine"):
        attention_map(translator.model, translator.tokenizers, SOURCES[0], "x", 0)


def test_the_guide_runs_as_it_is_written(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "runs" / "quickstart"
    model = saved_model(folder / "model", SHOWN, encoder_layers=1, decoder_layers=1)
    export_ctranslate2(model, folder / "ctranslate2", list(SHOWN))
    monkeypatch.chdir(tmp_path)
    section = text_of("serve").split("\n## CTranslate2\n")[1].split("\n## ")[0]
    blocks, names = printing_of(section), {}
    assert len(blocks) == section.count("```python") == 3
    for code, printed in blocks:
        exec(code.replace(', precision="int8"', ""), names)  # which tiny weights do not survive
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


def test_a_type_or_a_device_that_is_not_there_is_refused_by_name(
    memorised, memorised_folder, exported, tmp_path, monkeypatch
):
    monkeypatch.setattr(ctranslate2, "get_supported_compute_types", lambda *device: {"float32", "int8"})
    types = [("int16", r"`quantization` must be one of float32, int8, .*'int16'"), ("int4", r"float32, .*'int4'")]
    assert_refused(types, lambda each: export_ctranslate2(memorised_folder, tmp_path / "out", list(PAIRS), each))
    with pytest.raises(ValueError, match=r"`precision` must be one of float32, int8, .*'float16'"):
        Translator(*memorised, "ctranslate2", "float16")
    with pytest.raises(ValueError, match="`device` must be cpu or cuda for CTranslate2, but is 'mps'"):
        Translator(ExportedModel(exported, torch.device("mps")), memorised[1])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_broken_or_of_another_version_and_a_missing_package_are_named(
    exported, tmp_path, memorised, monkeypatch
):
    folder = shutil.copytree(exported, tmp_path / "other")

    def assert_named(message, **options):
        assert_error(message, Translator.from_pretrained, folder, device="cpu", **options)

    for engine in ("native", "generate"):
        assert_named(f"`engine` must be ctranslate2 .* but is {engine} instead", engine=engine)
    content = (folder / "model.bin").read_bytes()
    (folder / "model.bin").write_bytes(content[: len(content) // 2])
    assert_named(r"model\.bin changed since")
    (folder / CHECKSUMS_FILE).unlink()
    assert_named("cannot be loaded by CTranslate2")
    change_json(folder / "heed.json", format_version=9, heed_version="7.0")
    assert_named(r"`format_version` of .* must be 1, but is 9 instead: .*by Heed 7\.0")
    (folder / "heed.json").unlink()
    assert_named("must be written by `heedful export ctranslate2`")
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    extra = partial(assert_error, r"pip install 'heedful\[ctranslate2\]'", error=ImportError)
    extra(Translator, *memorised, "ctranslate2")
    extra(Translator.from_pretrained, exported, device="cpu")
    extra(export_ctranslate2, tmp_path, tmp_path / "out", ["a"])


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
