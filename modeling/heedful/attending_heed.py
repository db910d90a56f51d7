"""The `Call`: masks, positions and the attention function of one pass through a stack, chosen once for all layers.

It hides from layers how attention is computed: by `eager` or a kernel, over padded rows or rows laid end to end, with
restricted self-attention (section 4) in windows.

Letters in shape comments: B batch, Q and K lengths of queries and keys, S source length, H heads, D = d_model.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from .configuration_heed import GATED_ACTIVATIONS, RELATIVE_ENCODINGS, HeedConfig, check_one_kernel
from .fast_paths_heed import computing_dtype
from .messages_heed import wrong
from .packed_rows_heed import ALL_PADDED, PADDED, EndToEnd, Layout, packed_attention
from .positions_heed import positions_of
from .versions_heed import CACHE

Weights = torch.Tensor | None
AttentionFunction = Callable[..., tuple[torch.Tensor, Weights]]


class Call(NamedTuple):
    """The inputs of all layers, apart from the states."""

    # A layer takes these as arguments, since Accelerate moves, FSDP casts and checkpointing differentiates arguments.
    function: AttentionFunction | None = None  # by default equation 1 as written
    mask: Any = None  # of self-attention, in the function's form, or a `WindowedMask`
    positions: torch.Tensor | None = None  # (B, length)
    relative: Any = None  # a stack's tuple from `RelativePositions`, or one layer's item of it
    cache: EncoderDecoderCache | None = None
    layout: Layout = PADDED
    source: torch.Tensor | None = None  # for a decoder: (sources, S, D), each for B / sources consecutive targets
    source_mask: Any = None
    source_layout: Layout = PADDED
    is_lean: bool = False  # whether only the loss is used, and differentiated once
    options: Mapping[str, Any] | None = None  # the caller's, for the attention function
    number: int = 0  # of the layer

    def of_layer(self, number: int) -> "Call":
        """Return a layer's call, by its number from 0."""
        return self._replace(number=number, relative=self.relative[number % len(self.relative)])

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, Weights]:
        """Attend (section 3.2) with `(B, H, length, width)` queries, keys and values.

        All targets that share a source are one sequence of queries. Return the output `(B, Q, H, d_v)`, and weights
        `(B, H, Q, K)` if the function returns any.
        """
        function = module.as_written if self.function is None else self.function
        given = {"dropout": module.dropout if module.training else 0.0, "scaling": module.scaling}
        given |= self.options or {}
        mask, layout = (self.source_mask, self.source_layout) if module.is_cross else (self.mask, self.layout)
        if self.relative is not None and not module.is_cross:
            name = "position_bias" if module.relative_keys is None else "distances"
            given[name] = self.relative.expand(query.shape[0], *self.relative.shape[1:])
        if function is packed_attention:
            given["sides"] = self.layout, layout
        if isinstance(mask, WindowedMask):
            return neighbourhood_attention(function, module, query, key, value, mask, **given)
        if query.shape[0] == key.shape[0]:
            return function(module, query, key, value, mask, **given)
        sharing = query.shape[0] // key.shape[0]
        query = query.unflatten(0, (-1, sharing)).transpose(1, 2).flatten(2, 3)  # (sources, H, sharing · Q, d_k)
        output, weights = function(module, query, key, value, mask, **given)  # (sources, sharing · Q, H, d_v)
        if weights is not None:
            weights = weights.unflatten(2, (sharing, -1)).transpose(1, 2).flatten(0, 1)  # (B, H, Q, K)
        return output.unflatten(1, (sharing, -1)).flatten(0, 1), weights


AS_WRITTEN = Call()  # equation 1, of all positions


