"""Each form generates with the settings of a generation config as `generate()` does, or refuses them by name."""

import copy
import json
import random
import re
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from test_page import run
from transformers import GenerationConfig

from chromium import needs_node
from heedful import BeamSearch
from heedful.conversion.stock_models import stock_model
from heedful.data.tokenizer_training import train_tokenizers
from heedful.decoding.strategies.steps import asked_of
from heedful.export.comparison import SETTINGS, check_settings
from heedful.export.ctranslate2 import ctranslate2_export
from heedful.export.ctranslate2.engine import CTranslate2Engine
from heedful.export.onnx.onnx_graphs import write_onnx
from heedful.export.onnx.onnx_model import OnnxModel
from heedful.export.page import write_page
from helpers import assert_error, dequantized
from memorised import PAIRS, memorised_model, saved_in

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
    "bad_words_ids": {"bad_words_ids": [[2], [70], [88, 93]], "min_new_tokens": 3},
    "several ends": {"eos_token_id": [2, 17, 46, 80], "num_beams": 3},
    "the paper's search": {
        **{"num_beams": 3, "length_penalty": 0.6, "length_penalty_form": "gnmt", "tokens_beyond_source": 2}
    },
    "sampling": {"do_sample": True, "temperature": 0.7},
    "the source's tokens": {"encoder_no_repeat_ngram_size": 2},
    "a bias": {"sequence_bias": [[[60], -3.0]], "exponential_decay_length_penalty": (3, 1.5)},
}


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
    """Return a generation config of the model that asks for something."""
    kept = {name: value for name, value in model.generation_config.to_dict().items() if name[0] != "_"}
    return GenerationConfig.from_dict(kept | asked)


def generated(model, ids, config):
    """Return the tokens of `generate()` without padding; with Heed's own search, where that is asked for."""
    strategy = {"custom_generate": BeamSearch()} if any(getattr(config, name, None) for name in SEARCHES) else {}
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setattr(model, "generation_config", config)
        return model.generate(torch.tensor([ids]), **strategy)[0].tolist()[1:]


def refused(form, config):
    """Return the message by which a form refuses a generation config, if it does."""
    try:
        check_settings(config, form)
        if form == "CTranslate2":
            ctranslate2_export.engine.check_settings(config, config)
    except ValueError as error:
        return str(error)
    return None


def said_by(form, memorised, each, sources, folder):
    """Return what a form makes of the texts, for each of the generation configs."""
    model, pair = memorised
    if form == "a page":
        places = [folder / str(number) for number in range(len(each))]
        for place, config in zip(places, each.values(), strict=True):
            config.to_json_file(saved_in(place, model, pair) / "generation_config.json")  # `save_pretrained` is strict
        write_page(places, folder / "page.html")
        return [[one["tokens"] for one in row] for row in run(folder / "page.html", TEXTS, None)]
    if form == "CTranslate2":
        ctranslate2_export.save_model(model, pair, folder, "float32")
        engine, found = CTranslate2Engine(folder, model, pair, "float32"), []
        for config in map(copy.deepcopy, each.values()):
            config.max_new_tokens = config.max_new_tokens or config.max_length - 1
            config.num_beams, config.num_return_sequences = config.num_beams or 1, 1
            found.append([[*best.token_ids] for (best,) in engine.search(sources, config, 4096)])
        return found
    if form == "transformers":
        other = stock_model(model).eval()
    else:
        write_onnx(copy.deepcopy(model), folder)
        other = OnnxModel.from_pretrained(folder)
    return [[generated(other, ids, config) for ids in sources] for config in each.values()]


def accepted(form, memorised, asked):
    """Return what a form does not refuse, as generation configs; what it refuses it must name."""
    each = {name: with_settings(memorised[0], settings) for name, settings in asked.items()}
    messages = {name: refused(form, config) for name, config in each.items()}
    for name, message in messages.items():
        assert not message or any(f"`{setting}`" in message for setting in asked[name]), message
    return {name: config for name, config in each.items() if not messages[name] and not config.do_sample}


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


@pytest.mark.parametrize("form", FORMS)
def test_a_form_carries_out_or_names_each_of_twenty_settings(form, memorised, tmp_path):
    found = compare(form, memorised, ASKED, tmp_path)
    tokens = set(map(json.dumps, found.values()))
    assert len(tokens) > 0.6 * len(found)  # the settings change what is said
    known = {"a page": 18, "CTranslate2": 8, "transformers": 19, "ONNX": 19}
    assert len(found) == known[form]


def test_each_form_takes_what_the_guide_says():
    table = GUIDE.read_text(encoding="utf-8").split("| the generation config asks for |")[1].split("\n\n")[0]
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
        assert_error(r"what .* cannot do: `a_new_mode` must not be set, but is 3", check_settings, config, form)


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


# What is drawn from, one setting at a time; two forced ends would be as good as each other.
POOL = {
    **{"num_beams": (2, 3, 4), "length_penalty": (-1.0, 0.0, 0.6, 2.0), "early_stopping": (True, "never")},
    **{"min_length": (3, 9), "min_new_tokens": (1, 5), "max_new_tokens": (3, 7), "max_length": (5, 11)},
    **{"no_repeat_ngram_size": (1, 2, 3), "repetition_penalty": (0.7, 1.3, 2.5), "renormalize_logits": (True,)},
    **{
        "forced_bos_token_id": (0, 44, 61),
        "forced_eos_token_id": (2, [17]),
        "eos_token_id": ([2, 46], [2, 17, 44, 80]),
    },
    **{"suppress_tokens": ([44], [2, 46, 70]), "begin_suppress_tokens": ([2], [44, 55]), "do_sample": (True,)},
    **{"bad_words_ids": ([[44]], [[2], [70, 71], [82, 85, 2]]), "num_return_sequences": (1,)},
    **{"length_penalty_form": ("gnmt",), "tokens_beyond_source": (1, 4), "encoder_repetition_penalty": (1.5,)},
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("form", ["a page", "CTranslate2", "transformers", "ONNX"])
def test_settings_that_are_drawn_together_are_carried_out_or_named(form, seed, memorised, tmp_path):
    draw, asked = random.Random(seed), {}
    while len(asked) < 20:
        names = [*draw.sample(list(POOL), draw.randint(1, 4)), *draw.choice([[], ["num_beams"]])]
        drawn = {name: draw.choice(POOL[name]) for name in names}
        with suppress(ValueError):  # what `generate()` itself refuses
            generated(memorised[0], [5, 6, 7, 2], with_settings(memorised[0], drawn))
            asked[str(len(asked))] = drawn
    assert compare(form, memorised, asked, tmp_path)
