"""A page computes what its model does with int8 weights, by itself, and shows what each token attended to."""

import json
import re
from pathlib import Path

import pytest
import torch

from chromium import in_node, needs_chromium, needs_node, opened
from heedful.data.tokenizer_training import train_tokenizers
from heedful.decoding.loading import load_model
from heedful.export import page as page_module
from heedful.export.page import write_page
from heedful.pipeline_heed import TEXT_TASK, pipelines_of_folder
from helpers import assert_error, assert_refused, change_json, dequantized, tiny_model, tiny_rnn
from memorised import PAIRS, memorised_model, saved_in

# Runs the scripts of a page as they stand there; prints ids, tokens, score and text for each model and sentence.
RUN = r"""
const page = (await import("fs")).readFileSync(process.argv[1], "utf8");
const code = page.match(/<script>\n"use strict";\n([\s\S]*?)<\/script>/)[1];
const models = JSON.parse(page.match(/const MODELS = (\[.*\]);/)[1]);
const kinds = "{ heed: Transformer, heed_rnn: Recurrent }";
const [Tokenizer, search, classes] = new Function(`${code}; return [Tokenizer, search, ${kinds}];`)();
const [texts, beams] = JSON.parse(process.argv[2]);
console.log(JSON.stringify(models.map((data) => {
  const bytes = Uint8Array.from(atob(data.weights), (letter) => letter.charCodeAt(0)).buffer;
  const tokenizer = new Tokenizer(data.tokenizer), model = new classes[data.config.model_type](data, bytes);
  return texts.map((text) => {
    const ids = tokenizer.encode(text), settings = { ...data.search, num_beams: beams ?? data.search.num_beams };
    const { encoded, hypotheses } = search(model, ids, settings);
    const [{ tokens, score, steps } = { tokens: [], steps: [] }] = hypotheses;
    const weights = (head) => Array.from(head.weights);
    const cross = steps.map((step) => step.attention.cross.map((layer) => layer.map(weights)));
    return { ids, tokens, score, cross, count: hypotheses.length, text: tokenizer.decode(tokens) };
  });
})));
"""
SHALLOW = {"encoder_layers": 1, "decoder_layers": 1}
PAPER, PRE_NORM = {"norm_placement": "post"}, {"norm_placement": "pre", **SHALLOW}
LEARNED = {"position_encoding": "learned", "embedding_norm": True, "max_position_embeddings": 20, **SHALLOW}
RECURRENT = {
    "bahdanau": {"cell": "gru", "attention": "additive"},
    "luong": {"cell": "lstm", "attention": "general", "encoder_layers": 2, "decoder_layers": 2, "bridge": "copy"},
    "one_way": {"cell": "rnn", "attention": "dot", "bidirectional": False, "reverse_source": True, "bridge": "none"},
    "sigmoid": {"cell": "rnn", "activation_function": "sigmoid", "attention": "additive"},
    "unfed": {"cell": "lstm", "attention": "scaled_dot", "input_feeding": False, "decoder_layers": 2},
}
TEXTS = [*PAIRS, "Hello  wörld 12's!\n  x", "그녀는 </s> 사과를 ㅎ 읽는다 😀"]


@pytest.fixture(scope="module")
def tokenizers():
    return train_tokenizers(list(PAIRS), list(PAIRS.values()), vocab_size=300)


def saved(folder: Path, tokenizers, has_learned: bool = True, **options) -> Path:
    if has_learned:
        model = memorised_model(tokenizers, PAIRS, **options)
    else:
        make, repeated = (tiny_rnn, None) if "cell" in options else (tiny_model, 1)
        model = make(vocab_size=len(tokenizers.source), **tokenizers.special_ids(), **options)
        model.generation_config.update(eos_token_id=2, no_repeat_ngram_size=repeated)
    # Of random weights, hypotheses become as good as each other to the last bit after some more tokens.
    model.generation_config.max_length = 32 if has_learned else 12
    return saved_in(folder, model, tokenizers)


def run(path: Path, texts: list[str], beams: int | None) -> list[list[dict]]:
    return in_node(RUN, path, json.dumps([texts, beams]))


@needs_node
def test_a_page_gives_the_tokens_of_generate_greedily_and_with_beams_of_recurrent_models_too(tokenizers, tmp_path):
    kinds = {"the_paper": PAPER} | RECURRENT
    folders = [saved(tmp_path / name, tokenizers, name == "the_paper", **kinds[name]) for name in kinds]
    models = [dequantized(load_model(folder)) for folder in folders]
    write_page(folders, tmp_path / "page.html")
    for beams, texts in ((1, TEXTS), (3, TEXTS[4:])):
        rows = tokenizers.encode_source(texts)
        for folder, same, found in zip(folders, models, run(tmp_path / "page.html", texts, beams), strict=True):
            for text, ids, one in zip(texts, rows, found, strict=True):
                assert one["ids"] == ids, text
                out = same.generate(torch.tensor([ids]), num_beams=beams)
                assert [1, *one["tokens"]] == out[0].tolist(), (folder.name, beams, text)
                assert one["count"] == beams
                assert folder.name != "the_paper" or one["text"] == PAIRS.get(text, one["text"])
            assert len({tuple(one["tokens"]) for one in found}) > len(texts) // 2


