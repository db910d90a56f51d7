"""Every attention kernel computes the same, and what one cannot do is refused by name."""

import importlib.util
import warnings
from contextlib import nullcontext

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from heedful import HeedConfig, HeedForConditionalGeneration
from helpers import VARIANTS, assert_near, padded, pairwise, sentences, tiny_config, tiny_model

SOURCE = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
TARGET = torch.tensor([[1, 13, 14], [1, 15, 16]])
GENERAL = [name for name in VARIANTS if name not in ("additive", "shaw")]


def batch(side="right", seed=1):
    torch.manual_seed(seed)
    source, source_mask = padded(sentences(9, 4, 1), side)
    target, target_mask = padded(sentences(5, 7, 2), side)
    return {
        "input_ids": source,
        "attention_mask": source_mask,
        "decoder_input_ids": target,
        "decoder_attention_mask": target_mask,
    }


def uncompiled(kernel):
    """Run flex_attention without compiling it, which takes a minute: the same mask, and torch's own reference."""
    warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
    return torch.compiler.set_stance("force_eager") if kernel == "flex_attention" else nullcontext()


def empty_cache(model, kind, source_length, target_length):
    config = model.config.get_text_config(decoder=True)
    if kind == "dynamic":
        return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
    lengths = target_length, source_length
    return EncoderDecoderCache(*(StaticCache(config=config, max_cache_len=length) for length in lengths))


@torch.no_grad()
def cached_logits(model, kind, inputs, first=2):
    """Decode the first tokens at once and the rest one by one."""
    target, mask = inputs["decoder_input_ids"], inputs["decoder_attention_mask"]
    cache = empty_cache(model, kind, inputs["input_ids"].shape[1], target.shape[1])
    encoded = model.model.encoder(inputs["input_ids"], attention_mask=inputs["attention_mask"])
    logits, start = [], 0
    for end in range(first, target.shape[1] + 1):
        step = model(
            encoder_outputs=encoded,
            attention_mask=inputs["attention_mask"],
            decoder_input_ids=target[:, start:end],
            decoder_attention_mask=mask[:, :end],
            past_key_values=cache,
            use_cache=True,
        )
        logits.append(step.logits)
        start = end
    return torch.cat(logits, dim=1)[mask.bool()]


@torch.no_grad()
@pytest.mark.parametrize(
    ("variant", "kernel", "side"), pairwise(GENERAL, ["sdpa", "flex_attention"], ["left", "right"])
)
def test_a_kernel_gives_the_logits_of_eager_attention_with_padding_on_either_side(variant, kernel, side):
    inputs = batch(side)
    real = inputs["decoder_attention_mask"].bool()
    expected = tiny_model(attention="eager", **VARIANTS[variant])(**inputs).logits[real]
    model = tiny_model(attention=kernel, **VARIANTS[variant])
    with uncompiled(kernel):
        assert_near(model(**inputs).logits[real], expected)
    assert model.config._attn_implementation == kernel


@torch.no_grad()
@pytest.mark.parametrize("kernel", ["sdpa", "flex_attention"])
@pytest.mark.parametrize("variant", ["default", "rotary", "t5", "neighbourhoods", "grouped"])
def test_a_kernel_without_any_mask_gives_the_logits_of_eager_attention(variant, kernel):
    torch.manual_seed(0)
    source, target = torch.randint(14, 71, (2, 11)), torch.randint(14, 71, (2, 9))
    expected = tiny_model(attention="eager", **VARIANTS[variant])(source, decoder_input_ids=target).logits
    with uncompiled(kernel):
        assert_near(
            tiny_model(attention=kernel, **VARIANTS[variant])(source, decoder_input_ids=target).logits, expected
        )


@pytest.mark.parametrize("variant", GENERAL)
def test_sdpa_gives_the_loss_and_the_gradients_of_eager_attention(variant):
    inputs = batch()
    labels = inputs["decoder_input_ids"].masked_fill(inputs.pop("decoder_attention_mask") == 0, -100)
    del inputs["decoder_input_ids"]
    losses, gradients = [], []
    for kernel in ("eager", "sdpa"):
        model = tiny_model(attention=kernel, **VARIANTS[variant]).train()
        loss = model(**inputs, labels=labels).loss
        loss.backward()
        losses.append(loss.detach())
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert_near(losses[1], losses[0])
    assert_near(gradients[1], gradients[0], 2e-5)


