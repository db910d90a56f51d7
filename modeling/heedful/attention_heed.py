"""Attention (section 3.2 of *Attention Is All You Need*): one class of heads, the functions behind it, and masks.

It reads from top to bottom: equation 1 and the additive score, multi-head attention, what a query sees, restricted
self-attention (section 4), and the choice among attention functions.

Letters in shape comments: B batch, Q and K lengths of queries and keys, H heads.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs

from .configuration_heed import HeedConfig, check_one_kernel
from .fast_paths_heed import HeedLinear, PackedTokens, Packing, computing_dtype, project_together
from .positions_heed import RotaryPositions

# The attention functions that take any mask and values of another width than the keys.
GENERAL_KERNELS = ("eager", "sdpa", "flex_attention")


# Equation 1, and the additive score


def eager_attention(
    module: "HeedAttention",
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute Attention(Q, K, V) = softmax(QKᵀ/√d_k) V (equation 1) as written, or with the additive score.

    Args:
        module: The attention whose scoring, scaling and dropout apply.
        query: `(batch, heads, query_length, d_k)`.
        key: `(batch, key_value_heads, key_length, d_k)`.
        value: `(batch, key_value_heads, key_length, d_v)`.
        attention_mask: Added to the scores, `(batch, 1, query_length, key_length)`, or `None`.
        kwargs: `dropout` and `scaling`, as every attention function of transformers is given them.

    Returns:
        The output `(batch, query_length, heads, d_v)` and the weights `(batch, heads, query_length, key_length)`.
    """
    if module.num_key_value_groups > 1:
        key = key.repeat_interleave(module.num_key_value_groups, dim=1)
        value = value.repeat_interleave(module.num_key_value_groups, dim=1)
    if module.additive_score is not None:
        scores = module.additive_score(query, key)
    else:
        scores = torch.matmul(query * kwargs["scaling"], key.transpose(2, 3))
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = F.softmax(scores, dim=-1)
    dropped = F.dropout(weights, p=kwargs["dropout"], training=module.training)
    return torch.matmul(dropped, value).transpose(1, 2), weights


class AdditiveScore(nn.Module):
    """Score vᵀ tanh(q + k) of each query and key (Bahdanau et al., 2015); q and k are already projected."""

    def __init__(self, heads: int, d_k: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, d_k))

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Score `(batch, heads, Q, d_k)` queries against `(batch, heads, K, d_k)` keys: `(batch, heads, Q, K)`."""
        activations = torch.tanh(query[:, :, :, None] + key[:, :, None])  # (B, H, Q, K, d_k)
        return torch.einsum("bhqkd,hd->bhqk", activations, self.weight)


# Multi-head attention, section 3.2.2


class HeedAttention(nn.Module):
    """Multi-head attention: h heads side by side, concatenated and projected (section 3.2.2).

    Args:
        config: Sizes and options.
        stack: `encoder` or `decoder`, whose heads apply.
        is_causal: Whether a position sees only itself and earlier ones (section 3.2.3).
        layer_idx: Number of the layer, under which keys and values are cached.
    """

    def __init__(self, config: HeedConfig, stack: str, is_causal: bool = False, layer_idx: int = 0):
        super().__init__()
        heads = getattr(config, f"{stack}_attention_heads")
        key_value_heads = getattr(config, f"{stack}_key_value_heads") or heads
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = is_causal
        self.d_k = config.d_k or config.d_model // heads
        self.d_v = config.d_v or config.d_model // heads
        self.num_key_value_groups = heads // key_value_heads
        self.scaling = self.d_k**-0.5 if config.attention_scoring == "scaled_dot" else 1.0
        self.dropout = config.attention_dropout
        self.q_proj = HeedLinear(config.d_model, heads * self.d_k, bias=config.attention_bias)
        self.k_proj = HeedLinear(config.d_model, key_value_heads * self.d_k, bias=config.attention_bias)
        self.v_proj = HeedLinear(config.d_model, key_value_heads * self.d_v, bias=config.attention_bias)
        self.out_proj = HeedLinear(heads * self.d_v, config.d_model, bias=config.attention_bias)
        self.additive_score = AdditiveScore(heads, self.d_k) if config.attention_scoring == "additive" else None
        self.rotary = RotaryPositions() if config.position_encoding == "rotary" else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        key_value_states: torch.Tensor | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        positions: torch.Tensor | None = None,
        attn_implementation: str = "eager",
        packing: Packing | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from `hidden_states` to themselves, or to `key_value_states` where given (cross-attention).

        Args:
            hidden_states: `(batch, query_length, d_model)`.
            attention_mask: As the chosen attention function takes it, or a `WindowedMask`.
            key_value_states: The encoder's output, `(sources, source_length, d_model)`, see `HeedDecoder`.
            past_key_values: Cache of earlier steps, read and extended.
            positions: `(batch, query_length)`, read where positions are rotary.
            attn_implementation: Name of the attention function.
            packing: Which tokens the states are, where the others are left out of them.
            kwargs: What the attention function takes beside.

        Returns:
            The output `(batch, query_length, d_model)`, and the weights if the attention function returns them.
        """
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(attn_implementation, eager_attention)
        tokens, source_tokens = (None, None) if packing is None else (packing.states, packing.source)
        if key_value_states is None:
            query, key, value = self._project_own(hidden_states, past_key_values, positions, tokens)
        else:
            query = self._split_heads(self.q_proj(hidden_states), self.d_k, tokens)
            key, value = self._project_source(key_value_states, past_key_values, source_tokens)
        if isinstance(attention_mask, WindowedMask):
            attend = functools.partial(neighbourhood_attention, attend)
        dropout = self.dropout if self.training else 0.0
        if attn_implementation == "flex_attention":
            check_flex_attention(query, dropout)
        sharing = 1  # targets of each source, which ask it together
        if query.shape[0] != key.shape[0]:
            sharing = query.shape[0] // key.shape[0]
            query = query.unflatten(0, (-1, sharing)).transpose(1, 2).flatten(2, 3)  # (sources, H, sharing · Q, d_k)
        output, weights = attend(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )  # (sources, sharing · Q, H, d_v)
        if sharing > 1 and weights is not None:
            weights = weights.unflatten(2, (sharing, -1)).transpose(1, 2).flatten(0, 1)  # (B, H, Q, K)
        if tokens is not None:
            output = tokens.pack(output.flatten(2))
        return self.out_proj(output.reshape(*hidden_states.shape[:-1], -1)), weights

    def _split_heads(self, states: torch.Tensor, width: int, tokens: PackedTokens | None) -> torch.Tensor:
        if tokens is not None:
            states = tokens.unpack(states)
        # -1 heads, not h: under tensor parallelism each process holds a share of them.
        return states.view(*states.shape[:-1], -1, width).transpose(1, 2)  # (B, H, length, width)

    def _project_own(
        self,
        states: torch.Tensor,
        past_key_values: EncoderDecoderCache | None,
        positions: torch.Tensor | None,
        tokens: PackedTokens | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project queries, keys and values of a stack's own states; keys and values of earlier steps are added."""
        query, key, value = project_together(states, self.q_proj, self.k_proj, self.v_proj)
        query, key = (self._split_heads(projected, self.d_k, tokens) for projected in (query, key))
        value = self._split_heads(value, self.d_v, tokens)
        if self.rotary is not None:
            query, key = self.rotary(query, positions), self.rotary(key, positions)
        if past_key_values is not None:
            key, value = past_key_values.self_attention_cache.update(key, value, self.layer_idx)
        return query, key, value

    def _project_source(
        self, states: torch.Tensor, past_key_values: EncoderDecoderCache | None, tokens: PackedTokens | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Project keys and values of the source, or take from the cache what an earlier step projected."""
        if past_key_values is not None and past_key_values.is_updated.get(self.layer_idx):
            layer: Any = past_key_values.cross_attention_cache.layers[self.layer_idx]
            return layer.keys, layer.values
        key, value = project_together(states, self.k_proj, self.v_proj)
        key, value = self._split_heads(key, self.d_k, tokens), self._split_heads(value, self.d_v, tokens)
        if past_key_values is None:
            return key, value
        past_key_values.is_updated[self.layer_idx] = True
        return past_key_values.cross_attention_cache.update(key, value, self.layer_idx)


# Masks


def neighbourhood_mask(radius: int | None) -> Callable | None:
    """Return the mask function of restricted self-attention (section 4): at most `radius` positions away."""
    if radius is None:
        return None
    return lambda batch, head, query, key: (query - key).abs() <= radius


def self_attention_mask(
    config: HeedConfig,
    embeddings: torch.Tensor,
    attention_mask: torch.Tensor | None,
    radius: int | None,
    is_causal: bool,
    output_attentions: bool | None = None,
    cache: Cache | None = None,
) -> Any:
    """Return what masks self-attention, as the attention function takes it or a `WindowedMask`; `None` masks nothing.

    Args:
        config: Of the call, with the name of its attention function.
        embeddings: `(batch, length, d_model)`, of which only shape, dtype and device count.
        attention_mask: `(batch, past_length + length)`, 0 at padding, or a finished mask.
        radius: How many positions away a query sees (section 4); `None` is any number.
        is_causal: Whether it sees only itself and earlier ones (section 3.2.3).
        output_attentions: Whether attention weights are returned, of all positions and not of a window's; by default
            as the config has it.
        cache: Of the self-attention of earlier steps.
    """
    is_plain_kernel = config._attn_implementation in ("eager", "sdpa")
    has_spare_room = cache is not None and cache.is_compileable
    if (
        is_causal
        and is_plain_kernel
        and attention_mask is None
        and not torch.compiler.is_compiling()  # before sizes, which what is traced must not ask for
        and embeddings.shape[1] == 1
        and radius is None
        and not has_spare_room
    ):
        # A single token sees all before it. To find that out by making a mask would take longer than a layer norm.
        return None
    records = config.output_attentions if output_attentions is None else output_attentions
    if radius is not None and cache is None and is_plain_kernel and not records:
        windows = _windows_if_faster(config, embeddings, attention_mask, radius, is_causal)
        if windows is not None:
            return windows
    given: dict[str, Any] = {"config": config, "inputs_embeds": embeddings, "attention_mask": attention_mask}
    given["and_mask_function"] = neighbourhood_mask(radius)
    return create_causal_mask(past_key_values=cache, **given) if is_causal else create_bidirectional_mask(**given)


def _windows_if_faster(
    config: HeedConfig,
    embeddings: torch.Tensor,
    attention_mask: torch.Tensor | None,
    radius: int,
    is_causal: bool,
) -> "WindowedMask | None":
    if attention_mask is not None and attention_mask.dim() != 2:
        return None
    # An exported program must not depend on the length.
    if torch.compiler.is_exporting() or not pays_in_windows(embeddings.shape[1], radius):
        return None
    if attention_mask is None:
        attention_mask = torch.ones(embeddings.shape[:2], device=embeddings.device)
    dtype = embeddings.dtype if config._attn_implementation == "eager" else torch.bool
    return windowed_mask(attention_mask, radius, is_causal, dtype)


def source_mask(
    config: HeedConfig, embeddings: torch.Tensor, attention_mask: torch.Tensor | None, source: torch.Tensor | None
) -> Any:
    """Return what masks attention to the source, as the attention function takes it; `None` masks nothing.

    Args:
        config: Of the call, with the name of its attention function.
        embeddings: `(batch, target_length, d_model)`, of which only shape, dtype and device count.
        attention_mask: `(sources, source_length)`, 0 at padding.
        source: `(sources, source_length, d_model)`, each of which serves as many consecutive targets.

    Raises:
        ValueError: If the targets cannot be shared out evenly among the sources.
    """
    if source is not None and source.shape[0] != embeddings.shape[0]:
        if source.shape[0] == 0 or embeddings.shape[0] % source.shape[0]:
            raise ValueError(
                f"The number of targets must be a multiple of that of the sources, {source.shape[0]}, "
                f"but is {embeddings.shape[0]} instead."
            )
        embeddings = embeddings.reshape(source.shape[0], -1, embeddings.shape[-1])  # the targets of a source as one
    if attention_mask is None and config._attn_implementation in ("eager", "sdpa"):
        return None
    return create_bidirectional_mask(
        config=config, inputs_embeds=embeddings, attention_mask=attention_mask, encoder_hidden_states=source
    )


# Restricted self-attention, section 4: time and memory grow with the length, not with its square

# A block of fewer positions costs more than it saves.
NARROWEST_BLOCK = 16
# Shorter sequences than so many blocks are masked instead.
FEWEST_BLOCKS = 4


class WindowedMask(NamedTuple):
    """Which of the keys around it each query sees, by blocks of consecutive queries.

    A block is as wide as the neighbourhood, so its keys lie in one window: the block before it, itself and, where
    later positions are seen, the block behind it.

    Attributes:
        windows: `(batch · blocks, 1, block, window)`, as the attention function takes its mask.
    """

    windows: torch.Tensor


def pays_in_windows(length: int, radius: int) -> bool:
    """Tell whether restricted self-attention is computed by windows at that length."""
    return length > FEWEST_BLOCKS * max(radius, NARROWEST_BLOCK)


def windows_of(states: torch.Tensor, block: int, window: int) -> torch.Tensor:
    """Lay out `(batch, heads, length, d)` as `(batch · blocks, heads, window, d)`, beyond both ends zeros."""
    length = states.shape[2]
    behind = -length % block + window - 2 * block
    padded = F.pad(states, (0, 0, block, behind))
    return padded.unfold(2, window, block).permute(0, 2, 1, 4, 3).flatten(0, 1)


def windowed_mask(tokens: torch.Tensor, radius: int, is_causal: bool, dtype: torch.dtype) -> WindowedMask:
    """Make the mask of restricted self-attention, in blocks.

    Args:
        tokens: `(batch, length)`, 0 at padding.
        radius: How many positions away a query sees, r.
        is_causal: Whether it sees only itself and earlier ones.
        dtype: `torch.bool` for a mask that says what is seen, or that of one which is added to the scores.
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

    Args:
        attend: An attention function, as `eager_attention` is one.
        module: Its first argument.
        query: `(batch, heads, length, d_k)`.
        key: `(batch, key_value_heads, length, d_k)`.
        value: `(batch, key_value_heads, length, d_v)`.
        mask: As `windowed_mask` makes it.
        kwargs: What else it takes.

    Returns:
        The output `(batch, length, heads, d_v)`, and no weights.
    """
    batch, _, length, _ = query.shape
    block, window = mask.windows.shape[2:]
    blocks = F.pad(query, (0, 0, 0, -length % block)).unflatten(2, (-1, block)).transpose(1, 2).flatten(0, 1)
    key, value = windows_of(key, block, window), windows_of(value, block, window)
    output, _ = attend(module, blocks, key, value, mask.windows, **kwargs)  # (B · blocks, block, H, d_v)
    return output.unflatten(0, (batch, -1)).flatten(1, 2)[:, :length], None


# The choice among attention functions


def has_uneven_heads(config: HeedConfig) -> bool:
    """Tell whether the keys of a head are wider or narrower than its values."""
    widths = (config.d_model // heads for heads in (config.encoder_attention_heads, config.decoder_attention_heads))
    return any((config.d_k or width) != (config.d_v or width) for width in widths)


def check_kernel(config: HeedConfig, name: str | None) -> None:
    """Raise a `ValueError` if the attention function of that name would not compute what the config says."""
    # First what every step of decoding asks: to read a config takes microseconds.
    if name in (None, "eager") or (name in GENERAL_KERNELS and config.attention_scoring != "additive"):
        return
    choices: tuple[str, ...] = GENERAL_KERNELS
    reason = None
    if config.attention_scoring == "additive":
        choices, reason = ("eager",), "`attention_scoring` is additive"
    elif config.encoder_neighbourhood or config.decoder_neighbourhood:
        reason = "self-attention is restricted to a neighbourhood"
    elif has_uneven_heads(config):
        reason = "`d_k` differs from `d_v`"
    if reason is not None:
        raise ValueError(f"`attn_implementation` must be {', '.join(choices)} where {reason}, but is {name} instead.")


def check_flex_attention(query: torch.Tensor, dropout: float) -> None:
    """Raise a `ValueError` where flex_attention cannot do what is asked of it."""
    if dropout > 0:
        raise ValueError(
            f"`attention_dropout` must be 0 to train with flex_attention, which cannot drop weights, but is {dropout} "
            "instead; eager and sdpa can."
        )
    if query.requires_grad and query.device.type == "cpu":
        raise ValueError(
            "`attn_implementation` must be eager or sdpa to compute gradients on the CPU, but is flex_attention "
            "instead. Where none are needed, call the model within `torch.no_grad()`."
        )


class KernelChoice(PreTrainedModel):
    """A model whose attention function can be chosen by name, if it computes what the config says."""

    config: HeedConfig

    def __init__(self, config: HeedConfig):
        # Read by transformers before it picks an attention function for a model that was given none.
        if config.attention_scoring == "additive":
            self._supports_sdpa = self._supports_flex_attn = self._supports_flash_attn = False
        if config.encoder_neighbourhood or config.decoder_neighbourhood or has_uneven_heads(config):
            self._supports_flash_attn = False
        super().__init__(config)

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        """Refuse what transformers would let pass: it looks at some names only, and does not know the config."""
        check_kernel(self.config, attn_implementation)
        known = ["eager", *(name for name in ALL_ATTENTION_FUNCTIONS.valid_keys() if not name.startswith("paged|"))]
        name = attn_implementation or "eager"
        if name not in known and ("/" not in name or name.startswith("paged|")):
            raise ValueError(
                f'Specified `attn_implementation="{name}"` is not supported: `attn_implementation` must be one of '
                f"{', '.join(known)}, or a kernel of the Hub (`owner/name`), but is {name} instead."
            )
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)

    def set_attn_implementation(self, attn_implementation: str | dict, *args: Any, **kwargs: Any) -> None:
        """Choose the attention function, as transformers does; encoder and decoder share one config, and so one name.

        Raises:
            ValueError: If it is unknown, would compute something else, or is given for a part of the model.
        """
        check_one_kernel(attn_implementation)
        super().set_attn_implementation(attn_implementation, *args, **kwargs)

    def attention_settings(self, output_attentions: bool | None) -> HeedConfig:
        """Return the config whose attention function one forward call uses.

        Only the `eager` function returns attention weights, so a call that asks for them runs under it. So does
        training in bfloat16 on the CPU, where `sdpa` is slow to differentiate.
        """
        kernel = self.config._attn_implementation
        check_kernel(self.config, kernel)  # it may have been assigned
        if kernel == "eager":
            return self.config
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        if not output_attentions and not (kernel == "sdpa" and self._trains_in_bfloat16_on_the_cpu()):
            return self.config
        settings = copy.copy(self.config)
        settings._attn_implementation = "eager"
        return settings

    def _trains_in_bfloat16_on_the_cpu(self) -> bool:
        if not (torch.is_grad_enabled() and self.training):
            return False
        weight = self.get_input_embeddings().weight
        return weight.device.type == "cpu" and computing_dtype(weight) == torch.bfloat16
