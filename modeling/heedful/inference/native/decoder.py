"""The native decoder as users meet it: `generate(custom_generate=NativeDecoder(model))`."""

from typing import Any

import torch
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.modeling_outputs import BaseModelOutput

from heedful.inference.fingerprint import Fingerprint
from heedful.inference.memory import keep_freed_memory
from heedful.inference.native.network import NativeNetwork
from heedful.inference.native.packing import PRECISIONS, Precision, kernel_name
from heedful.inference.native.search import Found, SearchSettings, beam_search, greedy_search
from heedful.inference.strategies.steps import BEAM_MODES, SEARCH_SETTINGS, check_request, end_tokens, filler

# Settings that stand for another way of decoding.
OTHER_MODES = (*BEAM_MODES, "penalty_alpha")
# Settings that read the source's tokens, which encoded sentences no longer have, and the values that change nothing.
SOURCE_SETTINGS = {"encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0}
# Of transformers' logits processors those that know the rows by their number.
ROW_PROCESSORS = (
    logits_process.PrefixConstrainedLogitsProcessor,
    logits_process.SynthIDTextWatermarkLogitsProcessor,
)
# What a step does not keep.
RECORDS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


class NativeDecoder:
    """Greedy and beam search on the CPU, faster than `generate()`'s own and with the same tokens in float32.

    It holds a packed copy of the model's weights, computes nothing that a step can do without, and lets finished
    sentences leave the batch. Settings, logits processors and lengths are `generate()`'s own; what it cannot do is
    refused by name. On Linux it asks the C library to keep freed memory for the next step.

        decoder = NativeDecoder(model)
        model.generate(**decoder.encoded(**inputs), num_beams=4, custom_generate=decoder)

    Args:
        model: A Heed model on the CPU.
        precision: `float32`; `bfloat16`, which is fast where the processor computes with it; or `int8` weights with
            inputs quantized at each call, which is the smallest and fastest, and whose tokens may depend on the
            sentences beside.

    Raises:
        ValueError: If the model is not on the CPU, its attention is additive or it has forward hooks, or for a
            precision that is unknown or that torch has no kernels for.

    """

    def __init__(self, model: Any, precision: Precision = "float32"):
        if precision not in PRECISIONS:
            raise ValueError(f"`precision` must be one of {', '.join(PRECISIONS)}, but is {precision!r} instead.")
        keep_freed_memory()
        self.model = model
        self.network = NativeNetwork(model, precision)
        self._fingerprint = Fingerprint(model)

    @property
    def precision(self) -> Precision:
        """Of the weights."""
        return self.network.precision

    @property
    def kernel(self) -> str:
        """Which library does the matrix products."""
        return kernel_name(self.precision)

    def encoded(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> dict[str, Any]:
        """Encode the source with the packed weights.

        Args:
            input_ids: `(batch, source_length)`.
            attention_mask: `(batch, source_length)`, 0 at padding.

        Returns:
            Arguments of `generate()`.

        Raises:
            ValueError: If an id is outside the vocabulary, the mask has another shape, the source is longer than
                learned positions reach, or the model's weights have changed.

        """
        self._check_weights()
        states = self.encode(input_ids, attention_mask)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return {"encoder_outputs": BaseModelOutput(last_hidden_state=states), "attention_mask": mask}

    def encode(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return the `(batch, source_length, d_model)` encoding, without asking whether the weights have changed.

        Args:
            input_ids: `(batch, source_length)`.
            attention_mask: `(batch, source_length)`, 0 at padding.

        Raises:
            ValueError: As `encoded`.

        """
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"`attention_mask` must have the shape of `input_ids`, {tuple(input_ids.shape)}, but has "
                f"{tuple(attention_mask.shape)} instead."
            )
        self.model.model.encoder.check_token_ids(input_ids)
        with torch.inference_mode(), torch.autocast("cpu", enabled=False):
            states = self.network.encode(input_ids, attention_mask)
        return states.clone()  # outside, or nothing could be differentiated that reads it

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """Decode; called by `generate()`.

        Args:
            model: The model whose `generate()` was called; the one that this decoder was made of.
            input_ids: `(batch · beams, length)` decoder prompts.
            logits_processor: Applied to the logits of the next token, or in beam search to log-probabilities.
            stopping_criteria: Length and end tokens.
            generation_config: With all settings.
            model_kwargs: The encoded source and its mask.

        Returns:
            `(batch · num_return_sequences, length)` tokens, or, with `return_dict_in_generate`, an output with
            `sequences` and `sequences_scores`, of greedy search too.

        Raises:
            ValueError: For what only `generate()` itself can do, for another model, or if the model's weights have
                changed since.

        """
        self._check(model, generation_config, stopping_criteria, model_kwargs)
        return _output(self.search(input_ids, logits_processor, generation_config, model_kwargs), generation_config)

    def search(
        self, input_ids: torch.Tensor, logits_processor: Any, generation_config: Any, model_kwargs: dict[str, Any]
    ) -> Found:
        """Search, without asking whether all settings can be met.

        Args:
            input_ids: `(batch · beams, length)` decoder prompts.
            logits_processor: As `generate()` made it.
            generation_config: With all settings.
            model_kwargs: The encoded source and its mask.

        Raises:
            ValueError: If an id is outside the vocabulary.

        """
        self.model.model.decoder.check_token_ids(input_ids)
        beams, ends = generation_config.num_beams or 1, end_tokens(generation_config)
        fill = filler(generation_config)
        if fill == 0 and beams > 1 and ends:
            fill = ends[0]  # as transformers' beam search does, which takes the id 0 for none
        settings = SearchSettings(
            beams=beams,
            returned=generation_config.num_return_sequences or 1,
            max_new_tokens=generation_config.max_length - input_ids.shape[1],
            ends=ends,
            fill=fill,
            length_penalty=generation_config.length_penalty,
            early_stopping=generation_config.early_stopping,
            processor=logits_processor if len(logits_processor) else None,
            scored=bool(generation_config.return_dict_in_generate),
            keeps_rows=any(_may_number_rows(each) for each in logits_processor),
        )
        prompt = input_ids[::beams]
        source, mask = model_kwargs["encoder_outputs"][0], model_kwargs.get("attention_mask")
        with torch.inference_mode(), torch.autocast("cpu", enabled=False):
            state = self.network.start(source, mask, beams)
            search = greedy_search if beams == 1 else beam_search
            found = search(self.network, state, prompt, settings)
        return Found(found.tokens.clone(), None if found.scores is None else found.scores.clone())  # as in `encode`

    def _check(self, model: Any, config: Any, stopping_criteria: Any, model_kwargs: dict[str, Any]) -> None:
        if model is not self.model:
            raise ValueError(
                "The model must be the one that the NativeDecoder was made of, but is another one instead."
            )
        self._check_weights()
        reason = refusal(config)
        if reason is not None:
            raise ValueError(reason)
        check_request("NativeDecoder", model, config, model_kwargs)
        others = [each for each in stopping_criteria if type(each) not in (MaxLengthCriteria, EosTokenCriteria)]
        if others:
            raise ValueError(
                f"`stopping_criteria` must be none but lengths and end tokens with NativeDecoder, but one is a "
                f"{type(others[0]).__name__} instead."
            )
        if model_kwargs.get("decoder_attention_mask") is not None:
            raise ValueError("`decoder_attention_mask` must be None with NativeDecoder, but is given instead.")

    @property
    def is_current(self) -> bool:
        """Whether the model still computes what was packed: with the same weights, and nothing hooked in between."""
        return self._fingerprint.is_current

    def _check_weights(self) -> None:
        if not self.is_current:
            raise ValueError(
                "The model must be as the NativeDecoder has packed it, but its weights or modules were changed since: "
                "make a new one."
            )


def _may_number_rows(processor: Any) -> bool:
    """Tell whether a processor may know the rows by their number, so that none of them may leave."""
    is_known = type(processor).__module__ == logits_process.__name__
    return not is_known or isinstance(processor, ROW_PROCESSORS)


def refusal(config: Any) -> str | None:
    """Return why the native decoder cannot do what generate()'s config asks for, or `None` where it can."""
    for name in (*OTHER_MODES, "max_time", "stop_strings"):
        value = getattr(config, name, None)
        if value and not (name == "num_beam_groups" and value == 1):
            return f"`{name}` must not be set with NativeDecoder, but is {value!r} instead."
    for name, same in SEARCH_SETTINGS.items():
        value = getattr(config, name, None)
        if value not in same:
            return f"`{name}` must not be set with NativeDecoder, but is {value!r} instead."
    if config.do_sample:
        return "`do_sample` must be False with NativeDecoder, but is True instead."
    for name, idle in SOURCE_SETTINGS.items():
        value = getattr(config, name, None)
        if value is not None and value != idle:
            return f"`{name}` must be {idle} with NativeDecoder, which reads no source tokens, but is {value} instead."
    for name in RECORDS:
        if config.return_dict_in_generate and getattr(config, name, None):
            return f"`{name}` must be False with NativeDecoder, which keeps none, but is True instead."
    return None


def _output(found: Found, config: Any) -> Any:
    if not config.return_dict_in_generate:
        return found.tokens
    from transformers.generation.utils import GenerateBeamEncoderDecoderOutput

    tokens, scores = found.tokens, found.scores
    return GenerateBeamEncoderDecoderOutput(sequences=tokens, sequences_scores=scores)  # type: ignore[arg-type]
