"""Heed models as ONNX files.

Before the folder appears, onnxruntime has translated sentences with it, greedily and with beams, to the tokens of
`generate()`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from heedful.configuration_base_heed import position_limit
from heedful.files import import_extra
from heedful.inference.engines import pad_sources
from heedful.publishing.exports import comparison
from heedful.publishing.exports.onnx_graphs import quantize_file, write_onnx
from heedful.publishing.exports.onnx_model import ONNX_FILES, OnnxModel

Quantization = Literal["float32", "int8"]

# The largest allowed difference of a logit in float32; relative where logits are above 1.
TOLERANCE = 1e-4
BEAMS = 4
# How many sentences have their logits compared, step by step.
LOGITS_SENTENCES = 16


def export_onnx(
    model: str | Path, target: str | Path, sentences: Sequence[str], quantization: Quantization = "float32"
) -> comparison.Export:
    """Write a saved Heed model as ONNX files, with its configuration and tokenizers, and compare it on sentences.

    `model` is a folder or an id on the Hub, of a Heed model or of an adapter; `target` must not exist, and appears
    whole or not at all. `int8` weights are a quarter of the size; onnxruntime quantizes their inputs at each call. A
    `ValueError` names what keeps the model from being exported, or the sentence if the exported one gives other tokens
    than `generate()` in float32; it is raised too for other logits in float32, and most tokens being others in int8.
    """
    comparison.check_quantization(quantization, get_args(Quantization))
    for name in ("onnxruntime", "onnx", "onnxscript"):  # before anything is loaded
        import_extra(name, "onnx")
    with comparison.begun_export(model, target, sentences, "ONNX") as (loaded, tokenizers, compared, folder):
        write_onnx(loaded, folder)
        if quantization == "int8":
            for name in ONNX_FILES:
                quantize_file(folder / name)
        searches, limit = comparison.searches_of(loaded.generation_config, BEAMS), position_limit(loaded.config)
        models = (loaded, OnnxModel.from_pretrained(folder))
        sources = comparison.encode(tokenizers, compared, limit)
        engines = [comparison.UnscoredEngine(each) for each in models]
        comparisons = comparison.compare_engines(engines, compared, sources, searches, limit)
        comparison.refuse(comparisons, "onnxruntime", quantization)
        is_exact = quantization == "float32"
        greedy = searches["greedy"]
        difference = logits_difference(*models, sources[:LOGITS_SENTENCES], greedy, limit) if is_exact else None
        size = sum(path.stat().st_size for path in folder.glob("*.onnx*"))
    return comparison.Export(Path(target), quantization, size, comparisons, difference)


@torch.inference_mode()
def logits_difference(
    model: Any, exported: OnnxModel, sources: list[list[int]], greedy: Any, limit: int | None
) -> float:
    """Return the largest difference of a logit of greedy search, relative where logits are above 1.

    Both models translate the sources alike. A `ValueError` is raised if a logit differs by more than rounding in
    float32 explains.
    """
    greedy.update(return_dict_in_generate=True, output_logits=True)
    model.generation_config = exported.generation_config = greedy
    largest = 0.0
    for numbers in comparison.batches(sources, greedy, limit):
        inputs = pad_sources([sources[number] for number in numbers], model.config.pad_token_id, model.device)
        expected, found = (torch.stack(each.generate(**inputs).logits) for each in (model, exported))
        difference = ((expected - found).abs().max() / expected.abs().max().clamp(min=1)).item()
        if not difference <= TOLERANCE:  # so that not-a-number is refused too
            raise ValueError(
                f"The exported model's logits differ by {difference:.1e} from generate()'s, so that no folder is left."
            )
        largest = max(largest, difference)
    return largest
