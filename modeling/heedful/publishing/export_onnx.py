"""Heed models as ONNX files: an encoder, a decoder for the first step, and one for every step after it.

Files, inputs and outputs are named as optimum names them. Before the folder appears, onnxruntime has translated real
sentences with it, greedily and with beams, to the tokens of `generate()`.
"""

import copy
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from heedful.data.tokenization import TokenizerPair
from heedful.files import check_is_new, listed, new_folder
from heedful.inference.engines import pad_sources, token_batches
from heedful.inference.loading import first_line
from heedful.inference.strategies.steps import end_tokens
from heedful.modeling_heed import AdditiveScore, HeedForConditionalGeneration, HeedLinear
from heedful.pipeline_heed import position_limit
from heedful.publishing.export_check import Comparison, compare, load_pair
from heedful.publishing.onnx_decoding import (
    DECODER_FILE,
    DECODER_WITH_PAST_FILE,
    ENCODER_FILE,
    ONNX_FILES,
    OnnxModel,
    cache_names,
    onnxruntime_module,
)

Quantization = Literal["float32", "int8"]

# Largest difference of a logit in float32; relative where logits are above 1.
TOLERANCE = 1e-4
# The oldest that torch's exporter writes: the most runtimes read it.
OPSET = 18
# A file of protocol buffers holds 2 GiB at most; larger weights lie in a file beside it.
LARGEST_FILE = 2**31 - 2**26
BEAMS = 4
# Longer translations than the source and this are cut off while comparing.
MORE_THAN_SOURCE = 50
TOKEN_BUDGET = 4096
# Below it, int8 has lost the model: the mean share of tokens in common.
LEAST_LIKENESS = 0.5
# Sentences whose logits are compared, step by step.
LOGITS_SENTENCES = 16
BATCH, SOURCE, TARGET, PAST = (
    *("batch_size", "encoder_sequence_length"),
    *("decoder_sequence_length", "past_decoder_sequence_length"),
)


@dataclass(frozen=True)
class OnnxExport:
    """What was exported, and how it compared.

    Attributes:
        folder: Where it lies.
        comparisons: By the name of a search, what `generate()` and onnxruntime made of the sentences.
        difference: Largest difference of a logit of greedy search, relative where logits are above 1; of float32.
        size: Of the ONNX files, in bytes.

    """

    folder: Path
    comparisons: dict[str, Comparison]
    difference: float | None
    size: int


def export_onnx(
    model: str | Path, target: str | Path, sentences: Sequence[str], quantization: Quantization = "float32"
) -> OnnxExport:
    """Write a saved Heed model as ONNX files, with its configuration and tokenizers, and compare it on sentences.

    The folder appears whole or not at all.

    Args:
        model: A folder, of a model or of an adapter, which is merged into the model it was trained on, or an id on
            the Hub.
        target: The folder to write; it must not exist.
        sentences: Sources to compare on, in the language that the model reads; blank ones are left out.
        quantization: Type of the weights: `float32`, or `int8`, a quarter of the size, whose inputs onnxruntime
            quantizes at each call.

    Raises:
        ValueError: If `target` exists, there is no sentence, the model cannot be exported, the exported one gives
            other tokens or logits than `generate()` in float32, or in int8 has most tokens lost.
        FileNotFoundError: If the model or its tokenizers are missing.
        ImportError: If onnx, onnxscript or onnxruntime is not installed.

    """
    if quantization not in get_args(Quantization):
        known = ", ".join(get_args(Quantization))
        raise ValueError(f"`quantization` must be one of {known}, but is {quantization!r} instead.")
    _check_installed()
    target = Path(target)
    check_is_new(target)
    sentences = [sentence for sentence in sentences if sentence.strip()]
    if not sentences:
        raise ValueError("`sentences` must hold a sentence to compare on, but hold none.")
    loaded, tokenizers = load_pair(model)
    with new_folder(target) as folder:
        write_onnx(loaded, folder)
        tokenizers.save_pretrained(folder)
        if quantization == "int8":
            for name in ONNX_FILES:
                _quantize(folder / name)
        with _same_settings(loaded, OnnxModel.from_pretrained(folder)) as models:
            sources = _encoded(loaded, tokenizers, sentences)
            comparisons = compare_translations(*models, sentences, sources)
            _refuse(comparisons, quantization)
            first = sources[:LOGITS_SENTENCES]
            difference = logits_difference(*models, first) if quantization == "float32" else None
        size = sum(path.stat().st_size for path in folder.glob("*.onnx*"))
    return OnnxExport(target, comparisons, difference, size)


