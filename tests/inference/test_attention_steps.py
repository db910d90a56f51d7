"""Attention step by step: the numbers are the model's own, and the terminal and the pictures show them."""

import math
import re
import sys

import numpy as np
import pytest
import torch
from transformers import MarianConfig, MarianMTModel

from heedful import (
    HeedConfig,
    HeedForConditionalGeneration,
    HeedRNNConfig,
    HeedRNNForConditionalGeneration,
    attention_maps,
)
from heedful.cli import main as cli
from heedful.inference.attention import drawing
from heedful.inference.attention.maps import AttentionMap, AttentionSteps
from heedful.inference.attention.recording import record_attention, recorded_heads
from heedful.inference.attention.request import _steps_lines
from heedful.studies.attention.single_heads import attention_modules

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
    sizes = {"vocab_size": 290, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 16}
    sizes |= {"decoder_ffn_dim": 16, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    return HeedForConditionalGeneration(HeedConfig(**sizes, **tokenizers.special_ids(), **options)).eval()


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
            assert steps.scaling == (module.d_k**-0.5 if module.config.attention_scoring == "scaled_dot" else 1)
            np.testing.assert_array_equal(steps.scores, maps.scores(kind)[layer, head])
            if module.additive_score is None:
                seen = np.isfinite(steps.scores)
                np.testing.assert_allclose((steps.query @ steps.key.T)[seen], steps.scores[seen], atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_one_query_at_a_time_gives_the_same_as_all_at_once(model, tokenizers, kind):
    steps = attention_maps(model, tokenizers, SOURCE, TARGET).steps(kind, 0, 2)
    for row, query in enumerate(steps.query):
        end = row + 1 if kind == "decoder" else len(steps.key)
        weights = softmax(steps.key[:end] @ query / math.sqrt(len(query)))
        np.testing.assert_allclose(weights @ steps.value[:end], steps.output[row], atol=1e-5)


def test_later_tokens_have_minus_infinity_in_the_decoder_alone(model, tokenizers):
    maps = attention_maps(model, tokenizers, SOURCE, TARGET)
    for kind in KINDS:
        scores = maps.scores(kind)
        later = np.triu(np.ones(scores.shape[-2:], dtype=bool), 1) & (kind == "decoder")
        np.testing.assert_array_equal(np.isinf(scores), np.broadcast_to(later, scores.shape))


def test_only_the_layer_that_is_asked_for_is_recorded_and_no_hook_stays(model, tokenizers):
    with recorded_heads(model, ["cross"], -1) as states:
        attention_maps(model, tokenizers, SOURCE, TARGET)
    assert {kind: len(layers) for kind, layers in states.items()} == {"cross": 1}
    attention_maps(model, tokenizers, SOURCE, TARGET)
    assert len(states["cross"]) == 1
    with (
        pytest.raises(ValueError, match="`layer` must be between -2 and 1, but is 2"),
        recorded_heads(model, KINDS, 2),
    ):
        pass


@pytest.mark.parametrize("family", ["marian", "recurrent"])
def test_other_models_tell_no_steps(tokenizers, family):
    if family == "marian":
        sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 290}
        sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
        other = MarianMTModel(MarianConfig(**sizes, **tokenizers.special_ids()))
    else:
        sizes = {"embedding_size": 16, "hidden_size": 16, "vocab_size": 290}
        other = HeedRNNForConditionalGeneration(HeedRNNConfig(**sizes, **tokenizers.special_ids()))
    maps = attention_maps(other, tokenizers, SOURCE, TARGET, kinds=["cross"])
    for look in (maps.steps, lambda: maps.scores("cross")):
        with pytest.raises(ValueError, match="The model must be a Heed Transformer to tell its scores"):
            look()
    with pytest.raises(ValueError, match="`kind` must be one of cross, but is 'encoder'"):
        maps.steps("encoder")


@pytest.mark.parametrize("options", [{"share_layers": True}, {"position_encoding": "t5"}])
def test_models_whose_scores_are_not_told_show_the_weights_of_every_layer(tokenizers, options):
    model = made(tokenizers, **options)
    maps = attention_maps(model, tokenizers, SOURCE, TARGET)
    assert [len(maps.weights[kind]) for kind in ("encoder", "decoder", "cross")] == [2, 2, 2]
    assert np.abs(maps.weights["encoder"][0] - maps.weights["encoder"][-1]).max() > 1e-6
    with recorded_heads(model, ["encoder"], 1) as states:
        found = record_attention(model, [5, 6, 7], [1, 5], ["encoder"], 1)
    assert not states
    expected = record_attention(model, [5, 6, 7], [1, 5], ["encoder"])["encoder"][1]
    assert torch.equal(found["encoder"][0], expected)
    with pytest.raises(ValueError, match=r"to tell its scores, without relative positions .* shared layers"):
        maps.steps("encoder")


def test_a_layer_or_head_that_there_is_not_is_an_error(model, tokenizers):
    maps = attention_maps(model, tokenizers, SOURCE, TARGET)
    for arguments, message in (
        ((2, 0), "`layer` must be between -2 and 1"),
        ((0, 4), "`head` must be between 0 and 3"),
    ):
        with pytest.raises(ValueError, match=message):
            maps.steps("cross", *arguments)


def numbers_below(text, heading):
    """The numbers of the table below a heading, with the labels of its rows."""
    (table,) = re.findall(rf"^{heading}.*?\n.*?\n(.*?)(?:\n\n|\Z)", text, flags=re.DOTALL | re.MULTILINE)
    cells = [line.split() for line in table.splitlines()]
    return [row[0] for row in cells], np.array(
        [[float(one.replace("−∞", "-inf")) for one in row[1:]] for row in cells]
    )


@pytest.fixture
def run(model, tokenizers, tmp_path, monkeypatch, capsys):
    """Run `heedful attention` with the sentence; return its exit code, output and errors."""
    model.save_pretrained(tmp_path / "model")
    tokenizers.save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["heedful", "attention", "model", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        printed = capsys.readouterr()
        return end.value.code or 0, printed.out, printed.err

    return command


def test_the_command_prints_every_step(run, model, tokenizers):
    steps = attention_maps(model, tokenizers, SOURCE, TARGET).steps("decoder", 0, 2)
    code, text, errors = run(SOURCE, "--target", TARGET, "--steps", "--kind", "decoder", "--layer", 0, "--head", 2)
    assert code == 0, errors
    first, shapes, *_ = text.splitlines()
    assert first == "decoder attention, layer 0 of 0 to 1, head 2"
    count = len(steps.query)
    assert shapes.count(f"({count}, 12)") == 3
    assert "√d_k = √12 = 3.464" in text
    assert f"Q Kᵀ ({count}, {count})" in text
    weights = steps.attention.weights
    expected = {
        "1. Scores": steps.scores,
        "2. Scores": steps.scaled,
        "3. Weights": np.c_[weights, weights.sum(axis=1)],
    }
    expected["4. Output"] = np.linalg.norm(steps.output, axis=1, keepdims=True)
    for heading, numbers in expected.items():
        labels, found = numbers_below(text, heading)
        assert labels == steps.attention.target_tokens
        np.testing.assert_allclose(found, numbers, atol=0.0051)


def test_head_0_is_shown_unless_another_is_chosen_and_pictures_keep_the_mean(run):
    code, text, _ = run(SOURCE, "--steps", "-o", "map.svg")
    assert code == 0
    assert text.splitlines()[0] == "cross attention, layer 1 (the last), head 0"
    assert text.splitlines()[-1] == "map.svg"


def test_columns_stand_below_each_other_beside_korean_letters():
    tokens = ["나무", "a"]
    one, two = np.ones((2, 3), np.float32), np.array([[1, -np.inf], [-2.5, 3]], np.float32)
    steps = AttentionSteps(AttentionMap(tokens, tokens, softmax(two), "encoder"), one, one, one, two, 0.5)
    lines = list(_steps_lines(steps))
    start = next(number for number, line in enumerate(lines) if line.startswith("\n1."))
    assert lines[start + 1 : start + 4] == ["       나무     a", "나무   1.00    −∞", "a     -2.50  3.00"]


@pytest.mark.parametrize("layer", [None, 1])
def test_the_grid_draws_scores_as_dots_below_the_weights(model, tokenizers, tmp_path, monkeypatch, layer):
    figures = []
    monkeypatch.setattr(drawing, "_save", lambda figure, path: figures.append(figure) or path)
    maps = attention_maps(model, tokenizers, SOURCE, TARGET)
    drawing.draw_attention_grid(maps, tmp_path / "a.png", "decoder", layer, tokens=True, scores=True)
    (figure,) = figures
    layers = [0, 1] if layer is None else [layer]
    axes = np.array(figure.axes).reshape(len(layers), 2, 4)
    for row, number in enumerate(layers):
        for head in range(4):
            image, dots = axes[row, 0, head].images[0], axes[row, 1, head].collections[0]
            np.testing.assert_array_equal(image.get_array(), maps.weights["decoder"][number, head])
            scores = maps.scores("decoder")[number, head]
            seen = np.isfinite(scores)
            np.testing.assert_allclose(dots.get_array(), scores[seen], rtol=1e-6)
            sizes = np.abs(scores[seen]) / np.abs(scores[seen]).max()
            np.testing.assert_allclose(dots.get_sizes() / dots.get_sizes().max(), sizes, rtol=1e-5)
            places = [(column, row) for row, column in np.argwhere(seen)]
            np.testing.assert_array_equal(dots.get_offsets(), places)


def test_scores_are_written_where_there_is_room(model, tokenizers, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(drawing, "_save", lambda figure, path: figures.append(figure) or path)
    maps = attention_maps(model, tokenizers, SOURCE, TARGET)
    count = len(maps.target_tokens)
    for room in (count, count - 1):
        monkeypatch.setattr(drawing, "NUMBERED", room)
        drawing.draw_attention_grid(maps, tmp_path / "a.png", "decoder", 0, tokens=True, scores=True)
    small, large = ([text.get_text() for text in figure.axes[4].texts] for figure in figures)
    expected = [f"{score:.1f}".replace("-inf", "−∞") for score in maps.scores("decoder")[0, 0].flat]
    assert small == expected
    assert large == []


REFUSED = [
    (["--scores", "-o", "map.png"], "`--scores` must come with --grid"),
    (["--scores", "-o", "page.html"], "`--scores` must come with --grid"),
    (["--steps", "--rollout", "-o", "map.png"], "`--steps` must not come with --rollout"),
    (["--steps", "--json"], "`--steps` must not come with --json"),
    (["--steps", "--head", "4"], "`--head` must be between 0 and 3, but is 4"),
]


def test_what_would_be_ignored_is_refused(run):
    for options, message in REFUSED:
        code, output, errors = run(SOURCE, *options)
        assert (code, output) == (2, ""), options
        assert message in errors.splitlines()[-1], options
        assert "Traceback" not in errors
