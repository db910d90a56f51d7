"""What Heed's Transformer and recurrent models share around `generate()`: its arguments, its lengths, its scores.

The pipeline and the package read the lengths and the checks from here too.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from transformers.generation import GenerationConfig, GenerationMixin

from .configuration_base_heed import IGNORED_LABEL

# The longest translation where neither the call nor the model's generation config sets a bound. transformers' own, 20
# tokens, cuts ordinary sentences; one that grows with the longest source of a batch makes results depend on the batch.
DEFAULT_MAX_NEW_TOKENS = 256
TRANSFORMERS_DEFAULT_LENGTH = 20
# Arguments of `generate()` that it hands to no `custom_generate`.
KEPT_FROM_STRATEGIES = ("streamer", "assistant_model", "tokenizer", "assistant_tokenizer")

Forward = TypeVar("Forward", bound=Callable)


def with_known_signature(forward: Forward) -> Forward:
    """Keep the signature of a decorated `forward`, so that nobody has to find it out again.

    `generate()` asks for it at each token, and to read it off a decorated function takes as long as an attention or a
    recurrent cell of a small model.
    """
    forward.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    return forward


def check_strategy_arguments(arguments: dict[str, Any]) -> None:
    """Raise a `ValueError` for arguments beside a callable `custom_generate`, which would not get them."""
    if not callable(arguments.get("custom_generate")):
        return
    for name in KEPT_FROM_STRATEGIES:
        if arguments.get(name) is not None:
            raise ValueError(
                f"`{name}` must be None with a `custom_generate`, to which transformers hands none, but is a "
                f"{type(arguments[name]).__name__} instead."
            )


def check_generate_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise for arguments of `generate()` that transformers would drop silently, or fail at deep inside."""
    strategy = kwargs.get("custom_generate")
    if isinstance(strategy, type):
        raise ValueError(
            f"`custom_generate` must be an object such as {strategy.__name__}(…), but is the class itself instead."
        )
    check_strategy_arguments(kwargs)
    sources = [*args[:1], kwargs.get("inputs"), kwargs.get("input_ids"), kwargs.get("inputs_embeds")]
    sources.append(getattr(kwargs.get("encoder_outputs"), "last_hidden_state", None))
    source = next((given for given in sources if given is not None), None)
    prompt = kwargs.get("decoder_input_ids")
    if source is not None and prompt is not None and len(source) != len(prompt):
        raise ValueError(
            f"`decoder_input_ids` must have a row for each of the {len(source)} sources, "
            f"but have {len(prompt)} instead."
        )


def warn_of_unread_settings(config: GenerationConfig, strategy: Any) -> None:
    """Warn where a generation config has settings of Heedful's beam search, and transformers' own is about to run."""
    names = ("length_penalty_form", "tokens_beyond_source")
    unread = [name for name in names if getattr(config, name, None) not in (None, "power")]
    if unread and not callable(strategy):
        settings = " and ".join(f"`{name}`" for name in unread)
        warnings.warn(
            f"`generate()` does not read {settings} of the generation config: give it "
            "`custom_generate=heedful.BeamSearch()`, which does, or use heedful's `Translator`.",
            stacklevel=4,
        )


def weights_that_are_no_numbers(model: Any) -> Iterator[str]:
    """Name the parameters of a model that hold infinity or not-a-number, which make every output worthless."""
    for name, parameter in model.named_parameters():
        weights = parameter.detach()
        # Of quantized weights, those spread over processes, and those on disk, nothing can be told.
        is_plain = type(weights) is torch.Tensor and weights.is_floating_point() and weights.itemsize > 1
        if is_plain and weights.numel() and not weights.is_meta:
            extremes = torch.stack(torch.aminmax(weights))
            if not extremes.isfinite().all():
                yield name


class HeedGenerationMixin(GenerationMixin):
    """`generate()` for two vocabularies, and the decoder's inputs while training; both families inherit it."""

    config: Any
    generation_config: GenerationConfig

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Shift `(batch, target_length)` labels right by one: the decoder reads what stands before each label.

        Raises:
            ValueError: If labels are padded on the left, where the decoder's start would stand before the padding.
        """
        _check_padding_side(labels)
        # Without a slice that is one shorter, an exported program takes targets of one and two tokens too.
        shifted = labels.roll(1, dims=1)
        shifted[:, :1] = self.config.decoder_start_token_id
        return shifted.masked_fill(shifted == IGNORED_LABEL, self.config.pad_token_id)

    @functools.wraps(GenerationMixin.generate)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Generate as transformers does, with tokens counted by the target's vocabulary where it has another size.

        Raises:
            ValueError: If a callable `custom_generate` would not be given the `streamer`, `assistant_model` or
                `tokenizer`, or `decoder_input_ids` have not a row for each source.
        """
        check_generate_arguments(args, kwargs)
        config = kwargs.get("generation_config") or self.generation_config
        warn_of_unread_settings(config, kwargs.get("custom_generate"))
        with self.config.vocabulary_of_the_target():
            return GenerationMixin.generate(self, *args, **kwargs)

    def compute_transition_scores(
        self,
        sequences: torch.Tensor,
        scores: tuple[torch.Tensor, ...],
        beam_indices: torch.Tensor | None = None,
        normalize_logits: bool = False,
    ) -> torch.Tensor:
        """Return the score of each generated token, `(rows, steps)`, 0 behind the end of a beam, as transformers does.

        Its own takes the source's vocabulary for the target's.
        """
        if beam_indices is None:
            beam_indices = torch.arange(len(scores[0]), device=sequences.device)[:, None].expand(-1, len(scores))
        steps = int((beam_indices >= 0).sum(-1).max())
        stacked = torch.stack(tuple(scores[:steps]), dim=1)  # (rows, steps, V)
        stacked = stacked.log_softmax(-1) if normalize_logits else stacked
        rows, step = beam_indices[:, :steps], torch.arange(steps, device=sequences.device)
        return stacked[rows.clamp(min=0), step, sequences[:, -steps:]].masked_fill(rows < 0, 0.0)


def _check_padding_side(labels: torch.Tensor) -> None:
    # Only on the CPU, where collators make batches: elsewhere it would wait for the device on every call.
    if labels.device.type != "cpu" or torch.compiler.is_compiling() or labels.numel() == 0:
        return
    is_target = labels != IGNORED_LABEL
    if (~is_target[:, 0] & is_target.any(dim=1)).any():
        raise ValueError(
            "`labels` must be padded on the right, but a row begins with -100 instead: a data collator pads them "
            'on the `padding_side` of its tokenizer, which must be "right". (With `decoder_input_ids` of your own '
            "the first labels may be -100.)"
        )
