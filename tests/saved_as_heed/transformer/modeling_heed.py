"""The Transformer encoder-decoder of *Attention Is All You Need* (Vaswani et al., 2017) for transformers.

It reads from top to bottom as the paper does: positions (section 3.5), attention (3.2), feed-forward networks (3.3),
residual connections (3.1), layers, stacks, model, loss (5.4).

Letters in shape comments: B batch, S source length, T target length, Q and K lengths of queries and keys,
H heads, D = d_model, V = number of target tokens.
"""

import copy
import functools
import inspect
import math
import platform
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_heed import GATED_ACTIVATIONS, HeedConfig, check_one_kernel, vocabulary_of_the_target

IGNORED_LABEL = -100
# Bytes, a multiple of which is where torch puts a tensor on the CPU.
ALIGNMENT = 64
# Target tokens whose logits are held at once while training.
LOSS_ROWS = 256
# Tokens of the vocabulary whose embeddings' gradients are added up at once.
TOKENS = 8192
# Logits whose softmax is computed at once on the CPU: it goes over them several times, and they stay in its cache.
SOFTMAX_NUMBERS = 2**18
# The attention functions that take any mask and values of another width than the keys.
GENERAL_KERNELS = ("eager", "sdpa", "flex_attention")


# Positions, section 3.5


def sinusoids(positions: torch.Tensor, width: int, layout: str) -> torch.Tensor:
    """Sine and cosine of each position at geometrically growing wavelengths (section 3.5), in float32.

    Nothing is stored, so the encoding extends to any length, whatever the dtype of the model.

    Args:
        positions: Integer positions of any shape, say `(batch, length)`.
        width: Even size of the encoding, d_model.
        layout: `interleaved` puts sine 2i beside cosine 2i+1; `concatenated` and `tensor2tensor` put all sines first,
            the latter with wavelengths that grow up to 10000·2π and not just below it.

    Returns:
        `(*positions.shape, width)`.
    """
    even = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32)  # 2i
    span = width - 2 if layout == "tensor2tensor" else width
    angles = positions.to(torch.float32)[..., None] * torch.exp(even * (-math.log(10000.0) / span))
    waves = angles.sin(), angles.cos()
    return torch.stack(waves, dim=-1).flatten(-2) if layout == "interleaved" else torch.cat(waves, dim=-1)


class SinusoidalPositions(nn.Module):
    """PE(pos, 2i) = sin(pos / 10000^(2i/d_model)) and PE(pos, 2i+1) = cos(...) (section 3.5)."""

    def __init__(self, config: HeedConfig):
        super().__init__()
        self.width = config.d_model
        self.layout = config.sinusoid_layout
        self.offset = config.position_offset

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """Encode `(batch, length)` positions as `(batch, length, d_model)`."""
        return sinusoids(positions + self.offset, self.width, self.layout)


