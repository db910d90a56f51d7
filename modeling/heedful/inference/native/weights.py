"""Matrix products with weights laid out once for the CPU: by kernels of our own, oneDNN, or in 8 bits FBGEMM.

Each is a function from `(rows, in_features)` to `(rows, out_features)`. oneDNN and FBGEMM compute where our own
kernels could not be compiled, or the processor lacks their instructions. If torch was built without oneDNN, plain
`torch.nn.functional.linear` takes its place; without FBGEMM int8 is refused.
"""

import warnings
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F

from heedful.inference.native.kernels import INT8_LIMIT, CompiledProduct, can_multiply, has_vnni

Precision = Literal["float32", "int8"]
PRECISIONS: tuple[Precision, ...] = ("float32", "int8")
Product = Callable[[torch.Tensor], torch.Tensor]

# Up to so many weights, plain `linear` is faster for a single row, because its call costs less.
SMALL_MATRIX = 2**16


def has_onednn() -> bool:
    """Return whether torch can lay out weights for oneDNN here."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def int8_engine() -> str | None:
    """Return the engine of torch that multiplies with int8 weights here, if any."""
    if not hasattr(torch, "quantize_per_channel"):
        return None
    supported = torch.backends.quantized.supported_engines
    return next((name for name in ("fbgemm", "qnnpack") if name in supported), None)


def kernel_name(precision: Precision) -> str:
    """Return what does the matrix products of a precision here, for reports."""
    if can_multiply(precision == "int8"):
        return "kernels.cpp"
    if precision == "int8":
        return int8_engine() or "none"
    return "oneDNN with packed weights" if has_onednn() else "torch.nn.functional.linear"


def packed_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, precision: Precision, relu: bool = False
) -> Product:
    """Return the function x ↦ x Wᵀ + b, or max(0, x Wᵀ + b), of an `(out_features, in_features)` matrix.

    With `int8` each output feature has its own scale, and the input is quantized at each call: each row by itself, or
    by torch's kernels with one scale for all rows. If no kernel has the precision here, that is a `ValueError`.
    """
    weight = weight.detach().float()
    bias = None if bias is None else bias.detach().float()
    if can_multiply(precision == "int8"):
        return CompiledProduct(weight, bias, precision == "int8", relu)
    if precision == "int8":
        return _int8_product(weight, bias, relu)
    return (_packed_product if has_onednn() else _plain_product)(weight, bias, relu)


def _plain_product(weight: torch.Tensor, bias: torch.Tensor | None, relu: bool) -> Product:
    if relu:
        return lambda states: F.linear(states, weight, bias).relu_()
    return lambda states: F.linear(states, weight, bias)


def _packed_product(weight: torch.Tensor, bias: torch.Tensor | None, relu: bool) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    multiply, activation = torch.ops.mkldnn._linear_pointwise.default, "relu" if relu else "none"
    if weight.numel() > SMALL_MATRIX:
        return lambda states: multiply(states, packed, bias, activation, [], "")
    single = _plain_product(weight, bias, relu)
    return lambda states: single(states) if len(states) == 1 else multiply(states, packed, bias, activation, [], "")


def _int8_product(weight: torch.Tensor, bias: torch.Tensor | None, relu: bool) -> Product:
    engine = int8_engine()
    if engine is None:
        raise ValueError("`precision` must be float32 where torch has no int8 kernels, but is int8.")
    scales = (weight.abs().amax(1) / INT8_LIMIT).clamp(min=torch.finfo(torch.float32).tiny)
    with warnings.catch_warnings():
        # It is going to be removed; `int8_engine` looks whether it is there.
        warnings.filterwarnings("ignore", message="torch.quantize_per_tensor")
        levels = torch.quantize_per_channel(weight, scales, torch.zeros(len(weight), dtype=torch.long), 0, torch.qint8)
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = engine
    try:
        packed = torch.ops.quantized.linear_prepack(levels, bias)
    finally:
        torch.backends.quantized.engine = before
    operators = torch.ops.quantized
    multiply = operators.linear_relu_dynamic.default if relu else operators.linear_dynamic.default
    # Without the instructions for it FBGEMM adds pairs of products up in 16 bits, for which inputs of 8 are too large.
    reduce_range = engine == "fbgemm" and not has_vnni()
    return lambda states: multiply(states, packed, reduce_range)
