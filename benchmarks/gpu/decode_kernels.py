"""The Hopper decode against the portable one, by requests and keys: which is the faster one?

    python benchmarks/gpu/decode_kernels.py --out results/decode_kernels.json

`ops.triton.paged_decode` over the same cache with either kernel, and with "auto", the choice of the
heuristics. The outputs are compared before anything is timed. Times are medians of replays of a
CUDA graph of many calls, in turn, over copies of the cache that do not fit the L2 cache.
`hopper.support.HOPPER_DECODE_KEYS` follows from them.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attnlib.bench.provenance import provenance
from attnlib.bench.timer import GraphTimer, measure_in_turn, warm_up
from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.heuristics.device import limits_of
from attnlib.ops.triton.hopper.dispatch import num_counters
from attnlib.ops.triton.paged_decode import paged_decode

BLOCK_SIZE = 16
LAYERS = {"32/8 x 128": (32, 8, 128), "64/8 x 64": (64, 8, 64)}
"""Query heads, KV heads, head size."""

BATCHES = {
    "32/8 x 128": [(32, 128), (17, 128), (64, 128), (132, 128), (16, 128), (8, 128), (32, 64),
                   (128, 64), (32, 192), (128, 192), (256, 128), (1, 128)],
    "64/8 x 64": [(32, 256), (32, 128), (128, 256), (32, 512), (128, 512), (16, 256), (32, 1024),
                  (128, 1024), (8, 256), (1, 256), (1, 512), (64, 192)],
}  # fmt: skip
"""Requests and keys, by layer."""

KERNELS = ("auto", "hopper", "portable")

_COLD_BYTES = 256 << 20
"""Bytes of keys and values that the calls read in turn, several times the L2 cache."""


def measure(layer: tuple[int, int, int], num_reqs: int, seq_len: int) -> dict[str, float]:
    """Microseconds of a decode of `num_reqs` requests of `seq_len` keys by each kernel."""
    heads, kv_heads, size = layer
    device = torch.device("cuda")
    torch.manual_seed(0)
    columns = -(-seq_len // BLOCK_SIZE)
    shape = (num_reqs * columns, BLOCK_SIZE, kv_heads, size)
    num_bytes = 4 * num_reqs * columns * BLOCK_SIZE * kv_heads * size
    copies = min(256, max(2, -(-_COLD_BYTES // num_bytes)))
    make = partial(torch.randn, device=device, dtype=torch.bfloat16)
    caches = [(make(shape), make(shape)) for _ in range(copies)]
    query = make((num_reqs, heads, size))
    table = torch.randperm(num_reqs * columns, device=device).view(num_reqs, columns).int()
    starts = torch.arange(num_reqs + 1, device=device, dtype=torch.int32)
    seq_lens = torch.full((num_reqs,), seq_len, device=device, dtype=torch.int32)
    counters = torch.zeros(num_counters(limits_of(query)), device=device, dtype=torch.int32)
    workspace = torch.empty(256 << 20, device=device, dtype=torch.uint8)
    params, out = AttentionParams(scale=size**-0.5), torch.empty_like(query)

    def call(number: int, *, kernels: str) -> torch.Tensor:
        paged_decode(
            query, *caches[number], table, starts, seq_lens, params, max_query_len=1,
            max_seq_len=seq_len, out=out, workspace=workspace, counters=counters, kernels=kernels,
        )  # fmt: skip
        return out

    calls: dict[str, Any] = {name: partial(call, kernels=name) for name in KERNELS}
    results = [one(0).float().clone() for one in calls.values()]
    error = max(float((result - results[0]).abs().max()) for result in results)
    assert error < 1e-2, f"{num_reqs} x {seq_len}: the outputs differ by {error}"
    expected = {name: warm_up(one, device) for name, one in calls.items()}
    timers = {name: GraphTimer(one, copies, device, expected[name]) for name, one in calls.items()}
    return {name: found.us for name, found in measure_in_turn(timers, expected).items()}


def main() -> None:
    """Check and time all batches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    parser.add_argument("--commit", help="commit of attnlib, for copies without history")
    options = parser.parse_args()
    document: dict[str, Any] = {"provenance": provenance(commit=options.commit), "rows": []}
    for name, layer in LAYERS.items():
        for num_reqs, seq_len in BATCHES[name]:
            us = measure(layer, num_reqs, seq_len)
            row = {"layer": name, "requests": num_reqs, "keys": seq_len, "us": us,
                   "hopper_to_portable": us["hopper"] / us["portable"]}  # fmt: skip
            document["rows"].append(row)
            print(json.dumps(row), flush=True)
            if options.out:
                options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
