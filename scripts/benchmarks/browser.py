"""A model's forms for browsers, in one headless Chromium: sizes, milliseconds of a sentence, tokens, BLEU.

    python scripts/benchmarks/browser.py runs/quickstart/model --data pairs.jsonl --source ko --target en

`heedful export web` with transformers.js (`make browser`) in float32 and int8, and `heedful page`, take turns sentence
by sentence, greedily, each on one thread. `same` counts the translations that are those of `generate()`: for the page,
of its model with int8 weights; for the int8 files of transformers.js there is no such model.
"""

import statistics
import sys
import tempfile
import time
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer
from harness import Json, begin, report

from heedful import Translator
from heedful.data.sources import read_pairs
from heedful.evaluation.metrics import score_translations
from heedful.publishing.web.page import write_page
from heedful.publishing.web.web_export import export_web

sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))
from chromium import Chromium, served
from helpers import dequantized

MEASURE = """<!doctype html><meta charset="utf-8"><script type="module">
const { pipeline, env } = await import("/npm/@huggingface/transformers/dist/transformers.min.js");
env.allowRemoteModels = false, env.allowLocalModels = true, env.localModelPath = "/";
env.backends.onnx.wasm.numThreads = 1;
env.backends.onnx.wasm.wasmPaths = "/npm/onnxruntime-web/dist/";
const page = await (await fetch("/made/page.html")).text();
const code = page.match(/<script>\\n"use strict";\\n([\\s\\S]*?)<\\/script>/)[1];
const [data] = JSON.parse(page.match(/const MODELS = (\\[.*\\]);/)[1]);
const [Tokenizer, search, Model] = new Function(`${code}; return [Tokenizer, search,
  { heed: Transformer, heed_rnn: Recurrent }["${data.config.model_type}"]];`)();
const bytes = Uint8Array.from(atob(data.weights), (letter) => letter.charCodeAt(0)).buffer;
const tokenizer = new Tokenizer(data.tokenizer), model = new Model(data, bytes);
const forms = { page: (text) => {
  const { hypotheses: [{ tokens }] } = search(model, tokenizer.encode(text), { ...data.search, num_beams: 1 });
  return tokenizer.decode(tokens);
} };
for (const [name, dtype] of [["float32", "fp32"], ["int8", "q8"]]) {
  const translate = await pipeline("translation", "made/web", { dtype, device: "wasm" });
  forms[name] = async (text) => (await translate(text))[0].translation_text;
}
const texts = await (await fetch("/made/texts.json")).json();
window.found = { page: [], float32: [], int8: [] };
for (const text of [texts[0], ...texts]) {  // the first one warms up
  await new Promise((go) => setTimeout(go));  // for whoever waits
  for (const [name, translate] of Object.entries(forms)) {
    const start = performance.now(), translation = await translate(text);
    window.found[name].push([translation, performance.now() - start]);
  }
}
window.finished = true;
</script>
"""


def measure(folder: Path, sentences: int) -> dict[str, list[Any]]:
    """Translate in Chromium, and return for each form the translations and their milliseconds."""
    (folder / "measure.html").write_text(MEASURE, encoding="utf-8")
    (folder / "profile").mkdir()
    browser = Chromium(folder / "profile")
    try:
        with served(made=folder) as address:
            browser("Page.navigate", url=f"{address}/made/measure.html")
            while not browser.run("window.finished"):
                time.sleep(1)
                if mistakes := [each for each in browser.complaints() if each["method"] == "Runtime.exceptionThrown"]:
                    raise RuntimeError(dumps(mistakes))
            found = browser.run("window.found")
    finally:
        browser.close()
    return {name: each[-sentences:] for name, each in found.items()}


def main(
    model: Path,
    data: Annotated[str, typer.Option(help="File of pairs.")],
    source: Annotated[str, typer.Option(help="Language or column.")],
    target: Annotated[str, typer.Option(help="Language or column.")],
    count: Annotated[int, typer.Option(help="Sentences.")] = 500,
    json: Json = None,
) -> None:
    """Print a row for each form."""
    begin(1)
    pairs = [pair for _, pair in zip(range(count), read_pairs(data, source, target, split="test"), strict=False)]
    texts = [pair["source"] for pair in pairs]
    translator = Translator.from_pretrained(model, device="cpu")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "texts.json").write_text(dumps(texts), encoding="utf-8")
        export_web(model, folder / "web", texts[:20])
        write_page([model], folder / "page.html")
        found = measure(folder, len(texts))
        files = {"page": [folder / "page.html"], "int8": list(folder.glob("web/onnx/*_quantized.onnx"))}
        files["float32"] = [path for path in folder.glob("web/onnx/*.onnx") if path not in files["int8"]]
        sizes = {name: sum(path.stat().st_size for path in files[name]) for name in found}
    exact = {"float32": translator.model, "page": dequantized(translator.model)}
    rows = []
    for name, each in found.items():
        translations, milliseconds = [text for text, _ in each], [taken for _, taken in each]
        row = {"form": name, "MB": round(sizes[name] / 1e6, 2), "ms": round(statistics.median(milliseconds), 1)}
        row["BLEU"] = round(score_translations(translations, [pair["target"] for pair in pairs])["bleu"], 2)
        if name in exact:
            own = Translator(exact[name], translator.tokenizers, engine="generate")
            expected = [best.text for best, *_ in own.translate(texts, num_beams=1)]
            row["same"] = sum(one == other for one, other in zip(translations, expected, strict=True))
        rows.append(row)
    report(rows, json)


if __name__ == "__main__":
    typer.run(main)
