"""What both families put on their stacks: encoder and decoder as one, the output layer, and the training loss.

The loss (section 5.4 of *Attention Is All You Need*) has two forms that compute the same. `smoothed_cross_entropy` is
the formula. `OutputLoss` is what trains a Transformer, and a recurrent model where it is asked for: the same loss and
its gradient, without ever holding all logits. Whoever changes one must change the other;
`tests/model/test_loss_forms.py` compares them.

Letters in shape comments: B batch, T target length, N target tokens, D width of the states, V number of tokens in the
target's vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput, Seq2SeqModelOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple

from .configuration_base_heed import IGNORED_LABEL
from .fast_paths_heed import computing_dtype, is_plain, linear
from .generation_heed import with_known_signature

# `OutputLoss` holds the logits of so many target tokens at once,
TOKENS_AT_ONCE = 256
# adds up the gradients of so many rows of the pre-softmax matrix at once,
MATRIX_ROWS_AT_ONCE = 8192
# and on the CPU computes the softmax of so many logits at once: they are read several times, and stay in its cache.
LOGITS_AT_ONCE = 2**18


def smoothed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Return the summed cross-entropy with label smoothing ε_ls (section 5.4), in nats, computed in float32.

    Logits are `(…, V)`, labels `(…)`, -100 where nothing is to be predicted. The target of a label y has probability
    1 - ε_ls at y, and ε_ls is shared out evenly among all V tokens. A training step of a Transformer does not call
    this function but `OutputLoss`, which computes the same without holding all logits: change both.
    """
    return F.cross_entropy(
        logits.flatten(0, -2).float(),
        labels.to(logits.device).flatten(),
        ignore_index=IGNORED_LABEL,
        label_smoothing=smoothing,
        reduction="sum",
    )


