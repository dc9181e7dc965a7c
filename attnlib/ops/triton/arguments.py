"""Turning tensors and options into kernel arguments, in the one order that the attention kernels share.

What never changes for a layer (dtypes, head sizes, features, tile) becomes compile-time constants; what changes from
step to step stays a plain integer that Triton does not specialise on, so nothing compiles after warm-up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.triton.quant import KV_PLAIN, kv_kind, scale_kind
from attnlib.ops.triton.tiles import split_head_size

__all__ = ["UNSPECIALISED", "Options", "attention_constants", "attention_values"]

_UNBOUNDED = 1 << 30
_COMPUTE = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}

UNSPECIALISED = [
    "num_reqs", "num_tokens", "left", "right", "chunk", "stride_qt", "stride_qh", "stride_kb", "stride_kn", "stride_kh",
    "stride_vb", "stride_vn", "stride_vh", "stride_ot", "stride_oh", "stride_lt", "stride_bt", "stride_table",
    "num_splits", "num_tiles",
]  # fmt: skip
"""Parameters of the attention kernels whose values must not choose a compilation."""


@dataclass(frozen=True, slots=True)
class Options:
    """The optional features of one call, as the public functions take them."""

    scale: float
    causal: bool | Tensor
    window: tuple[int, int]
    attention_chunk_size: int
    logits_soft_cap: float
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    query_bias: Tensor | None
    k_scale: float | Tensor
    v_scale: float | Tensor
    out: Tensor
    lse: Tensor | None


def attention_values(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, seq_lens: Tensor, options: Options, fp8: bool
) -> tuple[Any, ...]:
    """The runtime arguments that every attention kernel begins with."""
    left, right = options.window
    causal = options.causal
    flags = causal.view(torch.uint8) if isinstance(causal, Tensor) else None
    bias, lse, out = options.query_bias, options.lse, options.out
    if fp8:
        key, value = key.view(torch.uint8), value.view(torch.uint8)
    ks, vs = key.stride(), value.stride()
    return (
        query, key, value, out, lse, starts, seq_lens, flags, options.alibi_slopes, options.sinks, bias,
        options.k_scale, options.v_scale, options.scale, options.logits_soft_cap,
        min(left, _UNBOUNDED), min(right, _UNBOUNDED), min(options.attention_chunk_size, _UNBOUNDED),
        starts.shape[0] - 1, query.shape[0], query.stride(0), query.stride(1), ks[0], ks[-3], ks[-2], vs[0], vs[-3],
        vs[-2], out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0),
        0 if bias is None else bias.stride(0),
    )  # fmt: skip


def attention_constants(
    query: Tensor, key: Tensor, value: Tensor, options: Options, block_size: int, has_fp8: bool
) -> dict[str, Any]:
    """The compile-time arguments that every attention kernel shares, by name."""
    head_size, head_size_v = query.shape[2], options.out.shape[2]
    kind = kv_kind(key.dtype, has_fp8)
    d0, d1 = split_head_size(head_size)
    dv0, dv1 = split_head_size(head_size_v)
    causal = options.causal
    scale = options.scale
    has_cap = options.logits_soft_cap > 0
    has_alibi, has_bias = options.alibi_slopes is not None, options.query_bias is not None
    return {
        "BLOCK_SIZE": block_size,
        "GROUP": query.shape[1] // key.shape[-2],
        "D": head_size,
        "D0": d0,
        "D1": d1,
        "DV": head_size_v,
        "DV0": dv0,
        "DV1": dv1,
        "KV_KIND": kind,
        "COMPUTE": compute_dtype(query.dtype, kind),
        "CAUSAL": 2 if isinstance(causal, Tensor) else int(causal),
        "HAS_LEFT": options.window[0] >= 0,
        "HAS_RIGHT": options.window[1] >= 0,
        "HAS_CHUNK": options.attention_chunk_size > 0,
        "HAS_CAP": has_cap,
        "HAS_ALIBI": has_alibi,
        "HAS_SINK": options.sinks is not None,
        "HAS_BIAS": has_bias,
        "HAS_LSE": options.lse is not None,
        "K_SCALE_KIND": scale_kind(options.k_scale),
        "V_SCALE_KIND": scale_kind(options.v_scale),
        "SCALE_LATE": scale > 0 and not (has_cap or has_alibi or has_bias),
        "VEC_Q": _vector(query),
        "VEC_K": _vector(key),
        "VEC_V": _vector(value),
        "VEC_O": _vector(options.out),
    }


def compute_dtype(query_dtype: torch.dtype, kind: int) -> tl.dtype:
    """What products are computed in: the query's dtype, and float16 for 16-bit queries over a float8 cache, which
    float16 holds exactly and reaches in fewer instructions than bfloat16."""
    if query_dtype not in _COMPUTE:
        raise ContractError(f"query has dtype {query_dtype}; the kernels take float16, bfloat16 and float32")
    if kind != KV_PLAIN.value and query_dtype != torch.float32:
        return tl.float16
    return _COMPUTE[query_dtype]


def _vector(tensor: Tensor) -> int:
    """Elements per 16 bytes when every row starts on such a boundary (given that the tensor does), or 1."""
    elements = 16 // tensor.element_size()
    strides = tensor.stride()
    if strides[-1] != 1 and tensor.shape[-1] > 1:
        raise ContractError(
            f"a tensor of shape {tuple(tensor.shape)} has last stride {strides[-1]}; make its last dimension dense",
            rule="P1",
        )
    aligned = all(s % elements == 0 or n == 1 for s, n in zip(strides[:-1], tensor.shape[:-1], strict=True))
    return elements if aligned else 1
