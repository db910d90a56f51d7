"""The native decoder, greedy and beam search with packed weights, and its uses.

They are `prepare_for_inference` for `generate()`, and a `Translator` engine.
"""

import warnings
from contextlib import AbstractContextManager
from operator import itemgetter
from typing import Any, cast, get_args

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from heedful.decoding.engines import GenerateEngine, Processor, Result
from heedful.decoding.native import conditions, kernels
from heedful.decoding.native.compiled_network import CompiledNetwork
from heedful.decoding.native.kernels import Precision
from heedful.decoding.native.network import NativeNetwork
from heedful.decoding.native.search import SearchSettings, beam_search, greedy_search
from heedful.decoding.search_settings import Inputs
from heedful.decoding.strategies.steps import once_per_sentence
from heedful.fast_paths_heed import runs_known_code
from heedful.generation_heed import FiniteLogits, check_logits
from heedful.host import keep_freed_memory, share_cores
from heedful.modeling_heed import HeedEncoder, HeedForConditionalGeneration
from heedful.processor_heed import multiplies_by_onednn
from heedful.protocols import Seq2SeqModel

ENCODER_ARGUMENTS = ("input_ids", "attention_mask", "inputs_embeds")  # arguments of `HeedEncoder.forward`, in order


def may_replace(model: Seq2SeqModel, config: GenerationConfig) -> bool:
    """Return whether the native decoder gives the same tokens as `generate()` with a generation config."""
    is_float32 = model.dtype == torch.float32
    return is_float32 and not (conditions.settings_obstacle(config) or conditions.model_obstacle(model))


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


class NativeEngine(GenerateEngine):
    """The native decoder as an engine; a `ValueError` if it cannot run the model."""

    def __init__(self, model: Seq2SeqModel, precision: Precision = "float32"):
        super().__init__(model)
        self.decoder = NativeDecoder(cast("HeedForConditionalGeneration", model), precision)  # checks it

    @property
    def is_current(self) -> bool:
        """Whether the packed weights are still the model's."""
        return not self.decoder.fingerprint.has_changed

    def check(self, config: GenerationConfig) -> None:
        """Raise a `ValueError` for a setting that the native decoder does not support."""
        if (reason := conditions.settings_obstacle(config)) is not None:
            raise ValueError(reason)

    def generate(self, inputs: Inputs, settings: GenerationConfig, processor: Processor) -> Result:
        """Return a batch's `(rows, length)` tokens, and their scores unless logits processors changed them."""
        settings.return_dict_in_generate = True
        search = {"generation_config": settings, "logits_processor": processor, "custom_generate": self._decode}
        sequences, scores = self.model.generate(**self.decoder.encoded(**inputs), **search)
        return sequences, scores

    def _decode(self, *call: Any, logits_processor: LogitsProcessorList, **given: Any) -> Result:
        output: Any = self.decoder(*call, logits_processor=logits_processor, **given)
        is_changed = any(not isinstance(each, FiniteLogits) for each in logits_processor)
        return output.sequences, None if is_changed else output.sequences_scores


def prepare_for_inference(model: HeedForConditionalGeneration, precision: Precision = "float32") -> "PreparedModel":
    """Speed up a model's `generate()` on the CPU by packed weights, with the same tokens in float32.

    The native decoder then runs greedy and beam search, and the encoder of `get_encoder()` without gradients.
    Everything else (sampling, streaming, recorded scores, …) runs as before. Changed weights are packed again, unless
    code changes only a few numbers through `.data` or numpy. The packed copies are not saved, copied or pickled with
    the model. `undo` of the returned object frees them, and so does the end of `with prepare_for_inference(model): …`.

    Args:
        model: A Heed model on the CPU, in evaluation mode.
        precision: `float32`, or `int8`, the smallest and fastest: weights and, row by row, inputs in 8 bits. If
            `kernels.cpp` cannot run the model in int8, a warning gives the reason, and float32 is used.

    Raises:
        ValueError: If the model is in training mode, already prepared or unsupported, or the precision is unknown.
    """
    decoder = NativeDecoder(model, precision)
    if model.training:
        raise ValueError("The model must be in evaluation mode to be prepared, but is training: call `eval()`.")
    if model.prepared is not None:
        raise ValueError("The model must not be prepared already, but is: `undo()` the earlier preparation first.")
    return PreparedModel(decoder)


