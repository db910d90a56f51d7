"""`generate()` for an exported ONNX folder: onnxruntime computes, transformers decodes."""

from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache
from transformers.generation import GenerationConfig
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput
from transformers.utils import can_return_tuple

from heedful.configuration_heed import HeedConfig
from heedful.files import check_inside, import_extra
from heedful.generation_heed import HeedGenerationMixin
from heedful.messages_heed import wrong
from heedful.versions_heed import CACHE, either_cache_name

ENCODER_FILE = "encoder_model.onnx"
DECODER_FILE = "decoder_model.onnx"
DECODER_WITH_PAST_FILE = "decoder_with_past_model.onnx"
FOR = "for a model exported to ONNX"  # in messages
ONNX_FILES = (ENCODER_FILE, DECODER_FILE, DECODER_WITH_PAST_FILE)


def cache_names(layers: int, prefix: str = "past_key_values", has_source: bool = True) -> list[str]:
    """Return the names of cached keys and values in the files' order; `encoder` means the source's."""
    parts = product(range(layers), ("decoder", "encoder") if has_source else ("decoder",), ("key", "value"))
    return [f"{prefix}.{layer}.{side}.{part}" for layer, side, part in parts]


def cached_tensors(cache: Any, has_source: bool = True) -> list[torch.Tensor]:
    """Return a cache's keys and values in the order of `cache_names`."""
    sides = [cache.self_attention_cache.layers, *([cache.cross_attention_cache.layers] if has_source else [])]
    return [part for layers in zip(*sides, strict=True) for layer in layers for part in (layer.keys, layer.values)]


def fill_cache(cache: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Put the tensors of `cached_tensors` into an empty cache."""
    for layer, start in enumerate(range(0, len(tensors), 4)):
        cache.self_attention_cache.update(tensors[start], tensors[start + 1], layer)
        cache.cross_attention_cache.update(tensors[start + 2], tensors[start + 3], layer)
        cache.is_updated[layer] = True


class OnnxModel(PreTrainedModel, HeedGenerationMixin):
    """An exported model on the CPU, with `generate()` and `forward()`; onnxruntime's `sessions` hold the weights."""

    config_class = HeedConfig
    main_input_name = "input_ids"

    def __init__(self, config: HeedConfig, sessions: Sequence[Any]):
        super().__init__(config)
        self.encoder = OnnxEncoder(sessions[0])
        self.first_step, self.next_step = sessions[1:]
        # Sets the model's device and dtype.
        self.place = nn.Parameter(torch.empty(0), requires_grad=False)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:  # type: ignore[override]
        """Load a folder from `heedful export onnx`; a `FileNotFoundError` names a missing file."""
        folder = Path(folder)
        for name in ("config.json", "generation_config.json", *ONNX_FILES):
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{folder} must hold a model exported to ONNX, but has no {name}.")
        check_inside(folder)
        onnxruntime = import_extra("onnxruntime", "onnx")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3  # errors
        with_options = partial(onnxruntime.InferenceSession, sess_options=options, providers=["CPUExecutionProvider"])
        sessions = [with_options(str(folder / name)) for name in ONNX_FILES]
        model = cls(HeedConfig.from_pretrained(folder, local_files_only=True), sessions)
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
        return model.eval()

    @either_cache_name
    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[Any, ...] | None = None,
        cache: EncoderDecoderCache | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """Return `logits` `(batch, target_length, decoder_vocab_size)`, with the arguments of the Heed model.

        A filled cache must be dynamic, takes one target token, and grows. Unsupported arguments raise a `ValueError`.
        """
        _check_request(decoder_input_ids, cache, kwargs)
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask)
        states = encoder_outputs[0]
        if attention_mask is None:
            attention_mask = states.new_ones(states.shape[:2], dtype=torch.long)
        inputs: dict[str, Any] = {"input_ids": decoder_input_ids, "encoder_attention_mask": attention_mask}
        if cache is None or not cache.get_seq_length():
            logits, *present = _run(self.first_step, inputs | {"encoder_hidden_states": states})
            if cache is not None:
                fill_cache(cache, present)
            return Seq2SeqLMOutput(logits=logits, **cast(Any, {CACHE: cache}))
        past = dict(zip(cache_names(self.config.decoder_layers), cached_tensors(cache), strict=True))
        logits, *present = _run(self.next_step, inputs | past)
        for layer, own in enumerate(cast(Any, cache.self_attention_cache.layers)):
            own.keys, own.values = present[2 * layer : 2 * layer + 2]
        return Seq2SeqLMOutput(logits=logits, **cast(Any, {CACHE: cache}))


class OnnxEncoder(nn.Module):
    """The exported encoder."""

    main_input_name = "input_ids"

    def __init__(self, session: Any):
        super().__init__()
        self.session = session

    def forward(
        self, input_ids: torch.LongTensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutput:
        """Encode `(batch, source_length)` tokens as `(batch, source_length, d_model)` states."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        (states,) = _run(self.session, {"input_ids": input_ids, "attention_mask": mask})
        return BaseModelOutput(last_hidden_state=states)


def _run(session: Any, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Run a session, which takes only 64-bit integers."""
    inputs = {name: value if value.is_floating_point() else value.long() for name, value in inputs.items()}
    outputs = session.run(None, {name: value.contiguous().numpy() for name, value in inputs.items()})
    return list(map(torch.from_numpy, outputs))


def _check_request(tokens: Any, cache: EncoderDecoderCache | None, others: dict[str, Any]) -> None:
    if cache is not None and cache.is_compileable:
        raise wrong("cache_implementation", f"be dynamic {FOR}", "static")
    if cache is not None and cache.get_seq_length() and tokens.shape[1] != 1:
        raise wrong("decoder_input_ids", "have one token with a filled cache", tokens.shape[1], verb="has")
    mask = others.pop("decoder_attention_mask", None)
    if mask is not None and not bool(mask.all()):
        raise wrong("decoder_attention_mask", f"be 1 everywhere {FOR}", "0 somewhere")
    for name, value in others.items():
        if name != "return_dict" and value not in (None, False):
            raise wrong(name, f"be left out {FOR}", value)
