"""A prepared model generates the same tokens, and stops being prepared when asked to."""

import copy
import io
import warnings
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import transformers
from test_native_decoder import OPTIONS, make_batch, make_model

from heedful import prepare_for_inference
from heedful.decoding.native import conditions
from heedful.decoding.native.compiled_network import CompiledNetwork
from heedful.decoding.native.network import NativeNetwork
from helpers import assert_error, empty_cache, needs_peft_of_transformers


@pytest.fixture
def model():
    return make_model({})


@pytest.fixture
def steps(monkeypatch):
    """Return a list that grows with each step of the native decoder and each source it encodes."""
    taken = []
    monkeypatch.setattr(conditions, "difference", lambda *compared: None)  # which takes steps when a model is prepared

    def count(network, name, original):
        def counted(self, *args):
            taken.append(name)
            return original(self, *args)

        monkeypatch.setattr(network, name, counted)

    for network, name in product((NativeNetwork, CompiledNetwork), ("step", "encode")):
        count(network, name, getattr(network, name))
    return taken


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "base")
def test_the_tokens_of_generate_stay_the_same(options, steps):
    model = make_model(options)
    for beams, side in ((1, "right"), (4, "left")):
        batch = make_batch(1, side=side)
        before = model.generate(**batch, num_beams=beams)
        assert not steps
        with prepare_for_inference(model):
            prepared = model.generate(**batch, num_beams=beams)
        assert {"step", "encode"} == set(steps)
        steps.clear()
        assert torch.equal(prepared, before)
        assert torch.equal(model.generate(**batch, num_beams=beams), before)
        assert not steps


def test_a_model_that_cannot_be_prepared_is_left_as_it_was_and_undone_twice_it_is_as_before(model):
    prepared = prepare_for_inference(model)
    prepared.undo()
    prepared.undo()
    assert model.prepared is None
    assert model.get_encoder() is model.model.encoder
    with prepare_for_inference(model, "int8") as again:
        prepared.undo()
        assert model.prepared is again
    for options, message in (
        ({"attention_scoring": "additive"}, "`attention_scoring`"),
        ({"position_encoding": "t5"}, "`position_encoding`"),
        ({}, "evaluation mode"),
    ):
        other = make_model(options).train(not options)
        assert_error(message, prepare_for_inference, other)
        assert other.prepared is None
    prepare_for_inference(model)
    assert_error("prepared already", prepare_for_inference, model, "int8")


CALLS_FOR_GENERATE = {
    "sampling": {"do_sample": True},
    "recording": {"return_dict_in_generate": True, "output_scores": True},
    "a static cache": {"cache_implementation": "static"},
    "time": {"max_time": 100.0},
    "the source's tokens": {"encoder_no_repeat_ngram_size": 2},
    "a mask of the prompt": {
        "decoder_input_ids": torch.tensor([[0, 0, 5]] * 7),
        "decoder_attention_mask": torch.tensor([[0, 1, 1]] * 7),
    },
}


def test_what_the_native_decoder_cannot_do_is_done_as_before(model, steps):
    def found(batch, **arguments):
        torch.manual_seed(7)
        result = model.generate(**batch, **arguments)
        return result if isinstance(result, torch.Tensor) else result.sequences

    for name, arguments in CALLS_FOR_GENERATE.items():
        before = found(make_batch(4), **arguments)
        with prepare_for_inference(model):
            assert torch.equal(found(make_batch(4), **arguments), before), name
        assert "step" not in steps, name
    batch = make_batch(4)
    batch["attention_mask"][2] = 0
    before = found(batch)
    steps.clear()
    with prepare_for_inference(model):
        assert torch.equal(found(batch), before)
        alone = found({name: rows[2:3] for name, rows in batch.items()})[0]
    assert alone.tolist() == before[2, : len(alone)].tolist()
    assert not steps


def test_a_streamer_is_fed_token_by_token_and_a_cache_that_is_handed_in_is_filled(model, steps):
    batch = {name: rows[:1] for name, rows in make_batch(4).items()}
    cache = empty_cache(model, "dynamic", 0, 0)
    prepare_for_inference(model)
    streamed = []
    streamer = SimpleNamespace(put=streamed.append, end=lambda: streamed.append(None))
    tokens = model.generate(**batch, streamer=streamer)
    assert len(streamed) == tokens.shape[1] + 1
    assert torch.equal(model.generate(**batch, past_key_values=cache), tokens)
    assert cache.get_seq_length() == tokens.shape[1] - 1
    assert "step" not in steps


def test_generate_takes_what_it_took_before(model, steps):
    batch, embeddings = make_batch(5), model.get_input_embeddings()
    mask, embedded = {"attention_mask": batch["attention_mask"]}, embeddings(batch["input_ids"])
    processors = transformers.LogitsProcessorList([transformers.MinLengthLogitsProcessor(6, [2], device="cpu")])
    marked = transformers.SynthIDTextWatermarkingConfig(keys=[1, 2, 3, 4], ngram_len=3)  # which knows its rows
    marked = {**batch, "watermarking_config": marked, "eos_token_id": [2, *range(5, 40)]}
    calls = [
        {"inputs": batch["input_ids"]},
        {**batch, "logits_processor": processors, "num_beams": 3, "num_return_sequences": 2},
        {"encoder_outputs": model.model.encoder(**batch), **mask},
        {"inputs_embeds": embedded, **mask},
        {**batch, "use_cache": False},
        *({**marked, "num_beams": beams} for beams in (1, 3)),
    ]
    before = [model.generate(**call) for call in calls]
    prepare_for_inference(model)
    for call, expected in zip(calls, before, strict=True):
        steps.clear()
        assert torch.equal(model.generate(**call), expected)
        assert "step" in steps
    message = "Exactly one of `input_ids` and `inputs_embeds`"
    assert_error(message, model.generate, **make_batch(1), decoder_inputs_embeds=embeddings(torch.tensor([[1]] * 7)))