class RotaryPositions(nn.Module):
    """Rotates each pair of query and key features by an angle that grows with the position (Su et al., 2021)."""

    def forward(self, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate `(batch, heads, length, d_k)` queries or keys at `(batch, length)` positions."""
        waves = sinusoids(positions, states.shape[-1], "interleaved").to(states.dtype)[:, None]  # (B, 1, length, d_k)
        sine, cosine = waves[..., 0::2], waves[..., 1::2]
        even, odd = states[..., 0::2], states[..., 1::2]
        rotated = even * cosine - odd * sine, even * sine + odd * cosine
        return torch.stack(rotated, dim=-1).flatten(-2)


def positions_of(length: int, past_length: int | torch.Tensor, attention_mask: torch.Tensor | None, device):
    """Return the positions of the newest `length` tokens of each sequence, padding on either side not counted.

    Args:
        length: Number of new tokens.
        past_length: Number of tokens already in the cache.
        attention_mask: `(batch, past_length + length)`, 0 at padding, or anything else to count every token.
        device: Where the positions are made.

    Returns:
        `(batch, length)`, or `(1, length)` where every sequence is numbered alike.
    """
    if attention_mask is None or attention_mask.dim() != 2:
        return (torch.arange(length, device=device) + past_length)[None]
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:].to(device)


# Matrix products and dropout as fast as the CPU does them


class OneDnnProduct(torch.autograd.Function):
    """x Wᵀ + b in float32 by oneDNN, forwards and backwards.

    It sums as accurately as `torch.nn.functional.linear` does, which leaves float32 to MKL; on processors that MKL was
    not written for, that takes about twice as long.
    """

    @staticmethod
    def forward(ctx, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Transform `(…, in_features)`."""
        ctx.save_for_backward(states, weight)
        ctx.has_bias = bias is not None
        return torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of states, weight and bias, themselves differentiable."""
        states, weight = ctx.saved_tensors
        of_states = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_states = OneDnnProduct.apply(gradient, weight.t(), None)
        rows = gradient.flatten(0, -2)
        if ctx.needs_input_grad[1]:
            of_weight = OneDnnProduct.apply(rows.t(), states.flatten(0, -2).t(), None)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            of_bias = rows.sum(0)
        return of_states, of_weight, of_bias


# A smaller matrix with fewer rows is multiplied by MKL before oneDNN has looked at it.
FEWEST_ROWS = 8
LARGE_MATRIX = 2**21
HAS_ONEDNN = platform.machine() in ("x86_64", "AMD64") and torch.backends.mkldnn.is_available()


class HeedLinear(nn.Linear):
    """A linear projection whose float32 products on the CPU are oneDNN's; elsewhere it is `nn.Linear`."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Transform `(…, in_features)` to `(…, out_features)`."""
        return linear(states, self.weight, self.bias)


def linear(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x Wᵀ + b of `(…, in_features)`, by oneDNN where that is faster."""
    # Tensors of other types are quantized, sharded or traced.
    is_for_onednn = (
        HAS_ONEDNN
        and not torch.compiler.is_compiling()  # first, for what is traced must not ask for sizes
        and (states.numel() >= FEWEST_ROWS * states.shape[-1] or weight.numel() >= LARGE_MATRIX)
        and type(states) is torch.Tensor
        and type(weight) in (nn.Parameter, torch.Tensor)
        and states.dtype == weight.dtype == torch.float32
        and states.device.type == "cpu"
        and states.numel() > 0
        and torch.backends.mkldnn.enabled
        and not torch.is_autocast_enabled("cpu")
    )
    if not is_for_onednn:
        return F.linear(states, weight, bias)
    if not torch.is_grad_enabled():
        return torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")
    return OneDnnProduct.apply(states, weight, bias)


def is_plain(projection: nn.Module) -> bool:
    """Tell whether nothing but x Wᵀ + b happens in a projection: no adapter, quantizer, shard or hook."""
    return (
        type(projection) is HeedLinear
        and type(projection.weight) is nn.Parameter
        and projection.weight.shape == (projection.out_features, projection.in_features)
        and not (projection._forward_hooks or projection._forward_pre_hooks or hasattr(projection, "_hf_hook"))
        and not torch.compiler.is_compiling()
    )


class SharedBitsDropout(torch.autograd.Function):
    """Keeps and scales some features and sets the others to zero; its gradient does the same."""

    @staticmethod
    def forward(ctx, states: torch.Tensor, kept: torch.Tensor, scale: float) -> torch.Tensor:
        """Drop out features of a tensor of any shape where `kept`, of that shape, is 0 and not -1."""
        ctx.save_for_backward(kept)
        ctx.scale = scale
        scaled = states * scale
        integers = WORDS[scaled.element_size()]
        scaled.view(integers).bitwise_and_(kept.to(integers))  # to multiply by bits takes several times as long
        return scaled

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return the gradient of the states, itself differentiable."""
        (kept,) = ctx.saved_tensors
        return SharedBitsDropout.apply(gradient, kept, ctx.scale), None, None


# Integers by their number of bytes.
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class HeedDropout(nn.Dropout):
    """`nn.Dropout` (section 5.4), whose masks are drawn faster on the CPU.

    There a mask takes 16 bits of randomness a feature instead of a float's. The probability is met to 1/65,536, and
    the features that stay are scaled by exactly what compensates for it.
    """

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Drop out features of a tensor of any shape, while training."""
        if not self.training or self.p == 0.0:
            return states
        is_plain = states.device.type == "cpu" and type(states) is torch.Tensor and not torch.compiler.is_compiling()
        if not is_plain or self.p == 1.0:
            return F.dropout(states, self.p)
        dropped = min(round(self.p * 2**16), 2**16 - 1)  # of the 2^16 values of an int16
        words = torch.empty((states.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
        kept = words.view(torch.int16)[: states.numel()].ge_(dropped - 2**15).neg_().to(torch.int8)
        return SharedBitsDropout.apply(states, kept.view(states.shape), 2**16 / (2**16 - dropped))


class Rows(torch.autograd.Function):
    """Gathers rows, where the gradient of a row that is gathered more than once, or never, is known to be zero."""

    @staticmethod
    def forward(ctx, states: torch.Tensor, there: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        """Return the rows `there` of `(rows, D)` states; of the gradient the rows `back` are returned."""
        ctx.save_for_backward(there, back)
        return states.index_select(0, there)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return the gradient of the states, itself differentiable."""
        there, back = ctx.saved_tensors
        return Rows.apply(gradient, back, there), None, None


class Packing:
    """Lays the tokens of a padded batch one behind the other, that nothing be computed for padding but attention.

    One token of padding goes along, and stands for all. Nothing may depend on it: its gradient must be zero.

    Args:
        tokens: `(batch, length)`, true at tokens and false at padding, of which there is some.
    """

    def __init__(self, tokens: torch.Tensor):
        flat = tokens.flatten()
        count = int(flat.sum())
        self.shape = tokens.shape
        self.rows = torch.cat([flat.nonzero()[:, 0], flat.logical_not().nonzero()[:1, 0]])  # (N + 1)
        self.places = (flat.cumsum(0) - 1).masked_fill_(~flat, count)  # (B · length)

    def pack(self, states: torch.Tensor) -> torch.Tensor:
        """Lay out `(batch, length, D)` as `(1, N + 1, D)`."""
        return Rows.apply(states.flatten(0, 1), self.rows, self.places).unsqueeze(0)

    def unpack(self, states: torch.Tensor) -> torch.Tensor:
        """Lay out `(1, N + 1, D)` as `(batch, length, D)`."""
        return Rows.apply(states.flatten(0, 1), self.places, self.rows).unflatten(0, self.shape)


NOT_PACKED = (None, None)
# To pack takes as long as to compute so large a share of padding.
LEAST_PADDING = 0.03


def packing_of(tokens: torch.Tensor | None, states: torch.Tensor) -> Packing | None:
    """Return how `(batch, length, D)` states are packed whose `(batch, length)` tokens these are, if it pays."""
    if tokens is None or tokens.shape != states.shape[:2]:
        return None
    tokens = tokens != 0
    has_tokens = tokens.any(1).all()  # attention to nothing but padding is attention to all of it
    return Packing(tokens) if has_tokens and tokens.float().mean() < 1 - LEAST_PADDING else None


class OutputLoss(torch.autograd.Function):
    """Sum of the smoothed cross-entropy (section 5.4) over the pre-softmax layer, without ever holding all logits.

    A few hundred target tokens at a time it computes logits, loss and gradients, so that memory does not grow with
    tokens × vocabulary, and nothing is computed for padding.
    """

    @staticmethod
    def forward(ctx, states, weight, bias, labels, smoothing: float) -> torch.Tensor:
        """Return the summed loss in nats of `(N, D)` states and their `(N)` labels, -100 where none is predicted."""
        needs_states, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dtype = computing_dtype(states)
        matrix = weight.to(dtype)
        of_states = torch.zeros_like(states) if needs_states else None
        of_weight = torch.zeros_like(weight) if needs_weight else None
        of_bias = torch.zeros_like(bias) if needs_bias else None
        total = torch.zeros((), device=states.device)
        with torch.autocast(states.device.type, enabled=False):  # the dtypes are chosen here
            predicted = (labels != IGNORED_LABEL).nonzero()[:, 0]
            for rows in predicted.split(LOSS_ROWS) if len(predicted) else ():
                part, target = states[rows].to(dtype), labels[rows][:, None]
                logits = linear(part, matrix, None if bias is None else bias.to(dtype))
                total += replace_by_gradient(logits, target, smoothing, of_bias)
                if of_states is not None:
                    of_states[rows] = linear(logits, matrix.t(), None).to(states.dtype)
                if of_weight is not None:
                    # By parts, for a whole product would take as much memory again.
                    for known, columns in zip(of_weight.split(TOKENS), logits.split(TOKENS, 1), strict=True):
                        known += linear(columns.t(), part.t(), None)
        ctx.save_for_backward(of_states, of_weight, of_bias)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        """Scale the gradients that `forward` has computed."""
        return *(None if known is None else known * gradient for known in ctx.saved_tensors), None, None


def replace_by_gradient(logits, targets, smoothing: float, of_bias: torch.Tensor | None) -> torch.Tensor:
    """Return the summed loss of `(rows, V)` logits and `(rows, 1)` targets, and leave its gradient where they were.

    The gradient of the bias is added to `of_bias`.
    """
    total = torch.zeros((), device=logits.device)
    size = max(1, SOFTMAX_NUMBERS // logits.shape[-1]) if logits.device.type == "cpu" else len(logits)
    for part, target in zip(logits.split(size), targets.split(size), strict=True):
        gradient = part.softmax(-1, dtype=torch.float32)  # (size, V), but for the targets
        # The softmax's denominator, from the likeliest token, whose probability is far from underflow.
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


def computing_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype that matrix products with a tensor are computed in: its own, or autocast's."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


# Attention, section 3.2


def eager_attention(
    module: "HeedAttention",
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs,
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


def has_uneven_heads(config: HeedConfig) -> bool:
    """Tell whether the keys of a head are wider or narrower than its values."""
    widths = (config.d_model // heads for heads in (config.encoder_attention_heads, config.decoder_attention_heads))
    return any((config.d_k or width) != (config.d_v or width) for width in widths)


def check_kernel(config: HeedConfig, name: str | None):
    """Raise a `ValueError` if the attention function of that name would not compute what the config says."""
    # First what every step of decoding asks: to read a config takes microseconds.
    if name in (None, "eager") or (name in GENERAL_KERNELS and config.attention_scoring != "additive"):
        return
    choices, reason = GENERAL_KERNELS, None
    if config.attention_scoring == "additive":
        choices, reason = ("eager",), "`attention_scoring` is additive"
    elif config.encoder_neighbourhood or config.decoder_neighbourhood:
        reason = "self-attention is restricted to a neighbourhood"
    elif has_uneven_heads(config):
        reason = "`d_k` differs from `d_v`"
    if reason is not None:
        raise ValueError(f"`attn_implementation` must be {', '.join(choices)} where {reason}, but is {name} instead.")


def check_flex_attention(query: torch.Tensor, dropout: float):
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


class AdditiveScore(nn.Module):
    """Score vᵀ tanh(q + k) of each query and key (Bahdanau et al., 2015); q and k are already projected."""

    def __init__(self, heads: int, d_k: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, d_k))

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Score `(batch, heads, Q, d_k)` queries against `(batch, heads, K, d_k)` keys: `(batch, heads, Q, K)`."""
        activations = torch.tanh(query[:, :, :, None] + key[:, :, None])  # (B, H, Q, K, d_k)
        return torch.einsum("bhqkd,hd->bhqk", activations, self.weight)


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
    places = torch.arange(window, device=tokens.device)
    distance = places[:block, None] + block - places  # from key to query, (block, window)
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
    **kwargs,
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


class HeedAttention(nn.Module):
    """Multi-head attention: h heads side by side, concatenated and projected (section 3.2.2).

    Args:
        config: Sizes and options.
        stack: `encoder` or `decoder`, whose heads apply.
        is_causal: Whether a position sees only itself and earlier ones (section 3.2.3).
        layer_idx: Number of the layer, under which keys and values are cached.
    """

    def __init__(self, config: HeedConfig, stack: str, is_causal: bool = False, layer_idx: int | None = None):
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
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from `hidden_states` to themselves, or to `key_value_states` where given (cross-attention).

        Args:
            hidden_states: `(batch, query_length, d_model)`.
            attention_mask: As the chosen attention function takes it, or a `WindowedMask`.
            key_value_states: The encoder's output, `(sources, source_length, d_model)`, see `HeedDecoder`.
            past_key_values: Cache of earlier steps, read and extended.
            kwargs: `positions` of the queries for rotary positions, `attn_implementation`, what the attention
                function of that name takes, and `packings` of queries and source, whose states are packed then.

        Returns:
            The output `(batch, query_length, d_model)`, and the weights if the attention function returns them.
        """
        positions = kwargs.pop("positions")
        kernel = kwargs.pop("attn_implementation")
        packings = kwargs.pop("packings", NOT_PACKED)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(kernel, eager_attention)
        query, key, value = self._project(hidden_states, key_value_states, past_key_values, positions, packings)
        if isinstance(attention_mask, WindowedMask):
            attend = functools.partial(neighbourhood_attention, attend)
        dropout = self.dropout if self.training else 0.0
        if kernel == "flex_attention":
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
        if packings[0] is not None:
            output = packings[0].pack(output.flatten(2))
        return self.out_proj(output.reshape(*hidden_states.shape[:-1], -1)), weights

    def _split_heads(self, states: torch.Tensor, width: int, packing: Packing | None) -> torch.Tensor:
        if packing is not None:
            states = packing.unpack(states)
        # -1 heads, not h: under tensor parallelism each process holds a share of them.
        return states.view(*states.shape[:-1], -1, width).transpose(1, 2)  # (B, H, length, width)

    def _project(self, hidden_states, key_value_states, past_key_values, positions, packings):
        """Project queries, keys and values, or take from the cache what earlier steps projected of the last two."""
        if key_value_states is not None:
            query = self._split_heads(self.q_proj(hidden_states), self.d_k, packings[0])
            return query, *self._project_source(key_value_states, past_key_values, packings[1])
        query, key, value = project_together(hidden_states, self.q_proj, self.k_proj, self.v_proj)
        query, key = (self._split_heads(states, self.d_k, packings[0]) for states in (query, key))
        value = self._split_heads(value, self.d_v, packings[0])
        if self.rotary is not None:
            query, key = self.rotary(query, positions), self.rotary(key, positions)
        if past_key_values is not None:
            key, value = past_key_values.self_attention_cache.update(key, value, self.layer_idx)
        return query, key, value

    def _project_source(self, states, past_key_values, packing):
        if past_key_values is not None and past_key_values.is_updated.get(self.layer_idx):
            layer = past_key_values.cross_attention_cache.layers[self.layer_idx]
            return layer.keys, layer.values
        key, value = project_together(states, self.k_proj, self.v_proj)
        key, value = self._split_heads(key, self.d_k, packing), self._split_heads(value, self.d_v, packing)
        if past_key_values is None:
            return key, value
        past_key_values.is_updated[self.layer_idx] = True
        return past_key_values.cross_attention_cache.update(key, value, self.layer_idx)


def project_together(states: torch.Tensor, *projections: nn.Linear) -> tuple[torch.Tensor, ...]:
    """Apply several projections to the same `(…, d_model)` states; while training as one matrix product.

    What stands in the place of a plain projection, or hooks into one, is called by itself.
    """
    if not torch.is_grad_enabled() or not all(is_plain(projection) for projection in projections):
        return tuple(projection(states) for projection in projections)
    weight = torch.cat([projection.weight for projection in projections])
    biases = [projection.bias for projection in projections]
    joined = linear(states, weight, None if biases[0] is None else torch.cat(biases))
    return joined.split([projection.out_features for projection in projections], dim=-1)


# Feed-forward networks and residual connections, sections 3.3 and 3.1


class HeedFeedForward(nn.Module):
    """FFN(x) = max(0, xW₁ + b₁)W₂ + b₂ (equation 2), or a gated variant max(0, xW_gate) ⊙ (xW₁)."""

    def __init__(self, config: HeedConfig, inner_size: int):
        super().__init__()
        gated = GATED_ACTIVATIONS.get(config.activation_function)
        self.activation = ACT2FN[gated or config.activation_function]
        self.dropout = HeedDropout(config.activation_dropout)
        self.fc1 = HeedLinear(config.d_model, inner_size, bias=config.feed_forward_bias)
        self.fc_gate = HeedLinear(config.d_model, inner_size, bias=config.feed_forward_bias) if gated else None
        self.fc2 = HeedLinear(inner_size, config.d_model, bias=config.feed_forward_bias)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Transform each position of `(batch, length, d_model)` by itself."""
        if self.fc_gate is None:
            inner = self.activation(self.fc1(hidden_states))
        else:
            inner = self.activation(self.fc_gate(hidden_states)) * self.fc1(hidden_states)
        return self.fc2(self.dropout(inner) if self.training else inner)


def make_norm(config: HeedConfig) -> nn.Module:
    """Return the norm of the residual connections, over the last dimension of size d_model."""
    kind = nn.LayerNorm if config.norm_type == "layernorm" else nn.RMSNorm
    return kind(config.d_model, eps=config.layer_norm_eps)


class LeanLayerNorm(torch.autograd.Function):
    """LayerNorm that keeps its output for the gradient, which the next product keeps anyway, and not its input."""

    @staticmethod
    def forward(ctx, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalise `(…, D)`."""
        output, _, reciprocal = torch.native_layer_norm(states, weight.shape, weight, bias, eps)
        ctx.save_for_backward(output, reciprocal, weight, bias)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of states, weight and bias, from the input as the output gives it back."""
        output, reciprocal, weight, bias = ctx.saved_tensors
        normalised = (output - bias).div_(weight)
        zero, one = torch.zeros_like(reciprocal), torch.ones_like(reciprocal)
        of_normalised, of_weight, of_bias = torch.ops.aten.native_layer_norm_backward(
            gradient, normalised, weight.shape, zero, one, weight, bias, ctx.needs_input_grad[:3]
        )
        return None if of_normalised is None else of_normalised.mul_(reciprocal), of_weight, of_bias, None


# The output gives the input back to so many times what float32 rounds.
LARGEST_BIAS = 16


def may_be_lean(norm: nn.Module, states: torch.Tensor) -> bool:
    """Tell whether a norm is `nn.LayerNorm` in float32, with weights that the output can be divided by."""
    return (
        type(norm) is nn.LayerNorm
        and type(norm.weight) is nn.Parameter
        and states.dtype == norm.weight.dtype == torch.float32
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled(states.device.type)  # the next product would keep a copy in another dtype
        and bool(norm.bias.abs().amax() <= LARGEST_BIAS * norm.weight.abs().amin())
    )


class HeedResidual(nn.Module):
    """LayerNorm(x + Dropout(Sublayer(x))) (sections 3.1 and 5.4), or x + Dropout(Sublayer(LayerNorm(x)))."""

    def __init__(self, config: HeedConfig):
        super().__init__()
        self.is_post_norm = config.norm_placement == "post"
        self.dropout = HeedDropout(config.dropout)
        self.norm = make_norm(config)

    def forward(
        self, hidden_states: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor], is_lean: bool = False
    ) -> torch.Tensor:
        """Add what `sublayer` makes of `(batch, length, d_model)` to it.

        It is a function: accelerate moves a module among the arguments, and fails where its weights lie on disk.
        With `is_lean` the gradient needs less memory, and cannot be differentiated again.
        """
        output = sublayer(hidden_states if self.is_post_norm else self._normalise(hidden_states, is_lean))
        if self.training:
            output = self.dropout(output)
        added = hidden_states + output
        return self._normalise(added, is_lean) if self.is_post_norm else added

    def _normalise(self, states: torch.Tensor, is_lean: bool) -> torch.Tensor:
        if is_lean and may_be_lean(self.norm, states):
            return LeanLayerNorm.apply(states, self.norm.weight, self.norm.bias, self.norm.eps)
        return self.norm(states)


# Layers and stacks, section 3.1


class HeedEncoderLayer(GradientCheckpointingLayer):
    """Self-attention, then a feed-forward network, each in a residual connection (section 3.1)."""

    def __init__(self, config: HeedConfig, layer_idx: int):
        super().__init__()
        self.self_attn = HeedAttention(config, "encoder", layer_idx=layer_idx)
        self.self_attn_residual = HeedResidual(config)
        self.feed_forward = HeedFeedForward(config, config.encoder_ffn_dim)
        self.feed_forward_residual = HeedResidual(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        is_lean: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """Transform `(batch, source_length, d_model)`."""
        hidden_states = self.self_attn_residual(
            hidden_states, lambda states: self.self_attn(states, attention_mask, **kwargs)[0], is_lean
        )
        return self.feed_forward_residual(hidden_states, lambda states: self.feed_forward(states), is_lean)


class HeedDecoderLayer(GradientCheckpointingLayer):
    """Masked self-attention, attention to the source, then a feed-forward network (section 3.1)."""

    def __init__(self, config: HeedConfig, layer_idx: int):
        super().__init__()
        self.self_attn = HeedAttention(config, "decoder", is_causal=True, layer_idx=layer_idx)
        self.self_attn_residual = HeedResidual(config)
        self.cross_attn = HeedAttention(config, "decoder", layer_idx=layer_idx)
        self.cross_attn_residual = HeedResidual(config)
        self.feed_forward = HeedFeedForward(config, config.decoder_ffn_dim)
        self.feed_forward_residual = HeedResidual(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        is_lean: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """Transform `(batch, target_length, d_model)`, reading `(batch, source_length, d_model)` encoder states."""
        hidden_states = self.self_attn_residual(
            hidden_states,
            lambda states: self.self_attn(states, attention_mask, past_key_values=past_key_values, **kwargs)[0],
            is_lean,
        )
        if encoder_hidden_states is not None:
            hidden_states = self.cross_attn_residual(
                hidden_states,
                lambda states: self.cross_attn(
                    states, encoder_attention_mask, encoder_hidden_states, past_key_values, **kwargs
                )[0],
                is_lean,
            )
        return self.feed_forward_residual(hidden_states, lambda states: self.feed_forward(states), is_lean)


class HubToken:
    """Opens a private repository for what is loaded after the model; it is never shown, copied or saved."""

    def __init__(self, value: str | bool | None = None):
        self.value = value

    def __reduce__(self):
        return HubToken, ()


class HeedPreTrainedModel(PreTrainedModel):
    """What every Heed Transformer shares: loading, initial weights, and what transformers may do with it."""

    config: HeedConfig
    config_class = HeedConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["HeedEncoderLayer", "HeedDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    # Set by the model that holds this one, since only the whole has all matrices of a vocabulary.
    is_part_of_a_model = False

    def __init__(self, config: HeedConfig):
        # Read by transformers before it picks an attention function for a model that was given none.
        if config.attention_scoring == "additive":
            self._supports_sdpa = self._supports_flex_attn = self._supports_flash_attn = False
        if config.encoder_neighbourhood or config.decoder_neighbourhood or has_uneven_heads(config):
            self._supports_flash_attn = False
        super().__init__(config)

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args, **kwargs) -> str:
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

    def set_attn_implementation(self, attn_implementation: str | dict, *args, **kwargs):
        """Choose the attention function, as transformers does; encoder and decoder share one config, and so one name.

        Raises:
            ValueError: If it is unknown, would compute something else, or is given for a part of the model.
        """
        check_one_kernel(attn_implementation)
        super().set_attn_implementation(attn_implementation, *args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        """Draw matrices from Glorot's uniform distribution, and embeddings so that, scaled, they have variance 1."""
        super()._init_weights(module)
        if isinstance(module, nn.Embedding) or module is self.get_output_embeddings():
            init.normal_(module.weight, std=self.config.d_model**-0.5)
        elif isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight)
        elif isinstance(module, AdditiveScore):
            init.normal_(module.weight, std=module.weight.shape[-1] ** -0.5)

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """Resize the source embeddings; with one vocabulary for both sides the target's and the output too.

        Source and target have one vocabulary where `config.has_one_vocabulary` says so. Where they have two,
        `resize_decoder_token_embeddings` resizes the other. A decoder on its own resizes what it has.

        Args:
            new_num_tokens: Number of tokens from now on; `None` keeps it, but for the padding.
            pad_to_multiple_of: Rounds the number up.
            mean_resizing: Draw new rows around the mean of the old ones, instead of as those of a new model.

        Returns:
            The resized embeddings.

        Raises:
            ValueError: If a special id would no longer be in the vocabulary, the weights lie on the disk or another
                device, or this is a part of a model, whose other parts would keep their size.
        """
        has_both_sides = self.config.has_one_vocabulary and not isinstance(self, HeedStack)
        side = "decoder" if isinstance(self, HeedDecoder) else "encoder"
        sides = ["encoder", "decoder"] if has_both_sides else [side]
        return self._resize(sides, new_num_tokens, pad_to_multiple_of, mean_resizing)

    def resize_decoder_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """Resize the target embeddings and the output alone; from then on source and target have two vocabularies.

        The arguments are those of `resize_token_embeddings`.

        Returns:
            The resized target embeddings.

        Raises:
            ValueError: If source and target share a matrix, or as `resize_token_embeddings` does.
        """
        if self.config.shares_source_and_target_embeddings:
            raise ValueError(
                "`share_encoder_decoder_embeddings` must be False where the target's embeddings alone are resized, "
                "but is True instead; `resize_token_embeddings` resizes both."
            )
        return self._resize(["decoder"], new_num_tokens, pad_to_multiple_of, mean_resizing)

    def _resize(self, sides: list[str], new_num_tokens, pad_to_multiple_of, mean_resizing) -> nn.Embedding:
        """Resize the embeddings of the sides, and the output with the decoder's; return the first."""
        stacks = [self if isinstance(self, HeedStack) else getattr(self.base_model, side) for side in sides]
        size = stacks[0].embed_tokens.num_embeddings if new_num_tokens is None else new_num_tokens
        if pad_to_multiple_of is not None and not isinstance(pad_to_multiple_of, int):
            # The words of transformers, which its tests look for.
            raise ValueError(
                "Asking to pad the embedding matrix to a multiple of "
                f"`{pad_to_multiple_of}`, which is not and integer. Please make sure to pass an integer"
            )
        if pad_to_multiple_of is not None and pad_to_multiple_of < 1:
            raise ValueError(f"`pad_to_multiple_of` must be at least 1, but is {pad_to_multiple_of} instead.")
        if pad_to_multiple_of is not None:
            size = math.ceil(size / pad_to_multiple_of) * pad_to_multiple_of
        if new_num_tokens is None and pad_to_multiple_of is None:
            return stacks[0].embed_tokens
        config = self._config_of_size(sides, size)
        head = self.get_output_embeddings() if "decoder" in sides else None
        modules = [stack.embed_tokens for stack in stacks] + ([head] if head is not None else [])
        if self.is_part_of_a_model:
            raise ValueError(
                f"`{type(self).__name__}` must not be resized within a model, whose other parts would keep their "
                "size: call `resize_token_embeddings` or `resize_decoder_token_embeddings` of the whole model."
            )
        if any(module.weight.is_meta and hasattr(module, "_hf_hook") for module in modules):
            raise ValueError(
                "The embeddings must be in memory to be resized, but are offloaded: load the model without "
                "`device_map`, resize it and save it."
            )
        if head is not None:
            # First: tied weights change with the embeddings, in place, and the bias would be left behind.
            self._resize_head(head, size, mean_resizing)
        for stack in stacks:
            self._get_resized_embeddings(stack.embed_tokens, size, mean_resizing=mean_resizing)
        for name in ("share_encoder_decoder_embeddings", "vocab_size", "decoder_vocab_size"):
            setattr(self.config, name, getattr(config, name))
        self.vocab_size = self.config.vocab_size  # transformers keeps it here too
        self.tie_weights()
        return stacks[0].embed_tokens

    def _config_of_size(self, sides: list[str], size: int) -> HeedConfig:
        """Return a config whose vocabularies of these sides have another size, after checking it."""
        config = copy.copy(self.config)
        if not isinstance(self, HeedStack) and len(sides) == 1:
            config.share_encoder_decoder_embeddings = False
        if "encoder" in sides or config.has_one_vocabulary:
            config.vocab_size = size
        if "decoder" in sides:
            config.decoder_vocab_size = size
        config.validate_architecture()
        return config

    @torch.no_grad()
    def _resize_head(self, head: nn.Linear, size: int, mean_resizing: bool):
        """Give the pre-softmax layer and its bias as many rows; it stays the same module, with what hangs on it."""
        old_size = head.weight.shape[0]
        resized = self._get_resized_lm_head(head, size, mean_resizing=mean_resizing)
        if resized is head:
            return
        if size > old_size and not mean_resizing:
            resized.weight[old_size:].normal_(std=self.config.d_model**-0.5)  # as in `_init_weights`
        head.out_features = size
        head.weight = nn.Parameter(resized.weight, requires_grad=head.weight.requires_grad)
        if head.bias is not None:
            head.bias = nn.Parameter(resized.bias, requires_grad=head.bias.requires_grad)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """Load as transformers does, but refuse weights that are not this model's, and remember where they were.

        transformers draws missing weights at random and drops unknown ones, with a line in the log. Here both are an
        error, unless `output_loading_info=True` asks for the report of them or a `state_dict` is given. A model
        without its head loads from a folder with one, and the other way round, with a new head.

        Raises:
            ValueError: If weights are missing or unknown, which the message names, or a file is broken.
            RuntimeError: If weights have other shapes and `ignore_mismatched_sizes` is not set.
        """
        place, may_differ = pretrained_model_name_or_path, bool(kwargs.get("ignore_mismatched_sizes"))
        is_strict = place is not None and kwargs.get("state_dict") is None and not kwargs.get("output_loading_info")
        # transformers' own error for other shapes names none of them.
        asked = {**kwargs, "output_loading_info": True, "ignore_mismatched_sizes": may_differ or is_strict}
        try:
            model, report = super().from_pretrained(place, *args, **asked)
        except Exception as error:
            if type(error).__name__ != "SafetensorError":
                raise
            raise ValueError(f"{place} must hold whole safetensors files, but one is broken: {error}") from error
        own_report = model.__dict__.pop("_own_report", report)
        if is_strict:
            check_weights(model, own_report, place, may_differ)
            check_adapter(model, report)
        check_places(model)
        align_weights(model)
        is_torchao = type(getattr(model, "hf_quantizer", None)).__name__ == "TorchAoHfQuantizer"
        if is_torchao and not model.quantized_weights():
            raise ValueError(
                "`quantization_config` must fit the model, but no weight could be quantized with it: `group_size` "
                f"must divide `d_model` ({model.config.d_model}) and the inner sizes."
            )
        # With these a pipeline finds the target's tokenizer.
        model.config._commit_hash = getattr(model.config, "_commit_hash", None) or kwargs.get("revision")
        model._hub_token = HubToken(kwargs.get("token"))
        return (model, report) if kwargs.get("output_loading_info") else model

    def _adjust_missing_and_unexpected_keys(self, loading_info):
        """Keep the report of the model's own weights: after an adapter transformers returns the adapter's alone."""
        super()._adjust_missing_and_unexpected_keys(loading_info)
        self._own_report = loading_info.to_dict()

    def save_pretrained(self, save_directory, *args, **kwargs):
        """Save as transformers does; where the code travels along, every Auto class finds its model in the folder.

        Raises:
            ValueError: If torchao's `quantize_` changed the weights, which cannot be written then.
        """
        if self.quantized_weights() and getattr(self, "hf_quantizer", None) is None:
            raise ValueError(
                "The weights must be quantized by `from_pretrained` to be saved, but `quantize_` did it instead: save "
                "the model as it was, and load it with `quantization_config=TorchAoConfig(...)`."
            )
        self._keep_sharing()
        if self._auto_class is not None:
            self.config.auto_map = {
                "AutoConfig": "configuration_heed.HeedConfig",
                "AutoModel": "modeling_heed.HeedModel",
                "AutoModelForSeq2SeqLM": "modeling_heed.HeedForConditionalGeneration",
            }
            # transformers' saver sends along what a file imports, so this line brings the pipeline's file.
            from .pipeline_heed import CUSTOM_PIPELINES

            self.config.custom_pipelines = copy.deepcopy(CUSTOM_PIPELINES)
        super().save_pretrained(save_directory, *args, **kwargs)

    def quantized_weights(self) -> list[str]:
        """Return the names of the weights that torchao holds in fewer bits."""
        return [
            name for name, weight in self.named_parameters() if type(weight.data).__module__.startswith("torchao.")
        ]

    def _keep_sharing(self):
        """Let the config say which matrices are one, after peft wrote there that none is.

        Merging an adapter sets `tie_word_embeddings` to False where source and output embeddings are two matrices:
        with separate vocabularies they always are, though the target's is one with either.
        """
        if self.config.tie_word_embeddings or isinstance(self, HeedStack):
            return
        source, target = self.base_model.encoder.embed_tokens, self.base_model.decoder.embed_tokens
        head = self.get_output_embeddings()
        shares_input = source.weight is target.weight
        shares_output = head is not None and head.weight is target.weight
        if shares_input or shares_output:
            self.config.tie_word_embeddings = True
            self.config.share_encoder_decoder_embeddings = shares_input
            self.config.tie_output_embeddings = shares_output

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


@torch.no_grad()
def align_weights(model: PreTrainedModel):
    """Copy weights that lie in memory as they do in their file to places where torch would have put them.

    Where in the file they lie depends on the length of its header, and MKL adds up a product of one row in another
    order where its matrix does not begin at a multiple of 16 bytes: a loaded model would differ from the saved one.
    """
    for weight in model.parameters():
        if weight.device.type == "cpu" and type(weight.data) is torch.Tensor and weight.data_ptr() % ALIGNMENT:
            weight.data = weight.data.clone()


def check_places(model: PreTrainedModel):
    """Refuse a `device_map` that puts one matrix in two places, of which the disk is one.

    Raises:
        ValueError: If it does; the message names both.
    """
    places = getattr(model, "hf_device_map", None) or {}
    if "disk" not in places.values():
        return
    for pair in model.all_tied_weights_keys.items():
        found = []
        for name in pair:
            parts = name.split(".")
            prefixes = [".".join(parts[:end]) for end in range(len(parts), -1, -1)]
            found.append(next((places[prefix] for prefix in prefixes if prefix in places), None))
        if found[0] != found[1]:
            told = " and ".join(f"{name} on {place}" for name, place in zip(pair, found, strict=True))
            raise ValueError(
                f"`device_map` must put matrices that are one in one place, but puts {told} instead; "
                '`device_map="auto"` with `max_memory` sees to it.'
            )


def check_weights(model: PreTrainedModel, report: dict, place, may_differ: bool):
    """Raise if a model was not loaded whole, or not all of a file was used.

    Args:
        model: The model that was loaded.
        report: What `from_pretrained(output_loading_info=True)` tells of its own weights.
        place: The folder or repository, of the model or of an adapter, for the message.
        may_differ: Whether weights of other shapes are left as they were drawn.
    """
    if getattr(model, "_hf_peft_config_loaded", False):
        place = next(iter(model.peft_config.values())).base_model_name_or_path or place
    missing, unknown = report["missing_keys"], report["unexpected_keys"]
    name, base = type(model).__name__, model.base_model
    if name not in (model.config.architectures or [name]):
        # Saved without a head or with one: what lies outside the stacks may differ.
        prefix = f"{model.base_model_prefix}."
        unknown = [key for key in unknown if hasattr(base, key.removeprefix(prefix).split(".")[0])]
        missing = missing if base is model else [key for key in missing if key.startswith(prefix)]
    wrong = {"lacks": sorted(missing), "holds, unknown to it,": sorted(unknown)}
    for what, keys in wrong.items():
        if keys:
            told = f"{', '.join(keys[:3])}{f' and {len(keys) - 3} more' if len(keys) > 3 else ''}"
            raise ValueError(
                f"{place} must hold the weights of a {name} of its config, but {what} {told}; "
                "`output_loading_info=True` loads the rest and returns a list."
            )
    shapes = [f"{key} {tuple(found)} instead of {tuple(wanted)}" for key, found, wanted in report["mismatched_keys"]]
    if shapes and not may_differ:
        raise RuntimeError(
            f"{place} must hold weights of the shapes that its config says, but has {', '.join(sorted(shapes)[:3])}; "
            "`ignore_mismatched_sizes=True` draws them at random."
        )
    # transformers lets go of a tie where the file holds two different matrices.
    for pair in (getattr(model, "_tied_weights_keys", None) or {}).items():
        one, other = (model.get_parameter(key) for key in pair)
        if one is not other and one.device == other.device and one.device.type != "meta":
            raise ValueError(
                f"{place} must hold one matrix for {pair[0]} and {pair[1]}, which the config ties, but holds two "
                "different ones: set `tie_word_embeddings` to False in its config."
            )


def check_adapter(model: PreTrainedModel, report: dict):
    """Raise if a model was loaded with an adapter whose file lacks some of its weights."""
    lacking = sorted(report["missing_keys"]) if getattr(model, "_hf_peft_config_loaded", False) else []
    if lacking:
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        raise ValueError(f"The adapter must have all its weights, but lacks {', '.join(lacking[:3])}{more}.")


def neighbourhood_mask(radius: int | None) -> Callable | None:
    """Return the mask function of restricted self-attention (section 4): at most `radius` positions away."""
    if radius is None:
        return None
    return lambda batch, head, query, key: (query - key).abs() <= radius


class HeedStack(HeedPreTrainedModel):
    """What encoder and decoder share: token embeddings, positions, and the checks on what they are given."""

    def __init__(self, config: HeedConfig, vocab_size: int):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(vocab_size, config.d_model)
        self.embedding_scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.embed_positions = None
        self.longest_sequence = config.max_position_embeddings if config.position_encoding == "learned" else None
        if config.position_encoding == "sinusoidal":
            self.embed_positions = SinusoidalPositions(config)
        elif config.position_encoding == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.d_model)
        self.embedding_norm = make_norm(config) if config.embedding_norm else nn.Identity()
        self.dropout = HeedDropout(config.dropout)
        self.norm = make_norm(config) if config.norm_placement == "pre" else nn.Identity()
        self.gradient_checkpointing = False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        """Draw as every Heed model does; with `depth_scaled_init` the matrices of layer l are smaller by √l."""
        super()._init_weights(module)
        if self.config.depth_scaled_init and isinstance(module, nn.Linear):
            numbered = enumerate(self.layers, start=1)
            depth = next(number for number, layer in numbered if any(part is module for part in layer.modules()))
            init.xavier_uniform_(module.weight, gain=depth**-0.5)

    def post_init(self):
        """Finish as transformers does; the plan of tensor parallelism names no gate where there is none."""
        super().post_init()
        if self.config.activation_function not in GATED_ACTIVATIONS:
            self._tp_plan = {name: style for name, style in self._tp_plan.items() if not name.endswith("fc_gate")}

    def embed(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        """Look up and scale `(batch, length)` token ids (section 3.4), or scale `(batch, length, d_model)` embeddings.

        Raises:
            ValueError: If both or neither are given, or an id is outside the vocabulary.
        """
        if (input_ids is None) == (inputs_embeds is None):
            given = "neither" if input_ids is None else "both"
            raise ValueError(f"Exactly one of `input_ids` and `inputs_embeds` must be given, but {given} was.")
        if inputs_embeds is None:
            self.check_token_ids(input_ids)
            inputs_embeds = self.embed_tokens(input_ids)
        return inputs_embeds * self.embedding_scale

    def add_positions(self, embeddings: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Add the encoding of `(batch, length)` positions to `(batch, length, d_model)` embeddings, and drop out.

        Between the two stands a norm where `embedding_norm` asks for it.
        """
        if self.embed_positions is not None:
            embeddings = embeddings + self.embed_positions(positions).to(embeddings.dtype)
        return self.dropout(self.embedding_norm(embeddings))

    def _windowed_mask(self, embeddings, attention_mask, settings: HeedConfig, output_attentions: bool | None):
        """Return the mask of restricted self-attention in blocks; `None` where one of all positions must do, or does.

        Attention weights are those of all positions, and an exported program must not depend on how many there are.
        """
        is_causal = isinstance(self, HeedDecoder)
        radius = self.config.decoder_neighbourhood if is_causal else self.config.encoder_neighbourhood
        kernel = settings._attn_implementation
        if (
            radius is None
            or kernel not in ("eager", "sdpa")
            or (self.config.output_attentions if output_attentions is None else output_attentions)
            or (attention_mask is not None and attention_mask.dim() != 2)
            or torch.compiler.is_exporting()
            or not pays_in_windows(embeddings.shape[1], radius)
        ):
            return None
        if attention_mask is None:
            attention_mask = torch.ones(embeddings.shape[:2], device=embeddings.device)
        dtype = embeddings.dtype if kernel == "eager" else torch.bool
        return windowed_mask(attention_mask, radius, is_causal, dtype)

    def check_token_ids(self, input_ids: torch.Tensor):
        """Raise a `ValueError` if an id is outside the vocabulary, unless the ids lie on an accelerator."""
        # Only on the CPU, where it costs microseconds: elsewhere it would wait for the device on every call.
        if input_ids.device.type != "cpu" or torch.compiler.is_compiling() or input_ids.numel() == 0:
            return
        # Of the config: an adapter may stand in the place of the embeddings.
        limit = self.config.decoder_vocab_size if isinstance(self, HeedDecoder) else self.config.vocab_size
        lowest, highest = (bound.item() for bound in input_ids.aminmax())
        if lowest < 0 or highest >= limit:
            wrong = lowest if lowest < 0 else highest
            raise ValueError(f"Token ids must be at least 0 and below {limit}, but one is {wrong} instead.")

    def _check_lengths(self, length: int, past_length: int | torch.Tensor, attention_mask: torch.Tensor | None):
        if torch.compiler.is_compiling():
            return
        if isinstance(past_length, torch.Tensor):  # a static cache
            if past_length.device.type != "cpu":
                return
            past_length = int(past_length)
        total = past_length + length
        if attention_mask is not None and attention_mask.dim() == 2 and attention_mask.shape[1] != total:
            raise ValueError(
                f"The attention mask must cover {total} tokens, but it covers {attention_mask.shape[1]} instead."
            )
        limit = self.longest_sequence
        if limit is not None and total > limit:
            raise ValueError(
                f"A sequence must have at most {limit} tokens (`max_position_embeddings` of learned positions), "
                f"but it has {total} instead."
            )


class HeedEncoder(HeedStack):
    """A stack of N layers that read the whole source at once (section 3.1)."""

    _can_record_outputs = {
        "hidden_states": HeedEncoderLayer,
        "attentions": OutputRecorder(HeedAttention, index=1, layer_name="self_attn"),
    }
    _tp_plan = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.out_proj": "rowwise",
        "layers.*.feed_forward.fc1": "colwise",
        "layers.*.feed_forward.fc_gate": "colwise",
        "layers.*.feed_forward.fc2": "rowwise",
    }

    # What encodes in its place, see `HeedForConditionalGeneration.prepared`.
    prepared = None

    def __init__(self, config: HeedConfig):
        super().__init__(config, config.vocab_size)
        self.layers = nn.ModuleList([HeedEncoderLayer(config, layer_idx=i) for i in range(config.encoder_layers)])
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """Encode the source.

        Args:
            input_ids: `(batch, source_length)`.
            attention_mask: `(batch, source_length)`, 1 at tokens and 0 at padding, on either side.
            inputs_embeds: `(batch, source_length, d_model)` in place of `input_ids`.
            kwargs: `output_attentions`, `output_hidden_states`, `return_dict`.

        Returns:
            `last_hidden_state` `(batch, source_length, d_model)` and what was asked to be recorded.

        Raises:
            ValueError: If an id is outside the vocabulary, or the mask's width is not the source's length.
        """
        if self.prepared is not None:
            records = bool(kwargs.get("output_attentions") or kwargs.get("output_hidden_states"))
            states = self.prepared.encode(input_ids, attention_mask, inputs_embeds, records)
            if states is not None:
                return BaseModelOutput(last_hidden_state=states)
        embeddings = self.embed(input_ids, inputs_embeds)
        self._check_lengths(embeddings.shape[1], 0, attention_mask)
        settings = self.attention_settings(kwargs.get("output_attentions"))
        positions = positions_of(embeddings.shape[1], 0, attention_mask, embeddings.device)
        mask = self._windowed_mask(embeddings, attention_mask, settings, kwargs.get("output_attentions"))
        if mask is None:
            mask = create_bidirectional_mask(
                config=settings,
                inputs_embeds=embeddings,
                attention_mask=attention_mask,
                and_mask_function=neighbourhood_mask(self.config.encoder_neighbourhood),
            )
        hidden_states = self.add_positions(embeddings, positions)  # (B, S, D)
        # The loss cannot be differentiated twice either where it is known which targets it needs.
        is_lean = kwargs.pop("needed_targets", None) is not None
        packing = packing_of(attention_mask, hidden_states) if is_lean else None
        if packing is not None:
            hidden_states = packing.pack(hidden_states)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                mask,
                positions=positions,
                attn_implementation=settings._attn_implementation,
                packings=(packing, packing),
                is_lean=is_lean,
                **kwargs,
            )
        hidden_states = self.norm(hidden_states)
        return BaseModelOutput(last_hidden_state=hidden_states if packing is None else packing.unpack(hidden_states))


class HeedDecoder(HeedStack):
    """A stack of N layers that predict each target token from those before it and the source (section 3.1)."""

    _can_record_outputs = {
        "hidden_states": HeedDecoderLayer,
        "attentions": OutputRecorder(HeedAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(HeedAttention, index=1, layer_name="cross_attn"),
    }
    _tp_plan = {
        **HeedEncoder._tp_plan,
        "layers.*.cross_attn.q_proj": "colwise",
        "layers.*.cross_attn.k_proj": "colwise",
        "layers.*.cross_attn.v_proj": "colwise",
        "layers.*.cross_attn.out_proj": "rowwise",
    }

    def __init__(self, config: HeedConfig):
        super().__init__(config, config.decoder_vocab_size)
        self.layers = nn.ModuleList([HeedDecoderLayer(config, layer_idx=i) for i in range(config.decoder_layers)])
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Decode the target's newest tokens.

        Args:
            input_ids: `(batch, target_length)`, without the tokens that are already in the cache.
            attention_mask: `(batch, past_length + target_length)`, 0 at padding, on either side.
            encoder_hidden_states: `(sources, source_length, d_model)`; with fewer sources than targets, consecutive
                targets share one, as the hypotheses of a beam do.
            encoder_attention_mask: `(sources, source_length)`.
            past_key_values: Cache of earlier calls, extended in place.
            inputs_embeds: `(batch, target_length, d_model)` in place of `input_ids`.
            use_cache: Whether to return a cache; the config's `use_cache` by default.
            kwargs: `output_attentions`, `output_hidden_states`, `return_dict`.

        Returns:
            `last_hidden_state` `(batch, target_length, d_model)`, the cache, and what was asked to be recorded.

        Raises:
            ValueError: If an id is outside the vocabulary, the mask's width is not past plus new length, or targets
                cannot be shared out evenly among sources.
        """
        embeddings = self.embed(input_ids, inputs_embeds)
        if use_cache and past_key_values is None:
            past_key_values = EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))
        past_length = 0 if past_key_values is None else past_key_values.get_seq_length()
        self._check_lengths(embeddings.shape[1], past_length, attention_mask)
        settings = self.attention_settings(kwargs.get("output_attentions"))
        kernel = settings._attn_implementation  # once: to read a config takes microseconds
        if kernel == "flex_attention" and past_key_values is not None and past_key_values.is_compileable:
            # Its mask is read after the cache has moved the position that the mask counts from.
            raise ValueError(
                "`attn_implementation` must be eager or sdpa beside a static cache, but is flex_attention instead."
            )
        positions = positions_of(embeddings.shape[1], past_length, attention_mask, embeddings.device)
        causal_mask = self._causal_mask(embeddings, attention_mask, past_key_values, settings, kwargs)
        cross_mask = self._cross_mask(embeddings, encoder_hidden_states, encoder_attention_mask, settings)
        hidden_states = self.add_positions(embeddings, positions)  # (B, T, D)
        packings = NOT_PACKED
        needed = kwargs.pop("needed_targets", None)
        if needed is not None and past_key_values is None and encoder_hidden_states is not None:
            packings = packing_of(needed, hidden_states), packing_of(encoder_attention_mask, encoder_hidden_states)
        if packings[0] is not None:
            hidden_states = packings[0].pack(hidden_states)
        if packings[1] is not None:
            encoder_hidden_states = packings[1].pack(encoder_hidden_states)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                causal_mask,
                encoder_hidden_states,
                encoder_attention_mask=cross_mask,
                past_key_values=past_key_values,
                positions=positions,
                attn_implementation=kernel,
                packings=packings,
                is_lean=needed is not None,
                **kwargs,
            )
        hidden_states = self.norm(hidden_states)
        if packings[0] is not None:
            hidden_states = packings[0].unpack(hidden_states)
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=hidden_states, past_key_values=past_key_values
        )

    def _causal_mask(self, embeddings, attention_mask, past_key_values, settings: HeedConfig, asked: dict):
        """Return what masks self-attention, as the attention function takes it; `None` where all is seen."""
        radius, kernel = self.config.decoder_neighbourhood, settings._attn_implementation
        cache = None if past_key_values is None else past_key_values.self_attention_cache
        if kernel in ("eager", "sdpa") and not torch.compiler.is_compiling() and attention_mask is None:
            # To find out by making a mask would cost a step of decoding more than a layer norm does.
            has_spare_room = cache is not None and cache.is_compileable
            if embeddings.shape[1] == 1 and radius is None and not has_spare_room:
                return None
        if cache is None:
            in_windows = self._windowed_mask(embeddings, attention_mask, settings, asked.get("output_attentions"))
            if in_windows is not None:
                return in_windows
        return create_causal_mask(
            config=settings,
            inputs_embeds=embeddings,
            attention_mask=attention_mask,
            past_key_values=cache,
            and_mask_function=neighbourhood_mask(radius),
        )

    def _cross_mask(self, embeddings, source, attention_mask, settings: HeedConfig):
        """Return what masks attention to the source, as the attention function takes it."""
        by_source = self._by_source(embeddings, source)
        if attention_mask is None and settings._attn_implementation in ("eager", "sdpa"):
            return None
        return create_bidirectional_mask(
            config=settings, inputs_embeds=by_source, attention_mask=attention_mask, encoder_hidden_states=source
        )

    @staticmethod
    def _by_source(embeddings: torch.Tensor, source: torch.Tensor | None) -> torch.Tensor:
        """Return `(sources, targets of each · target_length, d_model)`."""
        if source is None or source.shape[0] == embeddings.shape[0]:
            return embeddings
        if source.shape[0] == 0 or embeddings.shape[0] % source.shape[0]:
            raise ValueError(
                f"The number of targets must be a multiple of that of the sources, {source.shape[0]}, "
                f"but is {embeddings.shape[0]} instead."
            )
        return embeddings.reshape(source.shape[0], -1, embeddings.shape[-1])


