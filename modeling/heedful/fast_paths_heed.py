"""Fast paths on the CPU: they are not in the paper and give the same results.

They are `project` and `project_together` (products by oneDNN, joined), `HeedDropout` (16 random bits per feature),
`normalise` (norms that keep less for the gradient) and `only_tokens_are_returned` (inference mode). The ordinary
operation runs if there are hooks, tracing, function transforms, adapters, quantizers, shards, patches or observed
states: `is_eager` checks a call, `is_unmodified` a layer, `runs_known_code` a model.

Without them a training step takes 1.9 times as long (3 + 3 layers of width 256, 64 pairs of 8 to 31 tokens, one core
with AVX-512, float32). Others are layouts without padding (`packed_rows_heed.py`) and the loss (`loss_heed.py`).

Letters in shape comments: D = d_model.
"""

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.module import _has_any_global_hook
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils.output_capturing import capture_outputs

from .processor_heed import multiplies_by_onednn

# When the ordinary operation runs


def is_traced() -> bool:
    """Return whether `torch.export` or `torch.jit.trace` (also to ONNX) records calls for other inputs."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()


def is_transformed() -> bool:
    """Return whether `torch.func` or forward-mode differentiation transforms calls."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def is_eager() -> bool:
    """Return whether nothing compiles, traces, transforms or observes calls."""
    return not (
        torch.compiler.is_compiling()
        or is_traced()
        or is_transformed()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or _has_any_global_hook()
    )


# Modules and functions that keep no tensors: ours (also from the Hub), torch's, transformers'.
OURS = rf"{re.escape(__name__.rpartition('.')[0])}\.\w+_heed"
FILES_OF_MODULES = re.compile(rf"{OURS}|torch\.nn\.modules\.|transformers\.activations$")
FILES_OF_FUNCTIONS = re.compile(rf"{OURS}|torch\.|transformers\.|accelerate\.")


def is_known(function: Any) -> bool:
    """Return whether a function, and each function it wraps, is Heedful's, torch's or transformers'."""
    while isinstance(function := getattr(function, "__func__", function), FunctionType):
        place = function.__globals__.get("__name__", "")  # a patch copies the function's other names
        if not FILES_OF_FUNCTIONS.match(place):
            return False
        function = getattr(function, "__wrapped__", None)
    return function is None or isinstance(function, BuiltinFunctionType)


# The function that each layer's `forward` calls, and both as they were at import.
FUNCTIONS: dict[Any, str] = {nn.Linear: "linear", nn.LayerNorm: "layer_norm", nn.Dropout: "dropout"}
AS_FOUND = ((kind, (kind.forward, getattr(F, name))) for kind, name in FUNCTIONS.items())
ORIGINALS = {kind: called for kind, called in AS_FOUND if all(map(is_known, called))}


def is_original(kind: type[nn.Module]) -> bool:
    """Return whether a layer's functions are torch's, not replacements."""
    return (kind.forward, getattr(F, FUNCTIONS[kind])) == ORIGINALS.get(kind)


def is_unmodified(layer: nn.Module, kind: type[nn.Module] = nn.Linear) -> bool:
    """Return whether a layer is exactly of this class, without adapter, quantizer, shard or hook."""
    is_of_torch = type(layer) is kind and type(layer.weight) is nn.Parameter and is_original(kind)
    return is_of_torch and not is_hooked(layer)


def is_hooked(module: nn.Module) -> bool:
    """Return whether hooks of PyTorch or Accelerate run with a module, forwards or backwards."""
    return bool(foreign_hooks(module) or module._backward_hooks or module._backward_pre_hooks)


