"""Half precision, deep stacks and rows of nothing but padding give finite numbers, near those of float32."""

import math
import re

import pytest
import torch

import helpers
from heedful import HeedForConditionalGeneration
from helpers import VARIANTS, assert_near, loss_and_gradients, pairwise, tiny_model, uncompiled

HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
DEPTH = {"encoder_layers": 12, "decoder_layers": 12}
BATCH = helpers.masked_batch((9, 4, 1, 12), (5, 7, 2, 11), "left")


def fresh(dtype=torch.float32, **changes):
    """Return a model with the weights that training starts from."""
    torch.manual_seed(0)
    return HeedForConditionalGeneration(helpers.tiny_config(**changes)).to(dtype)


@pytest.mark.parametrize(
    ("placement", "kernel", "dtype", "is_autocast"), pairwise(["post", "pre"], ["eager", "sdpa"], HALF, [False, True])
)
def test_twelve_and_twelve_layers_in_half_precision_keep_loss_and_gradients(placement, kernel, dtype, is_autocast):
    changes = {**DEPTH, "norm_placement": placement}
    expected = loss_and_gradients(fresh(**changes), BATCH)
    model = fresh(**changes) if is_autocast else fresh(HALF[dtype], **changes)
    model.set_attn_implementation(kernel)
    asked = {"logits_to_keep": torch.arange(0)} if is_autocast else {}  # as when it trains
    with torch.autocast("cpu", HALF[dtype], enabled=is_autocast):
        assert model(**BATCH).loss.dtype == torch.float32
        found = loss_and_gradients(model, BATCH, **asked)
    assert found[0].item() == pytest.approx(expected[0].item(), rel=5e-3)
    assert found.isfinite().all()
    assert torch.cosine_similarity(found[1:], expected[1:], dim=0) > 0.98


def test_depth_scaled_init_divides_the_matrices_of_layer_l_by_its_root_and_leaves_loaded_weights_alone(tmp_path):
    plain, scaled = fresh(**DEPTH), fresh(**DEPTH, depth_scaled_init=True)
    for name, parameter in scaled.named_parameters():
        other, layer = plain.get_parameter(name), re.search(r"\.layers\.(\d+)\.", name)
        if layer and parameter.dim() == 2:
            bound = other.abs().max().item() / math.sqrt(int(layer[1]) + 1)
            assert parameter.abs().max().item() == pytest.approx(bound, rel=0.02)
        elif layer:
            assert torch.equal(parameter, other)
    assert scaled.lm_head.weight.std().item() == pytest.approx(plain.lm_head.weight.std().item(), rel=0.05)
    scaled.save_pretrained(tmp_path)
    loaded = HeedForConditionalGeneration.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in scaled.state_dict().items())


@pytest.mark.parametrize(
    ("variant", "kernel", "dtype"),
    pairwise(["default", "rotary", "t5", "neighbourhoods"], ["eager", "sdpa", "flex_attention"], ["float32", *HALF]),
)
def test_rows_of_padding_alone_are_finite_and_leave_the_other_rows_as_they_are(variant, kernel, dtype):
    model = tiny_model(attention=kernel, **VARIANTS[variant]).to(HALF.get(dtype, torch.float32))
    given = helpers.padded_batch((9, 4, 6), (5, 7, 3), "left")
    with uncompiled(kernel), torch.set_grad_enabled(kernel != "flex_attention"):
        expected = model(**given).logits
        given["attention_mask"][2], given["decoder_attention_mask"][2] = 0, 0
        real = given["decoder_attention_mask"].bool()
        outputs = model(**given, labels=given["decoder_input_ids"].masked_fill(~real, -100))
    assert outputs.logits.isfinite().all()
    assert_near(outputs.logits[real].float(), expected[real].float(), 1e-5 if dtype == "float32" else 2e-2)
    if kernel != "flex_attention":
        outputs.loss.backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_the_loss_of_large_logits_in_float16_is_that_of_float32():
    model = fresh(torch.float16)
    logits = torch.full((1, 2, 99), -60000.0, dtype=torch.float16)
    logits[..., 5] = 60000.0
    labels = torch.tensor([[5, 6]])
    assert model.eval().loss(logits, labels).item() == pytest.approx(60000.0, rel=1e-3)
