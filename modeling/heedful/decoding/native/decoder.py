"""Greedy and beam search with packed weights instead of a model's modules."""

import warnings
from typing import Any, get_args

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from heedful.decoding.engines import Result
from heedful.decoding.native import conditions, kernels
from heedful.decoding.native.compiled_network import CompiledNetwork
from heedful.decoding.native.kernels import Precision
from heedful.decoding.native.network import NativeNetwork
from heedful.decoding.native.search import SearchSettings, beam_search, greedy_search
from heedful.decoding.strategies.steps import once_per_sentence
from heedful.generation_heed import check_logits
from heedful.host import keep_freed_memory, share_cores
from heedful.modeling_heed import HeedForConditionalGeneration
from heedful.processor_heed import multiplies_by_onednn
from heedful.protocols import Seq2SeqModel


class NativeDecoder:
    """Greedy and beam search with packed weights; for arguments and errors see `prepare_for_inference`."""

    def __init__(self, model: HeedForConditionalGeneration, precision: Precision = "float32"):
        if precision not in get_args(Precision):
            _raise(f"`precision` must be one of {', '.join(get_args(Precision))}, but is {precision!r} instead.")
        _raise(conditions.model_obstacle(model))
        keep_freed_memory()
        share_cores()
        if precision == "int8" and (missing := conditions.kernels_obstacle(model.config, precision)) is not None:
            message = f"`precision` is float32 instead of int8, which only Heedful's kernels support: {missing}."
            warnings.warn(message, stacklevel=3)
            precision = "float32"
        self.model, self.precision = model, precision
        of_torch = "oneDNN" if multiplies_by_onednn() else "torch.nn.functional.linear"
        self.kernel = of_torch if kernels.library() is None else "kernels.cpp"
        is_compiled = conditions.kernels_obstacle(model.config, precision) is None
        self.network: NativeNetwork = CompiledNetwork(model, precision) if is_compiled else NativeNetwork(model)
        _raise(conditions.difference(model, self.network, precision))
        self.fingerprint = conditions.Fingerprint(model)

    def encoded(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> dict[str, Any]:
        """Return arguments of `generate()` with the encoded source."""
        states = self.encode(input_ids, attention_mask)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        # The unused cache of transformers would take a tenth of the time for a short sentence.
        output = BaseModelOutput(last_hidden_state=states)
        return {"encoder_outputs": output, "attention_mask": mask, "use_cache": False}

    def encode(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Encode `(batch, source_length)` ids, masked by 0 at padding: `(batch, source_length, d_model)`."""
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            must = f"`attention_mask` must have the shape of `input_ids`, {tuple(input_ids.shape)}"
            _raise(f"{must}, but has {tuple(attention_mask.shape)} instead.")
        self.model.model.encoder.check_token_ids(input_ids)
        _raise(conditions.padding_obstacle(attention_mask))
        with torch.inference_mode(), torch.autocast("cpu", enabled=False):
            states = self.network.encode(input_ids, attention_mask)
        return states.clone()  # usable outside inference mode

    def __call__(
        self, model: Seq2SeqModel, input_ids: torch.Tensor, generation_config: GenerationConfig, **given: Any
    ) -> torch.Tensor | ModelOutput:
        """Decode as a strategy of `generate()`; a `ValueError` names unsupported settings."""
        if model is not self.model:
            _raise("The model must be the one given to NativeDecoder, but is another one instead.")
        if self.fingerprint.has_changed:
            _raise("The model must be as it was packed, but its weights or modules have changed since.")
        _raise(conditions.settings_obstacle(generation_config, **given))
        tokens, scores = self.search(input_ids, generation_config, **given)
        if not generation_config.return_dict_in_generate:
            return tokens
        return GenerateBeamEncoderDecoderOutput(sequences=tokens, sequences_scores=scores)  # type: ignore[arg-type]

    def search(
        self, input_ids: torch.Tensor, config: GenerationConfig, logits_processor: LogitsProcessorList, **given: Any
    ) -> Result:
        """Return tokens from `(batch · beams, length)` prompts, and scores (in greedy search only on request)."""
        self.model.model.decoder.check_token_ids(input_ids)
        settings = SearchSettings(config, logits_processor, input_ids.shape[1])
        if not 0 <= settings.fill < (limit := self.model.config.target_vocab_size):
            _raise(f"`pad_token_id` must be at least 0 and below {limit}, but is {settings.fill} instead.")
        prompt = input_ids[:: settings.beams]
        source, mask = once_per_sentence(given["encoder_outputs"][0], len(prompt)), given.get("attention_mask")
        mask = None if mask is None else once_per_sentence(mask, len(prompt))
        with torch.inference_mode(), torch.autocast("cpu", enabled=False):
            state = self.network.start(source, mask, prompt, settings.beams)
            search = greedy_search if settings.beams == 1 else beam_search
            tokens, scores = search(self.network, state, prompt, settings)
        if scores is not None and settings.processor is None:  # processors may make them -inf
            check_logits(-scores, torch.float32)
        return tokens.clone(), None if scores is None else scores.clone()  # as in `encode`


def _raise(obstacle: str | None) -> None:
    if obstacle is not None:
        raise ValueError(obstacle)