def write_onnx(model: HeedForConditionalGeneration, folder: Path) -> None:
    """Write the ONNX files of a model and its configuration into an existing folder, in float32.

    The model is changed: to evaluation mode, float32 and the `eager` attention function.

    Args:
        model: A Heed model on the CPU.
        folder: To write into.

    Raises:
        ValueError: If the model cannot be exported.

    """
    check_exportable(model)
    nn.Module.float(model).eval().set_attn_implementation("eager")
    encoder, first, following = (part(model).eval() for part in (_Encoder, _FirstStep, _NextStep))
    config: Any = model.config
    # No two sizes are alike, and none is 1: what is traced must not take one for another.
    tokens, mask = torch.full((2, 5), config.pad_token_id or 0), torch.ones(2, 5, dtype=torch.long)
    with _quiet(), torch.no_grad():
        states, start = encoder(tokens, mask), torch.full((2, 3), config.decoder_start_token_id)
        past = tuple(first(start, states, mask)[1:])
        names = cache_names(config.decoder_layers)
        source: dict[int, str] = {0: BATCH, 1: SOURCE}
        _write(
            folder / ENCODER_FILE,
            encoder,
            {"input_ids": (tokens, source), "attention_mask": (mask, source)},
            ["last_hidden_state"],
        )
        _write(
            folder / DECODER_FILE,
            first,
            {
                "input_ids": (start, {0: BATCH, 1: TARGET}),
                "encoder_hidden_states": (states, source),
                "encoder_attention_mask": (mask, source),
            },
            ["logits", *cache_names(config.decoder_layers, "present")],
        )
        cached = {
            name: (value, {0: BATCH, 2: PAST if ".decoder." in name else SOURCE})
            for name, value in zip(names, past, strict=True)
        }
        _write(
            folder / DECODER_WITH_PAST_FILE,
            following,
            {"input_ids": (start[:, :1], {0: BATCH}), "encoder_attention_mask": (mask, source), **cached},
            ["logits", *cache_names(config.decoder_layers, "present", has_source=False)],
        )
    _write_configuration(model, folder)


def check_exportable(model: Any) -> None:
    """Raise a `ValueError` that names what keeps a model from being written as ONNX files."""
    quantized = getattr(model.config, "quantization_config", None)
    if quantized is not None or model.quantized_weights():
        told = "torchao's `quantize_`" if quantized is None else quantized
        raise ValueError(
            f"`quantization_config` must be absent to export a model, but is {told} instead: export the model as it "
            "was before it was quantized."
        )
    known = (HeedLinear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, AdditiveScore)
    foreign = [
        f"{name} ({type(module).__name__})"
        for name, module in model.named_modules()
        if next(module.parameters(recurse=False), None) is not None
        and type(module) not in known
        and not name.endswith(".activation")  # some have parameters of their own
    ]
    if foreign:
        raise ValueError(
            f"The model must have no adapters or other replaced parts to be exported, but has {listed(foreign)}: "
            "merge an adapter first, with `merge_and_unload()`."
        )


@torch.inference_mode()
def compare_translations(
    model: HeedForConditionalGeneration, exported: OnnxModel, sentences: Sequence[str], sources: list[list[int]]
) -> dict[str, Comparison]:
    """Translate sentences by a model and by its ONNX files, greedily and with beams, and compare the tokens.

    Args:
        model: What was exported, on the CPU.
        exported: Its ONNX files.
        sentences: The sources.
        sources: Their tokens.

    Returns:
        The comparison of each search, by its name.

    """
    comparisons = {}
    for beams, name in ((1, "greedy"), (BEAMS, f"{BEAMS} beams")):
        expected, found = (_generated(each, sources, beams) for each in (model, exported))
        comparisons[name] = compare(sentences, expected, found)
    return comparisons


