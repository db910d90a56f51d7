"""Heed models for transformers.js: what its pages and programs load, and a page that translates with them.

Before the folder appears, onnxruntime has translated sentences with it. In float32 each translation must have the
tokens of `generate()`, greedily; of int8 the number of differences is returned.
"""

import base64
import copy
import hashlib
import html
import json
import re
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import models
from transformers import GenerationConfig

from heedful.configuration_base_heed import position_limit
from heedful.data.tokenization import TokenizerPair
from heedful.files import filled_template, write_text
from heedful.inference.attention.labels import is_of_characters
from heedful.inference.search_settings import end_tokens
from heedful.inference.strategies.steps import BEAM_SETTINGS, asked_of
from heedful.publishing.exports import comparison, onnx_model
from heedful.publishing.exports.onnx_graphs import LARGEST_FILE, check_packages, quantize_file, write_onnx
from heedful.publishing.exports.onnx_model import DECODER_FILE, DECODER_WITH_PAST_FILE, ENCODER_FILE, ONNX_FILES
from heedful.publishing.model_card import CARD_FILE
from heedful.publishing.web.merged_decoder import merge_decoders

PAGE = Path(__file__).with_name("translate.html")
# Types of weights as transformers.js tells them apart, with the ends of their files' names.
SUFFIXES = {"float32": "", "int8": "_quantized"}
ENCODER, MERGED = Path(ENCODER_FILE).stem, "decoder_model_merged"
# What transformers.js reads of a config.json; its type is one that it knows, whose graph it does not ask for.
CONFIG_FIELDS = (
    "d_model", "encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads", "vocab_size",
    "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id",
    "is_encoder_decoder",
)  # fmt: skip
CDN = "https://cdn.jsdelivr.net/npm/"
# What translate.html runs that is not its own: address, package of npm, version, file and hash.
LIBRARY = re.compile(rf'url: "({CDN}(@?[^"@]+)@([^"/]+)/([^"]+))", integrity: "sha384-([^"]+)"')

ABOUT = """A model in the browser, written by Heedful. `index.html` loads the files beside it with
transformers.js; other pages and programs do so with

```javascript
import { pipeline } from "@huggingface/transformers";

const translate = await pipeline("translation", "me/model");
console.log(await translate("…"));
```

The weights are there in int8, which browsers take, and in float32 (`dtype: "fp32"`)."""


def export_web(
    model: str | Path, target: str | Path, sentences: Sequence[str], packages: str | Path | None = None
) -> comparison.Export:
    """Write a folder that transformers.js loads, with weights in float32 and in int8, and a page for a Space.

    The page's library is copied from `packages`, npm's node_modules, or loaded from a CDN.
    """
    library = {} if packages is None else _library(Path(packages))
    check_packages()
    with comparison.begun_export(model, target, sentences, "transformers.js") as draft:
        check_pattern(draft.tokenizers)
        size = 4 * draft.model.num_parameters()
        if size > LARGEST_FILE:
            most = f"at most {LARGEST_FILE / 1e9:.1f} GB of weights in float32 for a browser"
            raise ValueError(f"The model must have {most}, but has {size / 1e9:.1f} GB instead.")
        config, onnx = draft.model.config, draft.folder / "onnx"
        _write_files(draft.model, onnx)
        read = {"model_type": "marian", **{name: getattr(config, name) for name in CONFIG_FIELDS}}
        write_text(draft.folder / "config.json", json.dumps(read, indent=2) + "\n")
        greedy = greedy_config(draft.model.generation_config)
        greedy.to_json_file(draft.folder / "generation_config.json")
        _write_page(draft.folder, comparison.model_name(model), draft.sentences[0], library)
        greedy.update(max_length=None)
        comparisons: dict[str, comparison.Comparison] = {}
        for quantization, suffix in SUFFIXES.items():
            engine = comparison.UnscoredEngine(_web_model(onnx, suffix, config))
            searches, limit = {f"greedy, {quantization}": copy.deepcopy(greedy)}, position_limit(config)
            found = draft.outputs(engine, searches, limit)
            comparisons |= draft.compare(found, searches, limit, "onnxruntime", quantization)
        size = sum(path.stat().st_size for path in onnx.glob("*_quantized.onnx"))
    return comparison.Export(Path(target), "int8", size, comparisons)


