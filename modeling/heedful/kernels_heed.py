"""The choice among the functions that compute attention: which of them compute what a config says, and how fast."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from .configuration_heed import GATED_ACTIVATIONS, RELATIVE_ENCODINGS, HeedConfig, check_one_kernel
from .fast_paths_heed import computing_dtype

Kernel = Callable[..., Any]  # an attention function of transformers
GENERAL_KERNELS = ("eager", "sdpa", "flex_attention")  # take any mask, and values of another width than the keys
DEVICE_OF_CUDNN = "cuda"  # where torch computes `sdpa` by cuDNN too
ALL_BUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.OVERRIDEABLE]


def why_only_eager(config: HeedConfig) -> str | None:
    """Return why no other kernel than `eager` computes what the config says, or `None` where others do."""
    if config.attention_scoring == "additive":
        return "`attention_scoring` is additive"
    return "`position_encoding` is shaw" if config.position_encoding == "shaw" else None


def why_only_general(config: HeedConfig) -> str | None:
    """Return why no others than the `GENERAL_KERNELS` compute what the config says, or `None` where others do."""
    if config.position_encoding == "t5":
        return "`position_encoding` is t5"
    if config.encoder_neighbourhood or config.decoder_neighbourhood:
        return "self-attention is restricted to a neighbourhood"
    widths = (config.d_model // heads for heads in (config.encoder_attention_heads, config.decoder_attention_heads))
    is_uneven = any((config.d_k or width) != (config.d_v or width) for width in widths)
    return "`d_k` differs from `d_v`" if is_uneven else None


def check_kernel(config: HeedConfig, name: str | None) -> None:
    """Raise a `ValueError` if the attention function of that name would not compute what the config says."""
    # First what every step of decoding asks: to read a config takes microseconds.
    if name in (None, "eager"):
        return
    choices, reason = "eager", why_only_eager(config)
    if reason is None and name not in GENERAL_KERNELS:
        choices, reason = ", ".join(GENERAL_KERNELS), why_only_general(config)
    if reason is not None:
        raise ValueError(f"`attn_implementation` must be {choices} where {reason}, but is {name} instead.")


def check_kernel_name(config: HeedConfig, name: str | None) -> None:
    """Raise for the same, and for a name that no attention function has: transformers checks some names only."""
    check_kernel(config, name)
    known = ["eager", *(name for name in ALL_ATTENTION_FUNCTIONS.valid_keys() if not name.startswith("paged|"))]
    if name is not None and name not in known and ("/" not in name or name.startswith("paged|")):
        raise ValueError(
            f'Specified `attn_implementation="{name}"` is not supported: `attn_implementation` must be one of '
            f"{', '.join(known)}, or a kernel of the Hub (`owner/name`), but is {name} instead."
        )


def check_flex_attention(query: torch.Tensor, dropout: float) -> None:
    """Raise a `ValueError` where flex_attention cannot do what is asked of it."""
    if dropout > 0:
        must = "`attention_dropout` must be 0 to train with flex_attention, which cannot drop weights"
        raise ValueError(f"{must}, but is {dropout} instead; eager and sdpa can.")
    if query.requires_grad and query.device.type == "cpu":
        must = "`attn_implementation` must be eager or sdpa to compute gradients on the CPU"
        raise ValueError(f"{must}, but is flex_attention instead. `torch.no_grad()` computes none.")


def attention_function(name: str, eager: Kernel, device: torch.device) -> Kernel:
    """Return the attention function of that name for states on that device: `sdpa` on a GPU without cuDNN's."""
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    return functools.partial(without_cudnn, attend) if name == "sdpa" and device.type == DEVICE_OF_CUDNN else attend


def without_cudnn(attend: Kernel, *states: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call an attention function without torch's cuDNN backend, unless some backend was excluded before.

    cuDNN, which torch prefers on some GPUs, takes up to half a second to plan each new shape, and texts have many.
    """
    if not chooses_from_all():
        return attend(*states, **kwargs)
    try:
        with sdpa_kernel(ALL_BUT_CUDNN):
            return attend(*states, **kwargs)
    finally:
        # The choice is of all threads: where two overlap, one may have found it without cuDNN, and put that back.
        torch.backends.cuda.enable_cudnn_sdp(True)


@torch.compiler.assume_constant_result
def chooses_from_all() -> bool:
    """Return whether torch may compute `sdpa` on a GPU by all backends that it has, as it may by default."""
    cuda = torch.backends.cuda
    kinds = (cuda.cudnn_sdp_enabled, cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled)
    return all(is_enabled() for is_enabled in kinds)


class KernelChoice(PreTrainedModel):
    """A model whose attention function can be chosen by name, if it computes what the config says."""

    config: HeedConfig
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: HeedConfig):
        # Read by transformers before it picks an attention function for a model that was given none.
        if why_only_eager(config) is not None:
            self._supports_sdpa = self._supports_flex_attn = self._supports_flash_attn = False
        elif why_only_general(config) is not None:
            self._supports_flash_attn = False
        check_kernel_name(config, config._attn_implementation)
        super().__init__(config)

    def set_attn_implementation(self, attn_implementation: str | dict[str, str], *args: Any, **kwargs: Any) -> None:
        """Choose the attention function, as transformers does, if it computes what the config says of both stacks."""
        check_one_kernel(attn_implementation)
        name = attn_implementation.get("") if isinstance(attn_implementation, dict) else attn_implementation
        check_kernel_name(self.config, name)
        super().set_attn_implementation(attn_implementation, *args, **kwargs)

    def _leave_out_of_tensor_parallelism(self) -> None:
        """Let a stack's plan of tensor parallelism name what there is."""
        left_out = [] if self.config.activation_function in GATED_ACTIVATIONS else ["fc_gate"]
        if self.config.position_encoding in RELATIVE_ENCODINGS:
            left_out.append("self_attn")  # what the heads share would get a share of its gradient
        plan = (self._tp_plan or {}).items()
        self._tp_plan = {name: style for name, style in plan if not any(part in name for part in left_out)}

    def attention_settings(self, output_attentions: bool | None) -> HeedConfig:
        """Return the config whose attention function one forward call uses.

        Only `eager` returns attention weights. It also trains in bfloat16 on the CPU, where `sdpa` is slow.
        """
        kernel = self.config._attn_implementation
        check_kernel(self.config, kernel)  # it may have been assigned
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