def foreign_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Return a module's forward hooks except transformers' recording, and a `forward` set on it (as by Accelerate)."""
    if not (module._forward_pre_hooks or module._forward_hooks or "forward" in module.__dict__):
        return []
    hooks = *module._forward_pre_hooks.values(), *module._forward_hooks.values()
    found = [hook for hook in hooks if getattr(hook, "__module__", None) != capture_outputs.__module__]
    own = module.__dict__.get("forward")
    if own is not None and getattr(own, "__func__", None) is not type(module).forward:
        found.append(own)
    return found


def runs_known_functions(model: Any) -> bool:
    """Return whether the model's attention function and torch's linear function are not a user's."""
    return is_original(nn.Linear) and is_known(ALL_ATTENTION_FUNCTIONS.get(model.config._attn_implementation))


def runs_known_code(model: Any) -> bool:
    """Return whether no user's code, which might keep a tensor, runs within a model."""
    modules = list(model.modules())
    is_known_globally = runs_known_functions(model) and not _has_any_global_hook()
    return is_known_globally and foreign_code(modules) is None and not any(map(foreign_hooks, modules))


def foreign_code(modules: Iterable[nn.Module]) -> str | None:
    """Name the first user class or method among modules, or return `None`; hooks are ignored."""
    kinds: dict[Any, None] = {}
    for module in modules:
        kinds[kind := type(module)] = None
        if isinstance(module, PreTrainedModel) and (name := method_of_one(module)) is not None:
            return f"{kind.__qualname__}.{name}"
    for kind in kinds:
        if not FILES_OF_MODULES.match(kind.__module__) or not is_known(kind.forward):
            return f"{kind.__module__}.{kind.__qualname__}"
        for each in _our_classes(kind):
            name = _foreign_method(each, tuple(value for value in vars(each).values() if value.__hash__))
            if name is not None:
                return f"{each.__qualname__}.{name}"
    return None


def method_of_one(module: nn.Module) -> str | None:
    """Name the first user method set on a module itself, or return `None`; `forward` counts as a hook."""
    own = {name: value for name, value in vars(module).items() if callable(value) and name != "forward"}
    found = (name for name in own if callable(getattr(type(module), name, None)))
    return next((name for name in found if not is_known(own[name])), None)


def has_own(model: Any, *methods: str) -> bool:
    """Return whether one of these methods or properties is a user's."""
    found = [getattr(type(model), name, None) for name in methods]
    return any(name in vars(model) for name in methods) or not all(is_known(getattr(f, "fget", f)) for f in found)


def is_ours(kind: type) -> bool:
    """Return whether a class is Heed's."""
    return re.match(OURS, kind.__module__) is not None


@functools.cache
def _our_classes(kind: type) -> list[type]:
    return list(filter(is_ours, kind.__mro__))


@functools.lru_cache(1024)
def _foreign_method(kind: type, values: tuple[Any, ...]) -> str | None:
    """Name the class's first user method, if any; `values`, its present attributes, key the cache."""
    for name, value in vars(kind).items():
        method = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if callable(method) and not isinstance(method, type) and not is_known(method):
            return name
    return None


def has_observers(model: Any, asked: Mapping[str, Any]) -> bool:
    """Return whether the layers' states may be recorded, or observed by hooks or a user's code."""
    names, stacks = ("output_attentions", "output_hidden_states"), (model.model.encoder, model.model.decoder)
    layers = [layer for stack in stacks for layer in stack.layers]
    parts = *layers, *filter(None, (stack.norm for stack in stacks))
    return (
        any(getattr(model.config, name) if asked.get(name) is None else asked[name] for name in names)
        or not runs_known_functions(model)
        or not all(is_ours(type(layer)) for layer in layers)
        or foreign_code(each for each in model.modules() if _our_classes(type(each))) is not None  # type: ignore[arg-type]
        or not all(is_ours(type(part)) for layer in layers for part in layer.children())  # adapters are within these
        or any(is_hooked(module) for part in parts for module in part.modules())
    )


# Matrix products


