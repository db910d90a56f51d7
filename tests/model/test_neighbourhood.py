"""Restricted self-attention in windows gives what the mask of all positions gives, and grows with the length alone."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import helpers
from heedful import attending_heed
from heedful.attending_heed import WindowedMask
from heedful.decoding.native.engine import NativeDecoder
from helpers import assert_near, loss_and_gradients, padded, pairwise, tiny_model

RADII = {"encoder_neighbourhood": 3, "decoder_neighbourhood": 5}
LONG = 70  # more than four blocks


@pytest.fixture
def masked(monkeypatch):
    """Return a function that calls another with the mask of all positions."""

    def call(function):
        with monkeypatch.context() as patch:
            patch.setattr(attending_heed, "FEWEST_BLOCKS", math.inf)
            return function()

    return call


class Sizes(TorchDispatchMode):
    """Remembers the shape of every tensor that is made."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple | list) else [result]
        self.shapes += [each.shape for each in made if isinstance(each, torch.Tensor)]
        return result


def batch(*lengths, side="right"):
    given = helpers.masked_batch(lengths, lengths[::-1], side)
    target = given["labels"].roll(1, 1).clamp(min=0)
    return {**given, "decoder_input_ids": target, "decoder_attention_mask": (given["labels"] != -100).long()}


def windows_used(model, given):
    found = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda module, args: found.append(type(args[1].mask) is WindowedMask)
        )
        for stack in (model.model.encoder, model.model.decoder)
        for layer in stack.layers
    ]
    model(**given)
    for hook in hooks:
        hook.remove()
    return sum(found)


def test_windows_are_used_for_long_sequences_alone():
    model = tiny_model(**RADII)
    assert windows_used(model, batch(LONG, 8)) == 4
    assert windows_used(model, batch(64, 8)) == 0
    assert windows_used(tiny_model(), batch(LONG, 8)) == 0
    for encoding in ("shaw", "t5"):  # whose distances are those of all keys
        assert windows_used(tiny_model(**RADII, position_encoding=encoding), batch(LONG, 8)) == 0


@pytest.mark.parametrize(
    ("variant", "side", "kernel"),
    [
        *pairwise(["default", "rotary", "grouped", "dot", "modern"], ["left", "right"], ["eager", "sdpa"]),
        ("additive", "right", "eager"),
    ],
)
def test_windows_give_the_loss_and_the_gradients_of_the_mask(variant, side, kernel, masked):
    model = tiny_model(attention=kernel, **helpers.VARIANTS[variant], **RADII).train()
    given = batch(LONG, 90, 8, side=side)
    assert windows_used(model, given) == 4
    expected = masked(lambda: loss_and_gradients(model, given))
    assert_near(loss_and_gradients(model, given), expected)
    helpers.checkpoint_activations(model, use_reentrant=side == "left")
    assert_near(loss_and_gradients(model, given), expected)


@torch.no_grad()
@settings(deadline=None, max_examples=40)
@given(
    radius=st.integers(1, 40),
    length=st.integers(1, 200),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 3)]),
    is_causal=st.booleans(),
    paddings=st.lists(st.integers(-60, 60), min_size=1, max_size=3),
)
def test_every_token_gets_what_the_mask_of_all_positions_gives(radius, length, heads, is_causal, paddings):
    torch.manual_seed(length)
    places = torch.arange(length)
    tokens = torch.stack([places < length + p if p < 0 else places >= p for p in paddings])
    query, key, value = (
        torch.randn(len(paddings), h, length, d)
        for h, d in zip((heads[0], heads[1], heads[1]), (6, 6, 4), strict=True)
    )
    distance = places[:, None] - places
    seen = (distance <= radius) & (distance >= (0 if is_causal else -radius)) & tokens[:, None, None]

    def attend(module, query, key, value, mask):
        given = {"attn_mask": mask, "enable_gqa": heads[0] != heads[1]}
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, **given).transpose(1, 2), None

    for dtype in (torch.bool, torch.float32):
        mask = attending_heed.windowed_mask(tokens, radius, is_causal, dtype)
        # Some kernels give NaN to a row that sees nothing.
        assert (mask.windows == (True if dtype == torch.bool else 0)).any(-1).all()
        output, weights = attending_heed.neighbourhood_attention(attend, None, query, key, value, mask)
        assert weights is None
        assert output.isfinite().all()
        expected, _ = attend(None, query, key, value, seen)
        torch.testing.assert_close(output[tokens], expected[tokens], rtol=0, atol=1e-5)


