"""What transformers.js computes with an exported folder, in Node and in a browser, is what `generate()` does."""

import base64
import json
import re
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from test_export_settings import ASKED, TEXTS, accepted, generated
from typer.testing import CliRunner

from chromium import EXECUTABLE, MODULES, Chromium, served
from heedful.cli.main import app
from heedful.data.tokenizer_training import train_tokenizers
from heedful.publishing.exports.onnx_model import session_of
from heedful.publishing.web import web_export
from heedful.publishing.web.web_export import export_web, greedy_config
from memorised import PAIRS, memorised_model

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

PACKAGE = MODULES / "@huggingface" / "transformers"
NODE = shutil.which("node")
needs_package = pytest.mark.skipif(not PACKAGE.is_dir(), reason="transformers.js is not installed (make browser)")
needs_chromium = pytest.mark.skipif(EXECUTABLE is None, reason="Chromium is not installed")
TRANSLATE = """
const { pipeline, env } = await import(process.argv[2]);
env.allowRemoteModels = false;
env.localModelPath = process.argv[3];
const texts = JSON.parse(process.argv[4]);
const found = {};
for (const dtype of ["fp32", "q8"]) {
  const translate = await pipeline("translation", "web", { dtype });
  found[dtype] = (await translate(texts)).map((one) => one.translation_text);
}
const inputs = await (await (await import(process.argv[2])).AutoTokenizer.from_pretrained("web"))(texts[0]);
const model = await (await import(process.argv[2])).AutoModelForSeq2SeqLM.from_pretrained("web", { dtype: "fp32" });
const out = await model.generate({ ...inputs, return_dict_in_generate: true, output_attentions: true });
const newest = (layer) => layer.tolist()[0].map((head) => head.at(-1));
found.attention = out.cross_attentions.map((layers) => layers.map(newest));
console.log(JSON.stringify(found));
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model, and its folder."""
    pair = train_tokenizers(list(PAIRS), list(PAIRS.values()), vocab_size=270)
    model = memorised_model(pair, PAIRS, encoder_layers=1, decoder_layers=1)
    folder = tmp_path_factory.mktemp("saved") / "model"
    for each in (model, pair):
        each.save_pretrained(folder)
    return model.set_attn_implementation("eager") or model, pair, folder


