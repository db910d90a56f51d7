"""Each form computes every option of a model and every setting as `generate()` does, or refuses it by name."""

import copy
import json
import re
import warnings
from pathlib import Path

import pytest
import torch
from test_page import run
from transformers import GenerationConfig, UMT5Config

from chromium import needs_node
from heedful import BeamSearch, HeedConfig, TokenizerPair
from heedful.conversion.families import plain_heads
from heedful.conversion.model_conversion import convert_model
from heedful.data.tokenizer_training import train_tokenizers
from heedful.decoding.engines import GenerateEngine
from heedful.decoding.search_settings import asked_of
from heedful.export import ctranslate2_export, page
from heedful.export.comparison import SETTINGS, check_fields, check_settings
from heedful.export.ctranslate2_export import CTranslate2Engine, export_ctranslate2
from heedful.export.ctranslate2_specification import CHOICES
from heedful.export.onnx.onnx_export import export_onnx
from heedful.export.onnx.onnx_graphs import write_onnx
from heedful.export.onnx.onnx_model import OnnxModel
from heedful.export.page import write_page
from heedful.export.transformers_export import stock_model
from helpers import SHARINGS, VARIANTS, assert_error, assert_near, dequantized, logits_of, rounding, tiny_model
from memorised import PAIRS, memorised_model, saved_in, saved_model

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "publish.md"
TEXTS = [*list(PAIRS)[:2], "그녀는 사과를 읽는다 공원", "abc"]
SEARCHES = ("length_penalty_form", "tokens_beyond_source")
# Twenty and one things to ask for; several at once where one alone would change little.
ASKED = {
    "nothing": {},
    "beams": {"num_beams": 3},
    "more beams than the page's menu": {"num_beams": 7, "length_penalty": 0.0},
    "length penalty": {"num_beams": 3, "length_penalty": 2.0, "early_stopping": True},
    "a patient search": {"num_beams": 3, "early_stopping": "never", "length_penalty": 0.4},
    "min_length": {"min_length": 11, "num_beams": 2},
    "min_new_tokens": {"min_new_tokens": 9, "min_length": 13},
    "a shortest beyond the longest": {"min_length": 20, "max_length": 6},
    "max_new_tokens": {"max_length": None, "max_new_tokens": 4, "num_beams": 2},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "pairs that are not repeated": {"no_repeat_ngram_size": 2, "repetition_penalty": 0.5, "num_beams": 2},
    "repetition_penalty": {"repetition_penalty": 3.0},
    "forced_bos_token_id": {"forced_bos_token_id": 50, "num_beams": 2},
    "forced_eos_token_id": {"forced_eos_token_id": 2, "max_length": 6},
    "suppress_tokens": {"suppress_tokens": [2, 60], "begin_suppress_tokens": [55, 71], "num_beams": 2},
    "suppress_tokens alone": {"suppress_tokens": [44, 60], "eos_token_id": [2, 17, 46, 80]},
    "bad_words_ids": {"bad_words_ids": [[2], [70], [88, 93]], "min_new_tokens": 3},
    "several ends": {"eos_token_id": [2, 17, 46, 80], "num_beams": 3},
    "the paper's search": {
        **{"num_beams": 3, "length_penalty": 0.6, "length_penalty_form": "gnmt", "tokens_beyond_source": 2}
    },
    "sampling": {"do_sample": True, "temperature": 0.7},
    "the source's tokens": {"encoder_no_repeat_ngram_size": 2},
    "a bias": {"sequence_bias": [[[60], -3.0]], "exponential_decay_length_penalty": (3, 1.5)},
}