@torch.no_grad()
def test_attention_weights_are_those_of_all_positions():
    model = tiny_model(attention="sdpa", **RADII)
    given = batch(LONG)
    outputs = model(**given, output_attentions=True)
    weights = outputs.encoder_attentions[0][0]
    assert weights.shape == (4, LONG, LONG)
    places = torch.arange(LONG)
    far = (places[:, None] - places).abs() > RADII["encoder_neighbourhood"]
    assert (weights[:, far] == 0).all()
    assert (weights[:, ~far] > 0).all()
    assert_near(outputs.logits, model(**given).logits)


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("side", ["source", "target"])
def test_no_tensor_of_a_training_step_holds_every_pair_of_positions(side, kernel, masked):
    model = tiny_model(attention=kernel, **RADII).train()

    def largest(length):
        # Every target position sees the whole source, so that one of them has to be short.
        lengths = (length, 3) if side == "source" else (3, length)
        source, target = (torch.randint(3, 99, (1, each)) for each in lengths)
        with Sizes() as sizes:
            model(input_ids=source, labels=target).loss.backward()
        return max(math.prod(shape) for shape in sizes.shapes)

    assert largest(1280) == 2 * largest(640) < 640 * 640
    assert masked(lambda: largest(640)) >= 640 * 640


@torch.no_grad()
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_rows_of_padding_are_finite_in_half_precision_and_dropout_reaches_weights_within_windows(kernel):
    given = batch(LONG, 8)
    model = tiny_model(attention=kernel, attention_dropout=0.5, **RADII)
    assert windows_used(model, given) == 4
    assert torch.equal(model(**given).loss, model(**given).loss)
    assert not torch.equal(model.train()(**given).loss, model(**given).loss)
    given["attention_mask"][1] = 0
    for dtype in (torch.float16, torch.bfloat16):
        encoder = model.eval().to(dtype).model.encoder
        assert encoder(given["input_ids"], given["attention_mask"]).last_hidden_state.isfinite().all()


@torch.no_grad()
def test_an_exported_encoder_takes_short_and_long_sources():
    encoder = tiny_model(attention="sdpa", encoder_layers=1, **RADII).model.encoder
    sizes = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("length", max=512)}
    names = ("input_ids", "attention_mask")
    example = {name: batch(9, 4, 1)[name] for name in names}
    program = torch.export.export(encoder, (), example, dynamic_shapes=dict.fromkeys(names, sizes)).module()
    for lengths in ((LONG, 8), (5, 3, 3, 2)):
        given = {name: batch(*lengths)[name] for name in names}
        real = given["attention_mask"].bool()
        found, expected = program(**given).last_hidden_state, encoder(**given).last_hidden_state
        assert_near(found[real], expected[real])


@torch.no_grad()
def test_the_native_decoder_reads_long_sources_in_windows():
    model = tiny_model(**RADII)
    source, mask = padded(helpers.sentences(LONG, 20, 90), "right")
    decoder = NativeDecoder(model)
    with Sizes() as sizes:
        encoded = decoder.encoded(source, mask)
    assert not any(shape[-2:] == (90, 90) for shape in sizes.shapes)
    for beams in (1, 3):
        options = {"num_beams": beams, "max_new_tokens": 12, "do_sample": False}
        found = model.generate(**encoded, custom_generate=decoder, **options)
        assert found.tolist() == model.generate(source, attention_mask=mask, **options).tolist()
