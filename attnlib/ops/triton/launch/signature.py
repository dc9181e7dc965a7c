"""Turning tensors and options into kernel arguments, in the one order that the attention kernels share.

What never changes for a layer (dtypes, head sizes, strides, features, tile) becomes compile-time constants, worked
out once per `Signature`; what changes from step to step stays a plain integer that Triton does not specialise on, so
nothing compiles after warm-up.

A step's layers call with the same numbers and other addresses. `launch_key` names all but the addresses, so that
everything else is worked out by the first of them; `attention_tensors` is what remains for each call.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.heuristics.device import DeviceLimits
from attnlib.ops.triton.heuristics.tiles import split_head_size
from attnlib.ops.triton.kernels.quant import KV_NATIVE, KV_PLAIN
from attnlib.ops.triton.launch.scales import kv_kind, scale_class, scale_kind

__all__ = [
    "Options", "Signature", "attention_constants", "attention_numbers", "attention_tensors",
    "count_of", "launch_key", "refuse_batch_invariant", "signature_of",
]  # fmt: skip

_UNBOUNDED = 1 << 30
_COMPUTE = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


class Options(NamedTuple):
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

    @classmethod
    def from_params(cls, params: AttentionParams, out: Tensor, lse: Tensor | None) -> Options:
        """The options of a call with these parameters and outputs."""
        return cls(
            params.scale, params.causal, params.window, params.attention_chunk_size, params.logits_soft_cap,
            params.alibi_slopes, params.sinks, params.query_bias, params.k_scale, params.v_scale, out, lse,
        )  # fmt: skip


class Signature(NamedTuple):
    """All that compile-time constants follow from: equal signatures share a compiled kernel."""

    query_dtype: torch.dtype
    cache_dtype: torch.dtype
    query_shape: tuple[int, ...]
    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    query_stride: tuple[int, ...]
    key_stride: tuple[int, ...]
    value_stride: tuple[int, ...]
    out_stride: tuple[int, ...]
    out_dtype: torch.dtype
    causal: int
    features: tuple[bool, ...]
    scale_kinds: tuple[int, int]
    limits: DeviceLimits

    @property
    def fp8_as_bytes(self) -> bool:
        """Whether the kernel sees the float8 cache as bytes."""
        return kv_kind(self.cache_dtype, self.limits.has_fp8) not in (
            KV_PLAIN.value,
            KV_NATIVE.value,
        )


def refuse_batch_invariant(batch_invariant: bool) -> None:
    """Raise UnsupportedConfigError for a call that asks for batch-invariant results."""
    if batch_invariant:
        raise UnsupportedConfigError(
            "batch_invariant=True is not supported by attnlib.ops.triton; "
            "use the same function of attnlib.ops.torch"
        )


def signature_of(
    query: Tensor, key: Tensor, value: Tensor, options: Options, limits: DeviceLimits
) -> Signature:
    """The signature of a call. Numbers of tokens are part of it only as one or many: a lone token has no stride."""
    tokens, num_heads, head_size = query.shape
    rows = key.shape[1] if key.dim() == 4 else min(key.shape[0], 2)
    left, right = options.window
    causal = options.causal
    return Signature(
        query.dtype, key.dtype, (min(tokens, 2), num_heads, head_size),
        (rows, *key.shape[-2:]), (rows, *value.shape[-2:]),
        query.stride(), key.stride(), value.stride(), options.out.stride(), options.out.dtype,
        2 if isinstance(causal, Tensor) else int(causal),
        (left >= 0, right >= 0, options.attention_chunk_size > 0, options.logits_soft_cap > 0,
         options.alibi_slopes is not None, options.sinks is not None, options.query_bias is not None,
         options.lse is not None, options.scale > 0),
        (scale_kind(options.k_scale), scale_kind(options.v_scale)), limits,
    )  # fmt: skip


def count_of(counters: Tensor | None) -> int:
    """How many counters a call brings (`counters` of the operations).

    Raises:
        ContractError: they are not int32.
    """
    if counters is None:
        return 0
    if counters.dtype != torch.int32:
        raise ContractError(
            f"counters are {counters.dtype} and must be torch.int32 zeros; make them with torch.zeros(n, dtype=torch.int32)"
        )
    return counters.numel()


def launch_key(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    seq_lens: Tensor,
    block_table: Tensor | None,
    options: Options,
) -> tuple[Any, ...]:
    """Everything that grids, constants and kernels follow from: calls with equal keys differ in addresses and scales."""
    scale, causal, window, chunk, cap, alibi, sinks, bias, k_scale, v_scale, out, lse = options
    return (
        query.get_device(), query.dtype, query.shape, query.stride(), key.dtype, key.shape, key.stride(),
        value.dtype, value.shape, value.stride(), out.dtype, out.stride(), starts.dtype, starts.shape,
        seq_lens.dtype, seq_lens.shape,
        None if block_table is None else (block_table.dtype, block_table.stride()),
        scale, window, chunk, cap, causal.dtype if isinstance(causal, Tensor) else causal,
        None if alibi is None else alibi.dtype, None if sinks is None else sinks.dtype,
        None if bias is None else (bias.dtype, bias.stride()), None if lse is None else (lse.dtype, lse.stride()),
        scale_class(k_scale), scale_class(v_scale),
    )  # fmt: skip


def attention_tensors(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    seq_lens: Tensor,
    options: Options,
    as_bytes: bool,
) -> tuple[Any, ...]:
    """The tensors and scales that every attention kernel's arguments begin with."""
    _, causal, _, _, _, alibi, sinks, bias, k_scale, v_scale, out, lse = options
    if as_bytes:
        key, value = key.view(torch.uint8), value.view(torch.uint8)
    return (
        query, key, value, out, lse, starts, seq_lens,
        causal.view(torch.uint8) if isinstance(causal, Tensor) else None, alibi, sinks, bias,
        k_scale if isinstance(k_scale, Tensor) else float(k_scale),
        v_scale if isinstance(v_scale, Tensor) else float(v_scale),
    )  # fmt: skip


