"""CUDA graphs for `generate()`: the same tokens in few shapes, when they begin, and when they step aside.

There need be no GPU: the CPU is taken for one, and what compiles a step returns the step as it is, but where tests say
otherwise.
"""

import copy
import itertools
import logging
import pickle
import warnings
from types import SimpleNamespace
from unittest.mock import Mock
from weakref import WeakKeyDictionary

import pytest
import torch
from transformers import CompileConfig, PreTrainedModel, StaticCache

from heedful import HeedForConditionalGeneration, SeededSampling, generation_heed, prepare_for_inference
from heedful.decoding import engines
from heedful.decoding.engines import GenerateEngine, pad_sources, token_batches
from heedful.decoding.strategies import graphs
from helpers import VARIANTS, assert_error, each_once, padded, sentences, tiny_model, tiny_rnn
from plain_strategies import model_of
from row_lengths import natural_lengths

SEARCHES = {
    "greedy": {},
    "beams": {"num_beams": 4},
    "n_best": {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.6, "early_stopping": True},
    "forbidden": {"no_repeat_ngram_size": 2, "min_new_tokens": 5, "repetition_penalty": 1.3, "suppress_tokens": [9]},
}
# Few and many sentences, short and long.
BATCHES = {"one": (5,), "two": (3, 70), "five": (30, 41, 2, 9, 13), "many": tuple(range(1, 36))}
GET_COMPILED_CALL = PreTrainedModel.get_compiled_call


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch):
    """Take the CPU for a GPU, on which graphs pay at once; returns the configs that steps are compiled with."""
    compiled = []
    for module in (generation_heed, engines):
        monkeypatch.setattr(module, "COMPILED_DEVICES", ("cpu",))
    monkeypatch.setattr(graphs, "_STEPS", WeakKeyDictionary())
    monkeypatch.setattr(graphs, "STEPS_THAT_PAY", 0)
    monkeypatch.setattr(graphs.COMPILING, "_compile_all_devices", True)

    def get_compiled_call(model, config):
        compiled.append(config)
        return model.__call__

    monkeypatch.setattr(PreTrainedModel, "get_compiled_call", get_compiled_call)
    return compiled


def settings_of(model, **changes):
    config = copy.deepcopy(model.generation_config)
    defaults = {"num_beams": 1, "num_return_sequences": 1, "max_new_tokens": 12, "max_length": None}
    for name, value in (defaults | changes).items():
        setattr(config, name, value)
    return config


def plainly(model, sources, settings, token_budget=4096):
    """Search with a copy that may use no graphs."""
    own = copy.deepcopy(settings)
    own.disable_compile = True
    return GenerateEngine(copy.deepcopy(model)).search(sources, own, token_budget)


def check_same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]
        assert [one.finished for one in ours] == [one.finished for one in theirs]
        assert [one.score for one in ours] == pytest.approx([one.score for one in theirs], abs=1e-5)


@pytest.mark.parametrize(
    ("variant", "case"), each_once(VARIANTS, list(itertools.product(SEARCHES, BATCHES)), ["default"])
)
def test_graphs_find_the_tokens_of_plain_steps(on_gpu, variant, case):
    torch.manual_seed(2)
    (search, batch), model = case, tiny_model(**VARIANTS[variant])
    sources, settings = [row.tolist() for row in sentences(*BATCHES[batch])], settings_of(model, **SEARCHES[search])
    found = GenerateEngine(model).search(sources, settings, 4096)
    assert on_gpu
    assert all(config == graphs.COMPILING for config in on_gpu)
    check_same(found, plainly(model, sources, settings))


def test_batches_of_sentences_as_they_come_have_few_shapes_within_the_models_positions(monkeypatch):
    shapes, model, lengths = [], tiny_model(), dict(enumerate(natural_lengths(4000)[0]))

    def generate(model, input_ids, attention_mask, generation_config):
        assert input_ids.shape == attention_mask.shape
        shapes.append(tuple(input_ids.shape))
        return input_ids

    monkeypatch.setattr(HeedForConditionalGeneration, "generate", generate)
    batches = list(token_batches(lengths, 4096))
    assert sorted(itertools.chain(*batches)) == sorted(lengths)
    assert all(len(batch) == 1 or len(batch) * max(map(lengths.get, batch)) <= 4096 for batch in batches)
    for batch in batches:
        inputs = pad_sources([[5] * lengths[number] for number in batch], 0, model.device)
        sentences, longest = inputs["input_ids"].shape
        assert len(graphs.generate(model, inputs, settings_of(model))) == sentences
        rows, length = shapes[-1]
        assert sentences <= rows <= 2 * sentences
        assert longest <= length < longest + 32
    assert len(shapes) == len(batches) > 15
    assert len(set(shapes)) <= 5
    for limit, length in ((12, 12), (39, 39), (40, 40), (41, 40)):
        model = tiny_model(position_encoding="learned", max_position_embeddings=limit)
        graphs.generate(model, pad_sources([[5] * 12], 0, model.device), settings_of(model))
        assert shapes.pop() == (2, length)


