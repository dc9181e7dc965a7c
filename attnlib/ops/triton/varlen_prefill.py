"""Attention over packed keys and values without a cache: encoders, and uncached decoders."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from attnlib.ops.params import AttentionParams
from attnlib.ops.triton import hopper
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.batch_tensors import BatchTensors
from attnlib.ops.triton.launch.bound import ALIGNMENT
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.ops.triton.launch.run import PreparedAttention, run_attention, run_kernels
from attnlib.ops.triton.paged_prefill import PlainPrefill

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
        cu_seqlens_q_cpu, cu_seqlens_k_cpu: ignored; see `attnlib.ops.torch.varlen_prefill`.
        batch_invariant: the bits of a row depend on that row and its keys only (M15).
        kernels: "auto" uses the Hopper prefill where it supports the call, "portable" never.

    Raises:
        ContractError: tensors that the kernel cannot address.
        UnsupportedConfigError: head sizes for which no tile fits the device.
    """
    if query.numel() == 0:
        return
    batch = BatchTensors.of(
        params,
        cu_seqlens_q,
        cu_seqlens_k,
        None,
        max_query_len=max_seqlen_q,
        max_seq_len=max_seqlen_k,
    )
    call = AttentionCall.of(query, key, value, out, lse, batch, params)
    if batch_invariant:
        from attnlib.ops.triton.invariant_attention import InvariantKernels

        run_kernels(call, InvariantKernels())
    elif call.limits.capability[0] != 9 or kernels == "portable" or not _run_on_hopper(call):
        run_kernels(call, PlainPrefill())


def _run_on_hopper(call: AttentionCall) -> bool:
    """Launch the Hopper prefill; False, and nothing is launched, where it does not serve a call."""
    if call.addresses & ALIGNMENT:
        return False
    # The first rows of the keys take the place of a block table.
    starts = call.batch.seq_lens.unsqueeze(1)
    packed = replace(call, batch=call.batch._replace(block_table=starts))
    found = _hopper_prefill(packed)
    if found is not None:
        run_attention(found, packed)
    return found is not None


def _hopper_prefill(call: AttentionCall) -> PreparedAttention | None:
    """The launch of the Hopper prefill for calls of this signature, None where it does not support
    them. Cached."""
    bound = call.batch.max_query_len
    key = ("unpaged prefill", call.signature, call.batch.form(), bound)
    found: PreparedAttention | None = LAUNCHES.get(key)
    if found is not None and found.limits is call.limits:
        return found
    dispatch = hopper.load()
    if dispatch is None:
        return None
    found = dispatch.select_unpaged(call)
    if found is not None:
        call.batch.check()
        LAUNCHES.keep(key, found)
    return found