class OneDnnProduct(torch.autograd.Function):
    """x Wᵀ + b in float32 by oneDNN, as accurate as `F.linear` (see `multiplies_by_onednn`)."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Transform `(rows, in_features)`."""
        ctx.save_for_backward(states, weight)
        ctx.has_bias = bias is not None
        return torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of states, weight and bias, themselves differentiable."""
        states, weight = ctx.saved_tensors
        product = OneDnnProduct.apply if is_eager() else F.linear
        needs_states, needs_weight, needs_bias = ctx.needs_input_grad
        of_states = product(gradient, weight.t(), None) if needs_states else None
        of_weight = product(gradient.t(), states.t(), None) if needs_weight else None
        return of_states, of_weight, gradient.sum(0) if ctx.has_bias and needs_bias else None


WORTH_ONEDNN = 2**20  # multiplications; with fewer MKL is faster


def is_large(states: torch.Tensor, out_features: int) -> bool:
    """Return whether oneDNN may be faster for a product of `(…, in_features)` states."""
    return states.numel() * out_features >= WORTH_ONEDNN


def filled(rows: int) -> int:
    """Return a number up to a sixteenth higher, so that few numbers occur: oneDNN compiles a product for each."""
    step = 1 << max(0, rows.bit_length() - 5)
    return -(-rows // step) * step


def linear(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x Wᵀ + b for `(…, in_features)` states in an eager call, by oneDNN if that is faster."""
    # Tensors of other types are quantized, sharded or traced.
    is_for_onednn = (
        multiplies_by_onednn()
        and is_large(states, len(weight))
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
    # As rows: for other shapes oneDNN returns a view, which may not be changed in place.
    return OneDnnProduct.apply(states.reshape(-1, states.shape[-1]), weight, bias).view(*states.shape[:-1], -1)


def project(states: torch.Tensor, projection: Any) -> torch.Tensor:
    """Apply a projection to `(…, in_features)` states, as a module if it is small or modified."""
    is_sized = type(projection) is nn.Linear and not (torch.compiler.is_compiling() or is_traced())
    if is_sized and not is_large(states, projection.out_features):
        return projection(states)
    if is_eager() and is_unmodified(projection):
        return linear(states, projection.weight, projection.bias)
    return projection(states)


def project_together(states: torch.Tensor, *projections: nn.Linear) -> tuple[torch.Tensor, ...]:
    """Apply projections to the same `(…, D)` states, in training on the CPU as one product."""
    # On a GPU autocast rounds each weight once per update, but joined weights once per micro-batch.
    is_joined = torch.is_grad_enabled() and states.device.type == "cpu" and is_eager()
    if not is_joined or not all(is_unmodified(each) for each in projections):
        return tuple(project(states, projection) for projection in projections)
    weight = torch.cat(tuple(projection.weight for projection in projections))
    biases = tuple(projection.bias for projection in projections)
    joined = linear(states, weight, None if biases[0] is None else torch.cat(biases))
    return joined.split([len(projection.weight) for projection in projections], dim=-1)


def computing_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype of matrix products with a tensor: the tensor's, or autocast's."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


# Dropout

INTEGERS_BY_WIDTH = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # keys: bytes


class SharedBitsDropout(torch.autograd.Function):
    """Scales kept features and sets the others to zero; its gradient does the same."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, kept: torch.Tensor, scale: float) -> torch.Tensor:
        """Drop features where `kept`, with the shape of the states, is 0 and not -1."""
        ctx.save_for_backward(kept)
        ctx.scale = scale
        scaled = states * scale
        integers = INTEGERS_BY_WIDTH[scaled.element_size()]
        scaled.view(integers).bitwise_and_(kept.to(integers))  # several times faster than a product
        return scaled

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return the gradient of the states, itself differentiable."""
        (kept,) = ctx.saved_tensors
        if is_eager():
            return SharedBitsDropout.apply(gradient, kept, ctx.scale), None, None
        return gradient * (kept * -ctx.scale).to(gradient.dtype), None, None


class HeedDropout(nn.Dropout):
    """`nn.Dropout` (section 5.4) with 16 random bits per feature on the CPU; p is exact to 1/65,536."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Drop features of any tensor in training."""
        if not self.training or self.p == 0.0:
            return states
        is_for_bits = states.device.type == "cpu" and type(states) is torch.Tensor and is_eager()
        if not (is_for_bits and is_original(nn.Dropout)) or self.p == 1.0:
            return super().forward(states)
        dropped = min(round(self.p * 2**16), 2**16 - 1)  # of an int16's 2^16 values
        words = torch.empty((states.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
        kept = words.view(torch.int16)[: states.numel()].ge_(dropped - 2**15).neg_().to(torch.int8)
        return SharedBitsDropout.apply(states, kept.view(states.shape), 2**16 / (2**16 - dropped))


# Norms


class LeanLayerNorm(torch.autograd.Function):
    """LayerNorm whose gradient uses its output, which the next product keeps anyway, instead of its input."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalise `(…, D)`."""
        output, _, reciprocal = torch.native_layer_norm(states, weight.shape, weight, bias, eps)
        ctx.save_for_backward(output, reciprocal, weight, bias)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of states, weight and bias; the input is recomputed from the output."""
        output, reciprocal, weight, bias = ctx.saved_tensors
        normalised = (output - bias).div_(weight)
        zero, one = torch.zeros_like(reciprocal), torch.ones_like(reciprocal)
        of_normalised, of_weight, of_bias = torch.ops.aten.native_layer_norm_backward(
            gradient, normalised, weight.shape, zero, one, weight, bias, ctx.needs_input_grad[:3]
        )
        return None if of_normalised is None else of_normalised.mul_(reciprocal), of_weight, of_bias, None


LARGEST_BIAS = 16  # times the weight: recomputing the input then costs about four bits of precision


def can_use_lean_norm(norm: Any, states: torch.Tensor) -> bool:
    """Return whether a norm is a float32 `nn.LayerNorm` whose input can be recomputed from its output."""
    return (
        not torch.compiler.is_compiling()
        and is_unmodified(norm, nn.LayerNorm)
        and states.dtype == norm.weight.dtype == torch.float32
        and states.device.type == "cpu"  # on a GPU the checks below would synchronize
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")  # or the next product keeps a copy in another dtype
        and bool(norm.bias.abs().amax() <= LARGEST_BIAS * norm.weight.abs().amin())
    )


def normalise(states: torch.Tensor, norm: Any, call: Any = None) -> torch.Tensor:
    """Apply a norm to `(…, D)` states; a lean call keeps less, but its gradient cannot be differentiated."""
    if call is not None and call.is_lean and can_use_lean_norm(norm, states):
        return LeanLayerNorm.apply(states, norm.weight, norm.bias, norm.eps)
    # A T5 in float16 divides states in float32 before it rounds them, as in transformers.
    if isinstance(norm, nn.RMSNorm) and norm.weight.dtype == torch.float16 and states.dtype == torch.float32:
        return F.rms_norm(states, norm.normalized_shape, eps=norm.eps).to(norm.weight.dtype) * norm.weight
    return norm(states)


# Decoding

READ_ALONE = (torch.Tensor, str, float, int, bool, type(None))  # `generate()` neither calls nor fills these
# With these it returns or keeps more than tokens, or calls other code.
KEEPING_SETTINGS = ("return_dict_in_generate", "cache_implementation", "custom_generate", "synced_gpus")


def only_tokens_are_returned(
    model: Any, inputs: Any = None, generation_config: Any = None, *args: Any, **kwargs: Any
) -> bool:
    """Return whether `generate()` returns only tokens: it may then run in inference mode, a tenth faster."""
    settings = [kwargs, vars(model.generation_config), *([vars(generation_config)] if generation_config else [])]
    return (
        is_eager()
        and all(type(value) in READ_ALONE for value in (inputs, *args, *kwargs.values()))
        and not any(each.get(name) for each in settings for name in KEEPING_SETTINGS)
        and runs_known_code(model)
        and not torch.is_autocast_enabled(model.device.type)  # it keeps copies of the weights
    )
