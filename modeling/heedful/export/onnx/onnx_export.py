"""Heed models as ONNX files, compared with `generate()` before their folder appears."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from heedful.configuration_base_heed import position_limit
from heedful.decoding.engines import pad_sources
from heedful.export import comparison
from heedful.export.onnx.onnx_graphs import quantize_file, write_onnx
from heedful.export.onnx.onnx_model import ONNX_FILES, OnnxModel
from heedful.files import import_extra
from heedful.messages_heed import wrong
from heedful.modeling_heed import HeedForConditionalGeneration

Quantization = Literal["float32", "int8"]

TOLERANCE = 1e-4  # largest allowed logit difference in float32, relative if above 1
BEAMS = 4
LOGITS_SENTENCES = 16  # with logits compared step by step


def export_onnx(
    model: str | Path, target: str | Path, sentences: Sequence[str], quantization: Quantization = "float32"
) -> comparison.Export:
    """Write a saved Heed model as ONNX files, with its configuration and tokenizers, and compare it on sentences.

    `int8` weights take a quarter of the space; onnxruntime quantizes their inputs at each call.
    """
    if quantization not in get_args(Quantization):
        raise wrong("quantization", f"be one of {', '.join(get_args(Quantization))}", repr(quantization))
    for name in ("onnxruntime", "onnx", "onnxscript"):
        import_extra(name, "onnx")
    with comparison.begun_export(model, target, sentences, "ONNX") as draft:
        write_onnx(draft.model, draft.folder)
        if quantization == "int8":
            for name in ONNX_FILES:
                quantize_file(draft.folder / name)
        searches = comparison.searches_of(draft.model.generation_config, BEAMS)
        exported, limit = OnnxModel.from_pretrained(draft.folder), position_limit(draft.model.config)
        found = draft.outputs(comparison.UnscoredEngine(exported), searches, limit)
        comparisons = draft.compare(found, searches, limit, "onnxruntime", quantization)
        difference = None
        if quantization == "float32":
            sources = comparison.encode(draft.tokenizers, draft.sentences, limit)[:LOGITS_SENTENCES]
            difference = greedy_difference(draft.model, exported, sources, searches["greedy"], limit)
        size = sum(path.stat().st_size for path in draft.folder.glob("*.onnx*"))
    return comparison.Export(Path(target), quantization, size, comparisons, difference)


@torch.inference_mode()
def greedy_difference(
    model: HeedForConditionalGeneration, exported: OnnxModel, sources: list[list[int]], greedy: Any, limit: int | None
) -> float:
    """Return the largest logit difference in greedy search while both models give the same tokens."""
    greedy.update(return_dict_in_generate=True, output_logits=True)
    model.generation_config = exported.generation_config = greedy
    largest = 0.0
    for numbers in comparison.batches(sources, greedy, limit):
        inputs = pad_sources([sources[number] for number in numbers], model.config.pad_token_id, model.device)
        expected, found = (torch.stack(each.generate(**inputs).logits) for each in (model, exported))
        largest = max(largest, comparison.logits_difference(expected, found, TOLERANCE))
    return largest