def call_of(
    stack: Any,
    embeddings: torch.Tensor,
    attention_mask: torch.Tensor | None,
    options: Any,
    cache: EncoderDecoderCache | None = None,
    source: torch.Tensor | None = None,
    source_tokens: torch.Tensor | None = None,
) -> Call:
    """Check a stack's inputs and return the call of its layers.

    Embeddings are `(B, length, D)`, their mask `(B, past_length + length)`, the source `(sources, S, D)`, its tokens
    `(sources, S)`. `options["packing"]` lays out the states.
    """
    length, side = embeddings.shape[1], stack.side
    packing, records = options.pop("packing", None), options.get("output_attentions")
    past_length = 0 if cache is None else cache.get_seq_length()
    check_length(past_length + length, attention_mask, stack.longest_sequence)
    settings = stack.attention_settings(records)
    kernel = settings._attn_implementation  # once: each access to a config takes microseconds
    if kernel == "flex_attention" and cache is not None and cache.is_compileable:
        # The mask is evaluated late, when the cache has already moved the position from which the mask counts.
        raise wrong("attn_implementation", "be eager or sdpa with a static cache", kernel)
    leaves_out = packing is not None and cache is None and (side == "encoder" or source is not None)
    layouts = packing if leaves_out else ALL_PADDED
    layout = layouts.of(side, embeddings)
    function = attention_function(kernel, embeddings.device)
    positions = positions_of(length, past_length, attention_mask, embeddings.device)
    if isinstance(layout, EndToEnd):
        function, positions = packed_attention, layout.positions
    own_cache = None if cache is None else cache.self_attention_cache
    relative = stack.relative_positions(positions, attention_mask, own_cache)
    mask = self_attention_mask(settings, embeddings, attention_mask, side, records, own_cache, layout)
    is_replayed = stack.gradient_checkpointing and stack.training and torch.is_grad_enabled()
    kept = None if is_replayed else cache  # or the second pass would fill it again
    lean = packing is not None
    call = Call(function, mask, positions, relative, kept, layout, None, None, PADDED, lean, options)
    if source is None:
        return call
    mask, layout = source_mask(settings, embeddings, source_tokens, source), layouts.of("encoder", source)
    return call._replace(source=layout.pack(source), source_mask=mask, source_layout=layout)


# Masks


def check_length(length: int | torch.Tensor, attention_mask: torch.Tensor | None, limit: int | None) -> None:
    """Raise a `ValueError` if a `(B, width)` mask does not cover all old and new tokens, or they exceed the limit."""
    # A static cache keeps its length in a tensor; on a GPU, reading it would synchronize.
    if torch.compiler.is_compiling() or (isinstance(length, torch.Tensor) and length.device.type != "cpu"):
        return
    length = int(length)
    if attention_mask is not None and attention_mask.dim() == 2 and attention_mask.shape[1] != length:
        found = f"it covers {attention_mask.shape[1]} instead"
        raise ValueError(f"The attention mask must cover {length} tokens, but {found}.")
    if limit is not None and length > limit:
        must = f"A sequence must have at most {limit} tokens (`max_position_embeddings` of learned positions)"
        raise ValueError(f"{must}, but it has {length} instead.")


def may_ask_for_padding(attention_mask: torch.Tensor | None, embeddings: torch.Tensor) -> bool:
    """Return whether a mask can be searched for padding without synchronizing with a GPU."""
    return attention_mask is None or embeddings.device.type == "cpu"


def neighbourhood_mask(radius: int | None) -> Callable[..., Any] | None:
    """Return the mask function of restricted self-attention (section 4): at most `radius` positions away."""
    if radius is None:
        return None
    return lambda batch, head, query, key: (query - key).abs() <= radius