class PreparedModel(AbstractContextManager["PreparedModel", None]):
    """A model with packed weights from `prepare_for_inference`; `kernel` names the library for products."""

    def __init__(self, decoder: NativeDecoder):
        self.model, self.precision, self.kernel = decoder.model, decoder.precision, decoder.kernel
        self._decoder, self._is_blocked = decoder, False
        self.encoder = PreparedEncoder(self)
        self.model.prepared = self

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies of the model are not prepared.
        return type(None), ()

    def __exit__(self, *_: object) -> None:
        self.undo()

    def undo(self) -> None:
        """Make `generate()` use the model's modules again. A second call does nothing."""
        if self.model.prepared is self:
            self.model.prepared = None

    def encode(
        self, input_ids: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None, **options: Any
    ) -> BaseModelOutput | None:
        """Encode like `HeedEncoder.forward`, or return `None` if only its modules can."""
        is_plain = options.pop("return_dict", None) is not False
        is_plain = is_plain and all(value is None or value is False for value in options.values())
        if not is_plain or input_ids is None or input_ids.numel() == 0 or not self._may_compute():
            return None
        is_table = attention_mask is None or attention_mask.dim() == 2
        if not is_table or conditions.padding_obstacle(attention_mask) or (decoder := self._current_decoder()) is None:
            return None
        # In the dtype of the decoder's modules, which may use it.
        states = decoder.encode(input_ids, attention_mask).to(self.model.model.encoder.embed_tokens.weight.dtype)
        return BaseModelOutput(last_hidden_state=states)

    def decode(
        self, input_ids: torch.Tensor, generation_config: GenerationConfig, **given: Any
    ) -> torch.Tensor | None:
        """Return a strategy's tokens, or `None` if only `generate()` itself can find them."""
        is_ours = (
            self._may_compute()
            and not generation_config.return_dict_in_generate
            and generation_config.cache_implementation is None
            and conditions.settings_obstacle(generation_config, **given) is None
            and runs_known_code(self.model)  # peft's prefix tuning sets another method
        )
        if not is_ours or (decoder := self._current_decoder()) is None:
            return None
        return decoder.search(input_ids, generation_config, **given)[0]

    def _may_compute(self) -> bool:
        is_other = torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu")
        return not (self.model.training or is_other)

    def _current_decoder(self) -> NativeDecoder | None:
        if self._decoder.fingerprint.has_changed:
            if (reason := conditions.model_obstacle(self.model)) is not None:
                if not self._is_blocked:
                    warnings.warn(f"`generate()` runs without the packed weights. {reason}", stacklevel=2)
                self._is_blocked = True
                return None
            self._decoder = NativeDecoder(self.model, self.precision)
        self._is_blocked = False
        return self._decoder


class PreparedEncoder:
    """A prepared model's encoder for `generate()`, with the original encoder's attributes."""

    def __init__(self, prepared: PreparedModel):
        self._prepared, self._encoder = prepared, cast("HeedEncoder", prepared.model.model.encoder)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return itemgetter(0), ((self._encoder,),)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Encode with packed weights if possible, else with the modules."""
        given = dict(zip(ENCODER_ARGUMENTS, args, strict=False)) | kwargs
        config = self._encoder.config
        is_other = config.output_hidden_states or config.output_attentions or not config.return_dict
        found = None if is_other else self._prepared.encode(**given)
        return self._encoder(*args, **kwargs) if found is None else found


def _raise(obstacle: str | None) -> None:
    if obstacle is not None:
        raise ValueError(obstacle)