class OutputLoss(torch.autograd.Function):
    """`smoothed_cross_entropy` of the pre-softmax layer's logits, without ever holding all of them.

    A few hundred target tokens at a time it computes logits, loss and gradients, so that memory does not grow with
    tokens × vocabulary, and nothing is computed for padding.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        smoothing: float,
    ) -> torch.Tensor:
        """Return the summed loss in nats of `(N)` labels, from `(N, D)` states and the layer's `(V, D)` weight."""
        needs_states, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dtype = computing_dtype(states)
        matrix = weight.to(dtype)
        of_states = torch.zeros_like(states) if needs_states else None
        of_weight = torch.zeros_like(weight) if needs_weight else None
        of_bias = torch.zeros_like(bias) if bias is not None and needs_bias else None
        total = torch.zeros((), device=states.device)
        with torch.autocast(states.device.type, enabled=False):  # the dtypes are chosen here
            predicted = (labels != IGNORED_LABEL).nonzero()[:, 0]
            for rows in predicted.split(TOKENS_AT_ONCE) if len(predicted) else ():
                part, target = states[rows].to(dtype), labels[rows][:, None]
                logits = linear(part, matrix, None if bias is None else bias.to(dtype))
                total += replace_by_gradient(logits, target, smoothing, of_bias)
                if of_states is not None:
                    of_states[rows] = linear(logits, matrix.t(), None).to(states.dtype)
                if of_weight is not None:
                    # A part of the matrix at a time: the product for all of it would take as much memory again.
                    parts = of_weight.split(MATRIX_ROWS_AT_ONCE), logits.split(MATRIX_ROWS_AT_ONCE, 1)
                    for known, columns in zip(*parts, strict=True):
                        known += linear(columns.t(), part.t(), None)
        ctx.save_for_backward(of_states, of_weight, of_bias)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Scale the gradients that `forward` has computed."""
        return *(None if known is None else known * gradient for known in ctx.saved_tensors), None, None


def replace_by_gradient(
    logits: torch.Tensor, targets: torch.Tensor, smoothing: float, of_bias: torch.Tensor | None
) -> torch.Tensor:
    """Return the summed loss of `(N, V)` logits and `(N, 1)` targets, and overwrite the logits by its gradient.

    The gradient of a logit is its probability minus that of the target: 1 - ε_ls + ε_ls/V at the label, ε_ls/V
    elsewhere. The gradient of the bias is added to `of_bias`.
    """
    total = torch.zeros((), device=logits.device)
    size = max(1, LOGITS_AT_ONCE // logits.shape[-1]) if logits.device.type == "cpu" else len(logits)
    for part, target in zip(logits.split(size), targets.split(size), strict=True):
        gradient = part.softmax(-1, dtype=torch.float32)  # the probabilities, (size, V)
        # log Σ exp(logits): the largest logit minus the logarithm of its probability, the one that cannot underflow.
        normaliser = part.amax(-1).float() - gradient.amax(-1).log()  # (size)
        total += (normaliser - (1 - smoothing) * part.gather(1, target)[:, 0].float()).sum()
        if smoothing:
            total -= smoothing * part.mean(-1, dtype=torch.float32).sum()
            gradient -= smoothing / gradient.shape[-1]
        gradient.scatter_add_(1, target, gradient.new_full(target.shape, smoothing - 1))
        if of_bias is not None:
            of_bias += gradient.sum(0)
        part.copy_(gradient)
    return total


class EncoderDecoder(nn.Module):
    """A model of two stacks, `encoder` and `decoder`, without a pre-softmax layer; both families inherit it."""

    config: Any
    encoder: Any
    decoder: Any

    def _hold_both_stacks(self, encoder: nn.Module, decoder: nn.Module) -> None:
        """Take the two stacks, and tell transformers which of their matrices are one."""
        self.encoder, self.decoder = encoder, decoder
        self.encoder.is_part_of_a_model = self.decoder.is_part_of_a_model = True
        self._tied_weights_keys = {}
        if self.config.shares_source_and_target_embeddings:
            self._tied_weights_keys["decoder.embed_tokens.weight"] = "encoder.embed_tokens.weight"

    def get_input_embeddings(self) -> nn.Module:
        """Return the source embeddings."""
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the source embeddings, and the target's where they are shared."""
        self.encoder.embed_tokens = value
        if self.config.shares_source_and_target_embeddings:
            self.decoder.embed_tokens = value

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        """Encode the source, unless `encoder_outputs` is given, and decode the target, with the stacks' arguments.

        `encoder_outputs` is what the encoder returns, or a tuple of it.

        Raises:
            ValueError: As the stacks raise it, or if the target is missing.
        """
        if encoder_outputs is None:
            source_inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
            encoded = self.encoder(**source_inputs, return_dict=True, **kwargs)
        else:
            encoded = self._encoded(encoder_outputs)
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            raise ValueError(
                "`decoder_input_ids` or, for a loss, `labels` must be given, but neither was. (transformers' Trainer "
                "takes the labels away where `label_smoothing_factor` is set: give the data collator the model, "
                "`DataCollatorForSeq2Seq(tokenizer, model=model)`, so that it makes `decoder_input_ids`.)"
            )
        source = encoded.last_hidden_state
        if attention_mask is not None and attention_mask.dim() == 2 and attention_mask.shape[1] != source.shape[1]:
            raise ValueError(
                f"The attention mask must cover {source.shape[1]} tokens of the source, "
                f"but it covers {attention_mask.shape[1]} instead."
            )
        decoded = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=source,
            encoder_attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **self._beside_states(encoded),
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoded.last_hidden_state,
            past_key_values=decoded.past_key_values,
            decoder_hidden_states=decoded.hidden_states,
            decoder_attentions=decoded.attentions,
            cross_attentions=decoded.cross_attentions,
            encoder_last_hidden_state=source,
            encoder_hidden_states=encoded.hidden_states,
            encoder_attentions=encoded.attentions,
        )

    def _encoded(self, given: BaseModelOutput | tuple) -> Any:
        """Return the encoder's output, given as such or as a tuple."""
        return given if isinstance(given, BaseModelOutput) else BaseModelOutput(*given)

    def _beside_states(self, encoded: Any) -> dict[str, Any]:
        """Return what the decoder is given of the encoder's output beside its states."""
        return {}


