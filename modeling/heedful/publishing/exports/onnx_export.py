"""Heed models as ONNX files.

Before the folder appears, onnxruntime has translated sentences with it, greedily and with beams, to the tokens of
`generate()`.
"""

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from heedful.configuration_base_heed import position_limit
from heedful.data.tokenization import TokenizerPair
from heedful.inference.engines import pad_sources, token_batches
from heedful.inference.strategies.steps import end_tokens
from heedful.publishing.exports.comparison import MORE_THAN_SOURCE, compare, refuse
from heedful.publishing.exports.export import Export, begun_export, check_quantization
from heedful.publishing.exports.onnx_graphs import quantize_file, write_onnx
from heedful.publishing.exports.onnx_model import ONNX_FILES, OnnxModel, import_for_onnx

Quantization = Literal["float32", "int8"]

# The largest allowed difference of a logit in float32; relative where logits are above 1.
TOLERANCE = 1e-4
BEAMS = 4
TOKEN_BUDGET = 4096
# How many sentences have their logits compared, step by step.
LOGITS_SENTENCES = 16


def export_onnx(
    model: str | Path, target: str | Path, sentences: Sequence[str], quantization: Quantization = "float32"
) -> Export:
    """Write a saved Heed model as ONNX files, with its configuration and tokenizers, and compare it on sentences.

    The folder appears whole or not at all.

    Args:
        model: A folder or an id on the Hub, of a Heed model or of an adapter.
        target: The folder to write; it must not exist.
        sentences: Sources to compare on, in the language that the model reads; blank ones are left out.
        quantization: Type of the weights: `float32`, or `int8`, a quarter of the size, whose inputs onnxruntime
            quantizes at each call.

    Raises:
        ValueError: If `target` exists, there is no sentence, the model cannot be exported, the exported one gives
            other tokens or logits than `generate()` in float32, or most tokens are others in int8.
        FileNotFoundError: If the model or its tokenizers are missing.
        ImportError: If onnx, onnxscript or onnxruntime is not installed.
    """
    check_quantization(quantization, get_args(Quantization))
    for name in ("onnxruntime", "onnx", "onnxscript"):  # before anything is loaded
        import_for_onnx(name)
    with begun_export(model, target, sentences) as (loaded, tokenizers, compared, folder):
        write_onnx(loaded, folder)
        if quantization == "int8":
            for name in ONNX_FILES:
                quantize_file(folder / name)
        models = (loaded, OnnxModel.from_pretrained(folder))
        sources = _encoded(tokenizers, compared, position_limit(loaded.config))
        comparisons = {
            name: compare(compared, *(_generated(each, sources, search) for each in models))
            for name, search in _searches(loaded).items()
        }
        refuse(comparisons, "onnxruntime", quantization)
        is_exact = quantization == "float32"
        difference = logits_difference(*models, sources[:LOGITS_SENTENCES]) if is_exact else None
        size = sum(path.stat().st_size for path in folder.glob("*.onnx*"))
    return Export(Path(target), quantization, size, comparisons, difference)


@torch.inference_mode()
def logits_difference(model: Any, exported: OnnxModel, sources: list[list[int]]) -> float:
    """Return the largest difference of a logit of greedy search, relative where logits are above 1.

    Args:
        model: The model that was exported, on the CPU.
        exported: Its ONNX files.
        sources: Tokens of sentences that both translate alike.

    Raises:
        ValueError: If a logit differs by more than rounding in float32 explains.
    """
    search = _searches(model)["greedy"]
    search.update(return_dict_in_generate=True, output_logits=True)
    largest = 0.0
    outputs = (_outputs(each, sources, search) for each in (model, exported))
    for (_, ours), (_, theirs) in zip(*outputs, strict=True):
        expected, found = torch.stack(ours.logits), torch.stack(theirs.logits)
        difference = ((expected - found).abs().max() / expected.abs().max().clamp(min=1)).item()
        if not difference <= TOLERANCE:  # so that not-a-number is refused too
            raise ValueError(
                f"The exported model's logits differ by {difference:.1e} from generate()'s, so that no folder is left."
            )
        largest = max(largest, difference)
    return largest


def _searches(model: Any) -> dict[str, Any]:
    """Return the settings of each search: the model's own, but for randomness and lengths."""
    searches = {}
    for name, beams in (("greedy", 1), (f"{BEAMS} beams", BEAMS)):
        searches[name] = copy.deepcopy(model.generation_config)
        searches[name].update(num_beams=beams, max_length=None, do_sample=False, num_return_sequences=1)
    return searches


def _encoded(tokenizers: TokenizerPair, sentences: list[str], limit: int | None) -> list[list[int]]:
    """Encode the sentences, into the target languages in turn where there are several."""
    languages = tokenizers.languages if len(tokenizers.languages) > 1 else (None,)
    sources: list[list[int]] = [[] for _ in sentences]
    for first, language in enumerate(languages):
        sources[first :: len(languages)] = tokenizers.encode_source(sentences[first :: len(languages)], language)
    for number, source in enumerate(sources, start=1):
        if limit is not None and len(source) > limit:
            raise ValueError(
                f"Sentence {number} must have at most {limit} tokens, the model's number of positions, but has "
                f"{len(source)} instead."
            )
    return sources


def _outputs(model: Any, sources: list[list[int]], search: Any) -> Iterator[tuple[list[int], Any]]:
    """Yield what `generate()` makes of batches of sources of similar length, with their numbers."""
    own, limit = model.generation_config, position_limit(model.config)
    lengths = {number: len(source) * search.num_beams for number, source in enumerate(sources)}
    for numbers in token_batches(lengths, TOKEN_BUDGET):
        longest = max(len(sources[number]) for number in numbers) + MORE_THAN_SOURCE
        inputs = pad_sources([sources[number] for number in numbers], model.config.pad_token_id, model.device)
        model.generation_config = search
        try:
            output = model.generate(**inputs, max_new_tokens=min(longest, limit or longest))
        finally:
            model.generation_config = own
        yield numbers, output


@torch.inference_mode()
def _generated(model: Any, sources: list[list[int]], search: Any) -> list[list[int]]:
    """Return the tokens that `generate()` makes of each source, up to the end of the sentence."""
    outputs: list[list[int]] = [[] for _ in sources]
    ends = end_tokens(search)
    for numbers, sequences in _outputs(model, sources, search):
        for number, row in zip(numbers, sequences[:, 1:].tolist(), strict=True):
            last = next((step for step, token in enumerate(row) if token in ends), len(row))
            outputs[number] = row[: last + 1]
    return outputs
