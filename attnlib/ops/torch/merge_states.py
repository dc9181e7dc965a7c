"""Merge attention over two disjoint sets of keys: split KV, cascade attention, chunked context.

Each state is weighted by its share of the sum of exp(lse), as in FlashAttention's split KV.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.ops.torch.softmax import merge_weights

__all__ = ["merge_partial_rows", "merge_states"]


@torch.no_grad()
def merge_states(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    out: Tensor,
    lse: Tensor | None = None,
) -> None:
    """Write the attention over the keys of both states to `out` and `lse`.

    Args:
        out_a: `[T, Hq, Dv]`, normalized by its own softmax denominator.
        lse_a: `[T, Hq]`, natural logarithm. -inf means a state without keys, of which `out_a` is
            not used even if it is NaN; +inf is read as -inf.
        out_b: as `out_a`.
        lse_b: as `lse_a`.
        out: `[T, Hq, Dv]`, written; may be `out_a` or `out_b`. 0 where both states have no keys.
        lse: `[T, Hq]` float32, written when given; may be `lse_a` or `lse_b`. -inf where both
            states have no keys.
    """
    dtype = torch.float64 if torch.float64 in (out_a.dtype, out_b.dtype) else torch.float32
    log_a, log_b = (_without_inf(state.to(dtype)) for state in (lse_a, lse_b))
    weights, merged = merge_weights(torch.stack([log_a, log_b]))
    total = _weighted(out_a, weights[0], dtype) + _weighted(out_b, weights[1], dtype)
    out.copy_(total)
    if lse is not None:
        lse.copy_(merged)


def _without_inf(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == torch.inf, -torch.inf)


def _weighted(out: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`out` times its weight; a state of weight 0 may hold anything, NaN included."""
    weight = weight.unsqueeze(-1)
    return torch.where(weight == 0, 0.0, out.to(dtype) * weight)


@torch.no_grad()
def merge_partial_rows(
    out: Tensor,
    lse: Tensor,
    partial_out: Tensor,
    partial_lse: Tensor,
    partial_starts: Tensor,
    partial_rows: Tensor,
) -> None:
    """Merge any number of partial states into each token's state, in place.

    Args:
        out: `[T, Hq, Dv]`, the first state of each token; overwritten with the merged one.
        lse: `[T, Hq]` float32, likewise. As in `merge_states`, -inf and +inf mean no keys.
        partial_out: `[P, Hq, Dv]`, states over other keys.
        partial_lse: `[P, Hq]` float32.
        partial_starts: `[T + 1]` int32; token t has entries `[starts[t], starts[t + 1])`. A token
            without entries keeps its state.
        partial_rows: `[n]` int32, rows of the partial states, grouped by token.
    """
    counts = (partial_starts[1:] - partial_starts[:-1]).long()
    tokens = torch.repeat_interleave(torch.arange(len(counts), device=out.device), counts)
    rows = partial_rows[: tokens.shape[0]].long()
    dtype = torch.float64 if out.dtype == torch.float64 else torch.float32
    log_own, log_parts = _without_inf(lse.to(dtype)), _without_inf(partial_lse.to(dtype)[rows])
    index = tokens.unsqueeze(-1).expand_as(log_parts)
    largest = log_own.scatter_reduce(0, index, log_parts, "amax")
    reference = largest.masked_fill(largest == -torch.inf, 0.0)
    own, parts = torch.exp(log_own - reference), torch.exp(log_parts - reference[tokens])
    weights = own.index_add(0, tokens, parts)
    total = _weighted(out, own, dtype)
    total.index_add_(0, tokens, _weighted(partial_out[rows], parts, dtype))
    out.copy_(total / torch.where(weights == 0, 1.0, weights).unsqueeze(-1))
    lse.copy_(reference + torch.log(weights))
