"""Trials of FlashInfer's names: plans, appended keys, lists around them, merges."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from random import Random
from typing import Any

import torch

from attnlib.compat import flashinfer
from tests.compat.reference import attention
from tests.properties.corruptions.reading import (
    blocks_of,
    close,
    defined,
    floats,
    ints,
    need,
    offsets,
    same,
    whole,
)
from tests.properties.corruptions.trial import Trial

LOG2_E = math.log2(math.e)
HEADS, KV_HEADS, SIZE = 4, 2, 8
WORKSPACE = torch.zeros(1 << 16, dtype=torch.uint8)


def _int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _lists(rng: Random, seq_lens: list[int], size: int) -> dict[str, torch.Tensor]:
    """Page lists of requests with these lengths, in a pool of 12 pages."""
    pages = [-(-length // size) for length in seq_lens]
    last = [
        length - (count - 1) * size if count else 0
        for length, count in zip(seq_lens, pages, strict=True)
    ]
    return {
        "indptr": _int32([0, *accumulate(pages)]),
        "indices": _int32(rng.sample(range(12), 12)[: sum(pages)] + [99] * rng.choice([0, 0, 2])),
        "last": _int32(last),
    }


def _requests(
    indptr: Any, indices: Any, last: Any, page_size: Any, pool: int | None
) -> list[tuple[list[int], int]]:
    """(pages, tokens) of each request."""
    size = whole(page_size, 1)
    starts, pages, ends = ints(indptr), ints(indices), ints(last)
    offsets(starts, len(pages))
    need(len(starts) == len(ends) + 1, "lists of other lengths")
    found = []
    for (first, end), tokens in zip(pairwise(starts), ends, strict=True):
        need(first == end or 1 <= tokens <= size, "an impossible last page")
        length = (end - first - 1) * size + tokens if end > first else 0
        found.append((blocks_of(pages[first:end], length, size, pool), length))
    return found


def _run_reference(
    q: Any, cache: Any, requests: list[tuple[list[int], int]], starts: list[int], causal: bool,
    size: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    need(cache.dim() == 5 and cache.shape[1] == 2, "no cache")
    floats(cache, None, 2, size, KV_HEADS, SIZE)
    need(cache.dtype == torch.float32 and q.dtype == torch.float32, "another dtype")
    need(all(page < len(cache) for pages, _ in requests for page in pages), "no such page")
    floats(q, None, HEADS, SIZE)
    offsets(starts, len(q))
    out = torch.zeros(len(q), HEADS, SIZE, dtype=torch.float64)
    lse = torch.full((len(q), HEADS), -torch.inf, dtype=torch.float64)
    for (pages, length), (first, end) in zip(requests, pairwise(starts), strict=True):
        keys, values = (cache[pages, i].flatten(0, 1)[:length] for i in (0, 1))
        if end > first and length:
            found = attention(q[first:end], keys, values, causal=causal)
            out[first:end], lse[first:end] = found[0], found[1] * LOG2_E
    return out, lse


def decode(rng: Random) -> Trial:
    """Plan and run of the decode wrapper."""
    size, per_request = rng.choice([1, 2, 4]), rng.choice([1, 1, 2])
    lengths = [rng.randint(per_request, 2 * size + 1) for _ in range(rng.randint(1, 3))]

    def call(cache: Any, indptr: Any, indices: Any, last: Any, page_size: Any, q: Any) -> Any:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
        wrapper.plan(indptr, indices, last, HEADS, KV_HEADS, SIZE, page_size,
                     q_data_type="float32", q_len_per_req=per_request)  # fmt: skip
        return wrapper.run(q, cache, return_lse=True)

    def reference(cache: Any, indptr: Any, indices: Any, last: Any, page_size: Any, q: Any) -> Any:
        requests = _requests(indptr, indices, last, page_size, len(cache))
        starts = [per_request * i for i in range(len(requests) + 1)]
        need(q.dim() == 3 and len(q) == starts[-1], "other queries")
        return _run_reference(q, cache, requests, starts, True, page_size)

    arguments = {**_lists(rng, lengths, size), "page_size": size}
    arguments["q"] = torch.randn(per_request * len(lengths), HEADS, SIZE)
    memory = {"cache": torch.randn(12, 2, size, KV_HEADS, SIZE)}
    # FlashInfer raises ValueErrors for rows that do not fit the plan.
    return Trial("decode", arguments, memory, call, reference, (ValueError,), close)


def prefill(rng: Random) -> Trial:
    """Plan and run of the prefill wrapper."""
    size, causal = rng.choice([1, 2, 4]), rng.random() < 0.5
    lengths = [rng.randint(0, 2 * size + 1) for _ in range(rng.randint(1, 3))]
    queries = [rng.randint(0, max(length, 1)) for length in lengths]

    def call(
        cache: Any, starts: Any, indptr: Any, indices: Any, last: Any, page_size: Any, q: Any
    ) -> Any:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
        wrapper.plan(starts, indptr, indices, last, HEADS, KV_HEADS, SIZE, page_size,
                     causal=causal, q_data_type="float32")  # fmt: skip
        return wrapper.run(q, cache, return_lse=True)

    def reference(
        cache: Any, starts: Any, indptr: Any, indices: Any, last: Any, page_size: Any, q: Any
    ) -> Any:
        requests = _requests(indptr, indices, last, page_size, len(cache))
        rows = ints(starts)
        need(len(rows) == len(requests) + 1, "lists of other lengths")
        return _run_reference(q, cache, requests, rows, causal, page_size)

    arguments = {**_lists(rng, lengths, size), "page_size": size}
    arguments["starts"] = _int32([0, *accumulate(queries)])
    arguments["q"] = torch.randn(sum(queries) + rng.choice([0, 0, 2]), HEADS, SIZE)
    memory = {"cache": torch.randn(12, 2, size, KV_HEADS, SIZE)}
    return Trial("prefill", arguments, memory, call, reference, (ValueError,), close)


def append(rng: Random) -> Trial:
    """`append_paged_kv_cache`."""
    size = rng.choice([1, 2, 4])
    lengths = [rng.randint(1, 2 * size + 1) for _ in range(rng.randint(1, 3))]
    rows = [
        (request, position)
        for request, length in enumerate(lengths)
        for position in range(length)
        if rng.random() < 0.5
    ] + [(-1, -1)] * rng.choice([0, 1])
    arguments = {
        **_lists(rng, lengths, size),
        "batch": _int32([row[0] for row in rows]),
        "positions": _int32([row[1] for row in rows]),
        "key": torch.randn(len(rows), KV_HEADS, SIZE),
        "value": torch.randn(len(rows), KV_HEADS, SIZE),
    }
    del arguments["last"]

    def call(cache: Any, key: Any, value: Any, batch: Any, positions: Any, **lists: Any) -> None:
        flashinfer.append_paged_kv_cache(
            key, value, batch, positions, cache, lists["indices"], lists["indptr"], _int32([1])
        )

    def reference(
        cache: Any, key: Any, value: Any, batch: Any, positions: Any, indptr: Any, indices: Any
    ) -> None:
        floats(cache, None, 2, None, None, None)
        requests, places, pages = ints(batch), ints(positions), ints(indices)
        starts = offsets(ints(indptr), len(pages))
        need(len(requests) == len(places) == len(key) == len(value), "other rows")
        for new in (key, value):
            floats(new, None, cache.shape[3], cache.shape[4])
        page_size, written = cache.shape[2], []
        for row, (request, position) in enumerate(zip(requests, places, strict=True)):
            if request < 0 or position < 0:
                continue
            need(request < len(starts) - 1, "no such request")
            place = starts[request] + position // page_size
            need(place < starts[request + 1], "past the pages of the request")
            need(0 <= pages[place] < len(cache), "no such page")
            written.append((pages[place], position % page_size))
            cache[pages[place], 0, position % page_size] = key[row].float()
            cache[pages[place], 1, position % page_size] = value[row].float()
        defined(len(set(written)) == len(written), "two rows have one slot (P4)")

    memory = {"cache": torch.randn(12, 2, size, KV_HEADS, SIZE)}
    return Trial("append", arguments, memory, call, reference)


def lists_around(rng: Random) -> Trial:
    """`get_seq_lens` and `get_batch_indices_positions`."""
    size = rng.choice([1, 3, 4])
    lengths = [rng.randint(0, 9) for _ in range(rng.randint(0, 3))]
    new = [rng.randint(0, length) for length in lengths]
    total = sum(new) + rng.choice([0, 2])
    lists = _lists(rng, [min(length, 4 * size) for length in lengths], size)

    def call(starts: Any, seq_lens: Any, nnz: Any, indptr: Any, last: Any, page_size: Any) -> Any:
        return (
            flashinfer.get_seq_lens(indptr, last, page_size),
            *flashinfer.get_batch_indices_positions(starts, seq_lens, nnz),
        )

    def reference(
        starts: Any, seq_lens: Any, nnz: Any, indptr: Any, last: Any, page_size: Any
    ) -> Any:
        pages, ends = offsets(ints(indptr)), ints(last)
        need(len(pages) == len(ends) + 1, "other requests")
        whole(page_size, 1)
        found = [
            (b - a - 1) * page_size + tokens if b > a else 0
            for (a, b), tokens in zip(pairwise(pages), ends, strict=True)
        ]
        rows, sizes = offsets(ints(starts), whole(nnz)), ints(seq_lens)
        need(len(rows) == len(sizes) + 1, "other requests")
        request, position = [-1] * nnz, [-1] * nnz
        for index, ((a, b), length) in enumerate(zip(pairwise(rows), sizes, strict=True)):
            need(length >= b - a, "more new tokens than tokens")
            request[a:b] = [index] * (b - a)
            position[a:b] = range(length - (b - a), length)
        return found, request, position

    arguments = {
        "starts": _int32([0, *accumulate(new)]), "seq_lens": _int32(lengths), "nnz": total,
        "indptr": lists["indptr"], "last": lists["last"], "page_size": size,
    }  # fmt: skip
    return Trial("lists around an append", arguments, {}, call, reference, same_result=same)


def merge(rng: Random) -> Trial:
    """`merge_state` and `merge_states`."""
    tokens, shift = rng.randint(0, 3), rng.choice([0.0, 0.0, 3e4, -6e4])
    both = torch.randn(2, tokens, HEADS) + shift
    if rng.random() < 0.3:
        both[rng.randrange(2)] = -torch.inf
    several = rng.random() < 0.5
    arguments: dict[str, Any] = {
        "v_a": torch.randn(tokens, HEADS, SIZE), "s_a": both[0],
        "v_b": torch.randn(tokens, HEADS, SIZE), "s_b": both[1],
    }  # fmt: skip

    def call(v_a: Any, s_a: Any, v_b: Any, s_b: Any) -> Any:
        return flashinfer.merge_state(v_a, s_a, v_b, s_b)

    def call_states(v: Any, s: Any) -> Any:
        return flashinfer.merge_states(v, s)

    def reference(v_a: Any, s_a: Any, v_b: Any, s_b: Any) -> Any:
        floats(v_a, None, None, None)
        floats(v_b, *v_a.shape)
        for logs in (s_a, s_b):
            floats(logs, *v_a.shape[:2])
            need(logs.dtype == torch.float32, "another dtype")
        logs = torch.stack([s_a, s_b]).double() / LOG2_E
        lse = torch.logsumexp(logs, 0)
        weights = torch.exp(logs - lse.masked_fill(lse == -torch.inf, 0.0))[..., None]
        return (torch.stack([v_a, v_b]).double() * weights).sum(0), lse * LOG2_E

    def reference_states(v: Any, s: Any) -> Any:
        need(v.dim() == 4 and s.dim() == 3 and s.shape == v.shape[:3], "other shapes")
        need(v.shape[1] == 2, "the reference takes two states")
        return reference(v[:, 0], s[:, 0], v[:, 1], s[:, 1])

    def compare(got: Any, wanted: Any) -> None:
        tolerance = 3e-5 if got[0].dtype in (torch.float32, torch.float64) else 2e-2
        close(got, wanted, tolerance)

    if several:
        arguments = {
            "v": torch.stack([arguments["v_a"], arguments["v_b"]], 1),
            "s": torch.stack([arguments["s_a"], arguments["s_b"]], 1),
        }
        return Trial("merge_states", arguments, {}, call_states, reference_states,
                     same_result=compare)  # fmt: skip
    return Trial("merge_state", arguments, {}, call, reference, same_result=compare)


TRIALS = (decode, prefill, append, lists_around, merge)
