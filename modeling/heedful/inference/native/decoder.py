"""The native decoder as users meet it: `generate(custom_generate=NativeDecoder(model))`."""

from typing import Any

import torch
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.modeling_outputs import BaseModelOutput

from heedful.inference.memory import keep_freed_memory
from heedful.inference.native.compiled_network import make_network
from heedful.inference.native.fingerprint import Fingerprint
from heedful.inference.native.search import SearchSettings, beam_search, greedy_search
from heedful.inference.native.weights import PRECISIONS, Precision, kernel_name
from heedful.inference.search_settings import SEARCH_SETTINGS, active_settings
from heedful.inference.strategies.steps import BEAM_MODES, OTHER_MODES, UNSET, check_request, once_per_sentence

# Settings of other ways of decoding.
UNREAD = {
    **OTHER_MODES,
    **BEAM_MODES,
    **{"penalty_alpha": UNSET, "max_time": (None,), "stop_strings": (None,)},
    **SEARCH_SETTINGS,
}
# Settings that read the source's tokens, of which only the encoding is left, and the values that change nothing.
SOURCE_SETTINGS = {"encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0}
# The stopping criteria that the native search applies itself.
KNOWN_CRITERIA = (MaxLengthCriteria, EosTokenCriteria)
PADDING_ALONE = "`attention_mask` must leave a token of each source, but one is padding alone instead."
# What a step does not keep.
RECORDS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


class NativeDecoder:
    """Greedy and beam search on the CPU, faster than `generate()`'s own and with the same tokens in float32.

    It holds a packed copy of the model's weights, computes only what a step needs, and takes finished sentences out of
    the batch. Settings, logits processors and lengths are those of `generate()`; a setting that it cannot follow is an
    error that names it. On Linux it asks the C library to keep freed memory for the next step.

        decoder = NativeDecoder(model)
        model.generate(**decoder.encoded(**inputs), num_beams=4, custom_generate=decoder)

    Args:
        model: A Heed model on the CPU.
        precision: `float32`, or `int8` weights with inputs quantized at each call, the smallest and fastest. In `int8`
            the tokens of a sentence may depend on the other sentences of its batch, unless kernels.cpp computes the
            whole step, as it does for models like the paper's: rounding makes last digits, those of padding, larger.

    Raises:
        ValueError: If `obstacle` finds one in the model, or the precision is unknown or torch has no kernels for it.
    """

    def __init__(self, model: Any, precision: Precision = "float32"):
        if precision not in PRECISIONS:
            raise ValueError(f"`precision` must be one of {', '.join(PRECISIONS)}, but is {precision!r} instead.")
        keep_freed_memory()
        self.model = model
        self.network = make_network(model, precision)
        self.precision: Precision = precision
        self.kernel = kernel_name(precision)  # what does the matrix products: kernels.cpp, or a library of torch
        self._fingerprint = Fingerprint(model)

    def encoded(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> dict[str, Any]:
        """Encode the source with the packed weights.

        Args:
            input_ids: `(batch, source_length)`.
            attention_mask: `(batch, source_length)`, 0 at padding.

        Returns:
            Arguments of `generate()`.

        Raises:
            ValueError: If an id is outside the vocabulary, the mask has another shape than the ids, a source is
                padding alone or longer than the learned positions reach, or the model's weights have changed.
        """
        self._check_weights()
        states = self.encode(input_ids, attention_mask)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return {"encoder_outputs": BaseModelOutput(last_hidden_state=states), "attention_mask": mask}

    def encode(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return the `(batch, source_length, d_model)` encoding as `encoded`, without its check of the weights."""
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"`attention_mask` must have the shape of `input_ids`, {tuple(input_ids.shape)}, but has "
                f"{tuple(attention_mask.shape)} instead."
            )
        self.model.model.encoder.check_token_ids(input_ids)
        if is_padding_alone(attention_mask):
            raise ValueError(PADDING_ALONE)
        with torch.inference_mode(), torch.autocast("cpu", enabled=False):
            states = self.network.encode(input_ids, attention_mask)
        return states.clone()  # a tensor of inference mode could not be read where gradients are computed

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """Decode as `Strategy` says; greedy search returns `sequences_scores` too.

        Raises:
            ValueError: If only `generate()` itself can do what is asked, `model` is not the one that this decoder was
                made of, or its weights have changed since.
        """
        self._check(model, generation_config, stopping_criteria, model_kwargs)
        tokens, scores = self.search(input_ids, logits_processor, generation_config, model_kwargs)
        if not generation_config.return_dict_in_generate:
            return tokens
        from transformers.generation.utils import GenerateBeamEncoderDecoderOutput

        return GenerateBeamEncoderDecoderOutput(sequences=tokens, sequences_scores=scores)  # type: ignore[arg-type]

    def search(
        self, input_ids: torch.Tensor, logits_processor: Any, generation_config: Any, model_kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Search, without a check that all settings can be followed, from `(batch · beams, length)` prompts on.

        Returns `(batch · num_return_sequences, length)` tokens, and `(batch · num_return_sequences)` scores: in greedy
        search only if `return_dict_in_generate` asks for them.
        """
        self.model.model.decoder.check_token_ids(input_ids)
        settings = SearchSettings(generation_config, logits_processor, input_ids.shape[1])
        prompt = input_ids[:: settings.beams]
        source, mask = model_kwargs["encoder_outputs"][0], model_kwargs.get("attention_mask")
        source = once_per_sentence(source, len(prompt))
        mask = None if mask is None else once_per_sentence(mask, len(prompt))
        with torch.inference_mode(), torch.autocast("cpu", enabled=False):
            state = self.network.start(source, mask, prompt, settings.beams)
            search = greedy_search if settings.beams == 1 else beam_search
            tokens, scores = search(self.network, state, prompt, settings)
        return tokens.clone(), None if scores is None else scores.clone()  # as in `encode`

    def _check(self, model: Any, config: Any, stopping_criteria: Any, model_kwargs: dict[str, Any]) -> None:
        if model is not self.model:
            raise ValueError(
                "The model must be the one that the NativeDecoder was made of, but is another one instead."
            )
        self._check_weights()
        reason = settings_obstacle(config, model_kwargs.get("attention_mask"))
        if reason is not None:
            raise ValueError(reason)
        check_request("NativeDecoder", model, config, model_kwargs)
        others = [each for each in stopping_criteria if type(each) not in KNOWN_CRITERIA]
        if others:
            raise ValueError(
                f"`stopping_criteria` must be none but lengths and end tokens with NativeDecoder, but one is a "
                f"{type(others[0]).__name__} instead."
            )
        if model_kwargs.get("decoder_attention_mask") is not None:
            raise ValueError("`decoder_attention_mask` must be None with NativeDecoder, but is given instead.")

    @property
    def is_current(self) -> bool:
        """Whether the model still has the weights that were packed, and no new hooks."""
        return self._fingerprint.is_current

    def _check_weights(self) -> None:
        if not self.is_current:
            raise ValueError(
                "The model must be as it was when the NativeDecoder packed it, but its weights or modules have "
                "changed since: make a new one."
            )


def is_padding_alone(attention_mask: torch.Tensor | None) -> bool:
    """Return whether a `(batch, source_length)` mask hides all of a source: attention functions differ in that."""
    return attention_mask is not None and not bool(attention_mask.any(dim=1).all())


def settings_obstacle(config: Any, attention_mask: torch.Tensor | None = None) -> str | None:
    """Return why the native decoder cannot follow a generation config, or a source's mask, or `None` if it can."""
    if is_padding_alone(attention_mask):
        return PADDING_ALONE
    for name, value in active_settings(config, UNREAD).items():
        return f"`{name}` must not be set with NativeDecoder, but is {value!r} instead."
    if config.do_sample:
        return "`do_sample` must be False with NativeDecoder, but is True instead."
    for name, same in SOURCE_SETTINGS.items():
        value = getattr(config, name, None)
        if value is not None and value != same:
            return f"`{name}` must be {same} with NativeDecoder, which reads no source tokens, but is {value} instead."
    for name in RECORDS:
        if config.return_dict_in_generate and getattr(config, name, None):
            return f"`{name}` must be False with NativeDecoder, which keeps none, but is True instead."
    return None
