"""The page to hover over: what is in it, and what it does in a real browser."""

import base64
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from chromium import needs_chromium, opened
from heedful.attention.maps import AttentionMaps
from heedful.attention.measures import attention_rollout, scores_between_words
from heedful.attention.recording import HeadStates
from heedful.attention.report import write_attention_report
from heedful.data.labels import Words
from helpers import assert_refused

HOSTILE = "</script><img src=x onerror=alert(1)>"
SOURCE = ["القطة", "▁صغيرة", HOSTILE, "</s>"]
TARGET = ["고양이", "▁छोटी", "▁😀", ".", "</s>"]


def random_maps(source, target, layers=2, heads=3, kinds=("cross", "encoder", "decoder")):
    generator = np.random.default_rng(0)
    sizes = {"cross": (len(target), len(source)), "encoder": (len(source),) * 2, "decoder": (len(target),) * 2}
    weights = {}
    for kind in kinds:
        scores = generator.exponential(size=(layers, heads, *sizes[kind]))
        scores = np.tril(scores) if kind == "decoder" else scores
        weights[kind] = (scores / scores.sum(axis=-1, keepdims=True)).astype(np.float32)
    words = [None] * len(source), [None] * len(target)
    return AttentionMaps(source, target, ["<s>", *target[:-1]], *words, weights)


@pytest.fixture(scope="module")
def maps():
    return random_maps(SOURCE, TARGET)


def data_of(path):
    page = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page)[1])


def unpacked(text, *shape):
    return np.frombuffer(base64.b64decode(text), dtype="<u2").reshape(shape) / 10_000


def test_the_page_holds_all_weights_to_four_digits_of_words_or_tokens(maps, tmp_path):
    def data(maps, **options):
        return data_of(write_attention_report(maps, tmp_path / "page.html", **options))

    tokens = [f"▁token{i}" for i in range(30)]  # of a base model
    base = write_attention_report(random_maps(tokens, tokens, layers=6, heads=8), tmp_path / "base.html")
    assert base.stat().st_size < 600_000
    found = data(maps)
    assert found["source"]["tokens"] == SOURCE
    for kind, weights in maps.weights.items():
        for name, expected in (("weights", weights), ("rollout", attention_rollout(maps, kind).weights)):
            numbers = unpacked(found["kinds"][kind][name], *expected.shape)
            np.testing.assert_allclose(numbers, expected, atol=0.500001e-4)
    shown = replace(maps, source_shown=Words(["고양이가", "잔다.", "</s>"], [0, 0, 1, 2]))
    assert data(shown, tokens=True) == found
    assert data(shown)["source"]["tokens"] == ["고양이가", "잔다.", "</s>"]
    found, weights = data(shown)["kinds"]["cross"], maps.weights["cross"]
    assert (found["rows"], found["columns"]) == (5, 3)
    numbers, rolled = unpacked(found["weights"], 2, 3, 5, 3), unpacked(found["rollout"], 5, 3)
    np.testing.assert_allclose(numbers[..., 0], weights[..., :2].sum(axis=-1), atol=0.500001e-4)
    np.testing.assert_allclose(rolled[:, 2], attention_rollout(maps).weights[:, 3], atol=0.500001e-4)


def test_hostile_tokens_end_no_element_no_place_is_named_and_directions_are_of_first_letters(maps, tmp_path):
    page = write_attention_report(maps, tmp_path / "page.html", title=f"{HOSTILE} {{{{data}}}}").read_text("utf-8")
    assert "<img" not in page
    assert page.count("</script>") == 2
    assert page.count('"kinds":{') == 1
    assert "&lt;img src=x onerror=alert(1)&gt; {{data}}</title>" in page
    page = write_attention_report(maps, tmp_path / "page.html").read_text("utf-8")
    assert re.findall(r"https?:|url\(|@import|<script src|<link(?! rel=\"icon\" href=\"data:,\")", page) == []
    assert "default-src 'none'" in page
    controls = random_maps(["<2en>", "القطة"], ["صغيرة", "b"])  # control tokens have none
    for shown, expected in ((maps, ["rtl", "ltr", "ltr"]), (controls, ["rtl", "rtl", "rtl"])):
        data = data_of(write_attention_report(shown, tmp_path / "page.html"))
        assert [data[name]["direction"] for name in ("source", "target", "fed")] == expected