def greedy_config(config: GenerationConfig) -> GenerationConfig:
    """Return a generation config for transformers.js, which searches greedily, and warn of what it has of beams."""
    asked = asked_of(config)
    beams = [f"`{name}` {asked[name]}" for name in BEAM_SETTINGS if name in asked]
    if (config.num_beams or 1) > 1:
        warnings.warn(f"transformers.js searches greedily, and does not read {' and '.join(beams)}.", stacklevel=3)
    greedy = copy.deepcopy(config)
    greedy.update(num_beams=1, do_sample=False, num_return_sequences=1, length_penalty=1.0, early_stopping=False)
    # `generate()` takes no end for a bad word.
    words = [word for word in config.bad_words_ids or [] if word not in [[end] for end in end_tokens(config)]]
    greedy.update(bad_words_ids=words or None, min_length=asked.get("min_length"))
    return greedy


def _library(packages: Path) -> dict[str, bytes]:
    """Return by their addresses the files that the page loads from npm's packages, out of a folder node_modules."""
    found = {}
    for url, package, version, file, digest in LIBRARY.findall(PAGE.read_text(encoding="utf-8")):
        path = packages / package / file
        content = path.read_bytes() if path.is_file() else b""
        if base64.b64encode(hashlib.sha384(content).digest()).decode() != digest:
            must = f"a folder node_modules with {package} {version}"
            raise ValueError(f"`packages` must be {must}, but {path} is {'another file' if content else 'missing'}.")
        found[url] = content
    return found


def check_pattern(tokenizers: TokenizerPair) -> None:
    """Raise a `ValueError` for a tokenizer of characters or words, which transformers.js does not take apart."""
    tokenizers.check_is_fast("transformers.js")
    is_of_words = isinstance(tokenizers.source.backend_tokenizer.model, models.WordLevel)
    if is_of_words or is_of_characters(tokenizers.source):
        kind = f"of {'words' if is_of_words else 'characters'}"
        raise ValueError(f"`tokenizer.algorithm` must be bpe or unigram for transformers.js, but is {kind} instead.")


def _write_files(model: Any, folder: Path) -> None:
    folder.mkdir()
    with tempfile.TemporaryDirectory() as work:
        parts = {name: Path(work) / name for name in ONNX_FILES}
        write_onnx(model, Path(work), with_attention=True)
        for quantization, suffix in SUFFIXES.items():
            if quantization == "int8":
                for path in parts.values():
                    quantize_file(path)
            shutil.copy(parts[ENCODER_FILE], folder / f"{ENCODER}{suffix}.onnx")
            merge_decoders(parts[DECODER_FILE], parts[DECODER_WITH_PAST_FILE], folder / f"{MERGED}{suffix}.onnx")


def _web_model(folder: Path, suffix: str, config: Any) -> onnx_model.OnnxModel:
    """Return what onnxruntime computes with the files of one type of weights."""
    encoder, decoder = (onnx_model.session_of(folder / f"{name}{suffix}.onnx") for name in (ENCODER, MERGED))
    names = (onnx_model.cache_names(config.decoder_layers, "present", has_source) for has_source in (True, False))
    return onnx_model.OnnxModel(config, [encoder, *(_Step(decoder, ["logits", *each]) for each in names)]).eval()


class _Step:
    """The merged decoder, called as a decoder of its own for the first step or the later ones."""

    def __init__(self, session: Any, outputs: list[str]):
        self.session, self.outputs = session, outputs

    def run(self, _: None, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        """Compute the outputs, with inputs that are not given as transformers.js fills them in: with nothing."""
        rows, empty = len(inputs["input_ids"]), {}
        for each in self.session.get_inputs():
            shape = [size if isinstance(size, int) else 0 for size in each.shape]
            empty[each.name] = np.zeros([rows, *shape[1:]], np.float32)
        return self.session.run(self.outputs, empty | inputs)


def _write_page(folder: Path, name: str, example: str, library: dict[str, bytes]) -> None:
    """Write the page, what it loads from beside it, and the lines by which the Hub serves the folder as a Space."""
    page = filled_template(PAGE, {"name": html.escape(name), "example": html.escape(example)})
    for url, content in library.items():
        page = page.replace(url, Path(url).name).replace(f" {CDN};", ";")
        (folder / Path(url).name).write_bytes(content)
    write_text(folder / "index.html", page)
    title = json.dumps(name, ensure_ascii=False)
    write_text(folder / CARD_FILE, f"---\ntitle: {title}\nsdk: static\npinned: false\n---\n\n{ABOUT}\n")
