"""Combine attention over two disjoint sets of keys into attention over both (split KV, cascade, chunked context).

Source: the log-sum-exp merge of partial attention states, as in FlashAttention's split-KV and Cascade inference.
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
    """Write the merged state to `out` and `lse`, which may be one of the inputs.

    Args:
        out_a, out_b: `[T, Hq, Dv]`, each normalised by its own denominator.
        lse_a, lse_b: `[T, Hq]`, natural log; -inf marks a state without keys, and +inf is read as -inf. What such a
            state holds in its output, NaN included, is not looked at.
        out: `[T, Hq, Dv]`. Both states empty: 0.
        lse: `[T, Hq]` float32, or None. Both states empty: -inf.
    """
    dtype = torch.float64 if torch.float64 in (out_a.dtype, out_b.dtype) else torch.float32
    log_a, log_b = (_finite_or_empty(state.to(dtype)) for state in (lse_a, lse_b))
    merged = torch.logaddexp(log_a, log_b)
    reference = merged.masked_fill(merged == -torch.inf, 0.0)
    total = _share(out_a, log_a, reference, dtype) + _share(out_b, log_b, reference, dtype)
    out.copy_(total)
    if lse is not None:
        lse.copy_(merged)


def _finite_or_empty(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == torch.inf, -torch.inf)


def _share(out: Tensor, lse: Tensor, reference: Tensor, dtype: torch.dtype) -> Tensor:
    weight = torch.exp(lse - reference).unsqueeze(-1)
    return torch.where(weight > 0, out.to(dtype) * weight, 0.0)