@torch.inference_mode()
def logits_difference(model: Any, exported: OnnxModel, sources: list[list[int]]) -> float:
    """Return the largest difference of a logit of greedy search, relative where logits are above 1.

    Args:
        model: What was exported, on the CPU.
        exported: Its ONNX files.
        sources: Tokens of sentences that both translate alike.

    Raises:
        ValueError: If one differs by more than float32 explains.

    """
    largest = 0.0
    for _, asked in _batches(sources, 1, model):
        asked |= {"return_dict_in_generate": True, "output_logits": True}
        expected, found = (torch.stack(each.generate(**asked).logits) for each in (model, exported))
        difference = ((expected - found).abs().max() / expected.abs().max().clamp(min=1)).item()
        if not difference <= TOLERANCE:  # not-a-number, too
            raise ValueError(
                f"The exported model's logits differ by {difference:.1e} from generate()'s, so that no folder is left."
            )
        largest = max(largest, difference)
    return largest


class _Encoder(nn.Module):
    """What encoder_model.onnx computes."""

    def __init__(self, model: HeedForConditionalGeneration):
        super().__init__()
        self.encoder = model.model.encoder

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        input_ids, attention_mask = inputs
        return self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


class _Decoder(nn.Module):
    """What the two decoder files share."""

    def __init__(self, model: HeedForConditionalGeneration):
        super().__init__()
        self.config = model.config
        self.decoder = model.model.decoder
        self.lm_head = model.lm_head

    def decode(self, input_ids: torch.Tensor, states: torch.Tensor, mask: torch.Tensor, cache: Any) -> torch.Tensor:
        # A mask of four dimensions is taken as it is: the model's own way to make one is slow in onnxruntime.
        added = (1 - mask[:, None, None].to(torch.float32)) * torch.finfo(torch.float32).min  # (B, 1, 1, S)
        output = self.decoder(
            input_ids=input_ids,
            encoder_hidden_states=states,
            encoder_attention_mask=added,
            past_key_values=cache,
            use_cache=True,
        )
        return self.lm_head(output.last_hidden_state)

    def empty_cache(self) -> Any:
        return EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))


class _FirstStep(_Decoder):
    """What decoder_model.onnx computes."""

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        input_ids, states, mask = inputs
        cache = self.empty_cache()
        logits = self.decode(input_ids, states, mask, cache)
        pairs = zip(cache.self_attention_cache.layers, cache.cross_attention_cache.layers, strict=True)
        return logits, *(part for pair in pairs for layer in pair for part in (layer.keys, layer.values))


class _NextStep(_Decoder):
    """What decoder_with_past_model.onnx computes."""

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        input_ids, mask, *past = inputs
        cache = self.empty_cache()
        for layer, start in enumerate(range(0, len(past), 4)):
            cache.self_attention_cache.update(past[start], past[start + 1], layer)
            cache.cross_attention_cache.update(past[start + 2], past[start + 3], layer)
            cache.is_updated[layer] = True
        # Of the source's states only the shape is read, where keys and values are in the cache.
        logits = self.decode(input_ids, past[2][:, 0], mask, cache)
        return logits, *(part for layer in cache.self_attention_cache.layers for part in (layer.keys, layer.values))


