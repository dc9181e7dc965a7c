"""Attention over packed keys and values without a cache: encoders, and uncached decoders."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnlib.ops.params import AttentionParams
from attnlib.ops.triton import hopper
from attnlib.ops.triton.heuristics.device import DeviceLimits, limits_of
from attnlib.ops.triton.launch.attention import BatchTensors, check_batch
from attnlib.ops.triton.launch.bound import ALIGNMENT
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.ops.triton.launch.run import PreparedAttention, run_attention
from attnlib.ops.triton.launch.signature import batch_signature, call_signature
from attnlib.ops.triton.paged_prefill import prepare_plain_prefill

__all__ = ["varlen_prefill"]


def varlen_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    params: AttentionParams,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    out: Tensor,
    lse: Tensor | None = None,
    cu_seqlens_q_cpu: Tensor | None = None,
    cu_seqlens_k_cpu: Tensor | None = None,
    batch_invariant: bool = False,
    kernels: str = "auto",
) -> None:
    """Attention of request r's queries over request r's keys, both packed without padding.

    Positions are aligned bottom-right: query i is at key length - query length + i (M1).

    Args:
        query: `[T, Hq, D]` float16, bfloat16 or float32, last stride 1.
        key: `[Tk, Hkv, D]`, last stride 1.
        value: `[Tk, Hkv, Dv]`, last stride 1.
        cu_seqlens_q: `[R + 1]` int32, where each request's queries start.
        cu_seqlens_k: `[R + 1]` int32, where each request's keys start.
        params: how scores are computed, masked and scaled.
        max_seqlen_q: upper bound of the query lengths.
        max_seqlen_k: upper bound of the key lengths.
        out: `[T, Hq, Dv]`, written; rows at or past `cu_seqlens_q[-1]` become 0 (M6).
        lse: `[T, Hq]` float32, written when given.
        cu_seqlens_q_cpu: ignored; see `attnlib.ops.torch.varlen_prefill`.
        cu_seqlens_k_cpu: ignored, likewise.
        batch_invariant: the bits of a row depend on that row and its keys only (M15).
        kernels: "auto" uses the Hopper prefill where it supports the call, "portable" never.

    Raises:
        ContractError, UnsupportedConfigError: as `paged_prefill`.
    """
    if query.numel() == 0:
        return
    flags = params.causal if isinstance(params.causal, Tensor) else None
    batch = BatchTensors(
        cu_seqlens_q, cu_seqlens_k, None, flags, params.query_bias,
        score_tensors=params.batch_score_tensors(),
    )  # fmt: skip
    if batch_invariant:
        from attnlib.ops.triton.invariant_attention import run_invariant_prefill

        run_invariant_prefill(query, key, value, out, lse, batch, params, max_seqlen_q)
        return
    tensors = (query, key, value, out, lse)
    signature, limits = call_signature(*tensors, params), limits_of(query)
    if limits.capability[0] == 9 and kernels != "portable" and not _is_misaligned(*tensors[:4]):
        # The first rows of the keys take the place of a block table.
        packed = batch._replace(block_table=cu_seqlens_k.unsqueeze(1), max_seq_len=max_seqlen_k)
        if found := _hopper_prefill(signature, tensors, packed, params, limits, max_seqlen_q):
            run_attention(found, packed, query, key, value, out, lse, params)
            return
    prepared = prepare_plain_prefill(signature, *tensors, batch, params, limits, max_seqlen_q)
    run_attention(prepared, batch, query, key, value, out, lse, params)


def _is_misaligned(*tensors: Tensor) -> bool:
    """Whether a tensor begins off a 16-byte boundary, which the Hopper kernels cannot read."""
    return any(tensor.data_ptr() & ALIGNMENT for tensor in tensors)


def _hopper_prefill(
    signature: tuple[Any, ...],
    tensors: tuple[Any, ...],
    batch: BatchTensors,
    params: AttentionParams,
    limits: DeviceLimits,
    max_query_len: int,
) -> PreparedAttention | None:
    """The launch of the Hopper prefill for calls of this signature, None where it does not support
    them. Cached."""
    key = ("unpaged prefill", signature, batch_signature(batch), max_query_len)
    found: PreparedAttention | None = LAUNCHES.get(key)
    if found is not None and found.limits is limits:
        return found
    dispatch = hopper.load()
    if dispatch is None:
        return None
    found = dispatch.select_unpaged(*tensors, batch, params, limits, max_query_len)
    if found is not None:
        check_batch(batch, max_query_len)
        LAUNCHES.keep(key, found)
    return found
