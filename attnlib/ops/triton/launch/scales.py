"""How the dtype and the scales of a cache are passed to the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.kv_dtype import KVFormat
from attnlib.ops.triton.kernels.quant import (
    KV_E4M3_BYTES,
    KV_E5M2_BYTES,
    KV_INT4,
    KV_INT8,
    KV_MXFP4,
    KV_NATIVE,
    KV_NVFP4,
    KV_PLAIN,
    SCALE_FLOAT,
    SCALE_PER_HEAD,
    SCALE_PER_TOKEN,
    SCALE_TENSOR,
)

__all__ = ["kv_kind", "scale_kind", "stored_kind"]


def kv_kind(dtype: torch.dtype, has_fp8: bool) -> int:
    """The `KV_*` constant by which a kernel reads a cache of this dtype."""
    if dtype == torch.float8_e4m3fn:
        return int(KV_NATIVE.value if has_fp8 else KV_E4M3_BYTES.value)
    if dtype == torch.float8_e5m2:
        return int(KV_NATIVE.value if has_fp8 else KV_E5M2_BYTES.value)
    if dtype == torch.int8:
        return int(KV_INT8.value)
    if dtype == torch.uint8:
        return int(KV_INT4.value)
    return int(KV_PLAIN.value)


def stored_kind(dtype: torch.dtype, stored: KVFormat | None) -> int:
    """`kv_kind` of a side of a cache for the Hopper decodes, which convert bytes.

    Args:
        dtype: of the stored elements.
        stored: their format, where pages hold scales; None elsewhere.
    """
    if stored is None or not stored.elements_per_group:
        return kv_kind(dtype, has_fp8=False)
    return int((KV_NVFP4 if stored.elements_per_group == 16 else KV_MXFP4).value)


def scale_kind(name: str, scale: float | Tensor) -> int:
    """The `SCALE_*` constant by which a kernel receives a scale.

    Raises:
        ContractError: a scale per head that is not contiguous; kernels index it as dense.
    """
    if not isinstance(scale, Tensor):
        return int(SCALE_FLOAT.value)
    if scale.dim() == 4:
        return int(SCALE_PER_TOKEN.value)
    if scale.numel() == 1:
        return int(SCALE_TENSOR.value)
    if scale.stride(-1) != 1:
        raise ContractError(
            f"{name} has stride {scale.stride(-1)}; it must be 1: call .contiguous()", rule="M9"
        )
    return int(SCALE_PER_HEAD.value)