class OutputLayer(nn.Module):
    """A pre-softmax layer `lm_head` on an encoder-decoder `model`, and the loss; both families inherit it."""

    config: Any
    model: Any
    lm_head: nn.Linear
    prepare_decoder_input_ids_from_labels: Any  # of `HeedGenerationMixin`
    # The class of `lm_head` where nothing stands in its place, such as an adapter.
    lm_head_class: type[nn.Linear] = nn.Linear
    # Whether a training step returns no logits unless it is asked for them.
    skips_logits_in_training = False

    def _hold_head(self, model: nn.Module, head: nn.Linear) -> None:
        """Take the model and its pre-softmax layer, and tell transformers which of their matrices are one."""
        self.model, self.lm_head = model, head
        self.model.is_part_of_a_model = True
        owner = "encoder" if self.config.shares_source_and_target_embeddings else "decoder"
        self._tied_weights_keys = {}
        if self.config.shares_target_and_output_embeddings:
            self._tied_weights_keys["lm_head.weight"] = f"model.{owner}.embed_tokens.weight"

    def get_output_embeddings(self) -> nn.Module:
        """Return the pre-softmax linear layer."""
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the pre-softmax linear layer."""
        self.lm_head = new_embeddings

    @with_known_signature
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_items_in_batch: int | torch.Tensor | None = None,
        skip_logits: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        """Score the next target token at every position; with labels, compute the loss too.

        Args:
            input_ids: `(batch, source_length)`.
            attention_mask: `(batch, source_length)`, 0 at padding.
            decoder_input_ids: `(batch, target_length)`; made from `labels` where missing.
            decoder_attention_mask: `(batch, target_length)`, with a cache that of all tokens so far.
            encoder_outputs: The encoder's output, in place of `input_ids`.
            past_key_values: Cache of earlier calls, extended in place.
            inputs_embeds: `(batch, source_length, D)`, in place of `input_ids`.
            decoder_inputs_embeds: `(batch, target_length, D)`, in place of `decoder_input_ids`.
            labels: `(batch, target_length)`, -100 where nothing is to be predicted.
            use_cache: Whether to return a cache; never with labels.
            logits_to_keep: Compute the logits of the last so many positions, or of these positions; 0 means all.
            num_items_in_batch: Number of labels over all micro-batches and processes of one update, by which the
                summed loss is divided; the labels of this call by default.
            skip_logits: Whether to compute the loss alone, a few hundred tokens at a time, and return no logits: most
                of a step's memory with large vocabularies. By default a Transformer does while training with labels.
            kwargs: `output_attentions`, `output_hidden_states`, `return_dict`.

        Returns:
            `loss` (in nats per label), `logits` `(batch, target_length, decoder_vocab_size)` unless they are skipped,
            the cache, and what was asked to be recorded.

        Raises:
            ValueError: As the stacks raise it, or if no label is to be predicted.
        """
        if labels is not None:
            use_cache = False
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        skips_logits = labels is not None and self._may_skip_logits(skip_logits)
        if labels is not None and skips_logits:
            kwargs |= self._shortcuts(labels, attention_mask, decoder_attention_mask, kwargs)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        recorded = dict(outputs.items())
        states = recorded.pop("last_hidden_state")  # (B, T, D)
        if labels is not None and skips_logits:
            recorded["loss"] = self.loss_of_states(states, labels, num_items_in_batch)
            return Seq2SeqLMOutput(**recorded)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(states[:, kept])  # (B, T, V)
        loss = None if labels is None else self.loss(logits, labels, num_items_in_batch)
        return Seq2SeqLMOutput(loss=loss, logits=logits, **recorded)

    def _may_skip_logits(self, skip_logits: bool | None) -> bool:
        """Tell whether the loss is computed without logits: where that is asked for, and nobody looks at `lm_head`."""
        if skip_logits is None:
            skip_logits = self.skips_logits_in_training and self.training and torch.is_grad_enabled()
        # float16 must be scaled before it is differentiated.
        dtypes = {self.lm_head.weight.dtype, computing_dtype(self.lm_head.weight)}
        return skip_logits and is_plain(self.lm_head, self.lm_head_class) and torch.float16 not in dtypes

    def _shortcuts(
        self,
        labels: torch.Tensor,
        attention_mask: torch.Tensor | None,
        decoder_attention_mask: torch.Tensor | None,
        asked: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return arguments for `model` by which a step takes less where its loss alone is looked at."""
        return {}

    def loss(
        self, logits: torch.Tensor, labels: torch.Tensor, num_items_in_batch: int | torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the smoothed cross-entropy (section 5.4) in nats per label; in evaluation mode nothing is smoothed.

        Args:
            logits: `(batch, target_length, decoder_vocab_size)`.
            labels: `(batch, target_length)`, -100 where nothing is to be predicted.
            num_items_in_batch: Divisor in place of the number of labels here.

        Raises:
            ValueError: If no label is to be predicted, or labels and logits differ in length.
        """
        _check_label_shape(logits, labels)
        return _mean(smoothed_cross_entropy(logits, labels, self._smoothing), labels, num_items_in_batch)

    def loss_of_states(
        self, states: torch.Tensor, labels: torch.Tensor, num_items_in_batch: int | torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the same loss as `loss`, of the `(batch, target_length, D)` states that `lm_head` reads."""
        _check_label_shape(states, labels)
        labels, head = labels.to(states.device), self.lm_head
        total = OutputLoss.apply(states.flatten(0, 1), head.weight, head.bias, labels.flatten(), self._smoothing)
        return _mean(total, labels, num_items_in_batch)

    @property
    def _smoothing(self) -> float:
        return self.config.label_smoothing if self.training else 0.0


def _check_label_shape(states: torch.Tensor, labels: torch.Tensor) -> None:
    if states.shape[:-1] != labels.shape:
        raise ValueError(
            f"`labels` must have the shape of the logits, {tuple(states.shape[:-1])}, "
            f"but have {tuple(labels.shape)} instead."
        )


def _mean(total: torch.Tensor, labels: torch.Tensor, num_items_in_batch: int | torch.Tensor | None) -> torch.Tensor:
    """Divide a summed loss by the number of labels: those given here, or of the whole update."""
    if num_items_in_batch is None:
        num_items_in_batch = (labels != IGNORED_LABEL).sum()
        if not torch.compiler.is_compiling() and num_items_in_batch == 0:
            raise ValueError("`labels` must hold at least one label other than -100, but all are -100.")
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch
