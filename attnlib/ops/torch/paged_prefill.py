"""Attention of any batch over the paged cache, one request at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.ops.autocast import without_autocast
from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.batch import clear_tail, list_requests, on_host
from attnlib.ops.torch.page_formats import gather_pages
from attnlib.ops.torch.paged import PagedInputs, attend_paged
from attnlib.ops.torch.token_sinks import adds_token_sinks

__all__ = ["paged_prefill"]


@torch.no_grad()
@without_autocast
@adds_token_sinks
def paged_prefill(
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
    counters: Tensor | None = None,
    kernels: str = "auto",
) -> None:
    """Write the attention of every query token to `out`, and its log-sum-exp to `lse` (M1 to M9).

    Query token i of request r has position p = seq_len - query_len + i. It sees the keys k in
    [0, seq_len) with k <= p (causal), p - left <= k <= p + right (window) and
    k // chunk == p // chunk (attention chunks).

    Args:
        query: `[T, Hq, D]`, any strides.
        key_cache: `[B, N, Hkv, D]`, any strides, any floating-point dtype including float8; or
            the elements of a format with scales in the page, which `params` hold (M16).
        value_cache: `[B, N, Hkv, Dv]`, likewise.
        block_table: `[R, M]` int32; entries at or past ceil(seq_len / N) are never read (P3).
        query_start_loc: `[R + 1]` int32, the first query token of each request.
        seq_lens: `[R]` int32, context and this step's tokens.
        params: how scores are computed, masked and scaled.
        max_query_len: upper bound of the query lengths. Ignored: the lengths themselves are read.
        max_seq_len: upper bound of the sequence lengths. Ignored likewise.
        out: `[T, Hq, Dv]`, any strides; rows at or past `query_start_loc[-1]` become 0 (M6).
        lse: `[T, Hq]` float32, written when given: natural logarithm of the softmax denominator,
            sink included (M5); rows at or past `query_start_loc[-1]` become -inf.
        query_start_loc_cpu: `query_start_loc` on the host. Without it, the call copies it from the
            device and synchronizes.
        seq_lens_cpu: `seq_lens` on the host, likewise.
        batch_invariant: the bits of a row depend on that row and its keys only; slower, because
            fused attention is not used.
        counters: ignored; see `attnlib.ops.triton.paged_prefill`.
        kernels: ignored; likewise.
    """
    starts, lengths = on_host(query_start_loc, query_start_loc_cpu), on_host(seq_lens, seq_lens_cpu)
    cache = gather_pages(key_cache, value_cache, block_table, lengths, params)
    key_cache, value_cache, block_table, params = cache
    inputs = PagedInputs(query, key_cache, value_cache, block_table, params)
    attend_paged(list_requests(starts, lengths, params.causal), inputs, out, lse, batch_invariant)
    clear_tail(out, lse, starts)