# The model, figure 1


class HeedModel(HeedPreTrainedModel):
    """Encoder and decoder of figure 1 without the final linear layer.

    Args:
        config: Sizes and options.
    """

    def __init__(self, config: HeedConfig):
        super().__init__(config)
        self.encoder = HeedEncoder(config)
        self.decoder = HeedDecoder(config)
        self.encoder.is_part_of_a_model = self.decoder.is_part_of_a_model = True
        self._tied_weights_keys = {}
        if config.shares_source_and_target_embeddings:
            self._tied_weights_keys["decoder.embed_tokens.weight"] = "encoder.embed_tokens.weight"
        self.post_init()
        self._tp_plan.pop("embed_tokens", None)  # transformers 5.17 adds it; the stacks have their own

    def get_input_embeddings(self) -> nn.Module:
        """Return the source embeddings."""
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module):
        """Replace the source embeddings, and the target's where they are shared."""
        self.encoder.embed_tokens = value
        if self.config.shares_source_and_target_embeddings:
            self.decoder.embed_tokens = value

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        """Encode the source, unless `encoder_outputs` is given, and decode the target, with the stacks' arguments.

        Raises:
            ValueError: As the stacks raise it, or if the target is missing.
        """
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs
            )
        elif not isinstance(encoder_outputs, BaseModelOutput):
            encoder_outputs = BaseModelOutput(*encoder_outputs)
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            raise ValueError(
                "`decoder_input_ids` or, for a loss, `labels` must be given, but neither was. (transformers' Trainer "
                "takes the labels away where `label_smoothing_factor` is set: give the data collator the model, "
                "`DataCollatorForSeq2Seq(tokenizer, model=model)`, so that it makes `decoder_input_ids`.)"
            )
        source = encoder_outputs.last_hidden_state
        if attention_mask is not None and attention_mask.dim() == 2 and attention_mask.shape[1] != source.shape[1]:
            raise ValueError(
                f"The attention mask must cover {source.shape[1]} tokens of the source, "
                f"but it covers {attention_mask.shape[1]} instead."
            )
        decoder_outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=source,
            encoder_attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            past_key_values=decoder_outputs.past_key_values,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
        )