@pytest.fixture(scope="module")
def web(saved, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "web"
    told = CliRunner().invoke(app, ["export", "web", str(saved[2]), str(out), "--count", "6"])
    assert told.exit_code == 0, told.output
    assert re.search(r"greedy, float32: 0 of 6 .*\ngreedy, int8: \d of 6 .*\n0\.\d MB in int8", told.output)
    return out


def attention_of(saved):
    """The attention of each generated token of the first sentence to the source, `(tokens, layers, heads, source)`."""
    model, pair, _ = saved
    source = torch.tensor(pair.encode_source(list(PAIRS)[:1]))
    out = model.generate(source, num_beams=1, return_dict_in_generate=True, output_attentions=True)
    return torch.stack([torch.stack([layer[0, :, -1] for layer in step]) for step in out.cross_attentions])


def test_one_decoder_serves_every_step_and_gives_the_attention(saved, web):
    decoder = session_of(web / "onnx" / "decoder_model_merged.onnx")
    model, pair, _ = saved
    source = torch.tensor(pair.encode_source(list(PAIRS)[:1]))
    states = model.get_encoder()(source).last_hidden_state.detach().numpy()
    fixed = {each.name: each.shape for each in decoder.get_inputs()}
    assert fixed["past_key_values.0.decoder.key"] == ["batch_size", 4, "past_decoder_sequence_length", 12]
    past = {name: np.zeros([1, 4, 0, 12], np.float32) for name in fixed if name.startswith("past")}
    names, token, found = [each.name for each in decoder.get_outputs()], 1, []
    for _ in range(8):
        inputs = {"input_ids": np.array([[token]]), "encoder_attention_mask": np.ones(source.shape, np.int64)}
        outputs = decoder.run(None, {**inputs, "encoder_hidden_states": states, **past})
        told = dict(zip(names, outputs, strict=True))
        token = int(told["logits"][0, -1].argmax())
        past = {name: told[name.replace("past_key_values", "present")] for name in past}
        found.append(told["cross_attentions.0"][0, :, -1])
    expected = attention_of(saved)[:8, 0]
    assert np.abs(np.stack(found) - expected.numpy()).max() < 1e-5
    assert expected.std() > 0.01


def test_weights_that_both_steps_need_are_in_the_file_once(web):
    graph = onnx.load(web / "onnx" / "decoder_model_merged.onnx").graph
    contents = [weight.raw_data for weight in graph.initializer if len(weight.raw_data) > 64]
    assert len(contents) == len(set(contents)) > 10


@needs_package
@pytest.mark.skipif(NODE is None, reason="Node is not installed")
def test_transformers_js_gives_the_translations_and_the_attention_in_node(saved, web, tmp_path):
    script = tmp_path / "translate.mjs"
    script.write_text(TRANSLATE, encoding="utf-8")
    entry = PACKAGE / "dist" / "transformers.node.mjs"
    command = [NODE, script, entry, f"{web.parent}/", json.dumps(list(PAIRS), ensure_ascii=False)]
    done = subprocess.run(list(map(str, command)), capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["fp32"] == found["q8"] == list(PAIRS.values())
    assert np.abs(np.array(found["attention"]) - attention_of(saved).numpy()).max() < 1e-5


GENERATE = """
const { AutoModelForSeq2SeqLM, Tensor, env } = await import(process.argv[2]);
Object.assign(env, { allowRemoteModels: false, localModelPath: process.argv[3] });
const found = {};
for (const [name, sources] of Object.entries(JSON.parse(process.argv[4]))) {
  const model = await AutoModelForSeq2SeqLM.from_pretrained(name, { dtype: "fp32" });
  found[name] = [];
  for (const ids of sources) {
    const tensor = (values) => new Tensor("int64", BigInt64Array.from(values, BigInt), [1, ids.length]);
    const tokens = await model.generate({ input_ids: tensor(ids), attention_mask: tensor(ids.map(() => 1)) });
    found[name].push(tokens.tolist()[0].slice(1).map(Number));
  }
}
console.log(JSON.stringify(found));
"""


@needs_package
@pytest.mark.skipif(NODE is None, reason="Node is not installed")
def test_transformers_js_carries_out_the_settings_of_the_generation_config_in_node(saved, web, tmp_path):
    model, pair, _ = saved
    each = accepted("transformers.js", (model, pair), ASKED)
    sources = pair.encode_source(TEXTS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        greedy = {f"s{number}": greedy_config(config) for number, config in enumerate(each.values())}
    for name, config in greedy.items():
        shutil.copytree(web, tmp_path / name)
        config.to_json_file(tmp_path / name / "generation_config.json")
    script = tmp_path / "generate.mjs"
    script.write_text(GENERATE, encoding="utf-8")
    entry = PACKAGE / "dist" / "transformers.node.mjs"
    command = [NODE, script, entry, f"{tmp_path}/", json.dumps(dict.fromkeys(greedy, sources))]
    done = subprocess.run(list(map(str, command)), capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    expected = {name: [generated(model, ids, config) for ids in sources] for name, config in greedy.items()}
    assert json.loads(done.stdout) == expected
    assert len(set(map(json.dumps, expected.values()))) > 7
    assert len(expected) == 17


def test_the_page_runs_only_files_whose_hashes_it_knows(web):
    page = (web / "index.html").read_text(encoding="utf-8")
    found = web_export.LIBRARY.findall(page)
    assert [(package, version) for _, package, version, _, _ in found][:2] == [
        ("@huggingface/transformers", "4.3.1"),
        ("onnxruntime-web", "1.31.0-dev.20260914-8d85527a0"),
    ]
    assert "@huggingface/transformers@4.3.1" in (Path(__file__).parents[2] / "Makefile").read_text()
    assert len(re.findall(r"https?:", page)) == len(found) + 1  # the policy names the place too
    assert all(len(base64.b64decode(digest)) == 48 for *_, digest in found)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert "default-src 'none'" in policy
    assert re.search(r"script-src ([^;]*);", policy)[1] == "'unsafe-inline' 'wasm-unsafe-eval' blob:"
    assert re.search(r"connect-src ([^;]*);", policy)[1] == f"'self' blob: {web_export.CDN}"


@needs_package
def test_the_hashes_are_those_of_npms_files():
    assert len(web_export._library(MODULES)) == 3


def test_a_folder_without_npms_packages_is_refused_before_anything_is_written(saved, tmp_path):
    (tmp_path / "onnxruntime-web" / "dist").mkdir(parents=True)
    message = r"`packages` must be a folder node_modules with .*transformers 4\.3\.1, but .*min\.js is missing"
    with pytest.raises(ValueError, match=message):
        export_web(saved[2], tmp_path / "out", list(PAIRS), tmp_path)
    file = tmp_path / "@huggingface" / "transformers" / "dist" / "transformers.min.js"
    file.parent.mkdir(parents=True)
    file.write_text("alert(1)")
    with pytest.raises(ValueError, match=r"transformers\.min\.js is another file"):
        export_web(saved[2], tmp_path / "out", list(PAIRS), tmp_path)
    assert not (tmp_path / "out").exists()


@needs_package
@needs_chromium
def test_the_page_translates_and_shows_attention_in_a_browser(web, tmp_path):
    with served(web=web) as address:
        translate_in_a_browser(address, tmp_path, f"{address}/npm/")


@needs_package
@needs_chromium
def test_a_page_with_its_library_beside_it_loads_nothing_from_elsewhere(saved, web, tmp_path):
    web = shutil.copytree(web, tmp_path / "web")
    web_export._write_page(web, "name", "…", web_export._library(MODULES))
    assert "https://" not in (web / "index.html").read_text(encoding="utf-8")
    (tmp_path / "profile").mkdir()
    with served(web=web) as address:
        translate_in_a_browser(address, tmp_path / "profile", f"{address}/web/")


@needs_chromium
@pytest.mark.parametrize("answer", ["nothing", "another file"])
def test_a_page_whose_library_cannot_be_had_says_so(web, tmp_path, answer):
    web = shutil.copytree(web, tmp_path / "web")
    page = (web / "index.html").read_text(encoding="utf-8").replace(web_export.CDN, "/web/nowhere/")
    if answer == "another file":
        page = re.sub(r"/web/nowhere/\S*transformers.min.js", "other.js", page)
        (web / "other.js").write_text("document.body.textContent = 'run'", encoding="utf-8")
    (web / "index.html").write_text(page, encoding="utf-8")
    (tmp_path / "profile").mkdir()
    browser = Chromium(tmp_path / "profile")
    try:
        with served(web=web) as address:
            browser("Page.navigate", url=f"{address}/web/")
            said, end = "", time.monotonic() + 60
            while "cannot be loaded" not in said and time.monotonic() < end:
                time.sleep(0.1)
                said = browser.run("document.getElementById('state')?.textContent ?? ''")
    finally:
        browser.close()
    assert re.search(
        r"(transformers\.min|other)\.js cannot be loaded, or is not the file that this page was made for", said
    )


def translate_in_a_browser(address, tmp_path, library):
    browser = Chromium(tmp_path)
    try:
        browser("Page.navigate", url=f"{address}/web/")
        end = time.monotonic() + 60

        def shown(text: str) -> list[str]:
            while time.monotonic() < end and browser.run("document.querySelector('output').textContent") != text:
                time.sleep(0.1)
            rows = "[...document.querySelectorAll('#attention tr')].map((row) => row.children[0].textContent)"
            return browser.run(rows)

        # The example on the page is the first built-in sentence, which this model does not know.
        end = time.monotonic() + 60
        while time.monotonic() < end and not browser.run("document.querySelector('output')?.textContent"):
            time.sleep(0.1)
        for source, target in list(PAIRS.items())[:2]:
            box = "document.getElementById('source')"
            browser.run(f"{box}.value = {json.dumps(source)}; {box}.dispatchEvent(new Event('input'))")
            assert shown(target) == ["", *target.split(), "</s>"]
        weights = "[...document.querySelectorAll('#attention td')].map((e) => +e.style.getPropertyValue('--weight'))"
        assert max(browser.run(weights)) > 0.2
        assert not browser.complaints()
        assert all(url.startswith((address, f"blob:{address}")) for url in browser.requests())
        assert sum(url.startswith(library) and "transformers" in url for url in browser.requests()) == 1
    finally:
        browser.close()


@pytest.mark.slow
@needs_package
@pytest.mark.skipif(EXECUTABLE is None, reason="Chromium is not installed")
def test_the_forms_for_browsers_are_measured_side_by_side(saved, tmp_path):
    pairs = tmp_path / "pairs.jsonl"
    lines = [json.dumps({"ko": source, "en": target}) for source, target in PAIRS.items()]
    pairs.write_text("\n".join(lines * 4), encoding="utf-8")  # `web` compares with twenty sentences
    script = Path(__file__).parents[2] / "scripts" / "benchmarks" / "browser.py"
    options = ["--data", pairs, "--source", "ko", "--target", "en", "--json", tmp_path / "found.json"]
    done = subprocess.run(
        list(map(str, [sys.executable, script, saved[2], *options])),
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    _, *rows = json.loads((tmp_path / "found.json").read_text())
    assert [(row["form"], row.get("same")) for row in rows] == [("page", 24), ("float32", 24), ("int8", None)]
    assert all(row["BLEU"] == pytest.approx(100) and row["MB"] > 0 and row["ms"] > 0 for row in rows)


def test_what_no_browser_holds_is_refused_with_its_size(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(web_export, "LARGEST_FILE", 10_000)
    with pytest.raises(
        ValueError, match=r"must have at most 0\.0 GB of weights in float32 for a browser, but has 0\.0"
    ):
        export_web(saved[2], tmp_path / "out", list(PAIRS))
    assert not list(tmp_path.iterdir())
