"""Decode over the paged cache: few query tokens per request, bound by reading keys and values once.

On Hopper, a Gluon kernel (`hopper/`) serves the calls that it supports and is faster at.
"""

from __future__ import annotations

from torch import Tensor

from attnlib.ops.layer_shape import LayerShape
from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.batch_tensors import BatchTensors
from attnlib.ops.triton.decode_schedule import (
    schedule_decode,
)
from attnlib.ops.triton.heuristics.device import limits_of
from attnlib.ops.triton.heuristics.splits import (
    paged_decode_workspace_bytes,
    visible_bound,
)
from attnlib.ops.triton.launch.run import KernelFamily, run_kernels
from attnlib.ops.triton.prepare_decode import Decode, PlainDecode

__all__ = [
    "paged_decode",
    "paged_decode_num_splits",
    "paged_decode_workspace_bytes",
]


def paged_decode_num_splits(
    query: Tensor,
    key_cache: Tensor,
    head_size_v: int,
    *,
    num_reqs: int,
    max_query_len: int,
    max_seq_len: int,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    attention_chunk_size: int = 0,
    latent: bool = False,
) -> int:
    """The bound on splits that `paged_decode` uses when it is given none: to size a workspace.

    Args:
        query: any tensor `[*, Hq, D]` of the dtype and on the device that will be used.
        key_cache: any cache `[*, N, Hkv, D]` of the dtype that will be used.
        head_size_v: Dv.
        num_reqs: requests of the batch.
        max_query_len: upper bound of the query lengths.
        max_seq_len: upper bound of the sequence lengths.
        causal: False also covers causality per request.
        window: (left, right), -1 unbounded.
        attention_chunk_size: 0 is none.
        latent: the values are a prefix of the keys (P10).
    """
    visible = visible_bound(max_query_len, max_seq_len, window, causal, attention_chunk_size)
    num_heads, head_size = query.shape[1:]
    shape = LayerShape(
        num_heads=num_heads,
        num_kv_heads=key_cache.shape[2],
        head_size=head_size,
        head_size_v=head_size_v,
        query_dtype=query.dtype,
        cache_dtype=key_cache.dtype,
        block_size=key_cache.shape[1],
        latent=latent,
    )
    return schedule_decode(
        shape,
        limits_of(query),
        num_reqs=num_reqs,
        max_query_len=max_query_len,
        visible=visible,
        kernels="portable",
    ).num_splits


def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    params: AttentionParams,
    *,
    max_query_len: int,
    max_seq_len: int,
    out: Tensor,
    lse: Tensor | None = None,
    query_start_loc_cpu: Tensor | None = None,
    seq_lens_cpu: Tensor | None = None,
    batch_invariant: bool = False,
    num_splits: int | None = None,
    workspace: Tensor | None = None,
    counters: Tensor | None = None,
    kernels: str = "auto",
) -> None:
    """Attention for batches whose queries are all short (typically 1 to 8 tokens).

    Args:
        query: `[T, Hq, D]` float16, bfloat16 or float32.
        key_cache, value_cache: `[B, N, Hkv, D]` and `[B, N, Hkv, Dv]`, strided (P1).
        block_table: `[R, M]` int32.
        query_start_loc: `[R + 1]` int32.
        seq_lens: `[R]` int32.
        params: scale, mask, biases, sinks and KV scales.
        max_query_len, max_seq_len: upper bounds of the query and sequence lengths.
        out: `[T, Hq, Dv]`, written; rows at or past `query_start_loc[-1]` become 0 (M6).
        lse: `[T, Hq]` float32, written when given (M5).
        query_start_loc_cpu, seq_lens_cpu: ignored; see `attnlib.ops.torch.paged_prefill`.
        batch_invariant: the bits of a row depend on that row and its keys only (M15).
        num_splits: programs that share a request's keys. None: long requests get more. A number
            splits every request into that many. Not read with `batch_invariant`.
        workspace: float32 or uint8, `paged_decode_workspace_bytes(...)` bytes; None allocates it.
            With less than `hopper.dispatch.decode_workspace_bytes` the Hopper decode is not used.
        counters: int32 zeros, `hopper.dispatch.num_counters`. With them the Hopper decode combines
            splits itself and leaves zeros. Concurrent calls need counters of their own.
        kernels: "auto" uses the Hopper decode where it supports the call and is faster, "hopper"
            wherever it supports it, "portable" never.

    Raises:
        ContractError: a workspace that is too small, counters that are not int32, or tensors that
            the kernels cannot address.
        UnsupportedConfigError: head sizes for which no tile fits the device.
    """
    if query.numel() == 0:
        return
    batch = BatchTensors.of(
        *(params, query_start_loc, seq_lens, block_table),
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        workspace=workspace,
        counters=counters,
    )
    call = AttentionCall.of(query, key_cache, value_cache, out, lse, batch, params)
    run_kernels(call, *_families(call, batch_invariant, num_splits, kernels))


def _families(
    call: AttentionCall, batch_invariant: bool, num_splits: int | None, kernels: str
) -> tuple[KernelFamily, ...]:
    """The kernels that may serve a call, the preferred ones first."""
    if batch_invariant:
        from attnlib.ops.triton.invariant_attention import InvariantKernels

        return (InvariantKernels.of_decode(call, kernels),)
    params, batch = call.params, call.batch
    mask = (params.window, params.causal is True, params.attention_chunk_size)
    schedule = schedule_decode(
        call.shape,
        call.limits,
        num_reqs=batch.num_decodes,
        max_query_len=batch.max_query_len,
        visible=visible_bound(batch.max_query_len, batch.max_seq_len, *mask),
        num_splits=num_splits,
        kernels=kernels,
    )
    return Decode(schedule), PlainDecode(schedule)
