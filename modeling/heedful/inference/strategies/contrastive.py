"""Contrastive search for `generate(custom_generate=ContrastiveSearch(…))` (Su et al., 2022).

Letters in shape comments: B sentences, k candidates, V target tokens, L target length, D model width.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch

from heedful.inference.strategies.steps import (
    BEAM_MODES,
    ModelSteps,
    Records,
    check_request,
    end_tokens,
    filler,
    given_once,
    require,
)
from heedful.versions_heed import CACHE


@dataclass(frozen=True)
class ContrastiveSearch:
    """Contrastive search as a callable for `model.generate(…, custom_generate=ContrastiveSearch(0.6, 4))`.

    Each token is the one of the k most probable with the largest (1 - α) p(v) - α max_j s(h_v, h_j) (equation 5 of
    *A Contrastive Framework for Neural Text Generation*): probable, yet unlike, by the cosine s of the decoder's last
    hidden states, all tokens before it. All k candidates are run through the decoder side by side, so a step costs as
    much as one of a beam of k.

    With `return_dict_in_generate` the result is a `GenerateEncoderDecoderOutput`; its `scores` are the processed
    logits, before the penalty.

    Args:
        penalty_alpha: α from 0 (greedy search) to 1. `None` takes generate()'s `penalty_alpha`.
        top_k: Number of candidates. `None` takes generate()'s `top_k`.

    Raises:
        ValueError: If, when it is called, a setting is out of range or cannot be combined with another.
    """

    penalty_alpha: float | None = None
    top_k: int | None = None

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """Decode as `Strategy` says, one `(B, L)` sequence per sentence."""
        check_request("ContrastiveSearch", model, generation_config, model_kwargs, BEAM_MODES)
        self._check_cache(model_kwargs)
        alpha, k = self._resolve(generation_config, model.get_output_embeddings().weight.shape[0])
        # A copy, because the helper expands it in place and it may be the user's.
        model_kwargs["encoder_outputs"] = copy.copy(model_kwargs["encoder_outputs"])
        tokens, model_kwargs = model._expand_inputs_for_generation(
            expand_size=k, is_encoder_decoder=True, input_ids=input_ids, **model_kwargs
        )  # (B * k, L)
        steps = ModelSteps(model, model_kwargs | {"output_hidden_states": True})
        outputs = steps.next(tokens)
        context = outputs.decoder_hidden_states[-1].view(len(input_ids), k, input_ids.shape[1], -1)[:, 0]  # (B, L, D)
        mask = model_kwargs.get("decoder_attention_mask")
        mask = torch.ones_like(tokens) if mask is None else mask.to(tokens.device)
        is_context = mask[::k].bool()  # (B, L)
        records = Records(generation_config)
        going = torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
        sentences = torch.arange(len(input_ids), device=input_ids.device)
        while going.any():
            logits = outputs.logits[::k, -1].to(input_ids.device, torch.float32, copy=True)  # (B, V)
            scores = logits_processor(input_ids, logits)
            records.add(scores, outputs, every=k)
            probabilities, candidates = scores.softmax(-1).topk(k)  # (B, k)
            outputs = steps.next(torch.cat([tokens, candidates.view(-1, 1)], 1))
            states = outputs.decoder_hidden_states[-1][:, -1].view(len(sentences), k, -1)  # (B, k, D)
            chosen = choose(probabilities, states, context, is_context, alpha)  # (B)
            newest = candidates[sentences, chosen]
            if end_tokens(generation_config):
                newest = newest.masked_fill(~going, filler(generation_config))
            input_ids = torch.cat([input_ids, newest[:, None]], 1)
            context = torch.cat([context, states[sentences, chosen][:, None]], 1)
            is_context = torch.cat([is_context, torch.ones_like(is_context[:, :1])], 1)
            going = going & ~stopping_criteria(input_ids, records.scores)
            # The chosen candidate's row becomes all k rows of its sentence, cache and logits included.
            rows = (sentences * k + chosen).repeat_interleave(k)
            steps.reorder(rows)
            outputs = _rows_of(outputs, rows)
            tokens = input_ids.repeat_interleave(k, 0)
        if not generation_config.return_dict_in_generate:
            return input_ids
        from transformers.generation.utils import GenerateEncoderDecoderOutput

        # Without the cache, which has k rows for each sentence.
        return GenerateEncoderDecoderOutput(
            sequences=input_ids,  # type: ignore[arg-type]
            **records.fields(steps.model_kwargs["encoder_outputs"], len(input_ids)),
        )

    def _resolve(self, config: Any, vocabulary: int) -> tuple[float, int]:
        alpha: Any = given_once(self, config, "penalty_alpha")
        require(alpha is not None and 0 <= alpha <= 1, "penalty_alpha", "be between 0 and 1", alpha)
        k: Any = config.top_k if self.top_k is None else self.top_k
        require(bool(k) and 1 <= k <= vocabulary, "top_k", f"be between 1 and the {vocabulary} target tokens", k)
        for name, wanted in {"do_sample": False, "num_beams": 1, "num_return_sequences": 1}.items():
            value = getattr(config, name)
            require(value in (None, wanted), name, f"be {wanted} with ContrastiveSearch", value)
        return alpha, k

    def _check_cache(self, model_kwargs: dict[str, Any]) -> None:
        cache = model_kwargs.get(CACHE)
        if cache is not None and cache.is_compileable:
            # It has room for one token too few: candidates for the last token run through the decoder too.
            raise ValueError(
                "`cache_implementation` must be None or 'dynamic' with ContrastiveSearch, but the cache is static"
                " instead."
            )


def choose(
    probabilities: torch.Tensor,
    states: torch.Tensor,
    context: torch.Tensor,
    is_context: torch.Tensor,
    alpha: float,
) -> torch.Tensor:
    """Return which of k candidates has the largest (1 - α) p(v) - α max_j s(h_v, h_j) (Su et al., 2022, equation 5).

    The candidates have `(B, k)` probabilities and `(B, k, D)` last hidden states; those of the tokens before are the
    `(B, L, D)` context, whose mask is False at padding. Returns `(B)` numbers of candidates.
    """
    similarities = torch.nn.functional.cosine_similarity(
        states[:, :, None].float(), context[:, None].float(), dim=-1
    )  # (B, k, L)
    worst = similarities.masked_fill(~is_context[:, None], -1.0).amax(-1).to(probabilities.device)
    # A candidate that processors forbid has probability 0, and must not win because it is unlike the rest.
    values = ((1 - alpha) * probabilities - alpha * worst).masked_fill(probabilities == 0, float("-inf"))
    return values.argmax(-1)


def _rows_of(outputs: Any, rows: torch.Tensor) -> Any:
    """Return logits, attention weights and hidden states of these rows."""

    def taken(value: Any) -> Any:
        return tuple(layer[rows.to(layer.device)] for layer in value) if value else value

    from transformers.modeling_outputs import Seq2SeqLMOutput

    return Seq2SeqLMOutput(
        logits=outputs.logits[rows.to(outputs.logits.device)],
        decoder_hidden_states=taken(outputs.decoder_hidden_states),
        decoder_attentions=taken(outputs.get("decoder_attentions")),
        cross_attentions=taken(outputs.get("cross_attentions")),
    )