def test_steps_are_counted_over_engines_and_graphs_begin_when_they_pay(on_gpu, monkeypatch, caplog):
    monkeypatch.setattr(graphs, "STEPS_THAT_PAY", 30)
    caplog.set_level(logging.INFO, "heedful")
    model, sources = tiny_model(), [[5, 6, 7], [8, 9]]
    settings = settings_of(model, min_new_tokens=12)
    for taken in (13, 26, 39, 39):
        assert not on_gpu
        GenerateEngine(model).search(sources, settings, 4096)
        assert graphs._STEPS[model] == taken
    GenerateEngine(tiny_model(seed=1)).search(sources, settings, 4096)
    assert len(on_gpu) == 1
    messages = [record.getMessage() for record in caplog.records if record.name == graphs.__name__]
    assert messages == ["after 30 decoding steps, further steps are compiled into CUDA graphs"]


ADAPTER = type("Adapter", (torch.nn.Linear,), {"__module__": "users"})
QUANTIZED = type("Quantized", (torch.nn.Parameter,), {})
CHANGES = {
    "a hook": lambda model: model.model.decoder.register_forward_hook(lambda *_: None),
    "an adapter": lambda model: setattr(model.model.decoder.layers[0].feed_forward, "fc1", ADAPTER(32, 64)),
    "another kernel": lambda model: model.set_attn_implementation("flex_attention"),
    "quantized weights": lambda model: setattr(model.lm_head, "weight", QUANTIZED(model.lm_head.weight.detach())),
}
ASIDE = {
    "sampling": {"do_sample": True},
    "stop_strings": {"stop_strings": "a"},
    "max_time": {"max_time": 60.0},
    "a cache that was chosen": {"cache_implementation": "dynamic"},
    "a step compiled otherwise": {"compile_config": CompileConfig(mode=None)},
    "a switch": {"disable_compile": True},
    "penalties that read the source's padding": {"encoder_repetition_penalty": 1.2},
    "gnmt's length penalty": {"num_beams": 2, "length_penalty_form": "gnmt"},
    "a large cache": {"max_new_tokens": 2**17},
}


def test_graphs_step_aside_for_what_is_done_to_a_model_and_for_settings_that_a_user_has_chosen():
    model = tiny_model()
    inputs = pad_sources([[5, 6, 7]], 0, model.device)
    assert graphs.may_use_graphs(model, inputs, settings_of(model))
    for name, changes in ASIDE.items():
        assert not graphs.may_use_graphs(model, inputs, settings_of(model, **changes)), name
    with prepare_for_inference(model):
        assert not graphs.may_use_graphs(model, inputs, settings_of(model))
    others = {name: tiny_model() for name in CHANGES}
    for name, change in CHANGES.items():
        change(others[name])
    for name, other in (others | {"recurrent": tiny_rnn(), "bart": model_of("bart")}).items():
        assert not graphs.may_use_graphs(other, inputs, settings_of(other)), name


def test_graphs_step_aside_for_ensembles_drawn_tokens_and_on_the_cpu(on_gpu, monkeypatch):
    model, sources = tiny_model(), [[5, 6, 7]]
    settings = settings_of(model)
    GenerateEngine(model, [tiny_model(seed=1)]).search(sources, settings, 4096)
    GenerateEngine(model).search(sources, settings, 4096, SeededSampling(seed=1).processors)
    for module in (generation_heed, engines):
        monkeypatch.setattr(module, "COMPILED_DEVICES", ("cuda",))
    GenerateEngine(model).search(sources, settings, 4096)
    assert not on_gpu


