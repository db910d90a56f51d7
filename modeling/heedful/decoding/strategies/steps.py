"""Next tokens from one or several models, step by step, with their caches.

Letters in shape comments: B sentences, K hypotheses per sentence, V target tokens, S source length, L target length.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from transformers import GenerationConfig
from transformers.utils import ModelOutput

from heedful.decoding.search_settings import OTHER_MODES, asked_of, device_of, end_tokens
from heedful.generation_heed import share_sources
from heedful.messages_heed import wrong
from heedful.protocols import Seq2SeqModel
from heedful.versions_heed import CACHE, cache_of

Arguments = dict[str, Any]  # arguments for the model from `generate()`
OnRows = Callable[..., torch.Tensor]  # logits processors or stopping criteria, on rows' tokens and scores


def check_request(
    strategy: str, model: Seq2SeqModel, config: GenerationConfig, model_kwargs: Arguments, unread: Sequence[str] = ()
) -> None:
    """Raise a `ValueError` for a decoder-only model, a filled cache, or a setting that the strategy ignores."""
    if not model.config.is_encoder_decoder:
        raise ValueError(f"{strategy} needs an encoder-decoder, but {type(model).__name__} is none.")
    for name, value in asked_of(config, (*OTHER_MODES, *unread)).items():
        require(False, name, f"not be set with {strategy}", repr(value))
    cache = model_kwargs.get(CACHE)
    length = 0 if cache is None else int(cache.get_seq_length())
    require(length == 0, CACHE, f"be empty with {strategy}", f"of {length} tokens")


def require(is_right: bool, field: str, must: str, value: object, verb: str = "is") -> None:
    """Raise a `ValueError` unless a setting is valid."""
    if not is_right:
        raise wrong(field, must, value, verb=verb)


def single_source_of(strategy: object, config: GenerationConfig, name: str) -> Any:
    """Return a strategy's setting, else generate()'s; they must not differ."""
    own, given = getattr(strategy, name), getattr(config, name, None)
    if own is not None and given not in (None, own):
        where = type(strategy).__name__
        raise ValueError(f"`{name}` must be given once, but is {own!r} in {where} and {given!r} in generate().")
    return given if own is None else own


class ModelSteps:
    """A model with its decoder arguments from `generate()`, expanded to `(B * K, …)`."""

    def __init__(self, model: Seq2SeqModel, model_kwargs: Arguments, rows_per_sentence: int):
        self.model, self.model_kwargs = model, dict(share_sources(model, dict(model_kwargs), rows_per_sentence))
        self._is_first = True

    def next(self, tokens: torch.Tensor) -> ModelOutput:
        """Run the decoder on the new tokens in `(B * K, L)`, and return the model's output."""
        length = 1 if self.model_kwargs.get("use_cache") and not self._is_first else None
        given = {"next_sequence_length": length, "is_first_iteration": self._is_first, **self.model_kwargs}
        inputs = self.model.prepare_inputs_for_generation(tokens.to(device_of(self.model)), **given)
        outputs: ModelOutput = self.model(**inputs, return_dict=True)
        self._is_first = False
        if cache_of(outputs) is not None:
            self.model_kwargs[CACHE] = cache_of(outputs)
        mask = self.model_kwargs.get("decoder_attention_mask")
        if mask is not None:  # the next token is visible
            self.model_kwargs["decoder_attention_mask"] = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        return outputs

    def reorder(self, rows: torch.Tensor) -> None:
        """Let each of the B * K rows continue from another row's cache in its sentence."""
        cache = self.model_kwargs.get(CACHE)
        if cache is not None:
            cache.self_attention_cache.reorder_cache(rows.to(device_of(self.model)))


