"""`attnlib.compat.flash_attn_with_kvcache` against `Attention` over the same batch.

    python -m benchmarks.gpu.flash_attn_compat --out results/flash_attn_compat.json

Both append one token to each request and attend, by the triton backend, over the same cache. The
outputs and the written caches are compared first. Host time: the median over rounds of the time
until an eager call returns that allocates its output (`layer_calls.launch_microseconds`). Device
time: replays of a CUDA graph of many calls, in turn, over copies of the cache that do not fit the
L2 cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

import attnlib
from attnlib.bench.provenance import provenance
from attnlib.bench.timer import GraphTimer, measure_in_turn, warm_up
from attnlib.compat import flash_attn_with_kvcache
from attnlib.compat.flash_attn.prepared import STATE
from benchmarks.layer_calls import launch_microseconds

HEADS, KV_HEADS, SIZE = 32, 8, 128
CASES = [(1, 1024), (1, 8192), (8, 2048), (32, 4096), (64, 1024), (64, 4096), (128, 2048)]
"""(requests, sequence length)."""

_COLD_BYTES = 256 << 20
HOST_LIMIT_US, DEVICE_LIMIT = 3.0, 1.01


class Calls:
    """The two calls of one case.

    Args:
        requests, length: the batch; `length` counts the new token.
        form: "paged" with blocks of 16, "contiguous", or "read" (paged, without a new token).
    """

    def __init__(self, requests: int, length: int, form: str) -> None:
        torch.manual_seed(0)
        self.form, block_size = form, 16 if form != "contiguous" else 256
        columns = length // block_size
        shape = (requests * columns, block_size, KV_HEADS, SIZE)
        num_bytes = 2 * 2 * requests * length * KV_HEADS * SIZE
        self.copies = max(2, -(-_COLD_BYTES // num_bytes))
        make = {"device": "cuda", "dtype": torch.bfloat16}
        self.caches = [
            tuple(torch.randn(shape, **make) for _ in range(2)) for _ in range(self.copies)
        ]
        order = torch.arange(requests * columns, device="cuda")
        if form != "contiguous":
            order = order[torch.randperm(order.numel(), device="cuda")]
        self.table = order.view(requests, columns).int()
        spec = attnlib.AttentionSpec(
            num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=torch.bfloat16,
            block_size=block_size,
        )  # fmt: skip
        self.layer = attnlib.Attention(spec, backend="triton", device="cuda")
        builder = self.layer.backend.make_builder(spec, "cuda")
        common = attnlib.CommonAttentionMetadata.from_lengths(
            [1] * requests, [length] * requests, self.table, block_size, "cuda"
        )
        if form == "read":
            common.slot_mapping = None
        self.metadata = builder.build(0, common)
        self.native = [attnlib.PagedKVCache.from_views(*pair) for pair in self.caches]
        self.views = self.caches
        if form == "contiguous":
            self.views = [
                tuple(x.view(requests, length, KV_HEADS, SIZE) for x in pair)
                for pair in self.caches
            ]
        rows = [torch.randn(requests, heads, SIZE, **make) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        self.rows, self.batched = rows, [x[:, None] for x in rows]
        if form == "read":
            self.rows[1:] = self.batched[1:] = [None, None]
        cached = length if form == "read" else length - 1
        self.lens = torch.full((requests,), cached, dtype=torch.int32, device="cuda")

    def by_layer(self, number: int) -> torch.Tensor:
        """The layer over copy `number`."""
        return self.layer(*self.rows, self.native[number], self.metadata)

    def by_function(self, number: int) -> torch.Tensor:
        """The function over copy `number`."""
        q, k, v = self.batched
        table = None if self.form == "contiguous" else self.table
        return flash_attn_with_kvcache(
            q, *self.views[number], k, v, cache_seqlens=self.lens, block_table=table, causal=True
        )


def check(calls: Calls) -> bool:
    """Compare the outputs, and the bits of the written caches.

    Returns:
        Whether the outputs have equal bits too.
    """
    wanted = calls.by_layer(0)
    keys = [x.clone() for x in calls.caches[0]]
    if calls.form != "read":
        last = calls.table[:, -1].long()
        for x in calls.caches[0]:
            x[last, -1] = 0  # the function must write the new token itself
    for _ in range(3):
        got = calls.by_function(0)
    wanted = wanted.view_as(got)
    torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2)
    assert all(torch.equal(x, y) for x, y in zip(calls.caches[0], keys, strict=True))
    assert STATE.recent is not None
    return torch.equal(got, wanted)


def measure(calls: Calls) -> dict[str, Any]:
    """Host and device microseconds of both."""
    functions = {"Attention": calls.by_layer, "flash_attn_with_kvcache": calls.by_function}
    device = torch.device("cuda")
    expected = {name: warm_up(call, device) for name, call in functions.items()}
    timers = {name: GraphTimer(call, calls.copies, device, expected[name])
              for name, call in functions.items()}  # fmt: skip
    found = [measure_in_turn(timers, expected) for _ in range(3)]
    on_device = {name: statistics.median(times[name].us for times in found) for name in functions}
    host = launch_microseconds(*(lambda call=call: call(0) for call in functions.values()))
    return {
        "device_us": on_device,
        "device_ratio": on_device["flash_attn_with_kvcache"] / on_device["Attention"],
        "host_us": dict(zip(functions, host, strict=True)),
        "host_difference_us": host[1] - host[0],
    }


def main() -> None:
    """Check and time all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    parser.add_argument("--commit", help="commit of attnlib, for copies without history")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    document: dict[str, Any] = {"provenance": provenance(commit=options.commit), "rows": []}
    with attnlib.use_backend("triton"):
        for form in ("paged", "read", "contiguous"):
            for requests, length in CASES:
                calls = Calls(requests, length, form)
                equal = check(calls)
                row = {"form": form, "requests": requests, "seq_len": length, "equal_bits": equal}
                row |= measure(calls)
                row["within"] = (
                    row["host_difference_us"] <= HOST_LIMIT_US
                    and row["device_ratio"] <= DEVICE_LIMIT
                )
                document["rows"].append(row)
                print(json.dumps(row), flush=True)
                if options.out:
                    options.out.write_text(json.dumps(document, indent=1) + "\n")
                STATE.captured.clear()  # the graphs that used them are gone
                del calls
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