def self_attention_mask(
    config: HeedConfig,
    embeddings: torch.Tensor,
    attention_mask: torch.Tensor | None,
    side: str,
    records: bool | None,
    cache: Cache | None = None,
    layout: Layout = PADDED,
) -> Any:
    """Return self-attention's mask, in the attention function's form or a `WindowedMask`; `None` masks nothing.

    A query sees its neighbourhood (section 4), and in the decoder only itself and earlier positions (section 3.2.3).
    The attention mask is `(B, past_length + length)`, 0 at padding, or already `(B, 1, Q, K)`.
    """
    if isinstance(layout, EndToEnd):
        return None  # `packed_attention` keeps the rows apart
    radius, is_causal = getattr(config, f"{side}_neighbourhood"), side == "decoder"
    has_plain_mask = attention_mask is None or attention_mask.dim() == 2
    is_plain = has_plain_mask and config._attn_implementation in ("eager", "sdpa")
    if is_plain and radius is None and is_causal and attention_mask is None and decodes_one_token(embeddings, cache):
        return None  # one token sees all earlier ones, and making a mask takes longer than a layer norm
    in_windows = radius is not None and is_plain and cache is None and runs_in_windows(config, embeddings, radius)
    # Recorded weights cover all positions, not a window.
    if in_windows and not (config.output_attentions if records is None else records):
        if attention_mask is None:
            attention_mask = torch.ones(embeddings.shape[:2], device=embeddings.device)
        dtype = embeddings.dtype if config._attn_implementation == "eager" else torch.bool
        return windowed_mask(attention_mask, radius, is_causal, dtype)
    given: dict[str, Any] = {"config": config, "inputs_embeds": embeddings, "attention_mask": attention_mask}
    given["and_mask_function"] = neighbourhood_mask(radius)
    may_ask = may_ask_for_padding(attention_mask, embeddings)
    if is_causal:
        return create_causal_mask(**{CACHE: cache}, **given, allow_is_causal_skip=may_ask)
    return create_bidirectional_mask(**given, allow_is_bidirectional_skip=may_ask)


def decodes_one_token(embeddings: torch.Tensor, cache: Cache | None) -> bool:
    """Return whether a call decodes one token without a static cache; always False while compiling."""
    is_asked = not torch.compiler.is_compiling() and embeddings.shape[1] == 1
    return is_asked and not (cache is not None and cache.is_compileable)


def runs_in_windows(config: HeedConfig, embeddings: torch.Tensor, radius: int) -> bool:
    """Return whether restricted self-attention runs in windows: not with relative positions, which cover all keys."""
    is_of_all_keys = config.position_encoding in RELATIVE_ENCODINGS
    # An exported program must not depend on the length.
    return not (is_of_all_keys or torch.compiler.is_exporting()) and pays_in_windows(embeddings.shape[1], radius)


def source_mask(
    config: HeedConfig, embeddings: torch.Tensor, attention_mask: torch.Tensor | None, source: torch.Tensor | None
) -> Any:
    """Return cross-attention's mask from a `(sources, S)` attention mask; `None` masks nothing."""
    if source is not None and source.shape[0] != embeddings.shape[0]:
        if source.shape[0] == 0 or embeddings.shape[0] % source.shape[0]:
            must = f"The number of targets must be a multiple of the number of sources, {source.shape[0]}"
            raise ValueError(f"{must}, but is {embeddings.shape[0]} instead.")
        embeddings = embeddings.reshape(source.shape[0], -1, embeddings.shape[-1])  # a source's targets as one
    if attention_mask is None and config._attn_implementation in ("eager", "sdpa"):
        return None
    may_ask = may_ask_for_padding(attention_mask, embeddings)
    return create_bidirectional_mask(config, embeddings, attention_mask, source, allow_is_bidirectional_skip=may_ask)


# Restricted self-attention: time and memory grow linearly with the length

NARROWEST_BLOCK = 16  # positions; a narrower one costs more than it saves
FEWEST_BLOCKS = 4  # shorter sequences are masked instead


class WindowedMask(NamedTuple):
    """Restricted self-attention's mask, in blocks of queries, each with the keys of two or three blocks."""

    windows: torch.Tensor  # (B · blocks, 1, block, window), in the attention function's form


def pays_in_windows(length: int, radius: int) -> bool:
    """Return whether restricted self-attention is faster in windows at this length."""
    return length > FEWEST_BLOCKS * max(radius, NARROWEST_BLOCK)


def windows_of(states: torch.Tensor, block: int, window: int) -> torch.Tensor:
    """Lay out `(B, H, length, d)` as `(B · blocks, H, window, d)`, with zeros beyond both ends."""
    length = states.shape[2]
    behind = -length % block + window - 2 * block
    padded = F.pad(states, (0, 0, block, behind))
    return padded.unfold(2, window, block).permute(0, 2, 1, 4, 3).flatten(0, 1)


