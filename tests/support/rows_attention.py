"""Attention within rows that lie end to end, on the CPU: what `varlen_attn` computes on a GPU, row by row."""

from collections.abc import Iterator

import torch

Sides = tuple[slice, slice]


def rows_of(query_bounds: torch.Tensor, key_bounds: torch.Tensor) -> Iterator[Sides]:
    """Yield the queries and the keys of each row that has any."""
    bounds = query_bounds.tolist(), key_bounds.tolist()
    for start, end, first, last in zip(bounds[0], bounds[0][1:], bounds[1], bounds[1][1:], strict=False):
        if end > start:
            yield slice(start, end), slice(first, last)


def weights(query: torch.Tensor, key: torch.Tensor, scale: float, is_causal: bool) -> torch.Tensor:
    """Return the weights `(H, Q, K)` of a row's `(Q, H, d)` queries and keys, in float32."""
    scores = torch.einsum("qhd,khd->hqk", query.float(), key.float()) * scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1) & is_causal
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


@torch.library.custom_op("heedful_tests::attention", mutates_args=())
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_bounds: torch.Tensor,
    key_bounds: torch.Tensor,
    scale: float,
    is_causal: bool,
) -> torch.Tensor:
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    for own, other in rows_of(query_bounds, key_bounds):
        found = weights(query[own], key[other], scale, is_causal)
        output[own] = torch.einsum("hqk,khd->qhd", found, value[other].float()).to(output.dtype)
    return output


@torch.library.custom_op("heedful_tests::attention_backward", mutates_args=())
def attention_backward(  # noqa: PLR0913 - torch reads the operator's schema here
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_bounds: torch.Tensor,
    key_bounds: torch.Tensor,
    scale: float,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    found = [torch.zeros_like(each, memory_format=torch.contiguous_format) for each in (query, key, value)]
    for own, other in rows_of(query_bounds, key_bounds):
        probabilities, given = weights(query[own], key[other], scale, is_causal), gradient[own].float()
        of_weights = torch.einsum("qhd,khd->hqk", given, value[other].float())
        of_scores = probabilities * (of_weights - (of_weights * probabilities).sum(-1, keepdim=True)) * scale
        found[0][own] = torch.einsum("hqk,khd->qhd", of_scores, key[other].float()).to(query.dtype)
        found[1][other] = torch.einsum("hqk,qhd->khd", of_scores, query[own].float()).to(query.dtype)
        found[2][other] = torch.einsum("hqk,qhd->khd", probabilities, given).to(query.dtype)
    return found[0], found[1], found[2]


@attention.register_fake
def _(query, *_):
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@attention_backward.register_fake
def _(gradient, query, key, value, *_):
    return tuple(torch.empty_like(each, memory_format=torch.contiguous_format) for each in (query, key, value))


def keep(ctx, inputs, output):
    *tensors, scale, is_causal = inputs
    ctx.save_for_backward(*tensors)
    ctx.settings = scale, is_causal


attention.register_autograd(
    lambda ctx, gradient: (*attention_backward(gradient, *ctx.saved_tensors, *ctx.settings), *[None] * 4),
    setup_context=keep,
)


def varlen_attn(query, key, value, *bounds_and_lengths, scale=None, window_size=(-1, -1)):
    """Attend as torch's function of this name does; every row must have keys, and no more tokens than it says."""
    cu_seq_q, cu_seq_k, max_q, max_k = bounds_and_lengths
    if not (torch.compiler.is_compiling() or query.is_meta):
        lengths = cu_seq_q.diff(), cu_seq_k.diff()
        assert all((each <= most).all() for each, most in zip(lengths, (max_q, max_k), strict=True))
        assert ((lengths[0] == 0) == (lengths[1] == 0)).all()
        assert len(query) == cu_seq_q[-1]
        assert len(key) == cu_seq_k[-1]
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    return attention(query, key, value, cu_seq_q, cu_seq_k, scale, window_size == (-1, 0))