@torch.no_grad()
def test_the_loss_under_flex_attention_is_that_of_eager_attention():
    inputs = batch()
    labels = inputs["decoder_input_ids"].masked_fill(inputs.pop("decoder_attention_mask") == 0, -100)
    del inputs["decoder_input_ids"]
    expected = tiny_model(attention="eager")(**inputs, labels=labels).loss
    with uncompiled("flex_attention"):
        assert_near(tiny_model(attention="flex_attention")(**inputs, labels=labels).loss, expected)


@pytest.mark.parametrize(
    ("variant", "kernel_and_cache", "side"),
    pairwise(
        ["default", "rotary", "t5", "neighbourhoods", "grouped"],
        [("eager", "static"), ("sdpa", "dynamic"), ("sdpa", "static"), ("flex_attention", "dynamic")],
        ["left", "right"],
    ),
    ids=str,
)
def test_decoding_with_a_cache_gives_the_logits_of_the_whole_target(variant, kernel_and_cache, side):
    kernel, cache = kernel_and_cache
    inputs = batch(side)
    real = inputs["decoder_attention_mask"].bool()
    with torch.no_grad():
        expected = tiny_model(attention="eager", **VARIANTS[variant])(**inputs).logits[real]
    with uncompiled(kernel):
        assert_near(cached_logits(tiny_model(attention=kernel, **VARIANTS[variant]), cache, inputs), expected)


@pytest.mark.parametrize(
    ("variant", "kernel_and_cache", "beams"),
    pairwise(
        ["default", "rotary", "t5", "neighbourhoods", "grouped"],
        [("sdpa", None), ("sdpa", "static"), ("flex_attention", None)],
        [1, 3],
    ),
    ids=str,
)
def test_generate_gives_the_tokens_of_eager_attention(variant, kernel_and_cache, beams):
    kernel, cache = kernel_and_cache
    inputs = {name: value for name, value in batch("left").items() if not name.startswith("decoder")}
    settings = {"max_new_tokens": 8, "num_beams": beams}
    expected = tiny_model(attention="eager", **VARIANTS[variant]).generate(**inputs, **settings)
    model = tiny_model(attention=kernel, **VARIANTS[variant])
    with uncompiled(kernel):
        assert torch.equal(model.generate(**inputs, **settings, cache_implementation=cache), expected)
    assert expected.shape[1] > 4


@pytest.mark.slow
@torch.no_grad()
def test_flex_attention_as_torch_compiles_it_gives_the_logits_of_eager_attention():
    changes = {"encoder_layers": 1, "decoder_layers": 1, **VARIANTS["neighbourhoods"]}
    inputs = batch("left")
    real = inputs["decoder_attention_mask"].bool()
    expected = tiny_model(attention="eager", **changes)(**inputs).logits[real]
    assert_near(tiny_model(attention="flex_attention", **changes)(**inputs).logits[real], expected)


# What is refused


def test_flex_attention_refuses_to_compute_gradients_on_the_cpu():
    model = tiny_model(attention="flex_attention")
    message = r"must be eager or sdpa to compute gradients on the CPU.*torch.no_grad"
    with uncompiled("flex_attention"), pytest.raises(ValueError, match=message):
        model(SOURCE, labels=TARGET)


def test_flex_attention_refuses_the_dropout_that_it_would_leave_out():
    model = tiny_model(attention="flex_attention", attention_dropout=0.25).train()
    with torch.no_grad(), uncompiled("flex_attention"):
        with pytest.raises(ValueError, match=r"`attention_dropout` must be 0 .* flex_attention.* is 0.25"):
            model(SOURCE, labels=TARGET)
        assert model.eval()(SOURCE, labels=TARGET).loss.isfinite()


@torch.no_grad()
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_attention_dropout_drops_in_training_alone(kernel):
    model = tiny_model(attention=kernel, attention_dropout=0.5)
    quiet = model(SOURCE, labels=TARGET).loss
    assert torch.equal(model(SOURCE, labels=TARGET).loss, quiet)
    model.config.label_smoothing = 0.0
    assert (model.train()(SOURCE, labels=TARGET).loss - quiet).abs() > 1e-3


@torch.no_grad()
def test_flex_attention_refuses_a_static_cache():
    model = tiny_model(attention="flex_attention")
    message = "must be eager or sdpa beside a static cache, but is flex_attention"
    with uncompiled("flex_attention"):
        with pytest.raises(ValueError, match=message):
            model.generate(SOURCE, max_new_tokens=4, cache_implementation="static")
        with pytest.raises(ValueError, match=message):
            model(SOURCE, decoder_input_ids=TARGET, past_key_values=empty_cache(model, "static", 4, 8), use_cache=True)


