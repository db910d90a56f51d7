"""`generate()` for both families: its arguments, lengths and scores."""

import copy
import functools
import inspect
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.generation import GenerationConfig, GenerationMixin, LogitsProcessor, LogitsProcessorList
from transformers.modeling_outputs import BaseModelOutput

from .configuration_base_heed import IGNORED_LABEL
from .fast_paths_heed import is_eager, is_unmodified, only_tokens_are_returned, runs_known_code
from .messages_heed import listed, wrong
from .versions_heed import CACHE, cache_of, either_cache_name, rename_cache

# The limit if neither call nor generation config has one: transformers' own, 20, cuts ordinary sentences.
DEFAULT_MAX_NEW_TOKENS = 256
# Arguments that `generate()` does not pass to a `custom_generate`.
KEPT_FROM_STRATEGIES = ("streamer", "assistant_model", "tokenizer", "assistant_tokenizer")
COMPILED_DEVICES = ("cuda",)  # steps with a static cache are compiled here
NAMES = [name for name in inspect.signature(GenerationMixin.generate).parameters if name not in ("self", "kwargs")]


def check_strategy(arguments: dict[str, Any]) -> None:
    """Raise a `ValueError` for arguments that a callable `custom_generate` would not receive."""
    for name in KEPT_FROM_STRATEGIES if callable(arguments.get("custom_generate")) else ():
        if (given := arguments.get(name)) is not None:
            must = "be None with a `custom_generate`, to which transformers does not pass it"
            raise wrong(name, must, f"a {type(given).__name__}")


def check_generate_arguments(kwargs: dict[str, Any]) -> None:
    """Raise a `ValueError` for arguments that transformers' `generate()` ignores, or refuses without a reason."""
    strategy = kwargs.get("custom_generate")
    if isinstance(strategy, type):
        raise wrong("custom_generate", f"be an object such as {strategy.__name__}(…)", "the class itself")
    check_strategy(kwargs)
    sources = [kwargs.get("inputs"), kwargs.get("input_ids"), kwargs.get("inputs_embeds")]
    sources.append(getattr(kwargs.get("encoder_outputs"), "last_hidden_state", None))
    source: Any = next((given for given in sources if given is not None), None)
    is_ids = isinstance(source, torch.Tensor) and not source.is_floating_point()
    if is_ids and (source.dim() != 2 or not source.numel()):
        must = "be of shape (batch, source_length), with at least one sentence and token"
        raise wrong("input_ids", must, f"of shape {tuple(source.shape)}", verb="are")
    prompt = kwargs.get("decoder_input_ids")
    if source is not None and prompt is not None and len(source) != len(prompt):
        raise wrong("decoder_input_ids", f"have a row for each of the {len(source)} sources", len(prompt), verb="have")