@needs_node
def test_a_page_makes_nothing_up_for_what_nobody_sees_or_what_is_beyond_its_positions(tokenizers, tmp_path):
    folder = saved(tmp_path / "learned", tokenizers, False, **LEARNED)
    write_page([folder], tmp_path / "page.html")
    shorter = ("가" * count for count in range(30, 0, -1))
    fits = next(text for text in shorter if len(tokenizers.source(text).input_ids) <= 20)
    texts = [fits, fits + "가가가", "", " ", "\u200b", "\u00ad \u200b", "\u3164", "\ufeff\x07\n"]
    (found,) = run(tmp_path / "page.html", texts, 1)
    assert [one["count"] for one in found] == [1, *[0] * 7]
    assert [one["ids"] for one in found] == tokenizers.encode_source([fits, fits + "가가가", *[""] * 6])


@needs_node
def test_the_attention_that_a_page_shows_is_the_models(tokenizers, tmp_path):
    for name, options in {"a-run": PAPER, "recurrent": RECURRENT["bahdanau"]}.items():
        folder = saved(tmp_path / name / "model", tokenizers, name == "a-run", **options)
        write_page([folder], tmp_path / "page.html")
        assert f"<title>{name}</title>" in (tmp_path / "page.html").read_text(encoding="utf-8")
        ((found,),) = run(tmp_path / "page.html", TEXTS[:1], 1)
        same = dequantized(load_model(folder))
        same.set_attn_implementation("eager")
        fed = torch.tensor([[1, *found["tokens"][:-1]]])
        output = same(torch.tensor([found["ids"]]), decoder_input_ids=fed, output_attentions=True)
        expected = torch.stack([layer[0] for layer in output.cross_attentions]).permute(2, 0, 1, 3)  # (T, L, h, S)
        assert (torch.tensor(found["cross"]) - expected).abs().max() < 1e-4
        assert expected.std() > 0.01