def attention_numbers(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, options: Options
) -> tuple[float | int, ...]:
    """The numbers that follow them; equal for calls with equal `launch_key`.

    Raises:
        ContractError: an LSE or a bias whose last dimension is not dense.
    """
    left, right = options.window
    bias, lse, out = options.query_bias, options.lse, options.out
    for name, rows in (("lse", lse), ("query_bias", bias)):
        if rows is not None and rows.stride(1) != 1:
            raise ContractError(
                f"{name} has last stride {rows.stride(1)}; make its last dimension dense"
            )
    qs, ks, vs, os = query.stride(), key.stride(), value.stride(), out.stride()
    return (
        float(options.scale), float(options.logits_soft_cap),
        min(int(left), _UNBOUNDED), min(int(right), _UNBOUNDED), min(int(options.attention_chunk_size), _UNBOUNDED),
        starts.shape[0] - 1, query.shape[0], qs[0], qs[1], ks[0], ks[-3], ks[-2], vs[0], vs[-3], vs[-2], os[0], os[1],
        0 if lse is None else lse.stride(0), 0 if bias is None else bias.stride(0),
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def attention_constants(signature: Signature) -> dict[str, Any]:
    """The compile-time arguments that every attention kernel shares, by name; shared, so not to be changed.

    Raises:
        ContractError: a dtype without kernel, heads that do not divide, or a last dimension that is not dense.
    """
    _, num_heads, head_size = signature.query_shape
    block_size, num_kv_heads, head_size_v = signature.value_shape
    if num_heads % num_kv_heads:
        raise ContractError(
            f"query has {num_heads} heads and the keys {num_kv_heads}; the first must be a multiple"
        )
    left, right, chunk, cap, alibi, sink, bias, lse, positive = signature.features
    kind = kv_kind(signature.cache_dtype, signature.limits.has_fp8)
    query_bytes, cache_bytes = signature.query_dtype.itemsize, signature.cache_dtype.itemsize
    d0, d1 = split_head_size(head_size)
    dv0, dv1 = split_head_size(head_size_v)
    return {
        "BLOCK_SIZE": block_size if len(signature.key_stride) == 4 else 1,
        "GROUP": num_heads // num_kv_heads,
        "D": head_size,
        "D0": d0,
        "D1": d1,
        "DV": head_size_v,
        "DV0": dv0,
        "DV1": dv1,
        "KV_KIND": kind,
        "COMPUTE": _compute_dtype(signature.query_dtype, kind),
        "CAUSAL": signature.causal,
        "HAS_LEFT": left,
        "HAS_RIGHT": right,
        "HAS_CHUNK": chunk,
        "HAS_CAP": cap,
        "HAS_ALIBI": alibi,
        "HAS_SINK": sink,
        "HAS_BIAS": bias,
        "HAS_LSE": lse,
        "K_SCALE_KIND": signature.scale_kinds[0],
        "V_SCALE_KIND": signature.scale_kinds[1],
        "SCALE_LATE": positive and not (cap or alibi or bias),
        "VEC_Q": _vector("query", signature.query_shape, signature.query_stride, query_bytes),
        "VEC_K": _vector("key", signature.key_shape, signature.key_stride, cache_bytes),
        "VEC_V": _vector("value", signature.value_shape, signature.value_stride, cache_bytes),
        "VEC_O": _vector(
            "out", signature.query_shape, signature.out_stride, signature.out_dtype.itemsize
        ),
    }


def _compute_dtype(query_dtype: torch.dtype, kind: int) -> tl.dtype:
    """What products are computed in: the query's dtype, and float16 for 16-bit queries over a float8 cache, which
    float16 holds exactly and reaches in fewer instructions than bfloat16."""
    if query_dtype not in _COMPUTE:
        raise ContractError(
            f"query has dtype {query_dtype}; the kernels take float16, bfloat16 and float32"
        )
    if kind != KV_PLAIN.value and query_dtype != torch.float32:
        return tl.float16
    return _COMPUTE[query_dtype]


def _vector(name: str, shape: tuple[int, ...], strides: tuple[int, ...], element_bytes: int) -> int:
    """Elements per 16 bytes when every row starts on such a boundary (given that the tensor does), or 1.

    `shape` is that of the last three dimensions; a paged tensor has a block stride before them."""
    if strides[-1] != 1 and shape[-1] > 1:
        raise ContractError(
            f"{name} has last stride {strides[-1]}; make its last dimension dense", rule="P1"
        )
    elements = 16 // element_bytes
    blocks = strides[:-3]
    rows = [stride for stride, size in zip(strides[-3:-1], shape[:-1], strict=True) if size > 1]
    return elements if all(stride % elements == 0 for stride in (*blocks, *rows)) else 1