ROADS = {
    "when made": lambda name, config: HeedForConditionalGeneration._from_config(config, attn_implementation=name),
    "afterwards": lambda name, config: HeedForConditionalGeneration(config).set_attn_implementation(name),
    "on the encoder": lambda name, config: HeedForConditionalGeneration(config).model.encoder.set_attn_implementation(
        name
    ),
    "on the decoder": lambda name, config: HeedForConditionalGeneration(config).model.decoder.set_attn_implementation(
        name
    ),
    "as a dict": lambda name, config: HeedForConditionalGeneration(config).set_attn_implementation({"": name}),
}
OTHER = ["flash_attention_2", "paged|sdpa", "kernels-community/flash-attn2", "of_my_own"]


@pytest.fixture
def own_kernel():
    ALL_ATTENTION_FUNCTIONS.register("of_my_own", ALL_ATTENTION_FUNCTIONS["sdpa"])
    yield "of_my_own"
    del type(ALL_ATTENTION_FUNCTIONS)._global_mapping["of_my_own"]


REFUSED = [
    *(({"attention_scoring": "additive"}, name, "additive") for name in ("sdpa", "flex_attention", *OTHER)),
    *(({"position_encoding": "shaw"}, name, "is shaw") for name in ("sdpa", "flex_attention", *OTHER)),
    *(({"position_encoding": "t5"}, name, "is t5") for name in OTHER),
    *(({"decoder_neighbourhood": 2}, name, "a neighbourhood") for name in OTHER),
    *(({"d_k": 6}, name, "`d_k` differs from `d_v`") for name in OTHER),
    *(({}, name, "one of eager, .*sdpa") for name in ("paged|sdpa", "paged|eager", "nonsense")),
]


@pytest.mark.usefixtures("own_kernel")
@pytest.mark.parametrize("road", ROADS)
def test_a_kernel_that_would_compute_something_else_is_refused_by_name(road):
    for number, (changes, name, message) in enumerate(REFUSED):
        if road != "when made" and number % 3:
            continue  # all roads lead to one check; the first shows what it refuses
        config = tiny_config(**changes)
        with pytest.raises(ValueError, match=rf"`attn_implementation` must be .*{message}") as caught:
            ROADS[road](name, config)
        assert str(caught.value).endswith(f"is {name} instead.")


@pytest.mark.parametrize("name", ["sdpa", "flex_attention"])
def test_a_kernel_that_was_assigned_to_the_config_is_refused_when_called(name):
    model = tiny_model(attention_scoring="additive")
    model.config._attn_implementation = name
    with pytest.raises(ValueError, match=f"must be eager where `attention_scoring` is additive, but is {name}"):
        model(SOURCE, labels=TARGET)


def test_the_widths_of_heads_are_compared_as_they_are_and_not_as_they_are_written():
    choices = HeedForConditionalGeneration(tiny_config(d_k=8))._supports_flash_attn  # d_model / h
    assert choices
    assert not HeedForConditionalGeneration(tiny_config(d_k=8, decoder_attention_heads=2))._supports_flash_attn


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash_attn is installed")
@pytest.mark.skipif(importlib.util.find_spec("kernels") is not None, reason="kernels fetches a substitute")
@pytest.mark.parametrize("version", [2, 3])
def test_flash_attention_without_its_package_is_an_error_that_says_so(version):
    with pytest.raises(ImportError, match=f"FlashAttention{version}.*installed"):
        tiny_model(attention=f"flash_attention_{version}")


def test_encoder_and_decoder_have_one_kernel_and_two_are_refused():
    two = {"encoder": "sdpa", "decoder": "eager"}
    message = "`attn_implementation` must be one name for encoder and decoder"
    model = tiny_model()
    for road in (
        lambda: model.set_attn_implementation(two),
        lambda: HeedForConditionalGeneration._from_config(tiny_config(), attn_implementation=two),
        lambda: HeedConfig(attn_implementation=two),
    ):
        with pytest.raises(ValueError, match=message):
            road()
    model.model.encoder.set_attn_implementation("eager")
    assert model.config._attn_implementation == model.model.decoder.config._attn_implementation == "eager"


@torch.no_grad()
def test_another_kernel_may_be_chosen_at_any_time():
    model = tiny_model(attention="eager")
    expected = model(SOURCE, decoder_input_ids=TARGET, output_attentions=True)
    model.set_attn_implementation("sdpa")
    assert_near(model(SOURCE, decoder_input_ids=TARGET).logits, expected.logits)
    # Only eager attention returns weights, so a call that asks for them runs under it.
    weights = model(SOURCE, decoder_input_ids=TARGET, output_attentions=True).cross_attentions
    assert torch.equal(weights[0], expected.cross_attentions[0])
    assert model.config._attn_implementation == "sdpa"
