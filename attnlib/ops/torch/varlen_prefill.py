"""Attention over packed keys and values without a cache: encoders and cross-attention."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.ops.autocast import without_autocast
from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.batch import clear_tail, list_requests, on_host
from attnlib.ops.torch.invariant import attend_rows_invariant
from attnlib.ops.torch.quant import head_factor
from attnlib.ops.torch.request import KeySpan, QueryRows, attend_rows
from attnlib.ops.torch.token_sinks import adds_token_sinks

__all__ = ["varlen_prefill"]


@torch.no_grad()
@without_autocast
@adds_token_sinks
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
    """Attention of each request's queries over the same request's keys, both packed.

    Positions are aligned at the end: query token i has position key_len - query_len + i (M1).

    Args:
        query: `[T, Hq, D]`, any strides.
        key: `[Tk, Hkv, D]`, any strides.
        value: `[Tk, Hkv, Dv]`, any strides.
        cu_seqlens_q: `[R + 1]` int32, the first query token of each request.
        cu_seqlens_k: `[R + 1]` int32, the first key of each request.
        params: how scores are computed, masked and scaled.
        max_seqlen_q: upper bound of the query lengths. Ignored: the lengths themselves are read.
        max_seqlen_k: upper bound of the key lengths. Ignored likewise.
        out: `[T, Hq, Dv]`, any strides; rows at or past `cu_seqlens_q[-1]` become 0 (M6).
        lse: `[T, Hq]` float32, written when given; rows at or past `cu_seqlens_q[-1]` become -inf.
        cu_seqlens_q_cpu: `cu_seqlens_q` on the host. Without it, the call copies it from the device
            and synchronizes.
        cu_seqlens_k_cpu: `cu_seqlens_k` on the host, likewise.
        batch_invariant: the bits of a row depend on that row and its keys only.
        kernels: ignored; see `attnlib.ops.triton.varlen_prefill`.
    """
    starts = on_host(cu_seqlens_q, cu_seqlens_q_cpu)
    key_starts = on_host(cu_seqlens_k, cu_seqlens_k_cpu)
    attend = attend_rows_invariant if batch_invariant else attend_rows
    factors = head_factor(params.k_scale), head_factor(params.v_scale)
    ends, query_bias = key_starts.tolist(), params.query_bias
    for request in list_requests(starts, key_starts[1:] - key_starts[:-1], params.causal):
        keys = slice(ends[request.index], ends[request.index + 1])
        bias = None if query_bias is None else query_bias[request.rows, : request.query_len]
        first = request.first_position
        rows = QueryRows(
            query[request.rows],
            first,
            request.seq_len,
            first,
            request.causal,
            bias,
            request.index,
        )
        row_lse = None if lse is None else lse[request.rows]
        span = KeySpan(key[keys], value[keys], 0, *factors)
        attend(rows, span, params, out[request.rows], row_lse)
    clear_tail(out, lse, starts)
