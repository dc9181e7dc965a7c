"""Quantized caches: real value = stored value * scale (M9).

Writes saturate, because a plain cast may turn a large value into NaN. Reads are exact: every float8
value is a float32 value.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnlib.ops.scales import valid_scale

__all__ = ["compute_dtype", "head_factor", "is_quantized", "may_be_nan", "quantize"]

_FUSED_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def is_quantized(dtype: torch.dtype) -> bool:
    """Whether a cache of this dtype stores value / scale: the one-byte floating-point formats."""
    return dtype.is_floating_point and dtype.itemsize == 1


def quantize(values: Tensor, scale: float | Tensor, dtype: torch.dtype) -> Tensor:
    """`values / scale` in `dtype`, saturated at its largest finite value; NaN stays NaN.

    Args:
        values: `[T, Hkv, D]`.
        scale: a float, a 0-d tensor, or one scale per KV head `[Hkv]`.
        dtype: a float8 dtype.
    """
    limit = torch.finfo(dtype).max
    factor = head_factor(scale)
    if isinstance(factor, Tensor):
        factor = factor.to(values.device).reshape(-1, 1)
    return (values.float() / factor).clamp_(-limit, limit).to(dtype)


def head_factor(scale: float | Tensor) -> float | Tensor:
    """A scale as a float if the host has its value, else as a float32 tensor `[1]` or `[Hkv]`.

    Elements of a tensor that are out of range become NaN (M9). Never synchronizes with a device.
    """
    if not isinstance(scale, Tensor):
        return float(scale)
    scale = valid_scale(scale.float())
    if scale.numel() == 1 and scale.device.type == "cpu":
        return float(scale)
    return scale.reshape(-1)


def may_be_nan(factor: float | Tensor) -> bool:
    """Whether a factor of `head_factor` may be NaN (M9); elements of a tensor are not read."""
    return isinstance(factor, Tensor) or math.isnan(factor)


def compute_dtype(query: Tensor, cache: Tensor, *factors: float | Tensor) -> torch.dtype:
    """The dtype of the matrix products.

    It is the query's dtype if the cache has the same one and all factors are 1; otherwise float32,
    or float64 for a float64 query.
    """
    if query.dtype == torch.float64:
        return torch.float64
    plain = all(not isinstance(factor, Tensor) and factor == 1.0 for factor in factors)
    if plain and cache.dtype == query.dtype and query.dtype in _FUSED_DTYPES:
        return query.dtype
    return torch.float32