@pytest.mark.parametrize("num_beams", [1, 3])
def test_graphs_that_fail_are_warned_of_once_and_the_result_is_there(monkeypatch, num_beams):
    for error in (RuntimeError("no compiler"), torch.OutOfMemoryError("full"), MemoryError()):
        tried = Mock(side_effect=error)
        monkeypatch.setattr(PreTrainedModel, "get_compiled_call", tried)
        model, sources = tiny_model(), [[5, 6, 7], [8, 9]]
        settings = settings_of(model, num_beams=num_beams)
        with pytest.warns(UserWarning, match=r"^CUDA graphs failed, so decoding continues without them \(.*Error"):
            found = GenerateEngine(model).search(sources, settings, 4096)
        expected = plainly(model, sources, settings)
        check_same(found, expected)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            check_same(GenerateEngine(model).search(sources, settings, 4096), expected)
        tried.assert_called_once()


def test_what_is_wrong_with_a_call_or_interrupts_it_is_raised_and_is_no_failure_of_graphs(on_gpu, monkeypatch):
    model = tiny_model()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert_error(r"^Token ids must be", GenerateEngine(model).search, [[5, 10**6]], settings_of(model), 4096)
        GenerateEngine(model).search([[5, 6]], settings_of(model), 4096)
        assert on_gpu
    monkeypatch.setattr(PreTrainedModel, "get_compiled_call", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        GenerateEngine(model).search([[5, 6]], settings_of(model), 4096)


@pytest.mark.slow
def test_a_step_is_compiled_a_handful_of_times_for_all_shapes_and_leaves_nothing_on_the_model(monkeypatch):
    captured = []
    monkeypatch.setattr(PreTrainedModel, "get_compiled_call", GET_COMPILED_CALL)
    run_as_it_is = lambda graph, examples: captured.append(graph) or graph.forward  # noqa: E731
    compiling = CompileConfig(fullgraph=True, dynamic=True, backend=run_as_it_is, mode=None)
    compiling._compile_all_devices = True
    monkeypatch.setattr(graphs, "COMPILING", compiling)
    torch.compiler.reset()
    model = tiny_model(encoder_layers=1, decoder_layers=1)
    before = vars(model).keys()
    for changes in ({}, {"num_beams": 4}, {"num_beams": 5, "max_new_tokens": 17}):
        settings = settings_of(model, **changes)
        for lengths in [(9,), (50, 3), (7, 30, 41), tuple(range(1, 20)), (90, 4, 4), (1,), (3, 2, 1, 5, 6)]:
            sources = [row.tolist() for row in sentences(*lengths)]
            found = GenerateEngine(model).search(sources, settings, 4096)
            check_same(found, plainly(model, sources, settings))
    assert 0 < len(captured) <= 5
    assert vars(model).keys() == before
    other = pickle.loads(pickle.dumps(model))
    assert torch.equal(other.lm_head.weight, model.lm_head.weight)
    torch.compiler.reset()


def test_generate_compiles_the_step_of_beams_where_it_is_asked_to(on_gpu):
    model = tiny_model(encoder_layers=1, decoder_layers=1)
    source, mask = padded(sentences(9, 4, 1), "left")
    settings = {"attention_mask": mask, "num_beams": 3, "max_new_tokens": 8}
    expected = model.generate(source, **settings)
    static = {"cache_implementation": "static", "compile_config": graphs.COMPILING}
    assert torch.equal(model.generate(source, **settings, **static, disable_compile=True), expected)
    # Not by a static cache alone, as with other models of transformers.
    assert torch.equal(model.generate(source, **settings, cache_implementation="static"), expected)
    assert not on_gpu
    assert torch.equal(model.generate(source, **settings, **static), expected)
    assert len(on_gpu) == 1  # and not the first call, which fills the cache


def test_beams_are_reordered_where_they_lie():
    cache = StaticCache(config=tiny_model(decoder_layers=1).config, max_cache_len=3)
    cache.update(*torch.randn(2, 4, 2, 1, 8), 0)
    rows, layer = torch.tensor([2, 0, 2, 1]), cache.layers[0]
    before = [(states.data_ptr(), states[rows]) for states in (layer.keys, layer.values)]
    generation_heed.CachedGenerationMixin._reorder_cache(SimpleNamespace(self_attention_cache=cache), rows)
    for states, (address, expected) in zip((layer.keys, layer.values), before, strict=True):
        assert states.data_ptr() == address
        assert torch.equal(states, expected)
