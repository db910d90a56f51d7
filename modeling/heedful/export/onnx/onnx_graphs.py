"""A Heed model's ONNX files, named as by optimum: an encoder, and a decoder for first and later steps."""

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from heedful.export.onnx import onnx_model
from heedful.export.onnx.onnx_model import DECODER_FILE, DECODER_WITH_PAST_FILE, ENCODER_FILE, cache_names
from heedful.files import first_line
from heedful.messages_heed import wrong
from heedful.modeling_heed import HeedForConditionalGeneration

OPSET = 18  # the oldest that torch exports, for the most runtimes
LARGEST_FILE = 2**31 - 2**26  # bytes; protocol buffers hold 2 GiB, so larger weights get a separate file
BATCH, SOURCE = "batch_size", "encoder_sequence_length"  # names of varying axes
TARGET, PAST = "decoder_sequence_length", "past_decoder_sequence_length"


def write_onnx(model: HeedForConditionalGeneration, folder: Path) -> None:
    """Write a model's ONNX files and config in float32. The model switches to evaluation and `eager` attention."""
    check_exportable(model)
    nn.Module.float(model).eval().set_attn_implementation("eager")
    first, following = (_Decoder(model, has_past).eval() for has_past in (False, True))
    encoder, config = _Encoder(model).eval(), cast("Any", model.config)
    # All sizes differ and none is 1, so the trace cannot confuse them.
    tokens, mask = torch.full((2, 5), config.pad_token_id or 0), torch.ones(2, 5, dtype=torch.long)
    source: dict[int, str] = {0: BATCH, 1: SOURCE}
    present = cache_names(config.decoder_layers, "present")
    with quiet_export(), torch.no_grad():
        states, start = encoder(tokens, mask), torch.full((2, 3), config.decoder_start_token_id)
        inputs = {"input_ids": (tokens, source), "attention_mask": (mask, source)}
        write_part(folder / ENCODER_FILE, encoder, inputs, ["last_hidden_state"])
        inputs = {
            "input_ids": (start, {0: BATCH, 1: TARGET}),
            "encoder_hidden_states": (states, source),
            "encoder_attention_mask": (mask, source),
        }
        write_part(folder / DECODER_FILE, first, inputs, ["logits", *present])
        inputs = {"input_ids": (start[:, :1], {0: BATCH}), "encoder_attention_mask": (mask, source)}
        past = first(start, states, mask)[1 : 1 + len(present)]
        for name, value in zip(cache_names(config.decoder_layers), past, strict=True):
            inputs[name] = (value, {0: BATCH, 2: PAST if ".decoder." in name else SOURCE})
        present = cache_names(config.decoder_layers, "present", has_source=False)
        write_part(folder / DECODER_WITH_PAST_FILE, following, inputs, ["logits", *present])
    config = copy.deepcopy(config)
    config.dtype = torch.float32
    for name in ("auto_map", "custom_pipelines"):  # the folder has no code
        config.__dict__.pop(name, None)
    config.to_json_file(folder / "config.json")
    # `save_pretrained` refuses settings that `generate()` only warns about.
    model.generation_config.to_json_file(folder / "generation_config.json")


def check_exportable(model: HeedForConditionalGeneration) -> None:
    """Raise a `ValueError` for quantized weights, which the exporter does not support."""
    quantized = getattr(model.config, "quantization_config", None)
    if quantized is not None or model.quantized_weights():
        found = "torchao's `quantize_`" if quantized is None else quantized
        advice = "export the model as it was before it was quantized"
        raise wrong("quantization_config", "be absent to export a model", found, advice=advice)


class _Encoder(nn.Module):
    def __init__(self, model: HeedForConditionalGeneration):
        super().__init__()
        self.encoder = model.model.encoder

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        input_ids, attention_mask = inputs
        return self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


class _Decoder(nn.Module):
    """With `has_past`, decoder_with_past_model.onnx, else decoder_model.onnx."""

    def __init__(self, model: HeedForConditionalGeneration, has_past: bool):
        super().__init__()
        self.config, self.decoder, self.lm_head = model.config, model.model.decoder, model.lm_head
        self.has_past = has_past

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cache: Any = EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))
        if self.has_past:
            input_ids, mask, *past = inputs
            onnx_model.fill_cache(cache, past)
            states = past[2][:, 0]  # with a filled cache, the decoder uses only the shape of the source states
        else:
            input_ids, states, mask = inputs
        # The model uses a four-dimensional mask unchanged; its own mask would be slow in onnxruntime.
        added = (1 - mask[:, None, None].to(torch.float32)) * torch.finfo(torch.float32).min  # (B, 1, 1, S)
        source = {"encoder_hidden_states": states, "encoder_attention_mask": added}
        output = self.decoder(input_ids=input_ids, cache=cache, use_cache=True, **source)
        present = onnx_model.cached_tensors(cache, has_source=not self.has_past)
        return self.lm_head(output.last_hidden_state), *present


def write_part(
    path: Path, part: nn.Module, inputs: dict[str, tuple[torch.Tensor, dict[int, str]]], outputs: list[str]
) -> None:
    """Trace and write part of the model; each input has an example and names for its varying axes."""
    import onnx_ir

    try:
        names: dict[str, Any] = {"input_names": list(inputs), "output_names": outputs}
        examples, axes = (tuple(each[part_of] for each in inputs.values()) for part_of in (0, 1))
        options: dict[str, Any] = {"opset_version": OPSET, "dynamo": True, "verbose": False}
        program: Any = torch.onnx.export(part, examples, dynamic_shapes=(axes,), **names, **options)
    except Exception as error:  # torch's exporter raises any error type
        raise ValueError(f"torch cannot write {path.name}: {first_line(error)}") from error
    _remove_notes(program.model)
    weights = sum(value.const_value.nbytes for value in program.model.graph.initializers.values())
    onnx_ir.save(program.model, path, external_data=f"{path.name}_data" if weights > LARGEST_FILE else None)


def quantize_file(path: Path) -> None:
    """Replace an ONNX file's matrices by int8 ones, with a scale each."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    plain = path.with_suffix(".float32")
    path.rename(plain)
    with quiet_export():
        # Unsigned weights, because without VNNI unsigned inputs times signed weights overflow.
        quantize_dynamic(plain, path, weight_type=QuantType.QUInt8)
    plain.unlink()
    path.with_name(f"{path.name}_data").unlink(missing_ok=True)


@contextmanager
def quiet_export() -> Iterator[None]:
    """Silence messages about internals from torch's exporter and onnxruntime's quantizer."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(disabled)


def _remove_notes(model: Any) -> None:
    """Remove the exporter's notes, which name local files."""
    nodes, graph = list(model.graph.all_nodes()), model.graph
    for node in nodes:
        node.doc_string = None
    values = (value for node in nodes for value in node.outputs)
    for noted in (model, graph, *nodes, *values, *graph.inputs, *graph.initializers.values()):
        noted.metadata_props.clear()