def test_wrong_arguments_write_nothing(maps, tmp_path):
    cases = [
        ({"layer": 2}, "`layer` must be between -2 and 1"),
        ({"head": 3}, "`head` must be between 0 and 2"),
        ({"kind": "self"}, "`kind` must be one of cross, encoder, decoder, but is 'self'"),
        ({"path": tmp_path / "page.htm"}, r"`path` must end in one of \.html, but is .*page\.htm "),
        ({"path": tmp_path / "nowhere/page.html"}, "nowhere does not exist"),
    ]
    given = {"maps": maps, "path": tmp_path / "page.html"}
    assert_refused(cases, lambda wrong: write_attention_report(**given | wrong), (ValueError, FileNotFoundError))
    assert list(tmp_path.iterdir()) == []


# In the browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with opened(tmp_path_factory.mktemp("chromium") / "profile") as browser:
        yield browser


@pytest.fixture
def page(browser, maps, tmp_path):
    """The page of the maps, open in light colours, the mouse at its edge."""
    browser.prefer("light")
    browser("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    browser.open(write_attention_report(maps, tmp_path / "page.html", title=HOSTILE))
    yield browser
    assert browser.complaints() == []


# Of the rows from some row on, so many, of a canvas.
PIXELS = "(c => [...c.getContext('2d').getImageData(0, {}, c.width, {}).data])(document.querySelector('{}'))"


def token(side, index):
    return f"document.querySelectorAll('#{side} .token')[{index}]"


def shown(browser, side):
    """Return of each token of a side what is written under it, its background and its ink."""
    return browser.run(
        f"[...document.querySelectorAll('#{side} .token')].map(e => [e.querySelector('small').textContent, "
        "...['backgroundColor', 'color'].map(name => getComputedStyle(e)[name].match(/[\\d.]+/g).map(Number))])"
    )


def choose(browser, group, label):
    browser.click(f"[...document.querySelectorAll('#{group} label')].find(e => e.textContent === '{label}')")


def assert_shows(found, weights):
    """Compare numbers and shading with weights: from white at 0 to the accent at 1 by the root."""
    # To one digit of what has four.
    np.testing.assert_allclose([float(number) for number, _, _ in found], 100 * weights, atol=0.0551)
    for (_, background, _), weight in zip(found, weights, strict=True):
        expected = [255 + math.sqrt(weight) * (channel - 255) for channel in (0x1E, 0x4F, 0xAE)]
        np.testing.assert_allclose(background[:3], expected, atol=1.5)


@needs_chromium
def test_hovering_a_word_shades_what_it_looks_at_and_writes_the_numbers(page, maps):
    for row in (2, 0):
        page.move_to(token("rows", row))
        assert_shows(shown(page, "columns"), maps.map("cross").weights[row])
    best = np.argsort(-maps.map("cross").weights[0])
    assert page.texts("#detail li bdi") == [SOURCE[i] for i in best]
    lines = page.run("[...document.querySelectorAll('#detail li')].map(e => e.lastChild.textContent)")
    np.testing.assert_allclose([*map(float, lines)], maps.map("cross").weights[0][best], atol=1e-4)
    page("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    assert [number for number, _, _ in shown(page, "columns")] == [""] * len(SOURCE)
    page.move_to(token("columns", 1))  # a word of the source shows which words look at it
    assert_shows(shown(page, "rows"), maps.map("cross").weights[:, 1])


@needs_chromium
def test_kinds_layers_and_heads_are_chosen_also_by_their_small_maps_which_look_like_their_weights(page, maps):
    page.click('document.querySelector(\'.head[data-layer="1"][data-head="2"]\')')
    for canvas in (".head[aria-pressed=true] canvas", "#map canvas"):
        pixels = page.run(PIXELS.format(0, "c.height", canvas))
        reds = np.array(pixels).reshape(len(TARGET), len(SOURCE), 4)[..., 0]
        np.testing.assert_allclose(reds, 255 + np.sqrt(maps.weights["cross"][1, 2]) * (0x1E - 255), atol=1.5)
    page.move_to(token("rows", 4))
    assert_shows(shown(page, "columns"), maps.weights["cross"][1, 2, 4])
    for kind in ("cross", "encoder", "decoder"):
        choose(page, "kinds", kind)
        choose(page, "layers", "0")
        choose(page, "heads-of-layer", "1")
        page.move_to(token("rows", 3))
        assert_shows(shown(page, "columns"), maps.weights[kind][0, 1, 3])
        choose(page, "layers", "rollout")
        page.move_to(token("rows", 3))
        assert_shows(shown(page, "columns"), attention_rollout(maps, kind).weights[3])
        for side, labels in (("columns", maps.map(kind).source_tokens), ("rows", maps.map(kind).target_tokens)):
            assert page.texts(f"#{side} bdi") == page.texts(f"#map .{side} bdi") == labels


@pytest.fixture(scope="module")
def scored():
    """Random maps with scores, of which the decoder's are masked."""
    maps = random_maps(["a", "b", "c"], ["x", "y", "z"])
    generator = np.random.default_rng(1)
    states = {}
    for kind, weights in maps.weights.items():
        scores = generator.normal(scale=20, size=weights.shape).astype(np.float32)
        scores[weights == 0] = -np.inf
        states[kind] = [HeadStates(*[torch.zeros(3, 3, 2)] * 3, torch.from_numpy(layer), 0.5) for layer in scores]
    return replace(maps, states=states)


def test_the_page_holds_all_scores_what_is_masked_and_means_between_words(scored, tmp_path):
    data = data_of(write_attention_report(scored, tmp_path / "page.html"))
    for kind in scored.kinds:
        found, scores = data["kinds"][kind]["scores"], scored.scores(kind)
        parts = np.frombuffer(base64.b64decode(found["parts"]), dtype="<i2").reshape(scores.shape)
        is_masked = np.isinf(scores)
        assert is_masked.any() == (kind == "decoder")
        assert ((parts == -32_768) == is_masked).all()
        numbers = parts[~is_masked] / 32_767 * found["largest"]
        np.testing.assert_allclose(numbers, scores[~is_masked], atol=found["largest"] / 32_767)
    scores = np.array([[1, -np.inf, -np.inf], [2, 3, -np.inf], [4, 5, 6]])
    rows, columns = Words(["a", "b"], [0, 0, 1]), Words(["c", "d"], [0, 0, 1])
    np.testing.assert_array_equal(scores_between_words(scores, rows, columns), [[2, -np.inf], [4.5, 6]])


@needs_chromium
def test_scores_are_shown_in_place_of_weights_and_as_dots(browser, scored, tmp_path):
    browser.open(write_attention_report(scored, tmp_path / "page.html", kind="decoder", layer=0, head=1))
    choose(browser, "numbers", "scores")
    browser.move_to(token("rows", 1))
    first, second, _ = scored.scores("decoder")[0, 1, 1]
    assert browser.texts("#columns small") == [f"{first:.2f}", f"{second:.2f}", "−∞"]
    assert "raw scores" in browser.run("document.getElementById('map-note').textContent")
    pixels = browser.run(PIXELS.format(48, 48, "#map canvas"))
    inked = (np.array(pixels).reshape(48, 3, 48, 4)[..., 3] > 127).sum(axis=(0, 2))
    largest = np.abs(np.where(np.isinf(scored.scores("decoder")), 0, scored.scores("decoder"))).max()
    areas = [math.pi * (0.48 * 48) ** 2 * abs(score) / largest for score in (first, second)]
    np.testing.assert_allclose(inked, [*areas, 0], atol=40)
    choose(browser, "numbers", "weights")
    browser.move_to(token("rows", 2))
    assert_shows(shown(browser, "columns"), scored.weights["decoder"][0, 1, 2])
    choose(browser, "layers", "rollout")
    assert browser.run("document.getElementById('numbers-shown').hidden") is True
    assert browser.complaints() == []


@needs_chromium
def test_the_page_is_in_korean_too_and_keeps_what_was_chosen(page, maps):
    def words_in(language):
        page.run(f"find('language').value = '{language}'; find('language').dispatchEvent(new Event('change'))")
        return page.run("document.querySelector('main').innerText.replace(/^.*\\n/, '')")  # without the title

    choose(page, "layers", "0")
    page.click(token("rows", 1))
    english, korean = words_in("en"), words_in("ko")
    assert page.run("document.documentElement.lang") == "ko"
    assert "Point at a word" in english
    assert "가리키거나" in korean
    for each in [*page.texts("#columns bdi"), *page.texts("#rows bdi"), "English"]:
        korean = korean.replace(each, "")
    assert re.findall("[A-Za-z]{2,}", korean) == ["Tab", "Esc"]
    label = page.run("document.querySelector('#map canvas').ariaLabel")
    assert label.startswith("교차 어텐션, 층 0, 헤드 평균의 히트맵")
    assert_shows(shown(page, "columns"), maps.map("cross", 0).weights[1])
    assert words_in("en") == english


@needs_chromium
def test_everything_to_operate_has_a_name_and_a_reading_order(page, maps):
    # A page without scores offers none.
    assert page.run("document.getElementById('numbers').children.length") == 0
    nameless = page.run(
        "[...document.querySelectorAll('button, input, canvas, [role=group]')].filter(e => !e.closest('[aria-hidden]')"
        " && !e.getAttribute('aria-label') && !e.getAttribute('aria-labelledby')).length"
    )
    assert nameless == 0
    for side, is_to_left in (("columns", True), ("rows", False)):
        places = [page.run(f"{token(side, i)}.getBoundingClientRect().x") for i in range(3)]
        assert places == sorted(places, reverse=is_to_left)
    page.run(f"{token('columns', 0)}.focus()")
    # The source is read from the right to the left.
    for key, label in (("ArrowLeft", SOURCE[1]), ("Tab", TARGET[0])):
        page.press(key)
        assert page.run("document.activeElement.getAttribute('aria-label')") == label
    for key, row in (("ArrowRight", 1), ("End", -1)):
        page.press(key)
        assert_shows(shown(page, "columns"), maps.map("cross").weights[row])
    spoken = page.run("document.getElementById('spoken').textContent")
    assert spoken.startswith("</s> looks at ")
    assert page.run("document.getElementById('spoken').getAttribute('aria-live')") == "polite"


@needs_chromium
def test_what_was_pointed_at_is_marked_in_the_map_and_a_click_on_the_map_keeps_it_until_escape(page, maps):
    marked = "['left', 'top', 'width', 'height'].map(name => parseInt(document.querySelector('.band').style[name]))"
    for side, index, band, label in (
        ("rows", 2, [0, 48, 24 * len(SOURCE), 24], TARGET[2]),
        ("columns", 1, [24, 0, 24, 24 * len(TARGET)], SOURCE[1]),
    ):
        page.move_to(token(side, index))
        assert page.run(marked) == band
        assert page.texts("#map .on") == [label]
    page.run(
        "(c => { const b = c.getBoundingClientRect(); c.dispatchEvent(new MouseEvent('click', "
        "{clientX: b.x + 5, clientY: b.bottom})); })(document.querySelector('#map canvas'))"
    )
    assert page.run("state.pinned") is False  # by a click on the edge
    page.run("document.querySelector('#map canvas').scrollIntoView({block: 'center'})")
    x, y = page.run("(b => [b.x, b.y])(document.querySelector('#map canvas').getBoundingClientRect())")
    place = {"x": x + 1.5 * 24, "y": y + 2.5 * 24}
    page("Input.dispatchMouseEvent", type="mouseMoved", **place)
    note = page.run("document.getElementById('map-note').textContent")
    assert note == f"{TARGET[2]} → {SOURCE[1]}: {maps.map().weights[2, 1]:.4f}"
    for kind in ("mousePressed", "mouseReleased"):
        page("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)
    page.move_to(token("rows", 0))
    assert_shows(shown(page, "columns"), maps.map("cross").weights[2])
    assert page.run(f"{token('rows', 2)}.getAttribute('aria-pressed')") == "true"
    page.press("Escape")
    assert [number for number, _, _ in shown(page, "columns")] == [""] * len(SOURCE)


@needs_chromium
def test_hostile_tokens_are_text_and_nothing_is_fetched(page, tmp_path):
    assert page.run(f"{token('columns', 2)}.querySelector('bdi').textContent") == HOSTILE
    assert page.run("document.querySelectorAll('img').length") == 0
    assert page.run("document.querySelector('h1').textContent") == HOSTILE
    page.move_to(token("rows", 1))
    assert page.requests() == [(tmp_path / "page.html").as_uri()]
    assert page.run("performance.getEntriesByType('resource').length") == 0


@needs_chromium
def test_pages_begin_with_what_was_asked_for_whatever_the_stacks(browser, maps, tmp_path):
    browser.open(write_attention_report(maps, tmp_path / "page.html", kind="decoder", layer=0, head=2))
    chosen = browser.run("[...document.querySelectorAll('input:checked')].map(e => e.nextSibling.textContent)")
    assert chosen == ["decoder", "0", "2"]
    browser.move_to(token("rows", 1))
    assert_shows(shown(browser, "columns"), maps.weights["decoder"][0, 2, 1])
    deep, flat = (random_maps(["a", "b"], ["x", "y", "z"], layers=layers) for layers in (4, 1))
    maps = replace(flat, weights={**flat.weights, "encoder": deep.weights["encoder"]})
    browser.open(write_attention_report(maps, tmp_path / "page.html", kind="encoder"))
    for kind, layer, row in (("decoder", None, 2), ("encoder", "rollout", 1)):
        if layer is not None:
            choose(browser, "layers", layer)
        choose(browser, "kinds", kind)
        browser.move_to(token("rows", row))
        assert_shows(shown(browser, "columns"), maps.map(kind).weights[row])
    assert browser.complaints() == []