@needs_chromium
def test_a_page_opens_from_a_disk_translates_and_asks_the_network_for_nothing(tokenizers, tmp_path, heedful_command):
    folders = [
        saved(tmp_path / "the_paper", tokenizers, **PAPER),
        saved(tmp_path / "pre_norm", tokenizers, **PRE_NORM),
    ]
    folders.append(saved(tmp_path / "recurrent", tokenizers, False, **RECURRENT["luong"]))
    path = tmp_path / "page.html"
    assert heedful_command("page", *folders, "-o", path, "--example", "<b>네.")[:2] == (0, f"{path}\n")
    with opened(tmp_path / "profile", path) as browser:
        assert browser.run("document.getElementById('source').value") == "<b>네."
        browser.run("source.value = '비가 온다.'; views.forEach((view) => view.translate(source.value))")
        assert browser.texts("output")[:2] == ["It rains."] * 2
        assert browser.run("views[2].part('.kind').options[1].disabled")  # a recurrent encoder attends to nothing
        browser.run("language = 'en'; sayAll()")
        # With the mouse, and with the keyboard: the token, and the numbers behind it.
        browser.move_to("document.querySelectorAll('.target button')[2]")
        asked = "document.querySelector('.asked').textContent"
        first = browser.run(asked)
        browser.press("Tab")
        browser.run("document.querySelectorAll('.target button')[3].focus()")
        assert first.startswith("Token ")
        assert browser.run(asked) != first
        cells = "[...row.cells].map((each) => each.textContent)"
        rows = f"[...document.querySelector('.weights').rows].map((row) => {cells})"
        table = browser.run(rows)
        assert "".join(row[0] for row in table) == "비가▁온다.</s>"
        assert sum(float(row[3]) for row in table) == pytest.approx(1, abs=0.02)
        assert {len(row) for row in table} == {4}
        assert browser.run("document.querySelector('.next').rows.length") == 8
        for kind in ("encoder", "decoder", "cross"):
            browser.run(f"document.querySelector('.kind').value = '{kind}'; views[0].chooseKind()")
            assert browser.run(rows)
        # Layers and heads count as `heedful attention` counts them.
        numbers = "[...document.querySelector('%s').options].map((each) => each.textContent)"
        assert [browser.run(numbers % name) for name in (".layer", ".head")] == [["0", "1"], ["mean", *"0123"]]
        # No token is half a character: those of one stand together, and what it attends to adds up to 1.
        browser.run("source.value = '곰돌이가 뷁 잔다.'; views[0].translate(source.value)")
        labels = "[...views[0].section.querySelectorAll('.source button')].map((each) => each.textContent)"
        assert "".join(browser.run(labels)) == "곰돌이가▁뷁▁잔다.</s>"
        assert len(browser.run(labels)) < len(tokenizers.encode_source(["곰돌이가 뷁 잔다."])[0])
        assert sum(float(row[3]) for row in browser.run(rows)) == pytest.approx(1, abs=0.02)
        browser.run("language = 'ko'; sayAll()")
        assert "원문 토큰" in browser.run("document.querySelector('h3').textContent")
        assert "번역" in browser.run("document.querySelector('main > p').textContent")
        browser("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=1, mobile=True)
        assert browser.run("document.documentElement.scrollWidth") <= 360
        assert browser.requests() == [path.as_uri()]
        assert not browser.complaints()


@needs_chromium
def test_a_page_of_a_model_for_another_task_speaks_of_no_translation_and_names_it_once(tokenizers, tmp_path):
    folder = saved(tmp_path / "answers" / "model", tokenizers, **SHALLOW)
    change_json(folder / "config.json", custom_pipelines=pipelines_of_folder(TEXT_TASK))
    card = "---\n---\n\n# 문의 <b>답변\n\n## Limits\n\n- It knows no prices.\n\n## How to use\n\nNot this.\n"
    (folder / "README.md").write_text(card, encoding="utf-8")
    write_page([folder], tmp_path / "page.html", "네. " * 9 + "가" * 99)
    with opened(tmp_path / "profile", tmp_path / "page.html") as browser:
        for language, words in {"en": ["translat"], "ko": ["번역", "원문"]}.items():
            browser.run(f"language = '{language}'; sayAll()")
            shown = browser.run("document.querySelector('main').innerText")
            assert not any(word in shown for word in words)
            assert shown.count("문의 <b>답변") == 1
        assert browser.run("document.querySelector('.limits').textContent") == "- It knows no prices."
        browser("Emulation.setDeviceMetricsOverride", width=390, height=740, deviceScaleFactor=1, mobile=True)
        assert browser.run("document.documentElement.scrollWidth") <= 390
        ends = "[...document.querySelectorAll('.weights td')].map((each) => each.getBoundingClientRect().right)"
        assert max(browser.run(ends)) <= 390


@pytest.mark.parametrize(
    ("code", "example"),
    [
        ('print(translate("Lampe \\"bleue\\" <b>é\\n2", tgt_lang="en"))', "Lampe &quot;bleue&quot; &lt;b&gt;é\n2"),
        ('inputs = tokenizer(["Désolé."], return_tensors="pt")', "Désolé."),
        ('print(generate(text)[0]["generated_text"])', ""),
        ('translate("\\x" + "not JSON")', ""),
        ("no code", ""),
    ],
)
def test_a_page_begins_with_the_example_of_the_models_card_or_with_nothing(tokenizers, tmp_path, code, example):
    folders = [saved(tmp_path / name, tokenizers, False, **SHALLOW) for name in ("bare", "described")]
    (folders[1] / "README.md").write_text(f"# x\n\n```python\n{code}\n```\n", encoding="utf-8")
    write_page(folders, tmp_path / "page.html")
    assert f">{example}</textarea>" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_page_is_little_larger_than_its_weights_and_no_text_ends_its_script(tokenizers, tmp_path):
    folder = saved(tmp_path / "<!--<script>", tokenizers, **SHALLOW)
    write_page([folder], tmp_path / "page.html", example="</script><script>alert(1)</script>")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert text.count("<script>") == text.count("</script>") == 2
    assert "<!--" not in text
    parameters = sum(p.numel() for p in load_model(folder).parameters())
    assert len(text.encode()) <= 1.5 * parameters + 300_000


def test_what_a_page_cannot_hold_is_refused_by_name(tokenizers, tmp_path, monkeypatch):
    sizes = {"vocab_size": len(tokenizers.source), **tokenizers.special_ids()}
    words = train_tokenizers(list(PAIRS), list(PAIRS.values()), vocab_size=300, algorithm="unigram")
    saved_in(tmp_path / "attention", tiny_rnn(**sizes, attention="none"), tokenizers)
    saved_in(tmp_path / "tokenizer", tiny_model(vocab_size=len(words.source), **words.special_ids()), words)
    cases = [("attention", "`attention` must be"), ("tokenizer", "must be byte-level BPE with NFC .* but is Unigram")]
    assert_refused(cases, lambda name: write_page([tmp_path / name], tmp_path / "page.html"))
    monkeypatch.setattr(page_module, "LARGEST", 1000)
    with pytest.raises(ValueError, match=r"must have at most 1,000 bytes of weights, but have \d\d"):
        write_page([saved(tmp_path / "large", tokenizers, **SHALLOW)], tmp_path / "page.html")
    assert_error(re.escape("must end in one of .html"), write_page, [tmp_path / "large"], tmp_path / "page.txt")
    assert not (tmp_path / "page.html").exists()
