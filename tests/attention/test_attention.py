"""Attention maps: the weights of the model, labels that people can read, pictures with Korean letters."""

import importlib.util
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from transformers import BartConfig, BartForConditionalGeneration

from heedful import Translator, draw_attention, draw_attention_grid, write_attention_report
from heedful.attention import drawing
from heedful.attention.maps import AttentionMap, AttentionMaps, attention_map, attention_maps_of_ids
from heedful.data.labels import Words, token_labels
from heedful.data.tokenizer_training import train_tokenizers
from helpers import assert_error, assert_refused

matplotlib = pytest.importorskip("matplotlib")
font_manager, image = pytest.importorskip("matplotlib.font_manager"), pytest.importorskip("matplotlib.image")
SOURCE, TARGET = "고양이가 잔다.", "The cat sleeps."


@pytest.fixture
def small_map() -> AttentionMap:
    weights = np.array([[0.9, 0.1, 0.0], [0.2, 0.3, 0.5]], dtype=np.float32)
    return AttentionMap(["고양이", "▁café", "</s>"], ["$\\frac$", "▁cat"], weights)


def drawn_warnings(*arguments):
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        draw_attention(*arguments)
    return [str(warning.message) for warning in record]


def test_rows_are_predicted_tokens_and_columns_what_they_look_at(model, tokenizers):
    cross = attention_map(model, tokenizers, SOURCE, TARGET)
    assert cross.source_tokens == token_labels(tokenizers.source, tokenizers.encode_source([SOURCE])[0])
    assert cross.target_tokens == token_labels(tokenizers.target, tokenizers.encode_target([TARGET])[0])
    assert cross.target_tokens[-1] == cross.source_tokens[-1] == "</s>"
    decoder = attention_map(model, tokenizers, SOURCE, TARGET, kind="decoder")
    assert (decoder.source_tokens, decoder.target_tokens) == (["<s>", *cross.target_tokens[:-1]], cross.target_tokens)
    encoder = attention_map(model, tokenizers, SOURCE, TARGET, kind="encoder")
    assert encoder.source_tokens == encoder.target_tokens == cross.source_tokens
    translation = Translator(model, tokenizers).translate([SOURCE])[0][0]
    own = attention_map(model, tokenizers, SOURCE)
    assert own.target_tokens == token_labels(tokenizers.target, translation.token_ids)
    ids = tokenizers.encode_source([SOURCE])[0], translation.token_ids
    followed = attention_maps_of_ids(model, tokenizers, *ids, ["cross"]).map()
    np.testing.assert_array_equal(own.weights, followed.weights)


def test_the_model_stays_in_training_mode_but_dropout_is_off(training_model, tokenizers):
    training_model.get_encoder().eval()  # as a frozen one
    before = {name: module.training for name, module in training_model.named_modules()}
    during = attention_map(training_model, tokenizers, SOURCE, TARGET).weights
    assert {name: module.training for name, module in training_model.named_modules()} == before
    np.testing.assert_array_equal(during, attention_map(training_model.eval(), tokenizers, SOURCE, TARGET).weights)


def test_a_sentence_beyond_learned_positions_is_named(tokenizers):
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 20}
    config = BartConfig(**sizes, vocab_size=290, **tokenizers.special_ids(), attn_implementation="eager")
    model = BartForConditionalGeneration(config).eval()
    for side, texts in (("source", ("x" * 25, "y")), ("target", ("x", "y" * 25))):
        assert_error(rf"{side} must have at most 20 tokens.* but has 26", attention_map, model, tokenizers, *texts)


def test_bytes_are_shown_as_the_characters_that_begin_in_them_and_what_cannot_be_seen_by_its_name(tokenizers):
    def labels(text, tokenizer=tokenizers.source):
        return token_labels(tokenizer, tokenizer(text).input_ids)

    assert labels("네.") == ["네", "…", "…", ".", "</s>"]  # three bytes, the full stop, the end
    assert labels("a\tb")[1] == "\\t"
    assert "▁" in labels("x y")
    first_byte = tokenizers.source("네").input_ids[0]
    assert token_labels(tokenizers.source, [first_byte, 1, 9999]) == ["‹EB›", "<s>", "<9999>"]
    words = train_tokenizers(["개가 달린다"], ["the dog"], vocab_size=100, algorithm="word", languages=["en"])
    ids = words.encode_source(["개가 뭐"], target_language="en")[0]
    assert token_labels(words.source, ids) == ["<2en>", "▁개가", "<unk>", "</s>"]
    text = "می\u200cخواهم 👨\u200d👩"  # joiners stay within labels, and are visible alone
    words = train_tokenizers([text] * 9, ["a"], vocab_size=None, algorithm="word").source
    assert labels(text, words) == ["▁می\u200cخواهم", "▁👨\u200d👩", "</s>"]
    pieces = train_tokenizers([text] * 9, ["a"], vocab_size=281).source
    assert "👨\u200d👩" in "".join(labels(text, pieces))
    assert labels("\u200c", pieces)[0] == "\\u200c"


