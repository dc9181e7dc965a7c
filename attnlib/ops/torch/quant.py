"""Quantised caches: stored value * scale = real value (M9).

Writes saturate, because a cast alone may turn a large value into NaN. Reads are exact: every fp8 value is a float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["compute_dtype", "head_factor", "is_quantised", "quantise"]

_FUSED_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def is_quantised(dtype: torch.dtype) -> bool:
    """Whether a cache of this dtype stores value / scale: the one-byte floating-point formats."""
    return dtype.is_floating_point and dtype.itemsize == 1


def quantise(values: Tensor, scale: float | Tensor, dtype: torch.dtype) -> Tensor:
    """`values [T, Hkv, D] / scale`, clamped to the finite range of `dtype`, in `dtype`; NaN stays NaN, Inf saturates.

    `scale` is a float, a 0-d tensor, or one factor per KV head `[Hkv]`.
    """
    limit = torch.finfo(dtype).max
    factor = head_factor(scale)
    if isinstance(factor, Tensor):
        factor = factor.to(values.device).reshape(-1, 1)
    return (values.float() / factor).clamp_(-limit, limit).to(dtype)


def head_factor(scale: float | Tensor) -> float | Tensor:
    """A scale as a float where the host knows it, else as a float32 tensor `[1]` or `[Hkv]`; never syncs."""
    if not isinstance(scale, Tensor):
        return float(scale)
    if scale.numel() == 1 and scale.device.type == "cpu":
        return float(scale)
    return scale.float().reshape(-1)


def compute_dtype(query: Tensor, cache: Tensor, *factors: float | Tensor) -> torch.dtype:
    """The dtype to compute in: the query's if the cache has it too and nothing is rescaled, else float32 or better."""
    if query.dtype == torch.float64:
        return torch.float64
    plain = all(not isinstance(factor, Tensor) and factor == 1.0 for factor in factors)
    return (
        query.dtype
        if plain and cache.dtype == query.dtype and query.dtype in _FUSED_DTYPES
        else torch.float32
    )
