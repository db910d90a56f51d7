"""Attention step by step: the numbers are the model's own, and the terminal and the pictures show them."""

from itertools import product

import numpy as np
import pytest
import torch
from transformers import MarianConfig, MarianMTModel

from heedful import HeedForConditionalGeneration, attention_maps
from heedful.attention import drawing
from heedful.attention.maps import AttentionMap, AttentionSteps
from heedful.attention.measures import steps_lines
from heedful.attention.recording import record_weights, recorded_heads
from heedful_lab.studies.attention.single_heads import attention_modules
from helpers import assert_error, tiny_config, tiny_rnn

SOURCE, TARGET = "개가 공원에서 달린다.", "The dog runs in the park."
KINDS = ["cross", "encoder", "decoder"]
VARIANTS = [
    {},
    {"position_encoding": "rotary"},
    {"attention_scoring": "additive"},
    {"attention_scoring": "dot"},
    {"d_k": 6, "d_v": 10, "encoder_key_value_heads": 2, "decoder_key_value_heads": 1},
    {"encoder_neighbourhood": 2, "decoder_neighbourhood": 3},
]


def made(tokenizers, **options):
    torch.manual_seed(1)
    config = tiny_config(vocab_size=290, **tokenizers.special_ids(), **options)
    return HeedForConditionalGeneration(config).eval()


def softmax(scores):
    parts = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return parts / parts.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("options", VARIANTS, ids=lambda options: " ".join(map(str, options.values())) or "paper")
def test_the_steps_are_what_the_model_computes(tokenizers, options):
    model, before = made(tokenizers, **options), {}
    modules = attention_modules(model)
    for place, module in modules.items():
        module.out_proj.register_forward_pre_hook(
            lambda _, inputs, place=place: before.__setitem__(place, inputs[0][0].unflatten(-1, (4, -1)).numpy())
        )
    maps = attention_maps(model, tokenizers, SOURCE, TARGET)
    for (kind, layer), module in modules.items():
        for head in range(4):
            steps = maps.steps(kind, layer, head)
            weights = maps.weights[kind][layer, head]
            np.testing.assert_array_equal(steps.attention.weights, weights)
            np.testing.assert_allclose(softmax(steps.scaled), weights, atol=1e-6)
            np.testing.assert_allclose(steps.output, before[kind, layer][:, head], atol=1e-5)
            np.testing.assert_allclose(weights @ steps.value, steps.output, atol=1e-5)
            assert steps.scaling == (module.d_k**-0.5 if module.config.attention_scoring == "scaled_dot" else 1)
            np.testing.assert_array_equal(steps.scores, maps.scores(kind)[layer, head])
            if module.additive_score is None:
                seen = np.isfinite(steps.scores)
                np.testing.assert_allclose((steps.query @ steps.key.T)[seen], steps.scores[seen], atol=1e-5)


def test_one_layer_is_recorded_where_it_is_asked_for_and_later_tokens_have_minus_infinity(model, tokenizers):
    maps = attention_maps(model, tokenizers, SOURCE, TARGET)
    for kind in KINDS:
        scores = maps.scores(kind)
        later = np.triu(np.ones(scores.shape[-2:], dtype=bool), 1) & (kind == "decoder")
        np.testing.assert_array_equal(np.isinf(scores), np.broadcast_to(later, scores.shape))
    with recorded_heads(model, ["cross"], -1) as states:
        attention_maps(model, tokenizers, SOURCE, TARGET)
    assert {kind: len(layers) for kind, layers in states.items()} == {"cross": 1}
    attention_maps(model, tokenizers, SOURCE, TARGET)
    assert len(states["cross"]) == 1
    with pytest.raises(ValueError, match="`layer` must be between -2 and 1, but is 2"):
        recorded_heads(model, KINDS, 2).__enter__()


