"""`prepare_for_inference`: `generate()` itself over packed weights, until that is undone."""

import warnings
from typing import Any, Self

import torch
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from heedful.inference.native.decoder import NativeDecoder, refusal
from heedful.inference.native.network import obstacle
from heedful.inference.native.packing import Precision


def prepare_for_inference(model: Any, precision: Precision = "float32") -> "PreparedModel":
    """Let `generate()` of a model on the CPU run over packed weights, with the same tokens in float32.

    Greedy and beam search are then the `NativeDecoder`'s, and so is the encoder wherever no gradient is computed. What
    the native decoder cannot do (sampling, streaming, recorded scores and attentions, other caches, …) runs as before.
    Changed weights are packed anew; a few rows written through `.data` or numpy may go unseen, unlike those written
    under `torch.no_grad()`. The copies are not saved, copied or sent with the model; `undo` lets go of them.

        prepared = prepare_for_inference(model)
        model.generate(**inputs, num_beams=4)
        prepared.undo()

    or, for a while, `with prepare_for_inference(model): …`.

    Args:
        model: A Heed model on the CPU, in evaluation mode.
        precision: `float32`, `bfloat16` or `int8`, as `NativeDecoder` takes it.

    Returns:
        The handle that undoes it.

    Raises:
        ValueError: If the model is in training mode, prepared already, or the `NativeDecoder` cannot take its place.

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
    """A model whose `generate()` runs over packed weights; made by `prepare_for_inference`.

    Args:
        decoder: The model's native decoder.

    """

    def __init__(self, decoder: NativeDecoder):
        self.model = decoder.model
        self.precision: Precision = decoder.precision
        self._decoder: NativeDecoder = decoder
        self._is_blocked = False
        self.model.prepared = self.model.model.encoder.prepared = self

    def __reduce__(self):
        # A copy of the model, or what another process gets, is not prepared.
        return type(None), ()

    def __enter__(self) -> Self:
        """Return itself; it was prepared when it was made."""
        return self

    def __exit__(self, *_: object) -> None:
        """Undo it."""
        self.undo()

    def undo(self) -> None:
        """Let `generate()` use the model's own modules again; a second time it does nothing."""
        if self.model.prepared is self:
            self.model.prepared = self.model.model.encoder.prepared = None

    def encode(
        self,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        records: bool,
    ) -> torch.Tensor | None:
        """Encode `(batch, source_length)` tokens, or return `None` where the encoder's modules must do it.

        Args:
            input_ids: `(batch, source_length)`.
            attention_mask: `(batch, source_length)`, 0 at padding.
            inputs_embeds: Given in place of tokens.
            records: Whether attention weights or hidden states are asked for.

        Raises:
            ValueError: As `NativeDecoder.encoded`.

        """
        if input_ids is None or inputs_embeds is not None or records or not self._may_compute():
            return None
        if input_ids.numel() == 0 or (attention_mask is not None and attention_mask.dim() != 2):
            return None
        decoder = self._current_decoder()
        if decoder is None:
            return None
        # The modules may have to go on with it.
        return decoder.encode(input_ids, attention_mask).to(self.model.get_input_embeddings().weight.dtype)

    def decode(
        self,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> torch.Tensor | None:
        """Search as `generate()` asks, or return `None` where its own loops must do it.

        Args:
            input_ids: `(batch · beams, length)` decoder prompts.
            logits_processor: As `generate()` made it.
            stopping_criteria: Likewise.
            generation_config: With all settings.
            model_kwargs: The encoded source, its mask, the cache and what else there is.

        """
        config, cache = generation_config, model_kwargs.get("past_key_values")
        is_ours = (
            self._may_compute()
            and not config.return_dict_in_generate
            and config.cache_implementation is None
            and refusal(config) is None
            and all(type(each) in (MaxLengthCriteria, EosTokenCriteria) for each in stopping_criteria)
            and not any(model_kwargs.get(name) for name in ("streamer", "synced_gpus"))
            and not any(name in model_kwargs for name in ("decoder_attention_mask", "decoder_inputs_embeds"))
            # Prefix tuning of peft puts its own there.
            and "prepare_inputs_for_generation" not in self.model.__dict__
            # A cache that was handed in is to be filled; transformers marks it so.
            and not (cache is not None and getattr(cache, "_is_user_defined", False))
        )
        decoder = self._current_decoder() if is_ours else None
        if decoder is None:
            return None
        return decoder.search(input_ids, logits_processor, config, model_kwargs).tokens

    def _may_compute(self) -> bool:
        return not (
            self.model.training
            or torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or torch.is_autocast_enabled("cpu")
        )

    def _current_decoder(self) -> NativeDecoder | None:
        """Return the decoder with the present weights, or `None`, with a warning, if something stands in its way."""
        if self._decoder.is_current:
            self._is_blocked = False
            return self._decoder
        reason = obstacle(self.model)
        if reason is None:
            self._decoder, self._is_blocked = NativeDecoder(self.model, self.precision), False
            return self._decoder
        if not self._is_blocked:
            warnings.warn(f"`generate()` runs as if the model was not prepared. {reason}", stacklevel=2)
        self._is_blocked = True
        return None