def check_generate_arguments(args: tuple, kwargs: dict):
    """Raise for arguments of `generate()` that transformers would drop silently, or fail at deep inside."""
    strategy = kwargs.get("custom_generate")
    if isinstance(strategy, type):
        raise ValueError(
            f"`custom_generate` must be an object such as {strategy.__name__}(…), but is the class itself instead."
        )
    for name in ("streamer", "assistant_model", "tokenizer", "assistant_tokenizer") if callable(strategy) else ():
        if kwargs.get(name) is not None:
            raise ValueError(
                f"`{name}` must be None with a `custom_generate`, to which transformers hands none, but is a "
                f"{type(kwargs[name]).__name__} instead."
            )
    sources = [*args[:1], kwargs.get("inputs"), kwargs.get("input_ids"), kwargs.get("inputs_embeds")]
    sources.append(getattr(kwargs.get("encoder_outputs"), "last_hidden_state", None))
    source = next((given for given in sources if given is not None), None)
    prompt = kwargs.get("decoder_input_ids")
    if source is not None and prompt is not None and len(source) != len(prompt):
        raise ValueError(
            f"`decoder_input_ids` must have a row for each of the {len(source)} sources, "
            f"but have {len(prompt)} instead."
        )


def warn_of_other_search(config, strategy):
    """Warn where the model's folder asks for settings that transformers' own search does not read."""
    names = ("length_penalty_form", "tokens_beyond_source")
    unread = [name for name in names if getattr(config, name, None) not in (None, "power")]
    if unread and not callable(strategy):
        settings = " and ".join(f"`{name}`" for name in unread)
        warnings.warn(
            f"`generate()` does not read {settings} of the generation config: give it "
            "`custom_generate=heed.BeamSearch()`, which does, or use heed's `Translator`.",
            stacklevel=4,
        )


