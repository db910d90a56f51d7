"""`prepare_for_inference`: `generate()` itself over packed weights, until that is undone."""

import warnings
from typing import Any, Self

import torch

from heedful.fast_paths_heed import runs_known_code
from heedful.inference.native.decoder import KNOWN_CRITERIA, NativeDecoder, is_padding_alone, settings_obstacle
from heedful.inference.native.network import obstacle
from heedful.inference.native.weights import Precision
from heedful.versions_heed import CACHE


def prepare_for_inference(model: Any, precision: Precision = "float32") -> "PreparedModel":
    """Let `generate()` of a model on the CPU run over packed weights, with the same tokens in float32.

    Greedy search and beam search are then those of the `NativeDecoder`, and so is the encoder wherever no gradient is
    computed. What the native decoder cannot do (sampling, streaming, recorded scores and attentions, other caches, …)
    runs as before. Weights that change are packed again. A change that is written to a few numbers through `.data` or
    numpy may go unnoticed; one under `torch.no_grad()` does not. The packed copies are not saved, copied or pickled
    with the model, and `undo` frees them.

        prepared = prepare_for_inference(model)
        model.generate(**inputs, num_beams=4)
        prepared.undo()

    or, for a while, `with prepare_for_inference(model): …`.

    Args:
        model: A Heed model on the CPU, in evaluation mode.
        precision: `float32` or `int8`, as `NativeDecoder` takes it.

    Returns:
        The handle that undoes it.

    Raises:
        ValueError: If the model is in training mode or already prepared, or the `NativeDecoder` cannot take its place.
    """
    decoder = NativeDecoder(model, precision)
    if model.training:
        raise ValueError(
            "The model must be in evaluation mode to be prepared, but is in training mode: call `eval()`."
        )
    if model.prepared is not None:
        raise ValueError("The model must not be prepared already, but is: `undo()` the earlier preparation first.")
    return PreparedModel(decoder)


class PreparedModel:
    """A model whose `generate()` runs over packed weights; made by `prepare_for_inference`."""

    def __init__(self, decoder: NativeDecoder):
        self.model = decoder.model
        self.precision: Precision = decoder.precision
        self._decoder: NativeDecoder = decoder
        self._is_blocked = False
        self.model.prepared = self.model.model.encoder.prepared = self

    def __reduce__(self):
        # A copy of the model is not prepared, neither here nor in another process.
        return type(None), ()

    def __enter__(self) -> Self:
        """Return itself: the model is prepared since this was made."""
        return self

    def __exit__(self, *_: object) -> None:
        """Undo it."""
        self.undo()

    def undo(self) -> None:
        """Let `generate()` use the model's own modules again. A second call does nothing."""
        if self.model.prepared is self:
            self.model.prepared = self.model.model.encoder.prepared = None

    def encode(
        self,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        records: bool,
    ) -> torch.Tensor | None:
        """Return the `(batch, source_length, d_model)` encoding, or `None` if the encoder's modules must compute it.

        They do where `records`, that is attention weights or hidden states, are asked for. Errors are those of
        `NativeDecoder.encoded`.
        """
        if input_ids is None or inputs_embeds is not None or records or not self._may_compute():
            return None
        if input_ids.numel() == 0 or (attention_mask is not None and attention_mask.dim() != 2):
            return None
        decoder = self._current_decoder()
        if decoder is None or is_padding_alone(attention_mask):
            return None
        # The decoder's modules may have to go on with it.
        return decoder.encode(input_ids, attention_mask).to(self.model.get_input_embeddings().weight.dtype)

    def decode(
        self,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> torch.Tensor | None:
        """Return the tokens as `Strategy` says, or `None` if the loops of `generate()` itself must find them."""
        config, cache = generation_config, model_kwargs.get(CACHE)
        is_ours = (
            self._may_compute()
            and not config.return_dict_in_generate
            and config.cache_implementation is None
            and settings_obstacle(config, model_kwargs.get("attention_mask")) is None
            and all(type(each) in KNOWN_CRITERIA for each in stopping_criteria)
            and not any(model_kwargs.get(name) for name in ("streamer", "synced_gpus"))
            and not any(name in model_kwargs for name in ("decoder_attention_mask", "decoder_inputs_embeds"))
            and runs_known_code(self.model)  # prefix tuning of peft, for one, sets a method of its own
            # A cache that the user passed in must be filled; `HeedGenerationMixin.generate` marks it so.
            and not getattr(cache, "is_the_users", False)
        )
        decoder = self._current_decoder() if is_ours else None
        if decoder is None:
            return None
        return decoder.search(input_ids, logits_processor, config, model_kwargs)[0]

    def _may_compute(self) -> bool:
        return not (
            self.model.training
            or torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or torch.is_autocast_enabled("cpu")
        )

    def _current_decoder(self) -> NativeDecoder | None:
        """Return the decoder with the present weights, or `None`, with one warning, if there is an obstacle."""
        if not self._decoder.is_current:
            reason = obstacle(self.model)
            if reason is not None:
                if not self._is_blocked:
                    warnings.warn(f"`generate()` runs as if the model was not prepared. {reason}", stacklevel=2)
                self._is_blocked = True
                return None
            self._decoder = NativeDecoder(self.model, self.precision)
        self._is_blocked = False
        return self._decoder