def test_a_picture_is_written(small_map, tmp_path):
    for suffix, start in {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF", ".PNG": b"\x89PNG"}.items():
        for draw, maps in ((draw_attention, small_map), (draw_attention_grid, random_maps(1, 2, 2, 3))):
            path = draw(maps, tmp_path / f"{draw.__name__}{suffix}", title="제목 $5")
            assert path.read_bytes().startswith(start)


def test_the_extras_font_serves_or_else_code_points(small_map, tmp_path, monkeypatch):
    pytest.importorskip("koreanize_matplotlib")
    with monkeypatch.context() as patch:
        patch.setattr(drawing, "WIDE_FONTS", ())
        patch.setattr(drawing, "REGULAR", ())
        assert drawn_warnings(small_map, tmp_path / "map.png", "제목") == []
    monkeypatch.setattr(drawing, "_wide_fonts", lambda manager: iter(()))
    (message,) = drawn_warnings(small_map, tmp_path / "map.png")
    assert "3 of the letters (고양이)" in message
    assert "heedful[plots]" in message
    with pytest.warns(UserWarning, match="code points are drawn instead"):
        (texts,), style = drawing.writable(["고a", "b"])
    assert (texts, style["family"]) == (["⟨ACE0⟩a", "b"], ["DejaVu Sans"])


def test_drawing_leaves_matplotlib_as_it_was_and_takes_no_font_of_boxes_nor_pyplot(small_map, tmp_path, monkeypatch):
    before = dict(matplotlib.rcParams)
    monkeypatch.delattr(matplotlib, "pyplot", raising=False)
    for name in ("matplotlib.pyplot", "koreanize_matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    assert drawn_warnings(small_map, tmp_path / "map.png", "제목") == []
    assert dict(matplotlib.rcParams) == before
    names = {family for family, _ in drawing._wide_fonts(font_manager.fontManager)}
    assert "DejaVu Sans" in names
    assert not any("Last Resort" in name for name in names)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # the module itself, imported anew, asks for it later
    specification = importlib.util.spec_from_file_location("drawing_anew", drawing.__file__)
    specification.loader.exec_module(importlib.util.module_from_spec(specification))


def random_maps(layers, heads, rows, columns):
    weights = np.random.default_rng(0).dirichlet(np.ones(columns), size=(layers, heads, rows)).astype(np.float32)
    words = [None] * columns, [None] * rows
    source, target = [f"s{i}" for i in range(columns)], [f"고{i}" for i in range(rows)]
    return AttentionMaps(source, target, ["<s>", *target[:-1]], *words, {"cross": weights})


def test_the_grid_has_a_small_map_for_each_head_in_its_place_of_words_or_tokens(tmp_path, drawn):
    maps = random_maps(2, 3, 4, 5)
    draw_attention_grid(maps, tmp_path / "grid.png")
    draw_attention_grid(maps, tmp_path / "grid.png", layer=-1)
    whole, last = (figure.axes for figure in drawn)
    assert [axes.get_title() for axes in whole] == [f"layer {i}, head {j}" for i in range(2) for j in range(3)]
    for axes, weights in zip(whole, maps.weights["cross"].reshape(6, 4, 5), strict=True):
        np.testing.assert_array_equal(axes.images[0].get_array(), weights)
        assert axes.images[0].get_clim() == (0, 1)
    assert [axes.get_title() for axes in last] == [f"layer 1, head {j}" for j in range(3)]
    np.testing.assert_array_equal(last[2].images[0].get_array(), maps.weights["cross"][1, 2])
    assert [label.get_text() for label in whole[-1].get_xticklabels()] == maps.source_tokens
    assert [label.get_text() for label in whole[3].get_yticklabels()] == maps.target_tokens
    labels = whole[0].get_yticklabels(), whole[3].get_yticklabels(), whole[-1].get_xticklabels()
    assert len({tuple(each[0].get_family()) for each in labels}) == 1  # one that has Korean letters
    maps = replace(random_maps(1, 2, 2, 3), source_shown=Words(["고양이가", "잔다."], [0, 0, 1]))
    draw_attention_grid(maps, tmp_path / "grid.png")
    draw_attention_grid(maps, tmp_path / "grid.png", tokens=True)
    words, tokens = ([label.get_text() for label in figure.axes[0].get_xticklabels()] for figure in drawn[2:])
    assert (words, tokens) == (["고\n양\n이\n가", "잔\n다\n."], ["s0", "s1", "s2"])
    expected = maps.weights["cross"][0, 1]
    np.testing.assert_allclose(drawn[2].axes[1].images[0].get_array()[:, 0], expected[:, :2].sum(axis=1), atol=1e-6)
    np.testing.assert_array_equal(drawn[3].axes[1].images[0].get_array(), expected)


def test_wrong_paths_and_a_grid_of_what_is_not_there_are_named(small_map, tmp_path, monkeypatch):
    (tmp_path / "folder.png").mkdir()
    paths = [
        ("map.jpg", r"`path` must end in one of \.png, \.svg, \.pdf, but is .*map\.jpg"),
        ("nowhere/map.png", r"nowhere does not exist"),
        ("folder.png", r"`path` must be a file to write, but .*folder\.png is a folder"),
    ]
    assert_refused(paths, lambda name: draw_attention(small_map, tmp_path / name), (ValueError, FileNotFoundError))
    grids = [
        (("grid.png", {"kind": "decoder"}), "`kind` must be one of cross, but is 'decoder'"),
        (("grid.png", {"layer": 1}), "`layer` must be between -1 and 0, but is 1"),
        (("grid.gif", {}), "`path` must end in one of"),
    ]
    maps = random_maps(1, 1, 2, 2)
    assert_refused(grids, lambda given: draw_attention_grid(maps, tmp_path / given[0], **given[1]))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert_error(r"heedful\[plots\]", draw_attention, small_map, tmp_path / "map.png", error=ImportError)
    assert [place.name for place in tmp_path.iterdir()] == ["folder.png"]


def test_a_picture_or_page_that_fails_half_way_leaves_the_former_one(small_map, tmp_path, monkeypatch):
    def fail(*given, **settings):
        path = next(each for each in given if isinstance(each, Path))
        path.write_bytes(b"half")
        raise OSError("The disk is full.")

    for name, write, of in (
        ("map.png", partial(draw_attention, small_map), "matplotlib.figure.Figure.savefig"),
        ("page.html", partial(write_attention_report, random_maps(1, 1, 2, 2)), "pathlib.Path.write_text"),
    ):
        (tmp_path / name).write_bytes(b"former")
        monkeypatch.setattr(of, fail)
        assert_error("full", write, tmp_path / name, error=OSError)
    found = {place.name: place.read_bytes() for place in tmp_path.iterdir()}
    assert found == dict.fromkeys(("map.png", "page.html"), b"former")


def test_korean_columns_are_never_turned(drawn, tmp_path):
    words = ["용감한", "화가는", "</s>"]
    for count in (1, 13):
        weights = np.full((2, 3 * count), 1 / (3 * count), dtype=np.float32)
        draw_attention(AttentionMap(words * count, ["a", "b"], weights), tmp_path / "map.png")
    labels = (figure.axes[0].get_xticklabels() for figure in drawn)
    few, many = ([(label.get_text(), label.get_rotation()) for label in each] for each in labels)
    assert few == [(word, 0) for word in words]
    assert many == [("용\n감\n한", 0), ("화\n가\n는", 0), ("</s>", 90)] * 13


def test_a_picture_says_what_it_shows(small_map, drawn, tmp_path):
    for kind, sides in drawing.SIDES.items():
        draw_attention(replace(small_map, kind=kind), tmp_path / "map.png", "layer 1 " * 20)
        axes, bar = drawn[-1].axes
        assert (axes.get_xlabel(), axes.get_ylabel()) == sides
        assert [label.get_text() for label in axes.get_xticklabels()] == small_map.source_tokens
        assert [label.get_text() for label in axes.get_yticklabels()] == small_map.target_tokens
        assert axes.images[0].get_clim() == (0, 1)
        assert (bar.get_ylabel(), drawn[-1].get_suptitle()) == ("attention weight", "layer 1 " * 20)
        # The title is wider than this map.
        assert drawn[-1].get_figwidth() >= drawing._inches(["layer 1 " * 20], 12)
