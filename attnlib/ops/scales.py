"""Scales of a quantized cache: real value = stored value * scale (M9).

Numbers are checked where they are given. Elements of a tensor are on the device, where a check
would synchronize; a backend uses NaN in place of an element that is out of range, so that the
result is NaN everywhere and never a plausible number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.sizes import MAX_KV_SCALE, MIN_KV_SCALE

__all__ = [
    "MAX_KV_SCALE",
    "MIN_KV_SCALE",
    "MIN_LATE_SCALE",
    "check_scale",
    "scale_for",
    "valid_scale",
]

MIN_LATE_SCALE = 2.0**-20
"""Smallest softmax scale that kernels may apply after masking, where -inf * 0 would be NaN. Its
product with `MIN_KV_SCALE` is a normal float32 number; usual scales are above 0.01."""


def check_scale(name: str, scale: float | Tensor) -> None:
    """Check a scale; elements of a tensor are not read.

    Raises:
        ContractError: no number, or one outside `MIN_KV_SCALE` to `MAX_KV_SCALE` (M9).
    """
    if isinstance(scale, Tensor):
        return
    if not isinstance(scale, int | float) or not MIN_KV_SCALE <= scale <= MAX_KV_SCALE:
        raise ContractError(
            f"{name}={scale} must be finite and above 0, from {MIN_KV_SCALE:.2g} to "
            f"{MAX_KV_SCALE:.2g}",
            rule="M9",
        )


def valid_scale(scale: Tensor) -> Tensor:
    """The scale, with NaN for every element outside `MIN_KV_SCALE` to `MAX_KV_SCALE`. No host
    sync."""
    valid = (scale >= MIN_KV_SCALE) & (scale <= MAX_KV_SCALE)
    return torch.where(valid, scale, torch.nan)


def scale_for(values: Tensor, largest: float) -> Tensor:
    """The scale that stores the largest finite magnitude of `values` as `largest`. No host sync.

    Args:
        values: of any shape.
        largest: the largest finite number of the cache's dtype.

    Returns:
        A float32 scalar on the device of `values`; 1 if no element is finite and not zero.
    """
    magnitude = values.detach().abs().float().nan_to_num(nan=0.0, posinf=0.0)
    most = magnitude.amax() if magnitude.numel() else magnitude.new_zeros(())
    scale = (most / largest).clamp(MIN_KV_SCALE, MAX_KV_SCALE)
    return torch.where(most > 0, scale, 1.0)