def needed_targets(labels: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return `(batch, length)`, true at the targets that a loss depends on; `None` where they are not known.

    They are those with a label, and those before one that the decoder's mask lets it see.
    """
    predicted = labels != IGNORED_LABEL
    needed = predicted.long().flip(1).cumsum(1).flip(1) > 0
    if attention_mask is None:
        return needed
    return needed & (predicted | (attention_mask != 0)) if attention_mask.shape == labels.shape else None


class HeedForConditionalGeneration(HeedPreTrainedModel, GenerationMixin):
    """The whole of figure 1: encoder, decoder, final linear layer, and the training loss (section 5.4).

    Args:
        config: Sizes and options.
    """

    _tp_plan = {"lm_head": "colwise_gather_output"}
    # What encodes and searches in place of the modules, as long as `heed.prepare_for_inference` holds.
    prepared = None

    def __init__(self, config: HeedConfig):
        super().__init__(config)
        self.model = HeedModel(config)
        self.model.is_part_of_a_model = True
        self.lm_head = HeedLinear(config.d_model, config.decoder_vocab_size, bias=config.output_bias)
        owner = "encoder" if config.shares_source_and_target_embeddings else "decoder"
        self._tied_weights_keys = {}
        if config.shares_target_and_output_embeddings:
            self._tied_weights_keys["lm_head.weight"] = f"model.{owner}.embed_tokens.weight"
        # Without a length, `generate()` would stop after 20 tokens and say so only in a log.
        self.generation_config.max_length = config.max_position_embeddings
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        """Return the pre-softmax linear layer."""
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module):
        """Replace the pre-softmax linear layer."""
        self.lm_head = new_embeddings

    def prepare_decoder_input_ids_from_labels(self, labels: torch.LongTensor) -> torch.LongTensor:
        """Shift `(batch, target_length)` labels right by one: the decoder reads what stands before each label.

        Raises:
            ValueError: If labels are padded on the left, where the decoder's start would stand before the padding.
        """
        self._check_padding_side(labels)
        # Without a slice that is one shorter, an exported program takes targets of one and two tokens too.
        shifted = labels.roll(1, dims=1)
        shifted[:, :1] = self.config.decoder_start_token_id
        return shifted.masked_fill(shifted == IGNORED_LABEL, self.config.pad_token_id)

    @staticmethod
    def _check_padding_side(labels: torch.LongTensor):
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

    def _expand_inputs_for_generation(
        self, expand_size: int = 1, is_encoder_decoder: bool = False, input_ids=None, **model_kwargs
    ):
        """Make a row of the target's for each hypothesis. The hypotheses of a sentence share its source."""
        kept = {name: model_kwargs.pop(name) for name in ("encoder_outputs", "attention_mask") if name in model_kwargs}
        mask = kept.get("attention_mask")
        if mask is not None and not torch.compiler.is_compiling() and bool(mask.all()):
            kept["attention_mask"] = None  # or it would be looked through at each step
        input_ids, expanded = super()._expand_inputs_for_generation(expand_size, False, input_ids, **model_kwargs)
        return input_ids, expanded | kept

    @staticmethod
    def _reorder_cache(past_key_values: EncoderDecoderCache, beam_idx: torch.LongTensor) -> EncoderDecoderCache:
        """Let each hypothesis go on from another of its sentence, which has the same source."""
        past_key_values.self_attention_cache.reorder_cache(beam_idx)
        return past_key_values

    @staticmethod
    def create_masks_for_generate(attention_mask: torch.Tensor | None = None, **kwargs) -> torch.Tensor | None:
        """Return the decoder's `(batch, length)` mask as it is.

        With a static cache `generate()` would hand the decoder a finished mask, which knows of no neighbourhood,
        leaves no padding to count positions by, and may not be of the kind that the attention function takes.
        """
        return attention_mask

    @functools.wraps(GenerationMixin.generate)
    def generate(self, *args, **kwargs):
        """Generate as transformers does, with tokens counted by the target's vocabulary where it has another size.

        Raises:
            ValueError: If a callable `custom_generate` would not be given the `streamer`, `assistant_model` or
                `tokenizer`, or `decoder_input_ids` have not a row for each source.
        """
        check_generate_arguments(args, kwargs)
        config = kwargs.get("generation_config") or self.generation_config
        warn_of_other_search(config, kwargs.get("custom_generate"))
        with vocabulary_of_the_target():
            return super().generate(*args, **kwargs)

    def prepare_inputs_for_generation(
        self, input_ids, next_sequence_length=None, past_key_values=None, attention_mask=None, **kwargs
    ) -> dict:
        """Return what one step of `generate()` hands to `forward`.

        transformers' own, for caches and places that ask for more, takes longer than an attention of a small model.
        """
        is_ordinary = past_key_values is not None and not past_key_values.is_compileable
        if not is_ordinary or input_ids.device != self.lm_head.weight.device:
            return super().prepare_inputs_for_generation(
                input_ids, next_sequence_length, past_key_values, attention_mask, **kwargs
            )
        newest = input_ids if next_sequence_length is None else input_ids[:, -next_sequence_length:]
        given = {name: value for name, value in kwargs.items() if name not in ("is_first_iteration", "labels")}
        own = {"decoder_input_ids": newest, "attention_mask": attention_mask, "past_key_values": past_key_values}
        return own | given

    def _sample(self, *args, **kwargs):
        """Search greedily or sample, as transformers does."""
        found = None if self.prepared is None else self.prepared.decode(*args, **kwargs)
        return super()._sample(*args, **kwargs) if found is None else found

    def _beam_search(self, *args, **kwargs):
        """Search with beams, as transformers does."""
        found = None if self.prepared is None else self.prepared.decode(*args, **kwargs)
        return super()._beam_search(*args, **kwargs) if found is None else found

    def compute_transition_scores(self, sequences, scores, beam_indices=None, normalize_logits=False) -> torch.Tensor:
        """Return the score of each generated token, `(rows, steps)`, 0 behind the end of a beam, as documented there.

        transformers' own takes the source's vocabulary for the target's.
        """
        if beam_indices is None:
            beam_indices = torch.arange(len(scores[0]), device=sequences.device)[:, None].expand(-1, len(scores))
        steps = int((beam_indices >= 0).sum(-1).max())
        stacked = torch.stack(tuple(scores[:steps]), dim=1)  # (rows, steps, V)
        stacked = stacked.log_softmax(-1) if normalize_logits else stacked
        rows, step = beam_indices[:, :steps], torch.arange(steps, device=sequences.device)
        return stacked[rows.clamp(min=0), step, sequences[:, -steps:]].masked_fill(rows < 0, 0.0)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
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
            inputs_embeds: `(batch, source_length, d_model)`, in place of `input_ids`.
            decoder_inputs_embeds: `(batch, target_length, d_model)`, in place of `decoder_input_ids`.
            labels: `(batch, target_length)`, -100 where nothing is to be predicted.
            use_cache: Whether to return a cache; never with labels.
            logits_to_keep: Compute the logits of the last so many positions, or of these positions; 0 means all.
            num_items_in_batch: Number of labels over all micro-batches and processes of one update, by which the
                summed loss is divided; the labels of this call by default.
            skip_logits: Whether to compute the loss alone, a few hundred tokens at a time, and return no logits: most
                of a step's memory with large vocabularies. By default while training with labels.
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
        if skips_logits and self._may_skip_padding(kwargs):
            kwargs["needed_targets"] = needed_targets(labels, decoder_attention_mask)
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
            **kwargs,
        )
        states = outputs.last_hidden_state
        if skips_logits:
            logits, loss = None, self.loss_of_states(states, labels, num_items_in_batch)
        else:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(states[:, kept])  # (B, T, V)
            loss = None if labels is None else self.loss(logits, labels, num_items_in_batch)
        recorded = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        return Seq2SeqLMOutput(loss=loss, logits=logits, **recorded)

    def _may_skip_logits(self, skip_logits: bool | None) -> bool:
        if skip_logits is False or (skip_logits is None and not (self.training and torch.is_grad_enabled())):
            return False
        # float16 must be scaled before it is differentiated.
        dtypes = {self.lm_head.weight.dtype, computing_dtype(self.lm_head.weight)}
        return is_plain(self.lm_head) and torch.float16 not in dtypes

    def _may_skip_padding(self, asked: dict) -> bool:
        """Tell whether nobody looks at the states of padding: on the CPU, where nothing is recorded and no hook is."""
        records = any(
            getattr(self.config, name) if asked.get(name) is None else asked[name]
            for name in ("output_attentions", "output_hidden_states")
        )
        if records or self.lm_head.weight.device.type != "cpu" or torch.compiler.is_compiling():
            return False
        stacks = self.model.encoder, self.model.decoder
        layers = [layer for stack in stacks for layer in stack.layers]
        watched = [*(stack.norm for stack in stacks), *(module for layer in layers for module in layer.modules())]
        return all(type(layer) in (HeedEncoderLayer, HeedDecoderLayer) for layer in layers) and not any(
            module._forward_hooks or module._forward_pre_hooks for module in watched
        )

    def loss_of_states(self, states: torch.Tensor, labels: torch.LongTensor, num_items_in_batch=None) -> torch.Tensor:
        """Return the same loss as `loss`, of the decoder's `(batch, target_length, d_model)` output."""
        self._check_label_shape(states, labels)
        smoothing = self.config.label_smoothing if self.training else 0.0
        labels = labels.to(states.device)
        head = self.lm_head
        total = OutputLoss.apply(states.flatten(0, 1), head.weight, head.bias, labels.flatten(), smoothing)
        return self._mean(total, labels, num_items_in_batch)

    def loss(self, logits: torch.Tensor, labels: torch.LongTensor, num_items_in_batch=None) -> torch.Tensor:
        """Sum the smoothed cross-entropy (section 5.4) and divide it by the number of labels.

        Args:
            logits: `(batch, target_length, decoder_vocab_size)`.
            labels: `(batch, target_length)`, -100 where nothing is to be predicted.
            num_items_in_batch: Divisor in place of the number of labels here.

        Returns:
            A scalar in nats per label.

        Raises:
            ValueError: If no label is to be predicted, or labels and logits differ in length.
        """
        self._check_label_shape(logits, labels)
        smoothing = self.config.label_smoothing if self.training else 0.0
        total = F.cross_entropy(
            logits.flatten(0, 1).float(),
            labels.to(logits.device).flatten(),
            ignore_index=IGNORED_LABEL,
            label_smoothing=smoothing,
            reduction="sum",
        )
        return self._mean(total, labels, num_items_in_batch)

    @staticmethod
    def _check_label_shape(states: torch.Tensor, labels: torch.LongTensor):
        if states.shape[:-1] != labels.shape:
            raise ValueError(
                f"`labels` must have the shape of the logits, {tuple(states.shape[:-1])}, "
                f"but have {tuple(labels.shape)} instead."
            )

    @staticmethod
    def _mean(total: torch.Tensor, labels: torch.LongTensor, num_items_in_batch) -> torch.Tensor:
        if num_items_in_batch is None:
            num_items_in_batch = (labels != IGNORED_LABEL).sum()
            if not torch.compiler.is_compiling() and num_items_in_batch == 0:
                raise ValueError("`labels` must hold at least one label other than -100, but all are -100.")
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(total.device)
        return total / num_items_in_batch


# transformers asks for it at each step of decoding, and to read it off the code takes as long as an attention does.
HeedForConditionalGeneration.forward.__signature__ = inspect.signature(HeedForConditionalGeneration.forward)

__all__ = [
    "HeedDecoder",
    "HeedEncoder",
    "HeedForConditionalGeneration",
    "HeedModel",
    "HeedPreTrainedModel",
]
