"""Attention computed one head of one request at a time, in float64: the reference of these tests.

It shares no code with any kernel, so that a mistake would have to be made twice to be missed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["gather_positions", "naive_attention", "naive_varlen_attention"]


def naive_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    causal: bool | Tensor = True,
    window: tuple[int, int] = (-1, -1),
    attention_chunk_size: int = 0,
    logits_soft_cap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    query_bias: Tensor | None = None,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    **ignored: object,
) -> tuple[Tensor, Tensor]:
    """Attention over the paged cache: (out float64 [T, Hq, Dv], lse float64 [T, Hq]).

    Takes the arguments of `paged_prefill`; `max_query_len`, `max_seq_len` and whatever else is
    passed change nothing.
    """
    block_size = key_cache.shape[1]
    starts = query_start_loc.tolist()
    lengths = seq_lens.tolist()
    keys, values = [], []
    for request, seq_len in enumerate(lengths):
        row = block_table[request].tolist()
        keys.append(gather_positions(key_cache, row, seq_len, block_size))
        values.append(gather_positions(value_cache, row, seq_len, block_size))
    return _attend(
        query, keys, values, starts, scale, causal, window, attention_chunk_size, logits_soft_cap,
        alibi_slopes, sinks, query_bias, k_scale, v_scale, value_cache.shape[3],
    )  # fmt: skip


def naive_varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    scale: float,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool | Tensor = False,
    window: tuple[int, int] = (-1, -1),
    attention_chunk_size: int = 0,
    logits_soft_cap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    query_bias: Tensor | None = None,
    **ignored: object,
) -> tuple[Tensor, Tensor]:
    """The same over packed keys `[Tk, Hkv, D]` and values `[Tk, Hkv, Dv]` without a cache."""
    ends = cu_seqlens_k.tolist()
    spans = [slice(ends[request], ends[request + 1]) for request in range(len(ends) - 1)]
    keys = [key[span].cpu().double() for span in spans]
    values = [value[span].cpu().double() for span in spans]
    return _attend(
        query, keys, values, cu_seqlens_q.tolist(), scale, causal, window, attention_chunk_size,
        logits_soft_cap, alibi_slopes, sinks, query_bias, 1.0, 1.0, value.shape[2],
    )  # fmt: skip


def gather_positions(cache: Tensor, blocks: list[int], seq_len: int, block_size: int) -> Tensor:
    """The first `seq_len` positions of a request, `[seq_len, Hkv, D]` float64."""
    used = torch.tensor(blocks[: -(-seq_len // block_size)], dtype=torch.int64)
    bytes_ = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
    rows = bytes_[used.to(cache.device)].view(cache.dtype)  # not every torch indexes float8
    return rows.flatten(0, 1)[:seq_len].cpu().double()


def _attend(
    query: Tensor, keys: list[Tensor], values: list[Tensor], starts: list[int], scale: float,
    causal: bool | Tensor, window: tuple[int, int], chunk: int, cap: float,
    alibi_slopes: Tensor | None, sinks: Tensor | None, query_bias: Tensor | None,
    k_scale: float | Tensor, v_scale: float | Tensor, head_size_v: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    num_tokens, num_heads, _ = query.shape
    out = torch.zeros(num_tokens, num_heads, head_size_v, dtype=torch.float64)
    lse = torch.full((num_tokens, num_heads), -math.inf, dtype=torch.float64)
    for request, (request_keys, request_values) in enumerate(zip(keys, values, strict=True)):
        seq_len, num_kv_heads = request_keys.shape[:2]
        rows = slice(starts[request], starts[request + 1])
        origin = seq_len - (rows.stop - rows.start)
        is_causal = bool(causal[request]) if isinstance(causal, Tensor) else causal
        position, key = torch.arange(origin, seq_len)[:, None], torch.arange(seq_len)
        hidden = ~_visible(key, position, is_causal, window, chunk)
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            products = query[rows, head].cpu().double() @ request_keys[:, kv_head].T
            scores = scale * products * _per_head(k_scale, kv_head)
            if cap > 0:
                scores = cap * torch.tanh(scores / cap)
            if alibi_slopes is not None:
                scores -= float(alibi_slopes[head]) * (position - key).abs().double()
            if query_bias is not None:
                own = key[key >= origin]
                scores[:, own] += query_bias[rows].cpu().double()[:, own - origin]
            scores[hidden] = -math.inf
            if sinks is not None:
                sink = sinks[head].cpu().double().expand(len(scores), 1)
                scores = torch.cat((scores, sink), 1)
            lse[rows, head] = scores.logsumexp(1)
            weights = (scores - lse[rows, head, None]).exp()[:, :seq_len]
            weights[lse[rows, head] == -math.inf] = 0.0
            sums = weights @ request_values[:, kv_head]
            out[rows, head] = sums * _per_head(v_scale, kv_head)
    return out, lse


def _visible(
    key: Tensor, position: Tensor, causal: bool, window: tuple[int, int], chunk: int
) -> Tensor:
    """Which keys `[S]` the queries at some positions `[T, 1]` see, `[T, S]`."""
    left, right = window
    seen = torch.ones(len(position), len(key), dtype=torch.bool)
    if causal:
        seen &= key <= position
    if left >= 0:
        seen &= key >= position - left
    if right >= 0:
        seen &= key <= position + right
    if chunk > 0:
        seen &= key // chunk == position // chunk
    return seen


def _per_head(scale: float | Tensor, kv_head: int) -> float:
    if isinstance(scale, Tensor):
        return float(scale.flatten()[kv_head]) if scale.numel() > 1 else float(scale)
    return scale
