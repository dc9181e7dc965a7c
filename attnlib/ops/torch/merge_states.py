"""Merge attention over two disjoint sets of keys: split KV, cascade attention, chunked context.

Each state is weighted by exp(lse - merged lse), as in FlashAttention's split KV.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["merge_states"]


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
    merged = torch.logaddexp(log_a, log_b)
    reference = merged.masked_fill(merged == -torch.inf, 0.0)
    total = _weighted(out_a, log_a, reference, dtype) + _weighted(out_b, log_b, reference, dtype)
    out.copy_(total)
    if lse is not None:
        lse.copy_(merged)


def _without_inf(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == torch.inf, -torch.inf)


def _weighted(out: Tensor, lse: Tensor, reference: Tensor, dtype: torch.dtype) -> Tensor:
    weight = torch.exp(lse - reference).unsqueeze(-1)
    return torch.where(weight > 0, out.to(dtype) * weight, 0.0)