def _write(path: Path, part: nn.Module, inputs: dict[str, tuple[torch.Tensor, dict[int, str]]], outputs: list[str]):
    """Trace a part of the model and write it.

    Args:
        path: File to write.
        part: A module of tensors only.
        inputs: For each its name, an example, and the names of the axes that vary.
        outputs: Their names.

    """
    import onnx_ir

    try:
        program: Any = torch.onnx.export(
            part,
            tuple(example for example, _ in inputs.values()),
            input_names=list(inputs),
            output_names=outputs,
            dynamic_shapes=(tuple(axes for _, axes in inputs.values()),),
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    except Exception as error:  # of torch's exporter, which raises whatever it likes
        raise ValueError(f"torch cannot write {path.name}: {first_line(error)}") from error
    _forget_the_machine(program.model)
    weights = sum(value.const_value.nbytes for value in program.model.graph.initializers.values())
    # As optimum names it.
    onnx_ir.save(program.model, path, external_data=f"{path.name}_data" if weights > LARGEST_FILE else None)


def _forget_the_machine(model: Any) -> None:
    """Remove what the exporter notes for its own authors, the paths of files on this machine among it."""
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()


def _write_configuration(model: HeedForConditionalGeneration, folder: Path) -> None:
    config: Any = copy.deepcopy(model.config)
    config.dtype = torch.float32
    for name in ("auto_map", "custom_pipelines"):  # the folder holds no code
        config.__dict__.pop(name, None)
    config.to_json_file(folder / "config.json")
    # Without `save_pretrained`, which refuses settings that `generate()` only warns of.
    model.generation_config.to_json_file(folder / "generation_config.json")


def _encoded(
    model: HeedForConditionalGeneration, tokenizers: TokenizerPair, sentences: Sequence[str]
) -> list[list[int]]:
    """Encode the sentences, into the target languages in turn where there are several."""
    languages = tokenizers.languages if len(tokenizers.languages) > 1 else (None,)
    sources = [
        tokenizers.encode_source([sentence], languages[number % len(languages)])[0]
        for number, sentence in enumerate(sentences)
    ]
    limit = position_limit(model.config)
    for number, source in enumerate(sources, start=1):
        if limit is not None and len(source) > limit:
            raise ValueError(
                f"Sentence {number} must have at most {limit} tokens, the model's number of positions, but has "
                f"{len(source)} instead."
            )
    return sources


def _batches(sources: list[list[int]], beams: int, model: Any) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Give batches of sentences of similar length: their numbers, and what `generate()` is asked."""
    limit = position_limit(model.config)
    lengths = {number: len(source) * beams for number, source in enumerate(sources)}
    for numbers in token_batches(lengths, TOKEN_BUDGET):
        longest = max(len(sources[number]) for number in numbers) + MORE_THAN_SOURCE
        inputs = pad_sources([sources[number] for number in numbers], model.config.pad_token_id, model.device)
        yield numbers, {**inputs, "num_beams": beams, "max_new_tokens": min(longest, limit or longest)}


def _generated(model: Any, sources: list[list[int]], beams: int) -> list[list[int]]:
    """Return what `generate()` makes of each source, without start and padding."""
    outputs: list[list[int]] = [[] for _ in sources]
    ends = torch.tensor(end_tokens(model.generation_config))
    for numbers, asked in _batches(sources, beams, model):
        rows = model.generate(**asked)[:, 1:]
        is_behind = torch.isin(rows, ends).int().cumsum(-1).roll(1, -1)
        is_behind[:, 0] = 0
        for number, row, behind in zip(numbers, rows, is_behind, strict=True):
            outputs[number] = row[behind == 0].tolist()
    return outputs


@contextmanager
def _same_settings(model: Any, exported: OnnxModel) -> Iterator[tuple[Any, OnnxModel]]:
    """Let both decode by the model's own settings, but for lengths and randomness."""
    own = model.generation_config
    settings = copy.deepcopy(own)
    settings.update(max_length=None, do_sample=False, num_return_sequences=1)
    model.generation_config, exported.generation_config = settings, copy.deepcopy(settings)
    try:
        yield model, exported
    finally:
        model.generation_config = own


def _refuse(comparisons: dict[str, Comparison], quantization: str) -> None:
    """Raise a `ValueError` if float32 gives other tokens, or int8 has lost the model."""
    for name, comparison in comparisons.items():
        if quantization == "float32":
            comparison.refuse(f"onnxruntime ({name})")
        elif comparison.likeness < LEAST_LIKENESS:
            raise ValueError(
                f"`quantization` {quantization} loses the model, so that no folder is left: its translations ({name}) "
                f"have {100 * comparison.likeness:.0f} % of their tokens in common with generate()'s."
            )


def _quantize(path: Path) -> None:
    """Replace the matrices of an ONNX file by int8 ones, with a scale each."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    plain = path.with_suffix(".float32")
    path.rename(plain)
    with _quiet():
        # Unsigned: processors without VNNI overflow in products of unsigned inputs and signed weights.
        quantize_dynamic(plain, path, weight_type=QuantType.QUInt8)
    plain.unlink()
    path.with_name(f"{path.name}_data").unlink(missing_ok=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep from the user what torch's exporter and onnxruntime's quantizer say about their own insides."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", None)]  # onnxruntime's quantizer logs to the root
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _check_installed() -> None:
    """Raise an `ImportError` that names the extra if something is missing, before anything is loaded."""
    onnxruntime_module()
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError("The export to ONNX needs onnx and onnxscript: pip install 'heedful[onnx]'") from error