@torch.no_grad()
def test_the_encoder_takes_and_gives_what_its_modules_do(model):
    prepare_for_inference(model)
    ids, mask = make_batch(1).values()
    encoder, expected = model.get_encoder(), model.get_encoder()(ids, mask).last_hidden_state
    assert torch.equal(encoder(ids, mask, None)[0], expected)
    assert isinstance(encoder(ids, mask, return_dict=False), tuple)
    model.config.output_hidden_states = True
    assert len(encoder(ids, mask).hidden_states) == model.config.encoder_layers + 1


def test_gradients_attentions_and_training_use_the_modules_and_states_can_be_differentiated_later(model, steps):
    prepare_for_inference(model)
    encoder, batch = model.get_encoder(), make_batch(6)
    encoder(**batch).last_hidden_state.sum().backward()
    assert model.get_input_embeddings().weight.grad is not None
    with torch.no_grad():
        assert encoder(**batch, output_attentions=True).attentions
        model.train()
        model.generate(**batch)
    assert not steps
    assert list(encoder.named_parameters()) == list(model.model.encoder.named_parameters())
    tokens = model.eval().generate(**batch, num_beams=2)
    with torch.no_grad():
        encoded = encoder(**batch)
    model(attention_mask=batch["attention_mask"], encoder_outputs=encoded, labels=tokens).loss.backward()
    assert model.lm_head.weight.grad.abs().sum() > 0


def test_changed_weights_are_packed_anew(model, steps):
    batch = make_batch(7)
    prepare_for_inference(model)
    before = model.generate(**batch, num_beams=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    steps.clear()
    after = model.generate(**batch, num_beams=2)
    assert "step" in steps
    assert not torch.equal(after, before)
    model.prepared.undo()
    assert torch.equal(model.generate(**batch, num_beams=2), after)


def test_what_comes_in_between_is_warned_of_once_and_takes_part(model, steps):
    batch, seen = make_batch(12), []
    prepare_for_inference(model)
    layer = model.model.decoder.layers[0]
    before, forward = model.generate(**batch), layer.forward
    steps.clear()
    handle = layer.register_forward_hook(lambda *_: seen.append(1))
    with pytest.warns(UserWarning, match="without the packed weights.*forward hooks"):
        model.generate(**batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate(**batch)
    assert seen
    assert not steps
    handle.remove()
    assert torch.equal(model.generate(**batch), before)
    assert "step" in steps
    layer.forward = lambda *args, **kwargs: 0.3 * forward(*args, **kwargs) + 1
    with pytest.warns(UserWarning, match="forward hooks"):
        assert not torch.equal(model.generate(**batch), before)
    del layer.forward
    assert torch.equal(model.generate(**batch), before)


def test_copies_and_saved_models_are_not_prepared(model, tmp_path):
    batch = make_batch(9)
    prepare_for_inference(model)
    expected = model.generate(**batch)
    model.save_pretrained(tmp_path)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert type(copy.deepcopy(model.get_encoder())) is type(model.model.encoder)
    others = [copy.deepcopy(model), torch.load(buffer, weights_only=False), type(model).from_pretrained(tmp_path)]
    assert model.prepared is not None
    for other in others:
        assert other.prepared is None
        assert other.get_encoder() is other.model.encoder
        assert torch.equal(other.generate(**batch), expected)


def test_models_of_other_types_or_without_version_counters_go_on_with_what_was_encoded():
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        model, batch = make_model({}).to(dtype), make_batch(10)
        prepare_for_inference(model)
        assert model.generate(**batch, do_sample=True, top_k=1).shape[0] == len(batch["input_ids"])
        with torch.no_grad():
            assert model.get_encoder()(**batch).last_hidden_state.dtype == dtype
            assert model(**batch, labels=batch["input_ids"]).loss.isfinite()
    with torch.inference_mode():
        model = make_model({})
    before = model.generate(**make_batch(1))
    with prepare_for_inference(model):
        assert torch.equal(model.generate(**make_batch(1)), before)


@needs_peft_of_transformers
def test_a_prefix_of_peft_is_not_left_out(model):
    peft = pytest.importorskip("peft")
    settings = {"num_virtual_tokens": 3, "token_dim": 16, "num_attention_heads": 4, "num_layers": 2}
    adapted = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="SEQ_2_SEQ_LM", **settings)).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "prompt" in name:
                parameter.normal_(std=3.0)
    batch = make_batch(11)
    before = adapted.generate(**batch, do_sample=False)
    with prepare_for_inference(model):
        assert torch.equal(adapted.generate(**batch, do_sample=False), before)
