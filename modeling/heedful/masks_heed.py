"""What a query sees: masks of self-attention and of the source, and restricted self-attention (section 4)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers.cache_utils import Cache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

from .configuration_heed import RELATIVE_ENCODINGS, HeedConfig
from .packed_rows_heed import EndToEnd
from .versions_heed import by_name


def check_length(length: int | torch.Tensor, attention_mask: torch.Tensor | None, limit: int | None) -> None:
    """Raise a `ValueError` if a `(batch, width)` mask does not cover all tokens, old and new, or they are too many."""
    # With a static cache the length is a tensor: to read it from a GPU takes time.
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
    """Return whether a mask may be searched for padding: not on a GPU, for which a call would wait."""
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
    tokens: Any = None,
) -> Any:
    """Return what masks self-attention, as the attention function takes it or a `WindowedMask`; `None` masks nothing.

    `config` is that of the call, with the name of its attention function, and `records` its `output_attentions`. Of
    the `(batch, length, d_model)` embeddings only shape, dtype and device count. The mask is `(batch, past_length +
    length)`, 0 at padding, or a finished one. A query sees so many positions away as the config says of its side
    (section 4), and in the decoder only itself and earlier ones (section 3.2.3).
    """
    if isinstance(tokens, EndToEnd):
        return None  # attention itself keeps the rows apart
    radius, is_causal = getattr(config, f"{side}_neighbourhood"), side == "decoder"
    has_plain_mask = attention_mask is None or attention_mask.dim() == 2
    is_plain = has_plain_mask and config._attn_implementation in ("eager", "sdpa")
    if is_plain and radius is None and is_causal and attention_mask is None and decodes_one_token(embeddings, cache):
        return None  # it sees all before it; to make a mask that says so would take longer than a layer norm
    in_windows = radius is not None and is_plain and cache is None and runs_in_windows(config, embeddings, radius)
    # Where weights are recorded, they are those of all positions, and not of a window's.
    if in_windows and not (config.output_attentions if records is None else records):
        if attention_mask is None:
            attention_mask = torch.ones(embeddings.shape[:2], device=embeddings.device)
        dtype = embeddings.dtype if config._attn_implementation == "eager" else torch.bool
        return windowed_mask(attention_mask, radius, is_causal, dtype)
    given: dict[str, Any] = {"config": config, "inputs_embeds": embeddings, "attention_mask": attention_mask}
    given["and_mask_function"] = neighbourhood_mask(radius)
    may_ask = may_ask_for_padding(attention_mask, embeddings)
    if is_causal:
        return create_causal_mask(**by_name(cache), **given, allow_is_causal_skip=may_ask)
    return create_bidirectional_mask(**given, allow_is_bidirectional_skip=may_ask)


def decodes_one_token(embeddings: torch.Tensor, cache: Cache | None) -> bool:
    """Return whether a call decodes a single token, behind a cache without spare room; what is traced must not ask."""
    is_asked = not torch.compiler.is_compiling() and embeddings.shape[1] == 1
    return is_asked and not (cache is not None and cache.is_compileable)


def runs_in_windows(config: HeedConfig, embeddings: torch.Tensor, radius: int) -> bool:
    """Return whether restricted self-attention runs in windows: not with relative positions, which are of all keys."""
    is_of_all_keys = config.position_encoding in RELATIVE_ENCODINGS
    # An exported program must not depend on the length.
    return not (is_of_all_keys or torch.compiler.is_exporting()) and pays_in_windows(embeddings.shape[1], radius)


def source_mask(
    config: HeedConfig, embeddings: torch.Tensor, attention_mask: torch.Tensor | None, source: torch.Tensor | None
) -> Any:
    """Return what masks attention to the source, with arguments as of `self_attention_mask`; `None` masks nothing.

    The mask is `(sources, source_length)`, and each source serves as many consecutive targets.
    """
    if source is not None and source.shape[0] != embeddings.shape[0]:
        if source.shape[0] == 0 or embeddings.shape[0] % source.shape[0]:
            must = f"The number of targets must be a multiple of that of the sources, {source.shape[0]}"
            raise ValueError(f"{must}, but is {embeddings.shape[0]} instead.")
        embeddings = embeddings.reshape(source.shape[0], -1, embeddings.shape[-1])  # the targets of a source as one
    if attention_mask is None and config._attn_implementation in ("eager", "sdpa"):
        return None
    may_ask = may_ask_for_padding(attention_mask, embeddings)
    return create_bidirectional_mask(config, embeddings, attention_mask, source, allow_is_bidirectional_skip=may_ask)


# Restricted self-attention: time and memory grow with the length, not with its square

NARROWEST_BLOCK = 16  # one of fewer positions costs more than it saves
FEWEST_BLOCKS = 4  # sequences of fewer are masked instead


class WindowedMask(NamedTuple):
    """Which of the keys around it each query sees, by blocks of consecutive queries.

    A block is as wide as the neighbourhood, so its keys lie in one window: the block before it, itself and, where
    later positions are seen, the block behind it.
    """

    windows: torch.Tensor  # (batch · blocks, 1, block, window), as the attention function takes its mask


def pays_in_windows(length: int, radius: int) -> bool:
    """Return whether restricted self-attention is computed by windows at that length."""
    return length > FEWEST_BLOCKS * max(radius, NARROWEST_BLOCK)


def windows_of(states: torch.Tensor, block: int, window: int) -> torch.Tensor:
    """Lay out `(batch, heads, length, d)` as `(batch · blocks, heads, window, d)`, beyond both ends zeros."""
    length = states.shape[2]
    behind = -length % block + window - 2 * block
    padded = F.pad(states, (0, 0, block, behind))
    return padded.unfold(2, window, block).permute(0, 2, 1, 4, 3).flatten(0, 1)


def windowed_mask(tokens: torch.Tensor, radius: int, is_causal: bool, dtype: torch.dtype) -> WindowedMask:
    """Make the mask of restricted self-attention, in blocks, of `(batch, length)` tokens that are 0 at padding.

    Of dtype `torch.bool` it says what is seen; of another it is added to the scores.
    """
    block = max(radius, NARROWEST_BLOCK)
    window = block * (2 if is_causal else 3)
    offsets = torch.arange(window, device=tokens.device)
    distance = offsets[:block, None] + block - offsets  # from key to query, (block, window)
    near = (distance <= radius) & (distance >= (0 if is_causal else -radius))
    seen = near & windows_of(tokens.bool()[:, None, :, None], block, window).transpose(2, 3)
    seen = seen | (distance == 0)  # or padding would see nothing, and be NaN
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
    """Attend to the positions around, block by block, with what masking all others gives (section 4).

    But for the mask, all arguments are those of the attention function `attend`; there are no weights.
    """
    batch, _, length, _ = query.shape
    block, window = mask.windows.shape[2:]
    blocks = F.pad(query, (0, 0, 0, -length % block)).unflatten(2, (-1, block)).transpose(1, 2).flatten(0, 1)
    key, value = windows_of(key, block, window), windows_of(value, block, window)
    output, _ = attend(module, blocks, key, value, mask.windows, **kwargs)  # (B · blocks, block, H, d_v)
    return output.unflatten(0, (batch, -1)).flatten(1, 2)[:, :length], None
