"""Arguments and compile-time constants that the kernels over the packed cache share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.heuristics.device import DeviceLimits
from attnlib.ops.triton.heuristics.tiles import split_head_size
from attnlib.ops.triton.launch.constants import compute_dtype, reads_bytes
from attnlib.ops.triton.launch.scales import kv_kind, scale_kind

__all__ = [
    "MAX_REQUESTS", "joined_addresses", "packed_constants", "readable_caches", "scale_arguments",
    "whole_vectors",
]  # fmt: skip

MAX_REQUESTS = 65534
"""Limit of a grid's third dimension, less the programs for rows past the last request."""


def packed_constants(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, params: AttentionParams,
    limits: DeviceLimits,
) -> dict[str, Any]:  # fmt: skip
    """The compile-time arguments that both attention kernels share, by name."""
    head_size, kind = query.shape[2], kv_kind(key.dtype, limits.has_fp8)
    d0, d1 = split_head_size(head_size)
    return {
        "BLOCK_SIZE": value.shape[3],
        "GROUP": query.shape[1] // value.shape[1],
        "D": head_size,
        "D0": d0,
        "D1": d1,
        "DV": head_size,
        "DV0": d0,
        "DV1": d1,
        "X": key.shape[4],
        "KV_KIND": kind,
        "COMPUTE": compute_dtype(query.dtype, kind),
        "HAS_ALIBI": params.alibi_slopes is not None,
        "K_SCALE_KIND": scale_kind("k_scale", params.k_scale),
        "V_SCALE_KIND": scale_kind("v_scale", params.v_scale),
        "VEC_Q": whole_vectors(query),
        "VEC_K": whole_vectors(key),
        "VEC_V": whole_vectors(value),
        "VEC_O": whole_vectors(out),
        "enable_fp_fusion": True,
    }


def whole_vectors(tensor: Tensor) -> int:
    """Elements per 16 bytes if the first two strides are multiples of 16 bytes, else 1."""
    elements = 16 // tensor.element_size()
    return elements if all(stride % elements == 0 for stride in tensor.stride()[:2]) else 1


def readable_caches(key: Tensor, value: Tensor, limits: DeviceLimits) -> tuple[Tensor, Tensor]:
    """The caches as the kernels read them: float8 as bytes where the chip does not convert it."""
    if reads_bytes(key.dtype, limits):
        return key.view(torch.uint8), value.view(torch.uint8)
    return key, value


def scale_arguments(params: AttentionParams) -> tuple[Tensor | float, ...]:
    return tuple(
        scale if isinstance(scale, Tensor) else float(scale)
        for scale in (params.k_scale, params.v_scale)
    )


def joined_addresses(*tensors: Tensor | None) -> int:
    """The addresses that the kernels are specialized on, joined by `|`."""
    joined = 0
    for tensor in tensors:
        joined |= 0 if tensor is None else tensor.data_ptr()
    return joined
