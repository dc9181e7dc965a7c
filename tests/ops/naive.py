"""Attention computed one head of one query at a time, in float64: the reference of these tests.

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
    """The first `seq_len` positions of a request, `[seq_len, Hkv, D]` float64, read one by one."""
    rows = []
    for position in range(seq_len):
        rows.append(cache[blocks[position // block_size], position % block_size].cpu().double())
    return torch.stack(rows) if rows else torch.zeros(0, *cache.shape[2:], dtype=torch.float64)


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
        query_len = starts[request + 1] - starts[request]
        is_causal = bool(causal[request]) if isinstance(causal, Tensor) else causal
        for i in range(query_len):
            token, position = starts[request] + i, seq_len - query_len + i
            for head in range(num_heads):
                kv_head = head // (num_heads // num_kv_heads)
                q = query[token, head].cpu().double()
                logits: list[float] = []
                seen: list[int] = []
                for k in range(seq_len):
                    if not _visible(k, position, is_causal, window, chunk):
                        continue
                    score = (
                        scale * float(q @ request_keys[k, kv_head]) * _per_head(k_scale, kv_head)
                    )
                    if cap > 0:
                        score = cap * math.tanh(score / cap)
                    if alibi_slopes is not None:
                        score -= float(alibi_slopes[head]) * abs(position - k)
                    if query_bias is not None and k >= seq_len - query_len:
                        score += float(query_bias[token, k - (seq_len - query_len)])
                    if score > -math.inf:
                        logits.append(score)
                        seen.append(k)
                sink = [float(sinks[head])] if sinks is not None else []
                largest = max(logits + sink, default=-math.inf)
                if largest == -math.inf:
                    continue
                denominator = sum(math.exp(logit - largest) for logit in logits + sink)
                lse[token, head] = largest + math.log(denominator)
                for logit, k in zip(logits, seen, strict=True):
                    weight = math.exp(logit - largest) / denominator * _per_head(v_scale, kv_head)
                    out[token, head] += weight * request_values[k, kv_head]
    return out, lse


def _visible(k: int, position: int, causal: bool, window: tuple[int, int], chunk: int) -> bool:
    left, right = window
    if causal and k > position:
        return False
    if left >= 0 and k < position - left:
        return False
    if right >= 0 and k > position + right:
        return False
    return not (chunk > 0 and k // chunk != position // chunk)


def _per_head(scale: float | Tensor, kv_head: int) -> float:
    if isinstance(scale, Tensor):
        return float(scale.flatten()[kv_head]) if scale.numel() > 1 else float(scale)
    return scale