class Records:
    """The records per step that `generate()` returns for the settings `output_…`."""

    def __init__(self, config: GenerationConfig):
        wanted = {"scores": config.output_scores, "logits": config.output_logits}
        wanted |= dict.fromkeys(("decoder_attentions", "cross_attentions"), config.output_attentions)
        wanted["decoder_hidden_states"] = config.output_hidden_states
        self.config, is_any = config, config.return_dict_in_generate
        self.steps: dict[str, list[Any]] = {name: [] for name in wanted if wanted[name] and is_any}

    def add(self, scores: torch.Tensor, outputs: ModelOutput) -> None:
        """Record a step: its `(rows, V)` processed scores, and parts of the output."""
        for name, values in self.steps.items():
            if name == "scores":
                values.append(scores.clone())
            elif name == "logits":
                values.append(outputs["logits"][:, -1].to(scores.device, torch.float32, copy=True))
            elif outputs.get(name):  # a recurrent decoder has no self-attention
                values.append(outputs[name])

    def fields(self, encoded: ModelOutput, sentences: int) -> dict[str, Any]:
        """Return the fields of transformers' output, with one row of encoder states per sentence."""
        fields: dict[str, Any] = {name: tuple(values) or None for name, values in self.steps.items()}
        for name in ("attentions", "hidden_states"):
            layers = encoded.get(name) if getattr(self.config, f"output_{name}") else None
            fields[f"encoder_{name}"] = layers and tuple(once_per_sentence(layer, sentences) for layer in layers)
        return fields


def once_per_sentence(states: torch.Tensor, sentences: int) -> torch.Tensor:
    """Return each sentence's first row, from states with one or several rows per sentence."""
    return states[:: len(states) // sentences]


def check_members(model: Seq2SeqModel, members: Sequence[Seq2SeqModel]) -> None:
    """Raise a `ValueError` for a model that cannot be combined with the first."""
    for number, member in enumerate(members):
        name, kind = f"models[{number}]", type(member).__name__
        require(hasattr(member, "prepare_inputs_for_generation"), name, "be a loaded model", repr(member))
        require(member.config.is_encoder_decoder, name, "be an encoder-decoder", kind)
        require(model.training or not member.training, name, "be in evaluation mode (call eval())", "in training mode")
        theirs = _vocabulary(member)
        for what, ours in _vocabulary(model).items():
            must = f"have the generating model's vocabulary, with {what} {ours}"
            require(ours == theirs[what], name, must, theirs[what])


def _vocabulary(model: Seq2SeqModel) -> dict[str, object]:
    config = model.generation_config
    return {
        "target size": model.get_output_embeddings().weight.shape[0],
        "source size": model.get_input_embeddings().weight.shape[0],
        "end tokens": sorted(end_tokens(config)),
        **{"start token": config.decoder_start_token_id, "padding": config.pad_token_id},
    }


def member_steps(
    member: Seq2SeqModel, source: torch.Tensor | None, first: ModelSteps, rows_per_sentence: int
) -> ModelSteps:
    """Encode `(B, S)` source tokens with another model, for K = `rows_per_sentence`, with the first model's masks."""
    if source is None or source.is_floating_point() or (source < 0).any():
        must = "`input_ids` must be given to generate() with several models, each of which encodes the source"
        raise ValueError(f"{must}, but `inputs_embeds` or `encoder_outputs` are given instead.")
    given = first.model_kwargs
    device, mask = device_of(member), given.get("attention_mask")
    mask = None if mask is None else once_per_sentence(mask, len(source)).to(device)
    encoded = member.get_encoder()(input_ids=source.to(device), attention_mask=mask, return_dict=True)
    model_kwargs = {"encoder_outputs": encoded, "attention_mask": mask}
    expand = cast("Any", member)._expand_inputs_for_generation
    _, model_kwargs = expand(rows_per_sentence, is_encoder_decoder=True, **model_kwargs)
    model_kwargs["use_cache"] = given.get("use_cache")
    if given.get("decoder_attention_mask") is not None:
        model_kwargs["decoder_attention_mask"] = given["decoder_attention_mask"].to(device)
    return ModelSteps(member, model_kwargs, rows_per_sentence)


def average(log_probabilities: list[torch.Tensor]) -> torch.Tensor:
    """Return the log of the mean probabilities for `(rows, V)` log-probabilities."""
    return torch.logsumexp(torch.stack(log_probabilities) - math.log(len(log_probabilities)), dim=0)