def counted(
    generated: torch.Tensor, ends: int | list[int] | None, stop_strings: str | list[str] | None, tokenizer: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each generated row's length, its end token included, and whether it has ended, both `(rows)`."""
    is_end = torch.isin(generated, torch.tensor([] if ends is None else ends, device=generated.device))
    ended = is_end.any(dim=1)
    # argmax finds the first end; a row without one is as long as the longest.
    counts = torch.where(ended, is_end.int().argmax(dim=1) + 1, generated.shape[1])
    if stop_strings is None:
        return counts, ended
    stops = [stop_strings] if isinstance(stop_strings, str) else stop_strings
    texts = tokenizer.batch_decode(generated, skip_special_tokens=True)
    is_stopped = torch.tensor([any(stop in text for stop in stops) for text in texts], device=ended.device)
    # After a stop string rows are filled with padding or, by beam search, end tokens.
    is_own = ~torch.isin(generated, torch.tensor(tokenizer.all_special_ids, device=generated.device))
    lengths = (is_own * torch.arange(1, 1 + generated.shape[1], device=generated.device)).amax(dim=1)
    return torch.where(is_stopped, lengths, counts), ended | is_stopped


def prepare_to_go_on(kwargs: dict[str, Any], start: int) -> None:
    """Let `generate()` continue from a filled cache; the call must pass the whole target so far."""
    prompt: Any = kwargs.get("decoder_input_ids")
    read = int(kwargs[CACHE].get_seq_length())
    given = 0 if prompt is None else prompt.shape[1] + int((prompt[:, 0] != start).all())
    if read and given <= read:
        must = f"be the whole target so far, more than the {read} tokens in `{CACHE}`"
        raise wrong("decoder_input_ids", must, f"{given} tokens", verb="are")
    if read and kwargs.get("decoder_attention_mask") is None:
        kwargs["decoder_attention_mask"] = torch.ones_like(prompt)  # or transformers would decode them again


def warn_ignored_settings(config: GenerationConfig, strategy: Any) -> None:
    """Warn of settings for Heedful's beam search if transformers' beam search will run."""
    names = ("length_penalty_form", "tokens_beyond_source")
    ignored = [f"`{name}`" for name in names if getattr(config, name, None) not in (None, "power")]
    if ignored and not callable(strategy):
        cure = "pass `custom_generate=heedful.BeamSearch()`, or use heedful's `Translator`"
        found = f"`generate()` ignores {' and '.join(ignored)} of the generation config"
        warnings.warn(f"{found}: {cure}.", stacklevel=4)


def check_weights(model: Any, place: str = "") -> None:
    """Raise a `ValueError` that names infinite or NaN weights."""
    broken = []
    for name, parameter in model.named_parameters():
        weights = parameter.detach()
        # Quantized, sharded and offloaded weights cannot be checked.
        is_plain = type(weights) is torch.Tensor and weights.is_floating_point() and weights.itemsize > 1
        if is_plain and weights.numel() and not weights.is_meta:
            extremes = torch.stack(torch.aminmax(weights))
            if not extremes.isfinite().all():
                broken.append(name)
    if broken:
        raise ValueError(f"The weights{place} must be finite numbers, but are not in {listed(broken)}.")


def check_logits(values: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise a `ValueError` if a model's logits, or scores computed from them, are NaN or infinite."""
    if not bool((values < torch.inf).all()):  # forbidden tokens get -inf
        cure = "load the model with `dtype=torch.float32`, or bfloat16, and save it so"
        cure = "look at its weights" if dtype == torch.float32 else cure
        raise ValueError(f"The model's logits must be finite numbers, but some are not in {dtype}: {cure}.")


class FiniteLogits(LogitsProcessor):
    """Checks a model's logits at the first step."""

    def __init__(self, model: Any, fills_cache: bool = False):
        self.model, self.fills_cache = model, fills_cache

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the `(rows, vocabulary)` scores unchanged."""
        if self.model is not None:
            check_logits(scores, self.model.dtype)
        self.model = None
        return scores


def with_check(model: Any, processors: Any, fills_cache: bool = False) -> LogitsProcessorList:
    """Return logits processors, preceded by one check of the model's logits."""
    others = [each for each in processors or () if not isinstance(each, FiniteLogits)]
    return LogitsProcessorList([FiniteLogits(model, fills_cache), *others])


def give_each_row_its_source(cache: Any) -> None:
    """Expand the source's keys and values in a returned cache to one row per target."""
    if not isinstance(cache, EncoderDecoderCache):
        return
    layers: Any = zip(cache.self_attention_cache.layers, cache.cross_attention_cache.layers, strict=True)
    for own, source in layers:
        sharing = len(own.keys) // len(source.keys) if own.is_initialized and source.is_initialized else 1
        if sharing > 1:
            source.keys = source.keys.repeat_interleave(sharing, dim=0)
            source.values = source.values.repeat_interleave(sharing, dim=0)


class HeedGenerationMixin(GenerationMixin):
    """`generate()` for two vocabularies, and the decoder's inputs while training."""

    config: Any
    generation_config: GenerationConfig

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Shift `(batch, target_length)` labels, padded on the right, by one: each input is the preceding label."""
        _check_padding_side(labels)
        # Not by a slice: an exported program would then refuse targets of one token.
        shifted = labels.roll(1, dims=1)
        shifted[:, :1] = self.config.decoder_start_token_id
        return shifted.masked_fill(shifted == IGNORED_LABEL, self.config.pad_token_id)

    @functools.wraps(GenerationMixin.generate)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Generate as transformers does, with the target's vocabulary; ignored arguments are an error."""
        kwargs = dict(**dict(zip(NAMES, args, strict=False)), **kwargs)
        check_generate_arguments(rename_cache(kwargs))
        given, encoded = kwargs.get(CACHE), kwargs.get("encoder_outputs")
        if encoded is not None:  # transformers changes it in place
            kwargs["encoder_outputs"] = BaseModelOutput(*encoded) if isinstance(encoded, tuple) else copy.copy(encoded)
        strategy = kwargs.get("custom_generate")
        warn_ignored_settings(kwargs.get("generation_config") or self.generation_config, strategy)
        if isinstance(given, Cache) and not callable(strategy):
            prepare_to_go_on(kwargs, self.config.decoder_start_token_id)
        if kwargs.get("max_new_tokens") is not None:
            kwargs.setdefault("max_length", None)  # or transformers would warn of the saved one at every call
        is_unseen = only_tokens_are_returned(self, **kwargs)
        kwargs["logits_processor"] = with_check(self, kwargs.get("logits_processor"), given is not None)
        with self.config.vocabulary_of_the_target(), torch.inference_mode() if is_unseen else nullcontext():
            found: Any = GenerationMixin.generate(self, **kwargs)
        if is_unseen:
            return found.clone()  # autograd can use the clone
        if given is None:  # a user's own cache may be extended later
            give_each_row_its_source(cache_of(found))
        return found

    @functools.wraps(GenerationMixin.compute_transition_scores)
    def compute_transition_scores(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Score each generated token as transformers does, with the target's vocabulary."""
        with self.config.vocabulary_of_the_target():
            return GenerationMixin.compute_transition_scores(self, *args, **kwargs)


class CachedGenerationMixin(HeedGenerationMixin):
    """`generate()` for models that cache keys and values; one sentence's hypotheses share its source."""

    lm_head: Any
    prepared: Any = None  # packed weights for encoding and search, set by `heedful.prepare_for_inference`

    def get_encoder(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the encoder; in a prepared model it has packed weights."""
        return super().get_encoder(*args, **kwargs) if self.prepared is None else self.prepared.encoder

    @staticmethod
    def _reorder_cache(cache: EncoderDecoderCache, beam_idx: torch.LongTensor) -> EncoderDecoderCache:
        """Let each hypothesis continue from another one with the same source."""
        own: Any = cache.self_attention_cache
        if own.is_compileable:  # in place: a CUDA graph uses the addresses at which it was recorded
            for states in [states for layer in own.layers for states in (layer.keys, layer.values)]:
                states.copy_(states.index_select(0, beam_idx.to(states.device)))
        else:
            own.reorder_cache(beam_idx)
        return cache

    @staticmethod
    def create_masks_for_generate(attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor | None:
        """Return the decoder's mask unchanged: transformers' static-cache mask lacks neighbourhood and padding."""
        return attention_mask

    @either_cache_name
    def prepare_inputs_for_generation(
        self,
        input_ids: Any,
        next_sequence_length: int | None = None,
        cache: Any = None,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return one step's inputs; transformers' method takes longer than a small model's attention."""
        is_static = cache is not None and cache.is_compileable
        if attention_mask is None and is_static:
            # `share_sources` leaves out a mask of ones, but without it a step is compiled again.
            source = kwargs["encoder_outputs"][0]
            attention_mask = torch.ones(source.shape[:2], dtype=torch.long, device=source.device)
        is_ordinary = cache is not None and not is_static and is_unmodified(self.lm_head)
        if not is_ordinary or input_ids.device != self.lm_head.weight.device:
            known = {CACHE: cache, "attention_mask": attention_mask}
            return super().prepare_inputs_for_generation(input_ids, next_sequence_length, **known, **kwargs)
        newest = input_ids if next_sequence_length is None else input_ids[:, -next_sequence_length:]
        given = {name: value for name, value in kwargs.items() if name not in ("is_first_iteration", "labels")}
        own = {"decoder_input_ids": newest, "attention_mask": attention_mask, CACHE: cache}
        return own | given

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        found = None if self.prepared is None else self.prepared.decode(*args, **kwargs)
        return super()._sample(*args, **share_sources(self, kwargs)) if found is None else found

    def _beam_search(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Search as transformers does, with a step compiled as in its greedy search."""
        if self.prepared is not None and (found := self.prepared.decode(*args, **kwargs)) is not None:
            return found
        config, searching = kwargs["generation_config"], self
        is_asked_for = config.compile_config and config.cache_implementation == "static" and not config.disable_compile
        if is_asked_for and self.device.type in COMPILED_DEVICES and runs_known_code(self):
            searching = CompiledSteps(self, self.get_compiled_call(config.compile_config))
        return GenerationMixin._beam_search(searching, *args, **share_sources(self, kwargs))


class CompiledSteps:
    """A model in a search, whose steps are compiled once the cache holds the source."""

    def __init__(self, model: Any, step: Callable[..., Any]):
        self._model, self._step = model, step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        """Run the first step uncompiled, later steps compiled."""
        return (self._step if inputs[CACHE].is_updated.get(0) else self._model)(**inputs)


def share_sources(model: Any, arguments: dict[str, Any], each: int | None = None) -> dict[str, Any]:
    """Return a search's arguments with one source row for the `each` hypotheses of a sentence.

    If the model is no Heed Transformer, or a user's code may see the rows, each hypothesis keeps its row.
    """
    if not (isinstance(model, CachedGenerationMixin) and runs_known_code(model)):
        return arguments
    encoded, mask = arguments["encoder_outputs"], arguments.get("attention_mask")
    if each is None:
        config = arguments["generation_config"]
        each = max(config.num_beams or 1, config.num_return_sequences or 1)
    if each > 1:
        encoded, mask = copy.copy(encoded), None if mask is None else mask[::each]
        encoded.last_hidden_state = encoded.last_hidden_state[::each].contiguous()
    if mask is not None and not torch.compiler.is_compiling() and bool(mask.all()):
        mask = None  # or each step would search it for padding
    return arguments | {"encoder_outputs": encoded, "attention_mask": mask}


def _check_padding_side(labels: torch.Tensor) -> None:
    # Only on the CPU, where collators make batches: on a GPU each call would synchronize.
    if labels.device.type != "cpu" or not is_eager() or labels.numel() == 0:
        return
    is_target = labels != IGNORED_LABEL
    if (~is_target[:, 0] & is_target.any(dim=1)).any():
        must = "`labels` must be padded on the right if `decoder_input_ids` are left out, but a row begins with -100"
        raise ValueError(f'{must}: the `padding_side` of a data collator\'s tokenizer must be "right".')