def test_other_models_have_no_steps(tokenizers):
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, **tokenizers.special_ids()}
    marian = MarianConfig(d_model=16, encoder_layers=1, decoder_layers=1, vocab_size=290, **heads)
    for other in (MarianMTModel(marian), tiny_rnn(vocab_size=290, **tokenizers.special_ids())):
        maps = attention_maps(other, tokenizers, SOURCE, TARGET, kinds=["cross"])
        for look in (maps.steps, lambda maps=maps: maps.scores("cross")):
            assert_error(
                "The model must be a Heed Transformer, loaded after `import heedful`, to show its scores", look
            )
        assert_error("`kind` must be one of cross, but is 'encoder'", maps.steps, "encoder")


@pytest.mark.parametrize("options", [{"share_layers": True}, {"position_encoding": "t5"}])
def test_models_whose_scores_are_not_told_show_the_weights_of_every_layer(tokenizers, options):
    model = made(tokenizers, **options)
    maps = attention_maps(model, tokenizers, SOURCE, TARGET)
    assert [len(maps.weights[kind]) for kind in ("encoder", "decoder", "cross")] == [2, 2, 2]
    assert np.abs(maps.weights["encoder"][0] - maps.weights["encoder"][-1]).max() > 1e-6
    with recorded_heads(model, ["encoder"], 1) as states:
        found = record_weights(model, [5, 6, 7], [1, 5], ["encoder"], 1)
    assert not states
    expected = record_weights(model, [5, 6, 7], [1, 5], ["encoder"])["encoder"][1]
    assert torch.equal(found["encoder"][0], expected)
    assert_error(r"to show its scores, but .* has relative positions .* shared layers", maps.steps, "encoder")


def test_columns_stand_below_each_other_beside_korean_letters():
    tokens = ["나무", "a"]
    one, two = np.ones((2, 3), np.float32), np.array([[1, -np.inf], [-2.5, 3]], np.float32)
    steps = AttentionSteps(AttentionMap(tokens, tokens, softmax(two), "encoder"), one, one, one, two, 0.5)
    lines = list(steps_lines(steps))
    start = next(number for number, line in enumerate(lines) if line.startswith("\n1."))
    assert lines[start + 1 : start + 4] == ["       나무     a", "나무   1.00    −∞", "a     -2.50  3.00"]


@pytest.mark.parametrize("layer", [None, 1])
def test_the_grid_draws_scores_as_dots_below_the_weights_and_writes_them_where_there_is_room(
    model, tokenizers, tmp_path, drawn, layer, monkeypatch
):
    maps = attention_maps(model, tokenizers, SOURCE, TARGET)
    for room in (len(maps.target_tokens), len(maps.target_tokens) - 1):
        monkeypatch.setattr(drawing, "NUMBERED", room)
        drawing.draw_attention_grid(maps, tmp_path / "a.png", "decoder", layer, tokens=True, scores=True)
    layers = [0, 1] if layer is None else [layer]
    numbered, axes = (np.array(figure.axes).reshape(len(layers), 2, 4) for figure in drawn)
    for (row, number), head in product(enumerate(layers), range(4)):
        image, dots = axes[row, 0, head].images[0], axes[row, 1, head].collections[0]
        np.testing.assert_array_equal(image.get_array(), maps.weights["decoder"][number, head])
        scores = maps.scores("decoder")[number, head]
        seen = np.isfinite(scores)
        np.testing.assert_allclose(dots.get_array(), scores[seen], rtol=1e-6)
        sizes = np.abs(scores[seen]) / np.abs(scores[seen]).max()
        np.testing.assert_allclose(dots.get_sizes() / dots.get_sizes().max(), sizes, rtol=1e-5)
        np.testing.assert_array_equal(dots.get_offsets(), np.argwhere(seen)[:, ::-1])
        written = [f"{score:.1f}".replace("-inf", "−∞") for score in scores.flat]
        assert [text.get_text() for text in numbered[row, 1, head].texts] == written
        assert list(axes[row, 1, head].texts) == []
