"""The arguments that the portable attention kernels share: runtime numbers, and compile-time
constants.

What never changes for a layer (dtypes, head sizes, features, tile) becomes compile-time constants.
What changes from step to step stays a plain integer that Triton does not specialize on, so nothing
compiles after warm-up.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.checks import vector_elements
from attnlib.ops.params import AttentionParams
from attnlib.ops.scales import MIN_LATE_SCALE
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.heuristics.device import DeviceLimits
from attnlib.ops.triton.kernels.quant import KV_NATIVE, KV_PLAIN
from attnlib.ops.triton.launch.scales import kv_kind, scale_kind
from attnlib.ops.triton.launch.score import score_constants

__all__ = [
    "attention_constants",
    "attention_numbers",
    "compute_dtype",
    "page_strides",
    "reads_bytes",
]

_UNBOUNDED = 1 << 30
_COMPUTE = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def reads_bytes(cache_dtype: torch.dtype, limits: DeviceLimits) -> bool:
    """Whether the plain kernels read a cache of this dtype as bytes (float8 on older chips)."""
    return kv_kind(cache_dtype, limits.has_fp8) not in (KV_PLAIN.value, KV_NATIVE.value)


def attention_numbers(call: AttentionCall) -> tuple[float | int, ...]:
    """The runtime numbers after the scales of the cache, from `scale` to `stride_bt`.

    Raises:
        ContractError: an LSE whose last dimension is not dense.
    """
    params, lse, bias = call.params, call.lse, call.params.query_bias
    left, right = params.window
    if lse is not None and lse.stride(1) != 1 and lse.shape[1] > 1:
        raise ContractError(f"lse has last stride {lse.stride(1)}; make its last dimension dense")
    keys, values = call.key.stride(), call.value.stride()
    return (
        float(params.scale),
        float(params.logits_soft_cap),
        *(min(int(n), _UNBOUNDED) for n in (left, right, params.attention_chunk_size)),
        call.num_reqs,
        call.num_tokens,
        *call.query.stride()[:2],
        *(keys[0], keys[-3], keys[-2]),
        *(values[0], values[-3], values[-2]),
        *call.out.stride()[:2],
        call.lse_stride,
        0 if bias is None else bias.stride(0),
    )


def page_strides(call: AttentionCall) -> tuple[int | None, ...]:
    """The strides of the scales in pages, for blocks, tokens and heads of keys and of values; None
    for other caches (M16)."""
    k_scale, v_scale = call.params.k_scale, call.params.v_scale
    if isinstance(k_scale, Tensor) and isinstance(v_scale, Tensor) and call.params.scales_in_page:
        return (*k_scale.stride()[:3], *v_scale.stride()[:3])
    return (None,) * 6


def attention_constants(call: AttentionCall) -> dict[str, Any]:
    """The compile-time arguments that the plain attention kernels share, by name.

    Raises:
        ContractError: a dtype without kernel, heads that do not divide, or a last dimension that is
            not dense.
    """
    params, shape = call.params, call.shape
    if params.scales_in_page:
        raise ContractError(
            "the pages of this cache hold its scales (M16), which this kernel does not read: use "
            "paged_decode or paged_prefill without batch_invariant",
            rule="M16",
        )
    if shape.num_heads % shape.num_kv_heads:
        raise ContractError(
            f"query has {shape.num_heads} heads and the keys have {shape.num_kv_heads}: the number "
            "of query heads must be a multiple of the number of KV heads"
        )
    kind = kv_kind(shape.cache_dtype, call.limits.has_fp8)
    return {
        "BLOCK_SIZE": shape.block_size or 1,
        "GROUP": shape.group,
        "D": shape.head_size,
        "DV": shape.head_size_v,
        "KV_KIND": kind,
        "COMPUTE": compute_dtype(shape.query_dtype, kind),
        **_features(params),
        "HAS_LSE": call.lse is not None,
        "K_SCALE_KIND": scale_kind("k_scale", params.k_scale),
        "V_SCALE_KIND": scale_kind("v_scale", params.v_scale),
        **score_constants(params, "triton"),
        "LATENT": shape.latent,
        # Sinks of query tokens have a row of all heads. Other kernels stay as they are.
        "NUM_KV_HEADS": shape.num_kv_heads if params.has_token_sinks else 0,
        "VEC_Q": vector_elements("query", call.query),
        "VEC_K": vector_elements("key", call.key),
        "VEC_V": vector_elements("value", call.value),
        "VEC_O": vector_elements("out", call.out),
    }


def _features(params: AttentionParams) -> dict[str, Any]:
    """The constants of masks and of what is added to scores."""
    changes_scores = (
        params.logits_soft_cap > 0
        or params.alibi_slopes is not None
        or params.query_bias is not None
        or params.score_function is not None
    )
    return {
        "CAUSAL": 2 if isinstance(params.causal, Tensor) else int(params.causal),
        "HAS_LEFT": params.window[0] >= 0,
        "HAS_RIGHT": params.window[1] >= 0,
        "HAS_CHUNK": params.attention_chunk_size > 0,
        "HAS_CAP": params.logits_soft_cap > 0,
        "HAS_ALIBI": params.alibi_slopes is not None,
        "HAS_SINK": params.sink_kind,
        "HAS_BIAS": params.query_bias is not None,
        "SCALE_LATE": params.scale >= MIN_LATE_SCALE and not changes_scores,
    }


def compute_dtype(query_dtype: torch.dtype, kind: int) -> tl.dtype:
    """The dtype of the matrix products: that of the query. For 16-bit queries over a float8 cache
    it is float16, which holds float8 exactly and takes fewer conversions than bfloat16."""
    if query_dtype not in _COMPUTE:
        raise ContractError(
            f"query has dtype {query_dtype}; the kernels take float16, bfloat16 and float32"
        )
    if kind != KV_PLAIN.value and query_dtype != torch.float32:
        return tl.float16
    return _COMPUTE[query_dtype]
