"""Trials of FlashAttention's functions: caches with and without blocks, packed sequences."""

from __future__ import annotations

from itertools import accumulate, pairwise
from random import Random
from typing import Any

import torch

from attnlib.compat import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from tests.compat.reference import attention
from tests.properties.corruptions.reading import (
    close,
    defined,
    floats,
    ints,
    need,
    offsets,
    whole,
)
from tests.properties.corruptions.trial import Trial

HEADS, KV_HEADS, SIZE, SIZE_V = 4, 2, 8, 8
INT32 = (torch.int32,)


def _int32(values: list[Any]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[S, H, D]` and LSE `[H, S]`; zeros without keys."""
    if not len(keys):
        out = torch.zeros(*q.shape[:2], values.shape[-1], dtype=torch.float64)
        return out, torch.full((q.shape[1], len(q)), -torch.inf, dtype=torch.float64)
    out, lse = attention(q, keys, values, causal=causal)
    return out.nan_to_num(0.0), lse.T


def _check_kind(*tensors: torch.Tensor) -> None:
    need(len({x.dtype for x in tensors}) == 1, "several dtypes")
    need(tensors[0].dtype in (torch.float32, torch.float64), "16 bits are not compared")


def kvcache(rng: Random) -> Trial:
    """`flash_attn_with_kvcache` with or without blocks and new keys."""
    paged, new, causal = rng.random() < 0.5, rng.choice([0, 0, 1, 2]), rng.random() < 0.7
    batch, block, queries = rng.randint(1, 3), rng.choice([1, 2, 4]), rng.randint(1, 3)
    per_row = 3
    capacity = per_row * block if paged else 8
    lens = [rng.randint(0, capacity - new) for _ in range(batch)]
    shape = (12, block, KV_HEADS, SIZE) if paged else (batch + 1, capacity, KV_HEADS, SIZE)
    arguments: dict[str, Any] = {
        "q": torch.randn(batch, queries, HEADS, SIZE), "cache_seqlens": _int32(lens),
    }  # fmt: skip
    if new:
        for name in ("k", "v"):
            arguments[name] = torch.randn(batch, new, KV_HEADS, SIZE)
    if paged:
        ids = rng.sample(range(12), 12)
        rows = [ids[per_row * i : per_row * i + per_row] for i in range(batch)]
        arguments["block_table"] = _int32(rows)
    elif rng.random() < 0.4:
        arguments["cache_batch_idx"] = _int32(rng.sample(range(batch + 1), batch))

    def call(**given: Any) -> Any:
        return flash_attn_with_kvcache(**given, causal=causal, return_softmax_lse=True)

    def reference(
        q: Any, k_cache: Any, v_cache: Any, cache_seqlens: Any, k: Any = None, v: Any = None,
        block_table: Any = None, cache_batch_idx: Any = None,
    ) -> Any:  # fmt: skip
        floats(q, None, None, None, None)
        floats(k_cache, None, None, None, q.shape[3])
        floats(v_cache, *k_cache.shape[:3], None)
        _check_kind(q, k_cache, v_cache)
        requests = len(q)
        lengths = ints(cache_seqlens, dtypes=INT32)
        need(len(lengths) == requests, "other requests")
        if block_table is not None:
            table = ints(block_table, 2, INT32)
        else:
            need(requests <= len(k_cache) or cache_batch_idx is not None, "too few rows")
            index = list(range(requests)) if cache_batch_idx is None else ints(cache_batch_idx)
            table = [[row] for row in index]
        need(len(table) == requests, "other requests")
        added = 0
        if k is not None:
            floats(k, requests, None, *k_cache.shape[2:])
            floats(v, requests, k.shape[1], *v_cache.shape[2:])
            _check_kind(q, k, v)
            added = k.shape[1]
        size, outs, logs = k_cache.shape[1], [], []
        slots, written = [], []
        for request, (row, length) in enumerate(zip(table, lengths, strict=True)):
            need(0 <= length and length + added <= len(row) * size, "lengths past the cache")
            places = [(row[p // size], p % size) for p in range(length + added)]
            need(all(0 <= block < len(k_cache) for block, _ in places), "no such block")
            slots.append(places)
            written += places[length:]
            for new, place in enumerate(places[length:]):
                k_cache[place], v_cache[place] = k[request, new], v[request, new]
        defined(len(set(written)) == len(written), "two new tokens have one slot (P4)")
        for request, places in enumerate(slots):
            blocks, rows = [b for b, _ in places], [o for _, o in places]
            keys, values = (x[blocks, rows].double() for x in (k_cache, v_cache))
            out, lse = _attend(q[request], keys, values, causal)
            outs.append(out)
            logs.append(lse)
        if not outs:
            return None
        return torch.stack(outs), torch.stack(logs)

    memory = {"k_cache": torch.randn(shape), "v_cache": torch.randn(shape)}
    return Trial("flash_attn_with_kvcache", arguments, memory, call, reference, same_result=close)


def varlen(rng: Random) -> Trial:
    """`flash_attn_varlen_func` over packed keys."""
    causal, count = rng.random() < 0.5, rng.randint(1, 3)
    queries = [rng.randint(0, 3) for _ in range(count)]
    keys = [rng.randint(max(length, 1), 6) for length in queries]
    arguments: dict[str, Any] = {
        "q": torch.randn(sum(queries), HEADS, SIZE),
        "k": torch.randn(sum(keys), KV_HEADS, SIZE),
        "v": torch.randn(sum(keys), KV_HEADS, SIZE_V),
        "cu_seqlens_q": _int32([0, *accumulate(queries)]),
        "cu_seqlens_k": _int32([0, *accumulate(keys)]),
        "max_seqlen_q": max(queries),
        "max_seqlen_k": max(keys),
    }

    def call(**given: Any) -> Any:
        return flash_attn_varlen_func(**given, causal=causal, return_attn_probs=True)[:2]

    def reference(
        q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any,
        max_seqlen_k: Any,
    ) -> Any:  # fmt: skip
        floats(q, None, None, None)
        floats(k, None, None, q.shape[2])
        floats(v, *k.shape[:2], None)
        _check_kind(q, k, v)
        rows = offsets(ints(cu_seqlens_q, dtypes=INT32), len(q))
        places = offsets(ints(cu_seqlens_k, dtypes=INT32), len(k))
        need(len(rows) == len(places), "other sequences")
        whole(max_seqlen_q)
        whole(max_seqlen_k)
        out = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64)
        lse = torch.full((q.shape[1], len(q)), -torch.inf, dtype=torch.float64)
        for (a, b), (c, d) in zip(pairwise(rows), pairwise(places), strict=True):
            need(b - a <= max_seqlen_q and d - c <= max_seqlen_k, "past the bounds")
            if b > a:
                out[a:b], lse[:, a:b] = _attend(q[a:b], k[c:d], v[c:d], causal)
        return out, lse

    return Trial("flash_attn_varlen_func", arguments, {}, call, reference, same_result=close)


def varlen_paged(rng: Random) -> Trial:
    """`flash_attn_varlen_func` over a paged cache."""
    causal, count, block = rng.random() < 0.5, rng.randint(1, 3), rng.choice([1, 2, 4])
    queries = [rng.randint(0, 3) for _ in range(count)]
    lengths = [rng.randint(length, 3 * block) if length <= 3 * block else 0 for length in queries]
    ids = rng.sample(range(12), 12)
    arguments: dict[str, Any] = {
        "q": torch.randn(sum(queries), HEADS, SIZE),
        "cu_seqlens_q": _int32([0, *accumulate(queries)]),
        "seqused_k": _int32(lengths),
        "block_table": _int32([ids[3 * i : 3 * i + 3] for i in range(count)]),
        "max_seqlen_q": max(*queries, 1),
    }

    def call(k_cache: Any, v_cache: Any, **given: Any) -> Any:
        return flash_attn_varlen_func(
            k=k_cache, v=v_cache, cu_seqlens_k=None, max_seqlen_k=3 * block, causal=causal,
            return_attn_probs=True, **given,
        )[:2]  # fmt: skip

    def reference(
        q: Any, k_cache: Any, v_cache: Any, cu_seqlens_q: Any, seqused_k: Any, block_table: Any,
        max_seqlen_q: Any,
    ) -> Any:  # fmt: skip
        floats(q, None, None, None)
        floats(k_cache, None, None, None, q.shape[2])
        floats(v_cache, *k_cache.shape[:3], None)
        _check_kind(q, k_cache, v_cache)
        rows = offsets(ints(cu_seqlens_q, dtypes=INT32), len(q))
        sizes, table = ints(seqused_k, dtypes=INT32), ints(block_table, 2, INT32)
        need(len(rows) == len(sizes) + 1 == len(table) + 1, "other sequences")
        whole(max_seqlen_q)
        size = k_cache.shape[1]
        out = torch.zeros(*q.shape[:2], v_cache.shape[3], dtype=torch.float64)
        lse = torch.full((q.shape[1], len(q)), -torch.inf, dtype=torch.float64)
        for (a, b), length, row in zip(pairwise(rows), sizes, table, strict=True):
            need(b - a <= max_seqlen_q, "past the bound")
            need(0 <= length <= len(row) * size, "lengths past the table")
            used = row[: -(-length // size)]
            need(all(0 <= one < len(k_cache) for one in used), "no such block")
            if b > a:
                keys, values = (x[used].flatten(0, 1)[:length] for x in (k_cache, v_cache))
                out[a:b], lse[:, a:b] = _attend(q[a:b], keys, values, causal)
        return out, lse

    shape = (12, block, KV_HEADS, SIZE)
    memory = {"k_cache": torch.randn(shape), "v_cache": torch.randn(shape)}
    return Trial("flash_attn_varlen_func, paged", arguments, memory, call, reference,
                 same_result=close)  # fmt: skip


def dense(rng: Random) -> Trial:
    """`flash_attn_func`."""
    causal, batch, queries = rng.random() < 0.5, rng.randint(1, 2), rng.randint(1, 4)
    keys = rng.randint(queries, 6)
    arguments = {
        "q": torch.randn(batch, queries, HEADS, SIZE),
        "k": torch.randn(batch, keys, KV_HEADS, SIZE),
        "v": torch.randn(batch, keys, KV_HEADS, SIZE),
    }

    def call(q: Any, k: Any, v: Any) -> Any:
        return flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)[:2]

    def reference(q: Any, k: Any, v: Any) -> Any:
        floats(q, None, None, None, None)
        floats(k, len(q), None, None, q.shape[3])
        floats(v, *k.shape[:3], None)
        _check_kind(q, k, v)
        found = [_attend(*one, causal) for one in zip(q, k, v, strict=True)]
        return tuple(torch.stack(part) for part in zip(*found, strict=True))

    return Trial("flash_attn_func", arguments, {}, call, reference, same_result=close)


TRIALS = (kvcache, varlen, varlen_paged, dense)