# What a model may compute otherwise than the default: one field, or several that meet in a line of a form's code.
T5 = {"position_encoding": "t5", "norm_placement": "pre", "norm_type": "rmsnorm", "feed_forward_bias": False}
GATED = {"activation_function": "geglu_new", "attention_scoring": "dot", "d_k": 6, "d_v": 6, "layer_norm_eps": 1e-3}
TENSOR2TENSOR = {"sinusoid_layout": "tensor2tensor", "position_offset": 1}
ACTIVATIONS = ["gelu", "gelu_new", "silu", "quick_gelu", "tanh", "sigmoid", "mish", "geglu", "reglu", "swiglu"]
# fmt: off
OPTIONS = VARIANTS | SHARINGS | {name: {"activation_function": name} for name in ACTIVATIONS} | {
    "everything_at_once": {
        "position_encoding": "rotary", "norm_placement": "pre", "norm_type": "rmsnorm", "embedding_norm": True,
        "activation_function": "geglu", "feed_forward_bias": False, "attention_bias": True, "output_bias": True,
        "d_k": 6, "d_v": 10, "encoder_key_value_heads": 2, "decoder_key_value_heads": 1, "layer_norm_eps": 1e-3,
        "encoder_neighbourhood": 3, "decoder_neighbourhood": 4, "scale_embedding": False, "d_model": 40,
        "encoder_layers": 1, "tie_word_embeddings": False, "encoder_ffn_dim": 48, "encoder_attention_heads": 2,
    },
    "separate_vocabularies_untied": {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
    "pre_norm": {"norm_placement": "pre"},
    "rmsnorm": {"norm_type": "rmsnorm", "layer_norm_eps": 0.05},
    "layer_norm_eps": {"layer_norm_eps": 0.05},
    "concatenated": {"sinusoid_layout": "concatenated"},
    "position_offset": {"position_offset": 2},
    "tensor2tensor": TENSOR2TENSOR | {"norm_placement": "pre"},
    "tensor2tensor_post_norm": TENSOR2TENSOR | {"norm_placement": "post"},
    "learned_pre_norm": {"position_encoding": "learned", "embedding_norm": True, "norm_placement": "pre"},
    "embedding_norm": {"embedding_norm": True},
    "biases": {"attention_bias": True, "output_bias": True, "feed_forward_bias": False},
    "unscaled": {"scale_embedding": False, "activation_function": "gelu"},
    "unequal_pre_norm": {"decoder_layers": 3, "decoder_attention_heads": 2, "norm_placement": "pre"},
    "narrow_heads": {"d_k": 6, "d_v": 6},
    "wide_heads": {"d_k": 12, "d_v": 12, "decoder_key_value_heads": 2},
    "d_v": {"d_v": 12},
    "grouped_decoder": {"decoder_key_value_heads": 2},
    "grouped_encoder": {"encoder_key_value_heads": 1, "attention_bias": True},
    "grouped_rotary": {"encoder_key_value_heads": 2, "decoder_key_value_heads": 2, "position_encoding": "rotary"},
    "encoder_neighbourhood": {"encoder_neighbourhood": 20},
    "decoder_neighbourhood": {"decoder_neighbourhood": 17},
    "sizes_that_are_the_default": {"d_k": 8, "d_v": 8, "encoder_key_value_heads": 4},
    "t5_of_transformers": T5,
    "gated_t5": T5 | GATED | {"scale_embedding": False, "relative_attention_max_distance": 20},
    "untied_t5": T5 | {"tie_output_embeddings": False, "activation_function": "reglu", "share_layers": True},
    "umt5": T5 | {"relative_bias_in_each_layer": True, "decoder_layers": 1},
}
# fmt: on
# What no number of an exported model depends on: initial values, training, `generate()`'s settings, sizes of a test.
NOT_COMPUTED = """
    depth_scaled_init dropout attention_dropout activation_dropout label_smoothing use_cache source_word_dropout
    target_word_dropout is_encoder_decoder pad_token_id bos_token_id eos_token_id decoder_start_token_id format_version
    vocab_size max_position_embeddings config_class
"""
REFUSED = {
    "a page": """
        modern rotary no_positions shaw t5 dot additive neighbourhoods grouped shared_layers gelu_new
        quick_gelu sigmoid mish geglu reglu swiglu everything_at_once rmsnorm wide_heads d_v grouped_decoder
        grouped_encoder grouped_rotary encoder_neighbourhood decoder_neighbourhood t5_of_transformers gated_t5
        untied_t5 umt5
    """,
    "CTranslate2": """
        additive neighbourhoods grouped mish everything_at_once d_v encoder_neighbourhood decoder_neighbourhood
    """,
    "transformers": """
        modern rotary learned no_positions shaw t5 dot additive neighbourhoods grouped separate_vocabularies m2m100
        nothing_shared own_source own_output own_source_and_output separate_vocabularies_untied geglu reglu swiglu
        everything_at_once rmsnorm layer_norm_eps position_offset tensor2tensor_post_norm embedding_norm narrow_heads
        wide_heads d_v grouped_decoder grouped_encoder grouped_rotary encoder_neighbourhood decoder_neighbourhood
    """,
}
if not hasattr(UMT5Config(), "scale_decoder_outputs"):  # its decoder looks ahead in this transformers
    del OPTIONS["umt5"]
    REFUSED["a page"] = REFUSED["a page"].replace(" umt5", "")


@pytest.fixture(scope="module")
def memorised():
    """A model that knows its pairs less than well, so that settings change what it says, and its tokenizers."""
    pair = train_tokenizers(list(PAIRS), list(PAIRS.values()), vocab_size=300)
    model = memorised_model(pair, PAIRS, norm_placement="post", encoder_layers=1, decoder_layers=1)
    with torch.no_grad():
        weight = model.model.encoder.embed_tokens.weight
        weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    model.generation_config.max_length = 14
    return model, pair


def with_settings(model, asked):
    kept = {name: value for name, value in model.generation_config.to_dict().items() if name[0] != "_"}
    return GenerationConfig.from_dict(kept | asked)


def generated(model, ids, config):
    """Return the tokens of `generate()` without padding; with Heed's own search, where that is asked for."""
    strategy = {"custom_generate": BeamSearch()} if any(getattr(config, name, None) for name in SEARCHES) else {}
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setattr(model, "generation_config", config)
        return model.generate(torch.tensor([ids]), **strategy)[0].tolist()[1:]


def engine_of(form, model, tokenizers, folder):
    """Return what searches as a form of a model does, written to a folder."""
    if form == "CTranslate2":
        check_fields(model.config, CHOICES, form)
        ctranslate2_export.specification.save_model(model, tokenizers, folder, "float32")
        return CTranslate2Engine(folder, model, tokenizers, "float32")
    if form == "transformers":
        return GenerateEngine(stock_model(model).eval())
    write_onnx(copy.deepcopy(model), folder)
    return GenerateEngine(OnnxModel.from_pretrained(folder))


def said_by(form, memorised, each, sources, folder):
    """Return what a form makes of the texts, for each of the generation configs."""
    model, pair = memorised
    if form == "a page":
        places = [folder / str(number) for number in range(len(each))]
        for place, config in zip(places, each.values(), strict=True):
            config.to_json_file(saved_in(place, model, pair) / "generation_config.json")  # `save_pretrained` is strict
        write_page(places, folder / "page.html")
        return [[one["tokens"] for one in row] for row in run(folder / "page.html", TEXTS, None)]
    engine, found = engine_of(form, model, pair, folder), []
    for config in map(copy.deepcopy, each.values()):
        if form == "CTranslate2":
            found.append(searched(engine, sources, config))
        else:
            found.append([generated(engine.model, ids, config) for ids in sources])
    return found


def searched(engine, sources, config):
    config.max_new_tokens = config.max_new_tokens or config.max_length - 1
    config.num_beams, config.num_return_sequences = config.num_beams or 1, 1
    return [[*best.token_ids] for (best,) in engine.search(sources, config, 4096)]


def accepted(form, memorised, asked):
    """Return what a form does not refuse, as generation configs; what it refuses it must name."""
    each = {}
    for name, settings in asked.items():
        config = with_settings(memorised[0], settings)
        try:
            check_settings(config, form)
            if form == "CTranslate2":
                config.early_stopping = (config.num_beams or 1) > 1  # as the export compares the two
                ctranslate2_export.check_settings(config, config)
        except ValueError as error:
            assert re.search("|".join(f"`{setting}`" for setting in settings), str(error))  # noqa: PT017
        else:
            each[name] = config
    return {name: config for name, config in each.items() if not config.do_sample}


NEEDED = {"CTranslate2": "ctranslate2", "ONNX": "onnxscript"}  # of extras


def compare(form, memorised, asked, folder):
    """Return what `generate()` says, by what is asked and carried out, after a form has said the same."""
    if form in NEEDED:
        pytest.importorskip(NEEDED[form])
    (model, pair), each = memorised, accepted(form, memorised, asked)
    sources, same = pair.encode_source(TEXTS), dequantized(model) if form == "a page" else model
    expected = {name: [generated(same, ids, config) for ids in sources] for name, config in each.items()}
    found = dict(zip(each, said_by(form, memorised, each, sources, folder), strict=True))
    # CTranslate2 does not count the start token as one that came before; no trained model says it.
    start = model.config.decoder_start_token_id if form == "CTranslate2" else None
    rows = [(asked[name], *both) for name in each for both in zip(found[name], expected[name], strict=True)]
    assert not [row for row in rows if row[1] != row[2] and start not in row[1]]
    return expected


FORMS = [
    pytest.param("a page", marks=needs_node),
    "CTranslate2",
    "transformers",
    pytest.param("ONNX", marks=pytest.mark.slow),  # its exporter takes seconds
]


def model_of(name, tokenizers):
    sizes = {"vocab_size": len(tokenizers.source), "decoder_vocab_size": len(tokenizers.target)}
    model = tiny_model(**OPTIONS[name] | sizes | tokenizers.special_ids())
    torch.nn.init.normal_(model.lm_head.weight, std=model.config.d_model**-0.5)  # or it repeats what it has read
    # CTranslate2 does not count the start token as one that came before.
    model.generation_config.update(eos_token_id=2, suppress_tokens=[1], max_length=9)
    return model


def searches_of(form, model):
    """Return generation configs of greedy search and of beams, with which CTranslate2 forbids nothing."""
    with_beams = {"num_beams": 3, "early_stopping": True}
    with_beams |= {"no_repeat_ngram_size": 0, "suppress_tokens": None} if form == "CTranslate2" else {}
    return [with_settings(model, settings) for settings in ({"num_beams": 1}, with_beams)]


@pytest.mark.parametrize("form", FORMS[:3])
def test_a_form_computes_each_option_or_refuses_it_by_the_name_of_a_field(form, memorised, tmp_path):
    if form in NEEDED:
        pytest.importorskip(NEEDED[form])
    refused, expected, found, folders = {}, {}, {}, []
    separate = train_tokenizers(list(PAIRS), list(PAIRS.values()), vocab_size=267, target_vocab_size=266, joint=False)
    for name in OPTIONS:
        if form == "a page" and "vocabularies" in name:  # whose two tokenizers no page has room for
            continue
        pair = separate if "vocabularies" in name else memorised[1]
        model, folder = model_of(name, pair), tmp_path / name
        before, sources = copy.deepcopy(model.state_dict()), pair.encode_source(TEXTS[1:3])
        try:
            if form == "a page":
                check_fields(model.config, page.CHOICES | plain_heads(model.config), form)
                folders.append(saved_in(folder, model, pair))
                engine, same = None, dequantized(model)
            else:
                folder.mkdir()
                engine, same = engine_of(form, model, pair, folder), model
        except ValueError as error:
            refused[name] = str(error)
            continue
        searches = searches_of(form, model)
        expected[name] = [searched(GenerateEngine(same), sources, search) for search in searches]
        found[name] = [engine and searched(engine, sources, search) for search in searches]
        # CTranslate2's own optimizations write into what they are given.
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        for other in (engine.model, convert_model(engine.model)) if form == "transformers" else ():
            assert_near(logits_of(other), logits_of(model), rounding(model))
    if form == "a page":
        write_page(folders, tmp_path / "page.html")
        rows = zip(*(run(tmp_path / "page.html", TEXTS[1:3], beams) for beams in (1, 3)), strict=True)
        tokens = [[[one["tokens"] for one in row] for row in both] for both in rows]
        found = dict(zip(expected, tokens, strict=True))
    assert {name for name, tokens in found.items() if tokens != expected[name]} == set()
    fields = {name: re.search(r"`(\w+)` must (be|have|equal) ", message)[1] for name, message in refused.items()}
    assert set(fields.values()) <= HeedConfig.__dataclass_fields__.keys()
    assert " ".join(refused) == " ".join(REFUSED[form].split())


def test_every_field_of_the_config_is_tried():
    tried = {field for changes in OPTIONS.values() for field in changes}
    assert set(HeedConfig.__annotations__) - tried <= set(NOT_COMPUTED.split())


@pytest.mark.parametrize("form", FORMS)
def test_a_form_carries_out_or_names_each_of_twenty_settings(form, memorised, tmp_path):
    found = compare(form, memorised, ASKED, tmp_path)
    tokens = set(map(json.dumps, found.values()))
    assert len(tokens) > 0.6 * len(found)  # the settings change what is said
    known = {"a page": 19, "CTranslate2": 12, "transformers": 20, "ONNX": 20}
    assert len(found) == known[form]


def test_each_form_takes_what_the_guide_says():
    table = GUIDE.read_text(encoding="utf-8").split("| Setting |")[1].split("\n\n")[0]
    heads, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    forms = [{"page": "a page"}.get(head, head) for head in heads if head]
    assert sorted(forms) == sorted(SETTINGS)
    told = set()
    for names, *cells in rows:
        for name in re.findall("`([^`]+)`", names):
            told.add(name)
            for form, cell in zip(forms, cells, strict=True):
                assert cell.startswith(("yes", "warned")) == (name in SETTINGS[form]), (name, form)
    assert told >= set(SETTINGS["a page"])


def test_what_changes_nothing_is_nothing_asked_and_a_setting_that_is_not_known_is_refused():
    idle = {"num_beams": 1, "repetition_penalty": 1.0, "min_length": 0, "length_penalty": 1.0, "do_sample": False}
    idle |= {"bad_words_ids": [], "early_stopping": False, "no_repeat_ngram_size": 0, "length_penalty_form": "power"}
    assert asked_of(GenerationConfig.from_dict(idle)) == {}
    zeros = {"forced_bos_token_id": 0, "length_penalty": 0.0, "no_repeat_ngram_size": 1, "min_new_tokens": 0}
    assert asked_of(GenerationConfig.from_dict(zeros)) == zeros
    config = GenerationConfig.from_dict({"a_new_mode": 3, "num_beams": 2, "top_k": 50, "temperature": 0.5})
    assert asked_of(config) == {"a_new_mode": 3, "num_beams": 2}
    for form in SETTINGS:
        assert_error(r"settings that .* does not support: `a_new_mode` must not be set", check_settings, config, form)


def test_a_form_that_ends_beams_otherwise_says_so(memorised):
    model = copy.copy(memorised[0])
    model.generation_config = with_settings(model, {"num_beams": 3, "early_stopping": False})
    with pytest.warns(UserWarning, match="`early_stopping` of the generation config is False, but CTranslate2"):
        assert set(ctranslate2_export._searches(model)) == {"greedy", "5 beams"}
    model.generation_config = with_settings(model, {"no_repeat_ngram_size": 3, "num_beams": 1})
    assert set(ctranslate2_export._searches(model)) == {"greedy"}
    model.generation_config.num_beams = 3
    with pytest.raises(ValueError, match="`no_repeat_ngram_size` must not be set in CTranslate2's beam search"):
        ctranslate2_export._searches(model)


@pytest.mark.parametrize(
    "export", [export_ctranslate2, pytest.param(export_onnx, marks=pytest.mark.slow)], ids=["CTranslate2", "ONNX"]
)
def test_separate_tokenizers_and_several_languages_go_along(export, tmp_path):
    pytest.importorskip("ctranslate2" if export is export_ctranslate2 else "onnxscript")
    options = {"vocab_size": 265, "joint": False, "languages": ["en", "fr"], "encoder_layers": 1, "decoder_layers": 1}
    saved_model(tmp_path / "model", PAIRS, "en", **options)
    result = export(tmp_path / "model", tmp_path / "out", list(PAIRS))
    assert [(each.sentences, each.differences) for each in result.comparisons.values()] == [(6, ())] * 2
    pairs = [TokenizerPair.from_pretrained(tmp_path / name) for name in ("model", "out")]
    assert pairs[0].languages == pairs[1].languages == ("en", "fr")
    assert pairs[0].vocabularies() == pairs[1].vocabularies()
