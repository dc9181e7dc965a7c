"""Attention of any batch over the paged cache, one request at a time: prefills, chunks, decodes, mixed."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.ops.torch.batch import clear_tail, list_requests, on_host
from attnlib.ops.torch.paged import PagedInputs, attend_paged
from attnlib.ops.torch.quant import head_factor
from attnlib.ops.torch.rules import ScoreRules

__all__ = ["paged_prefill"]


@torch.no_grad()
def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    causal: bool | Tensor = True,
    window: tuple[int, int] = (-1, -1),
    attention_chunk_size: int = 0,
    logits_soft_cap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    query_bias: Tensor | None = None,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    out: Tensor,
    lse: Tensor | None = None,
    query_start_loc_cpu: Tensor | None = None,
    seq_lens_cpu: Tensor | None = None,
    batch_invariant: bool = False,
) -> None:
    """Write the attention of every query token to `out`, and its log-sum-exp to `lse` (M1 to M9).

    Query i of request r stands at p = seq_len - query_len + i and sees key k iff (not causal or k <= p), k is within
    `window` (left, right) of p, and both lie in one chunk. Rows at or past `query_start_loc[-1]` become 0 and -inf.

    Args:
        query: `[T, Hq, D]`, any strides.
        key_cache: `[B, N, Hkv, D]`; value_cache: `[B, N, Hkv, Dv]`: any strides; any float dtype, fp8 included.
        block_table: `[R, M]` int32; query_start_loc: `[R + 1]` int32; seq_lens: `[R]` int32.
        max_query_len, max_seq_len: upper bounds. This twin reads the lengths themselves and does without.
        scale: factor of the dot product.
        causal: one flag for all, or `[R]` bool.
        window: visible keys before and after the query's own; -1 for all, 0 for none.
        attention_chunk_size: positions per chunk; 0 for no chunks.
        logits_soft_cap: c of `c * tanh(score / c)`; 0 for none.
        alibi_slopes: `[Hq]` float32; sinks: `[Hq]` float32.
        query_bias: `[T, >= max_query_len]` float32, added for the keys of the query span; -inf hides.
        k_scale, v_scale: float, 0-d tensor or `[Hkv]` float32: stored value * scale = real value.
        out: `[T, Hq, Dv]`, any strides.
        lse: `[T, Hq]` float32, natural log, sink included; None to skip.
        query_start_loc_cpu, seq_lens_cpu: the same on the host, which spares a device the sync. This twin only.
        batch_invariant: bits per row depend on that row and its keys only, at the price of fused attention. This twin
            only.
    """
    starts, lengths = on_host(query_start_loc, query_start_loc_cpu), on_host(seq_lens, seq_lens_cpu)
    rules = ScoreRules(scale, logits_soft_cap, alibi_slopes, window, attention_chunk_size, sinks)
    inputs = PagedInputs(
        query,
        key_cache,
        value_cache,
        block_table,
        query_bias,
        head_factor(k_scale),
        head_factor(v_scale),
    )
    attend_paged(list_requests(starts, lengths, causal), inputs, rules, out, lse, batch_invariant)
    clear_tail(out, lse, starts)
