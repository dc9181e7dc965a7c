"""Prefill with float8 queries and products (M19), and with bfloat16 ones over bfloat16 and float8.

    python -m benchmarks.gpu.float8_products --out results/float8_products.json

Keys and values are random e4m3 numbers; the bfloat16 cache holds the same numbers. Times are
medians of replays of a CUDA graph and include the copies of the cache. Each of the two is timed in
turn with bfloat16 alone, because the clock at the start of a round depends on the round before. The
error is that of the output, relative to attention over the same cache with the bfloat16 queries,
which `float8 cache` computes. `retrieval.py` searches values among 131072 keys with each of them.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from attnlib.bench.timer import GraphTimer, measure_in_turn, warm_up
from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.heuristics.device import limits_of
from attnlib.ops.triton.hopper.dispatch import num_counters
from attnlib.ops.triton.paged_prefill import paged_prefill
from benchmarks.gpu import rows

HEADS, KV_HEADS, SIZE = 32, 8, 128
ROWS = {
    f"prefill-1x{tokens >> 10}k-p{block_size}": (tokens, block_size)
    for tokens, block_size in ((16384, 128), (8192, 128), (32768, 128), (16384, 16))
}
"""Name -> (tokens, block size)"""


def make_call(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_size: int, allow: bool
) -> Any:
    """The prefill of one request over pages with these keys and values, `[tokens, heads, size]`."""
    torch.manual_seed(1)
    device, blocks, length = query.device, len(key) // block_size, len(query)
    pages = torch.randperm(blocks, device=device)
    caches = []
    for numbers in (key, value):
        cache = torch.empty(
            blocks, block_size, *numbers.shape[1:], dtype=numbers.dtype, device=device
        )
        words = torch.uint8 if numbers.dtype.itemsize == 1 else numbers.dtype
        cache.view(words)[pages] = numbers.view(words).view(cache.shape)
        caches.append(cache)
    table = pages.to(torch.int32).view(1, -1)
    starts = torch.tensor([0, length], device=device, dtype=torch.int32)
    lengths = torch.tensor([len(key)], device=device, dtype=torch.int32)
    counters = torch.zeros(num_counters(limits_of(query)), device=device, dtype=torch.int32)
    params = AttentionParams(scale=SIZE**-0.5, allow_fp8_queries=allow)
    out = torch.empty_like(query)

    def call(_: int = 0) -> torch.Tensor:
        paged_prefill(
            query, *caches, table, starts, lengths, params, max_query_len=length,
            max_seq_len=len(key), out=out, counters=counters,
        )  # fmt: skip
        return out

    return call


def random_numbers(length: int, heads: int) -> torch.Tensor:
    """Random e4m3 numbers [length, heads, size]."""
    return torch.randn(length, heads, SIZE, device="cuda").to(torch.float8_e4m3fn)


def measure(row: str) -> dict[str, Any]:
    """The times and the errors of one row."""
    length, block_size = ROWS[row]
    torch.manual_seed(0)
    device = torch.device("cuda")
    query = torch.randn(length, HEADS, SIZE, device=device).bfloat16()
    key, value = (random_numbers(length, KV_HEADS) for _ in range(2))
    calls = {
        "bfloat16": make_call(query, key.bfloat16(), value.bfloat16(), block_size, False),
        "float8 cache": make_call(query, key, value, block_size, False),
        "float8 products": make_call(query, key, value, block_size, True),
    }
    expected = {name: warm_up(call, device) for name, call in calls.items()}
    exact, found = (calls[name]().float() for name in ("float8 cache", "float8 products"))
    timers = {name: GraphTimer(calls[name], 1, device, expected[name]) for name in calls}
    us = {}
    for name in ("float8 cache", "float8 products"):
        pair = {"bfloat16": timers["bfloat16"], name: timers[name]}
        us[name] = {key: result.us for key, result in measure_in_turn(pair, expected).items()}
    return {
        "tokens": length, "block_size": block_size, "us": us,
        "rate": {name: times["bfloat16"] / times[name] for name, times in us.items()},
        "output_error": float((found - exact).norm() / exact.norm()),
    }  # fmt: skip


def main() -> int:
    """Time the chosen rows."""
    return rows.run(rows.parser(__doc__).parse_args(), ROWS, measure)


if __name__ == "__main__":
    sys.exit(main())