def windowed_mask(tokens: torch.Tensor, radius: int, is_causal: bool, dtype: torch.dtype) -> WindowedMask:
    """Make the windowed mask of `(B, length)` tokens, 0 at padding: bools, or numbers to add to the scores."""
    block = max(radius, NARROWEST_BLOCK)
    window = block * (2 if is_causal else 3)
    offsets = torch.arange(window, device=tokens.device)
    distance = offsets[:block, None] + block - offsets  # from key to query, (block, window)
    near = (distance <= radius) & (distance >= (0 if is_causal else -radius))
    seen = near & windows_of(tokens.bool()[:, None, :, None], block, window).transpose(2, 3)
    seen = seen | (distance == 0)  # otherwise padding would see nothing, and its output would be NaN
    if dtype != torch.bool:
        seen = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)
    return WindowedMask(seen)


def neighbourhood_attention(
    attend: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
    module: nn.Module | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: WindowedMask,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend to the neighbourhood (section 4) block by block with the function `attend`, without weights."""
    batch, _, length, _ = query.shape
    block, window = mask.windows.shape[2:]
    blocks = F.pad(query, (0, 0, 0, -length % block)).unflatten(2, (-1, block)).transpose(1, 2).flatten(0, 1)
    key, value = windows_of(key, block, window), windows_of(value, block, window)
    output, _ = attend(module, blocks, key, value, mask.windows, **kwargs)  # (B · blocks, block, H, d_v)
    return output.unflatten(0, (batch, -1)).flatten(1, 2)[:, :length], None


# Which function computes attention

GENERAL_KERNELS = ("eager", "sdpa", "flex_attention")  # allow any mask, and values and keys of different widths
DEVICE_OF_CUDNN = "cuda"  # where torch computes `sdpa` by cuDNN too
ALL_BUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.OVERRIDEABLE]


def why_only_eager(config: HeedConfig) -> str | None:
    """Return the setting that only `eager` can compute, or `None`."""
    if config.attention_scoring == "additive":
        return "`attention_scoring` is additive"
    return "`position_encoding` is shaw" if config.position_encoding == "shaw" else None


def why_only_general(config: HeedConfig) -> str | None:
    """Return the setting that only the `GENERAL_KERNELS` can compute, or `None`."""
    if config.position_encoding == "t5":
        return "`position_encoding` is t5"
    if config.encoder_neighbourhood or config.decoder_neighbourhood:
        return "self-attention is restricted to a neighbourhood"
    widths = (config.d_model // heads for heads in (config.encoder_attention_heads, config.decoder_attention_heads))
    is_uneven = any((config.d_k or width) != (config.d_v or width) for width in widths)
    return "`d_k` differs from `d_v`" if is_uneven else None


def check_kernel(config: HeedConfig, name: str | None) -> None:
    """Raise a `ValueError` if the named attention function cannot compute the config's attention."""
    if name in (None, "eager"):
        return
    choices, reason = "eager", why_only_eager(config)
    if reason is None and name not in GENERAL_KERNELS:
        choices, reason = ", ".join(GENERAL_KERNELS), why_only_general(config)
    if reason is not None:
        raise ValueError(f"`attn_implementation` must be {choices} if {reason}, but is {name} instead.")


def check_kernel_name(config: HeedConfig, name: str | None) -> None:
    """Do the same as `check_kernel`, and refuse unknown names; transformers checks only some."""
    check_kernel(config, name)
    known = ["eager", *(name for name in ALL_ATTENTION_FUNCTIONS.valid_keys() if not name.startswith("paged|"))]
    if name is not None and name not in known and ("/" not in name or name.startswith("paged|")):
        raise ValueError(
            f'Specified `attn_implementation="{name}"` is not supported: `attn_implementation` must be one of '
            f"{', '.join(known)}, or a kernel of the Hub (`owner/name`), but is {name} instead."
        )


def flex_attention(module: Any, query: torch.Tensor, *others: Any, **given: Any) -> tuple[torch.Tensor, Weights]:
    """Call transformers' function of this name, or raise a `ValueError` if it cannot train here."""
    if given["dropout"] > 0:
        must = "be 0 to train with flex_attention, which cannot drop weights"
        raise wrong("attention_dropout", must, given["dropout"], advice="eager and sdpa can")
    if query.requires_grad and query.device.type == "cpu":
        must, advice = "be eager or sdpa to compute gradients on the CPU", "`torch.no_grad()` computes none"
        raise wrong("attn_implementation", must, "flex_attention", advice=advice)
    return ALL_ATTENTION_FUNCTIONS["flex_attention"](module, query, *others, **given)


def attention_function(name: str, device: torch.device) -> AttentionFunction | None:
    """Return the named attention function for states on this device; `None` is eager."""
    if name == "sdpa" and device.type == DEVICE_OF_CUDNN:
        return sdpa_without_cudnn
    return flex_attention if name == "flex_attention" else ALL_ATTENTION_FUNCTIONS.get_interface(name, None)  # type: ignore[arg-type]


def sdpa_without_cudnn(*states: Any, **given: Any) -> tuple[torch.Tensor, Weights]:
    """Call `sdpa` without cuDNN, which needs up to half a second for each new shape, unless a user chose backends."""
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if not chooses_from_all():
        return attend(*states, **given)
    try:
        with sdpa_kernel(ALL_BUT_CUDNN):
            return attend(*states, **given)
    finally:
        # Threads share the setting: one may have restored the state that another had set.
        torch.backends.cuda.enable_cudnn_sdp(True)


@torch.compiler.assume_constant_result
def chooses_from_all() -> bool:
    """Return whether `sdpa` may use all backends on a GPU, as by default."""
    cuda = torch.backends.cuda
    kinds = (cuda.cudnn_sdp_enabled, cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled)
    return all(is_enabled() for is_enabled in kinds)


class KernelChoice(PreTrainedModel):
    """A model whose attention function can be chosen by name, if it can compute the config's attention."""

    config: HeedConfig
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: HeedConfig):
        # transformers picks the default by these.
        if why_only_eager(config) is not None:
            self._supports_sdpa = self._supports_flex_attn = self._supports_flash_attn = False
        elif why_only_general(config) is not None:
            self._supports_flash_attn = False
        check_kernel_name(config, config._attn_implementation)
        super().__init__(config)

    def set_attn_implementation(self, attn_implementation: str | dict[str, str], *args: Any, **kwargs: Any) -> None:
        """Choose the attention function of both stacks, or raise a `ValueError` if the config rules it out."""
        check_one_kernel(attn_implementation)
        name = attn_implementation.get("") if isinstance(attn_implementation, dict) else attn_implementation
        check_kernel_name(self.config, name)
        super().set_attn_implementation(attn_implementation, *args, **kwargs)

    def _leave_out_of_tensor_parallelism(self) -> None:
        """Remove modules that a stack lacks or must keep whole from its tensor-parallel plan."""
        left_out = [] if self.config.activation_function in GATED_ACTIVATIONS else ["fc_gate"]
        if self.config.position_encoding in RELATIVE_ENCODINGS:
            left_out.append("self_attn")  # weights shared by the heads would get only a part of their gradient
        plan = (self._tp_plan or {}).items()
        self._tp_plan = {name: style for name, style in plan if not any(part in name for part in left_out)}

    def attention_settings(self, output_attentions: bool | None) -> HeedConfig:
        """Return a call's config: `eager` records weights, and trains faster in bfloat16 on the CPU."""
        kernel = self.config._attn_implementation
        check_kernel(self.config, kernel)  # a user may have assigned another one
        if kernel == "eager":
            return self.config
        records = self.config.output_attentions if output_attentions is None else output_attentions
        if not records and kernel == "sdpa" and self.training and torch.is_grad_enabled():
            weight = self.get_input_embeddings().weight
            records = weight.device.type == "cpu" and computing_dtype(weight) == torch.bfloat16
        if not records:
            return self.config
        settings = copy.copy(self.config)
        settings._attn_implementation = "eager"
        return settings
