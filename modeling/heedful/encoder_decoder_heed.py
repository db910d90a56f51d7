"""Encoder and decoder as one model, and the output layer with its loss, for both families.

Letters in shape comments: B batch, T target length, D width of the states, V size of the target's vocabulary.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput, Seq2SeqModelOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple

from .configuration_base_heed import IGNORED_LABEL
from .fast_paths_heed import computing_dtype, has_own, is_eager, is_known, is_unmodified
from .loss_heed import OutputLoss, check_label_shape, mean_per_label, smoothed_cross_entropy
from .packed_rows_heed import packing_of
from .versions_heed import CACHE, cache_of, either_cache_name

Count = int | torch.Tensor | None


class EncoderDecoder(nn.Module):
    """An `encoder` and a `decoder`, without a pre-softmax layer."""

    config: Any
    encoder: Any
    decoder: Any

    def _hold_both_stacks(self, encoder: nn.Module, decoder: nn.Module) -> None:
        """Set the two stacks and the names of tied matrices."""
        self.encoder, self.decoder = encoder, decoder
        self.encoder.is_part_of_a_model = self.decoder.is_part_of_a_model = True
        tied = {"decoder.embed_tokens.weight": "encoder.embed_tokens.weight"}
        self._tied_weights_keys = tied if self.config.shares_source_and_target_embeddings else {}

    def get_input_embeddings(self) -> nn.Module:
        """Return the source embeddings."""
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the source embeddings, and the target's if they are shared."""
        self.encoder.embed_tokens = value
        if self.config.shares_source_and_target_embeddings:
            self.decoder.embed_tokens = value

    @either_cache_name
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[Any, ...] | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        """Encode the source, unless `encoder_outputs` is given, and decode the target; see the stacks' `forward`."""
        if encoder_outputs is None:
            source_inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
            encoded = self.encoder(**source_inputs, return_dict=True, **kwargs)
        else:
            encoded = self._encoded(encoder_outputs)
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            raise ValueError(
                "`decoder_input_ids` or, for a loss, `labels` must be given, but neither was. A call scores a target: "
                "use `generate()` to produce one, or `get_encoder()` to encode the source alone. (The Trainer "
                "removes labels to smooth them: it needs the collator `DataCollatorForSeq2Seq(tokenizer, model)`.)"
            )
        source = encoded.last_hidden_state
        if attention_mask is not None and attention_mask.dim() == 2 and attention_mask.shape[1] != source.shape[1]:
            must = f"The attention mask must cover {source.shape[1]} tokens of the source"
            found = f"it covers {attention_mask.shape[1]} instead (`generate()` cuts it by a `prefill_chunk_size`)"
            raise ValueError(f"{must}, but {found}.")
        of_source = {"encoder_hidden_states": source, "encoder_attention_mask": attention_mask}
        of_source |= self._beside_states(encoded)
        target_inputs: dict[str, Any] = {"input_ids": decoder_input_ids, "attention_mask": decoder_attention_mask}
        target_inputs |= {"inputs_embeds": decoder_inputs_embeds, "use_cache": use_cache, "cache": cache}
        decoded = self.decoder(**target_inputs, **of_source, return_dict=True, **kwargs)
        return Seq2SeqModelOutput(
            last_hidden_state=decoded.last_hidden_state,
            **{CACHE: cache_of(decoded)},
            decoder_hidden_states=decoded.hidden_states,
            decoder_attentions=decoded.attentions,
            cross_attentions=decoded.cross_attentions,
            encoder_last_hidden_state=source,
            encoder_hidden_states=encoded.hidden_states,
            encoder_attentions=encoded.attentions,
        )

    def _encoded(self, given: BaseModelOutput | tuple[Any, ...]) -> Any:
        return given if isinstance(given, BaseModelOutput) else BaseModelOutput(*given)

    def _beside_states(self, encoded: Any) -> dict[str, Any]:
        """Return further arguments for the decoder from the encoder's output."""
        return {}


