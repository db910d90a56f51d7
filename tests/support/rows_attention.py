"""Attention within rows that lie end to end, on the CPU: one mask computes the result of `varlen_attn` on a GPU."""

import torch
import torch.nn.functional as F


def places_of(bounds: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row of each token, and its position within it."""
    places = torch.arange(count, device=bounds.device)
    rows = torch.bucketize(places, bounds[1:].contiguous(), right=True)
    return rows, places - bounds[rows.clamp(max=len(bounds) - 1)]


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
    (rows, places), (rows_of_keys, places_of_keys) = places_of(cu_seq_q, len(query)), places_of(cu_seq_k, len(key))
    seen = rows[:, None] == rows_of_keys
    if window_size == (-1, 0):
        seen = seen & (places[:, None] >= places_of_keys)
    states = (each.float().transpose(0, 1)[None] for each in (query, key, value))
    output = F.scaled_dot_product_attention(*states, attn_mask=seen, scale=scale)
    return output[0].transpose(0, 1).to(query.dtype)
