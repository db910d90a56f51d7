"""The cache by either of its names, and a transformers of the future in which the old name is removed."""

import inspect
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import MarianConfig, MarianMTModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from heedful import BeamSearch
from heedful.cells_heed import RecurrentCache
from heedful.versions_heed import CACHE, CACHE_NAMES, cache_of
from helpers import FAMILIES, assert_near, tiny_model

SOURCE, TARGET = torch.tensor([[15, 16, 17], [18, 19, 20]]), torch.tensor([[1, 30, 31], [1, 32, 33]])
NEW = {"transformer": lambda: EncoderDecoderCache(DynamicCache(), DynamicCache()), "recurrent": RecurrentCache}


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CACHE_NAMES)
def test_either_name_is_taken_everywhere_and_the_one_of_the_version_warns_of_nothing(family, name):
    model = tiny_model(family=family)
    whole = model(SOURCE, decoder_input_ids=TARGET).logits
    source = model.get_encoder()(SOURCE)
    beside = {"encoder_final_state": source.final_state} if family == "recurrent" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("error" if name == CACHE else "ignore")
        for road in ("model", "base", "decoder"):
            cache = {name: NEW[family]()}
            for step in range(3):
                token = TARGET[:, step : step + 1]
                if road == "decoder":
                    states = model.model.decoder(
                        token, encoder_hidden_states=source.last_hidden_state, use_cache=True, **beside, **cache
                    )
                else:
                    called = model if road == "model" else model.model
                    states = called(encoder_outputs=source, decoder_input_ids=token, use_cache=True, **cache)
                assert cache_of(states) is cache[name]
                logits = states.logits if road == "model" else model.lm_head(states.last_hidden_state)
                assert_near(logits[:, 0], whole[:, step])
        given = {"do_sample": False, "max_new_tokens": 3}
        for search in ({}, {"num_beams": 2}, {"num_beams": 2, "custom_generate": BeamSearch()}):
            cache = NEW[family]()
            alone = model.generate(SOURCE, **given, **search)
            assert torch.equal(model.generate(SOURCE, **given, **search, **{name: cache}), alone)
            assert cache.get_seq_length()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_old_name_warns_where_transformers_own_models_warn_of_it_and_two_caches_are_refused(family):
    model = tiny_model(family=family)
    calls = partial(model, SOURCE, decoder_input_ids=TARGET, use_cache=True), partial(model.generate, SOURCE)
    for call in calls:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", FutureWarning)
            call(past_key_values=NEW[family]())
        messages = [str(warning.message) for warning in caught if issubclass(warning.category, FutureWarning)]
        assert [text for text in messages if "`past_key_values` is deprecated" in text] == messages
        assert len(messages) == (CACHE == "cache")
        with pytest.raises(ValueError, match="`cache` and `past_key_values` must be one cache"):
            call(cache=NEW[family](), past_key_values=NEW[family]())
    one = NEW[family]()
    assert cache_of(calls[0](cache=one, past_key_values=one)) is one


@torch.no_grad()
def test_outputs_and_signatures_have_the_name_that_a_peers_have():
    sizes = {"layers": 1, "ffn_dim": 32, "attention_heads": 2}
    sizes = {f"{stack}_{name}": size for stack in ("encoder", "decoder") for name, size in sizes.items()}
    ours = tiny_model()
    theirs = MarianMTModel(MarianConfig(vocab_size=99, pad_token_id=0, decoder_start_token_id=1, d_model=32, **sizes))
    outputs = [model(SOURCE, decoder_input_ids=TARGET, use_cache=True) for model in (ours, theirs)]
    assert [[name for name in CACHE_NAMES if name in [*found.keys()]] for found in outputs] == [[CACHE], [CACHE]]
    assert [hasattr(outputs[0], name) for name in CACHE_NAMES] == [hasattr(outputs[1], name) for name in CACHE_NAMES]
    for forward in (ours.forward, theirs.forward, theirs.model.decoder.layers[0].forward):
        assert [name for name in CACHE_NAMES if name in inspect.signature(forward).parameters] == [CACHE]


FUTURE = """
import sys
import types
import warnings
warnings.simplefilter("error", FutureWarning)
from transformers.utils import deprecation, generic

def refuse(old_name, version, *args, **kwargs):
    def decorate(function):
        def call(*args, **kwargs):
            assert old_name not in kwargs, old_name
            return function(*args, **kwargs)
        call.__signature__ = __import__("inspect").signature(function)
        # A copy with the globals of transformers: no code of a user's.
        names = {**globals(), "__name__": deprecation.__name__}
        copied = types.FunctionType(call.__code__, names, closure=call.__closure__)
        copied.__signature__, copied.__kwdefaults__ = call.__signature__, call.__kwdefaults__
        return copied
    return decorate

deprecation.deprecate_kwarg = refuse  # before any module takes it

def removed(self, *args):
    raise AttributeError("removed")

def not_renamed(kwargs):
    assert not {"past_key_values", "cache_params"} & {*kwargs}, kwargs

generic._rename_kwargs_for_bc = not_renamed
for name in ("past_key_values", "cache_params"):
    setattr(generic.ModelOutput, name, property(removed))
generic.ModelOutput._replace_old_cache_name = lambda self, key: key

import torch
sys.path.insert(0, sys.argv[1])
from helpers import FAMILIES, tiny_model
from heedful import BeamSearch, prepare_for_inference
from heedful.verification.verification import check_cache

source = torch.tensor([[15, 16, 17], [18, 19, 0]])
for family in FAMILIES:
    model = tiny_model(family=family)
    options = {"attention_mask": (source != 0).long(), "max_new_tokens": 3}
    forms = [{}, {"num_beams": 2}, {"do_sample": True}, {"num_beams": 2, "custom_generate": BeamSearch()}]
    forms += [{"cache_implementation": kind} for kind in ("static", "dynamic") if family == "transformer"]
    for form in forms:
        found = model.generate(source, **options, **{"do_sample": False, **form}, return_dict_in_generate=True)
        assert found.cache is not None and found.sequences.shape[1] > 1, form
    check_cache(model).assert_passed()
    cache = model(source, decoder_input_ids=source, use_cache=True).cache
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(source, decoder_input_ids=source, past_key_values=cache)
    model.train()(source, labels=source).loss.backward()
model = tiny_model()
first = model.generate(source[:1], max_new_tokens=6, prompt_lookup_num_tokens=2, do_sample=False)
second = model.generate(source[:1], max_new_tokens=6, assistant_model=tiny_model(seed=1), do_sample=False)
assert torch.equal(first, second)
with prepare_for_inference(model):
    assert torch.equal(model.generate(source[:1], max_new_tokens=6, do_sample=False), first)
"""


@pytest.mark.multiprocess
@pytest.mark.skipif(CACHE != "cache", reason="transformers from 5.24 on has the names to remove")
def test_nothing_needs_the_old_names_when_transformers_removes_them():
    command = [sys.executable, "-c", FUTURE, str(Path(__file__).parents[1] / "support")]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr[-3000:]