class OutputLayer(nn.Module):
    """A pre-softmax layer `lm_head` on an encoder-decoder `model`, and the loss."""

    config: Any
    model: Any
    lm_head: nn.Linear
    prepare_decoder_input_ids_from_labels: Any  # of `HeedGenerationMixin`

    def _hold_head(self, model: nn.Module, head: nn.Linear) -> None:
        """Set the model, its pre-softmax layer and the names of tied matrices."""
        self.model, self.lm_head = model, head
        self.model.is_part_of_a_model = True
        owner = "encoder" if self.config.shares_source_and_target_embeddings else "decoder"
        tied = {"lm_head.weight": f"model.{owner}.embed_tokens.weight"}
        self._tied_weights_keys = tied if self.config.shares_target_and_output_embeddings else {}

    @either_cache_name
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[Any, ...] | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_items_in_batch: Count = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        """Score the next target token at every position; with labels, compute the loss too.

        Args:
            input_ids: `(batch, source_length)`.
            attention_mask: `(batch, source_length)`, 0 at padding.
            decoder_input_ids: `(batch, target_length)`; by default made from `labels`.
            decoder_attention_mask: `(batch, past_length + target_length)`, 0 at padding.
            encoder_outputs: The encoder's output, in place of `input_ids`.
            cache: Cache of earlier calls, extended in place; `past_key_values` is its other name.
            inputs_embeds: `(batch, source_length, D)`, in place of `input_ids`.
            decoder_inputs_embeds: `(batch, target_length, D)`, in place of `decoder_input_ids`.
            labels: `(batch, target_length)`, -100 at positions without a prediction.
            use_cache: Whether to return a cache; never with labels.
            logits_to_keep: Number of last positions whose logits are computed, or the positions; 0 means all. With
                labels and no positions (`torch.arange(0)`), `loss_of` computes the loss.
            num_items_in_batch: Divisor of the summed loss: one update's number of labels, over all micro-batches and
                processes; by default this call's.
            kwargs: `output_attentions`, `output_hidden_states`, `return_dict`.

        Returns:
            `loss` (in nats per label), `logits` `(batch, target_length, decoder_vocab_size)` unless none are kept, the
            cache, and recorded outputs.

        Raises:
            ValueError: If ids are outside the vocabulary, masks have a wrong length, or targets or labels are missing.
        """
        inputs: dict[str, Any] = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "decoder_input_ids": decoder_input_ids,
            "decoder_attention_mask": decoder_attention_mask,
            "encoder_outputs": encoder_outputs,
            "inputs_embeds": inputs_embeds,
            "decoder_inputs_embeds": decoder_inputs_embeds,
            "cache": cache,
            "use_cache": use_cache,
            "return_dict": True,
            **kwargs,
        }
        is_alone = labels is not None and isinstance(logits_to_keep, torch.Tensor) and not logits_to_keep.numel()
        if labels is not None:
            inputs = self._inputs_of_labels(inputs, labels)
        leaves_out = is_alone and self._may_leave_out_logits()
        if labels is not None and leaves_out:
            inputs = {"packing": packing_of(self, inputs, labels)} | inputs
        outputs = dict(self.model(**inputs).items())
        states = outputs.pop("last_hidden_state")  # (B, T, D)
        if labels is not None and leaves_out:
            return Seq2SeqLMOutput(loss=self._loss_of_states(states, labels, num_items_in_batch), **outputs)
        last = 0 if is_alone else logits_to_keep  # if `is_alone`, a user's code uses the logits
        logits = self._score(states[:, slice(-last, None) if isinstance(last, int) else last])  # (B, T, V)
        loss = None if labels is None else self.loss(logits, labels, num_items_in_batch)
        return Seq2SeqLMOutput(loss=loss, logits=logits, **outputs)

    def loss_of(
        self,
        batch: Mapping[str, Any],
        num_items_in_batch: Count = None,
        objective: Any = None,
        body: Callable[..., Any] | None = None,
    ) -> torch.Tensor:
        """Return the loss of `forward`, in nats per label, for a step that uses nothing else and differentiates once.

        Unless a user's code uses or makes them, no logits are computed, and on the CPU no padding.

        Args:
            batch: Arguments of `forward` with `labels`, and perhaps `target_places`: the flat indices of labels other
                than -100, which avoid a GPU synchronization.
            num_items_in_batch: As in `forward`.
            objective: Replaces the cross-entropy; it may return several sums, whose first is differentiated.
            body: Replaces `model`, for example compiled.
        """
        others = {name: value for name, value in batch.items() if name not in ("labels", "target_places")}
        labels, places = batch["labels"], batch.get("target_places")
        inputs = self._inputs_of_labels(others, labels)
        leaves_out = self._may_leave_out_logits()
        if leaves_out and body is None:
            inputs = {"packing": packing_of(self, inputs, labels)} | inputs
        states = (body or self.model)(**inputs, return_dict=True).last_hidden_state  # (B, T, D)
        if leaves_out:
            return self._loss_of_states(states, labels, num_items_in_batch, objective, places)
        return self.loss(self._score(states), labels, num_items_in_batch, objective)

    def _inputs_of_labels(self, inputs: Mapping[str, Any], labels: torch.Tensor) -> dict[str, Any]:
        """Return inputs without a cache; missing decoder inputs are made from the labels."""
        given = {**inputs, "use_cache": False}
        if given.get("decoder_input_ids") is None and given.get("decoder_inputs_embeds") is None:
            given["decoder_input_ids"] = self.prepare_decoder_input_ids_from_labels(labels)
        return given

    def _score(self, states: torch.Tensor) -> torch.Tensor:
        return self.lm_head(states)

    def _may_leave_out_logits(self) -> bool:
        """Return whether the loss may be computed without logits: no user's code uses or makes them."""
        if not (is_eager() and is_unmodified(self.lm_head)):
            return False
        if has_own(self, "loss", "_score", "_smoothing") or not is_known(smoothed_cross_entropy):
            return False
        # A float16 loss must be scaled before it is differentiated.
        return torch.float16 not in (self.lm_head.weight.dtype, computing_dtype(self.lm_head.weight))

    def loss(
        self, logits: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Count = None, objective: Any = None
    ) -> torch.Tensor:
        """Return the cross-entropy of `(B, T, V)` logits in nats per label, smoothed (section 5.4) while training."""
        check_label_shape(logits, labels)
        summed = objective or smoothed_cross_entropy
        return mean_per_label(summed(logits, labels, self._smoothing), labels, num_items_in_batch)

    def _loss_of_states(
        self, states: Any, labels: Any, count: Count, objective: Any = None, places: Any = None
    ) -> torch.Tensor:
        """Return the same as `loss`, from the `(B, T, D)` inputs to `lm_head`."""
        check_label_shape(states, labels)
        labels, head = labels.to(states.device).flatten(), self.lm_head
        places = (labels != IGNORED_LABEL).nonzero()[:, 0] if places is None else places
        settings = places, self._smoothing, objective
        total = OutputLoss.apply(states.flatten(0, 1), head.weight, head.bias, labels, *settings)
        return mean_per_label(total, labels, count)

    @property
    def _smoothing(self) -> float:
        return self.config.label_smoothing if self.training else 0.0
