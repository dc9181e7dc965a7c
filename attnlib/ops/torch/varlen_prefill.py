"""Attention over packed, unpaged keys and values: encoders, cross-attention, and whoever has no cache."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.ops.torch.batch import clear_tail, list_requests, on_host
from attnlib.ops.torch.invariant import attend_rows_invariant
from attnlib.ops.torch.request import KeySpan, QueryRows, attend_rows
from attnlib.ops.torch.rules import ScoreRules

__all__ = ["varlen_prefill"]


@torch.no_grad()
def varlen_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    causal: bool | Tensor = False,
    window: tuple[int, int] = (-1, -1),
    attention_chunk_size: int = 0,
    logits_soft_cap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    query_bias: Tensor | None = None,
    out: Tensor,
    lse: Tensor | None = None,
    cu_seqlens_q_cpu: Tensor | None = None,
    cu_seqlens_k_cpu: Tensor | None = None,
    batch_invariant: bool = False,
) -> None:
    """Write the attention of every query token to `out`, and its log-sum-exp to `lse`; bottom-right aligned (M1).

    Args:
        query: `[T, Hq, D]`; key: `[Tk, Hkv, D]`; value: `[Tk, Hkv, Dv]`: any strides.
        cu_seqlens_q, cu_seqlens_k: `[R + 1]` int32, where each request's rows begin in query and key.
        max_seqlen_q, max_seqlen_k: upper bounds. This twin reads the lengths themselves and does without.
        cu_seqlens_q_cpu, cu_seqlens_k_cpu: the same on the host, which spares a device the sync. This twin only.
        batch_invariant: bits per row depend on that row and its keys only. This twin only.

    The others are as in `paged_prefill`.
    """
    starts, key_starts = (
        on_host(cu_seqlens_q, cu_seqlens_q_cpu),
        on_host(cu_seqlens_k, cu_seqlens_k_cpu),
    )
    rules = ScoreRules(scale, logits_soft_cap, alibi_slopes, window, attention_chunk_size, sinks)
    attend = attend_rows_invariant if batch_invariant else attend_rows
    ends = key_starts.tolist()
    for request in list_requests(starts, key_starts[1:] - key_starts[:-1], causal):
        keys = slice(ends[request.index], ends[request.index + 1])
        bias = None if query_bias is None else query_bias[request.rows, : request.query_len]
        first = request.first_position
        rows = QueryRows(query[request.rows], first, request.seq_len, first, request.causal, bias)
        part_lse = None if lse is None else lse[request.rows]
        attend(rows, KeySpan(key[keys], value[keys]), rules, out[request.rows], part_lse)
    clear_tail(out, lse, starts)
