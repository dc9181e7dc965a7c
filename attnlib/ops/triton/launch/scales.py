"""How a cache dtype and a KV scale are passed to the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.ops.triton.kernels.quant import (
    KV_E4M3_BYTES,
    KV_E5M2_BYTES,
    KV_NATIVE,
    KV_PLAIN,
    SCALE_FLOAT,
    SCALE_PER_HEAD,
    SCALE_TENSOR,
)

__all__ = ["kv_kind", "scale_class", "scale_kind"]


def kv_kind(dtype: torch.dtype, has_fp8: bool) -> int:
    """Which of the `KV_*` ways reads a cache of this dtype."""
    if dtype == torch.float8_e4m3fn:
        return int(KV_NATIVE.value if has_fp8 else KV_E4M3_BYTES.value)
    if dtype == torch.float8_e5m2:
        return int(KV_NATIVE.value if has_fp8 else KV_E5M2_BYTES.value)
    return int(KV_PLAIN.value)


def scale_kind(scale: float | Tensor) -> int:
    """Which of the `SCALE_*` ways passes this scale to a kernel."""
    if not isinstance(scale, Tensor):
        return int(SCALE_FLOAT.value)
    return int(SCALE_TENSOR.value if scale.numel() == 1 else SCALE_PER_HEAD.value)


def scale_class(scale: float | Tensor) -> tuple[torch.dtype, int] | None:
    """What of a scale chooses a kernel: dtype and number of a tensor's elements, None for a number."""
    return (scale.dtype, scale.numel()) if isinstance(scale, Tensor) else None
