"""`attnlib.compat.flash_attn_with_kvcache` against `Attention` over the same batch.

    python -m benchmarks.gpu.flash_attn_compat --out results/flash_attn_compat.json

Both append one token to each request and attend, by the triton backend, over the same cache. The
outputs and the written caches are compared first. Host time: the median over rounds of the time
until an eager call returns that allocates its output (`layer_calls.launch_microseconds`). Device
time: replays of a CUDA graph of many calls over copies of the cache that do not fit the L2 cache.
The graphs of both take turns, with a third one that repeats the calls of `Attention` as a control;
each round gives one ratio, and the result is their median.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import torch

import attnlib
from attnlib.bench.provenance import provenance
from attnlib.bench.timer import GraphTimer, warm_up
from attnlib.compat import flash_attn_with_kvcache
from attnlib.compat.flash_attn.prepared import STATE
from benchmarks.layer_calls import launch_microseconds

HEADS, KV_HEADS, SIZE = 32, 8, 128
CASES = [(1, 1024), (1, 8192), (8, 2048), (64, 1024), (32, 4096), (64, 4096), (128, 2048)]
"""(requests, sequence length)."""

FORMS = ("paged", "contiguous", "read")
"""See `Calls`."""

_SHORT_US, _SHORT_ROUNDS, _ROUNDS = 40.0, 36, 12
"""Calls of at most so many microseconds get more rounds. A round takes 10 ms for each graph. With
multiples of 6 each order of the three graphs occurs equally often."""

_HOST_ROUNDS = {True: 60, False: 20}
"""Rounds of host times, of short and of other calls."""

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


def paired_times(timers: list[GraphTimer], rounds: int) -> list[list[float]]:
    """Microseconds of a call, for each timer, in each round. The orders of the timers alternate."""
    times: list[list[float]] = [[] for _ in timers]
    orders = itertools.cycle(itertools.permutations(range(len(timers))))
    for order in itertools.islice(orders, rounds):
        for index in order:
            times[index].append(timers[index].round()[0])
    return times


def quartiles(values: list[float]) -> list[float]:
    """The lower quartile, the median and the upper quartile."""
    return statistics.quantiles(values, n=4, method="inclusive")


def measure(calls: Calls) -> dict[str, Any]:
    """Host and device microseconds of both."""
    device = torch.device("cuda")
    functions = {"Attention": calls.by_layer, "flash_attn_with_kvcache": calls.by_function}
    expected = [warm_up(call, device) for call in functions.values()]
    given = [calls.by_layer, calls.by_function, calls.by_layer]
    timers = [GraphTimer(call, calls.copies, device, max(expected)) for call in given]
    is_short = timers[0].round()[0] <= _SHORT_US
    rounds = _SHORT_ROUNDS if is_short else _ROUNDS
    layer, function, again = paired_times(timers, rounds)
    ratios = quartiles([2 * b / (a + c) for a, b, c in zip(layer, function, again, strict=True)])
    control = quartiles([c / a for a, c in zip(layer, again, strict=True)])
    eager = [functools.partial(call, 0) for call in functions.values()]
    host = launch_microseconds(*eager, rounds=_HOST_ROUNDS[is_short])
    return {
        "device_us": {
            "Attention": statistics.median(layer + again),
            "flash_attn_with_kvcache": statistics.median(function),
        },
        "device_ratio": ratios[1],
        "device_ratio_quartiles": [ratios[0], ratios[2]],
        "control_ratio": control[1],
        "control_ratio_quartiles": [control[0], control[2]],
        "rounds": rounds,
        "host_us": dict(zip(functions, host, strict=True)),
        "host_difference_us": host[1] - host[0],
    }


def main() -> None:
    """Check and time all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    parser.add_argument("--commit", help="commit of attnlib, for copies without history")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--cases", nargs="+", type=int, default=range(len(CASES)), help="indices")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    document: dict[str, Any] = {"provenance": provenance(commit=options.commit), "rows": []}
    with attnlib.use_backend("triton"):
        # The short calls of all forms come first.
        for index, form in itertools.product(options.cases, options.forms):
            requests, length = CASES[index]
            calls = Calls(requests, length, form)
            equal = check(calls)
            row = {"form": form, "requests": requests, "seq_len": length, "equal_bits": equal}
            row |= measure(calls)
            row["within"] = (
                row["host_difference_us"] <= HOST_LIMIT_US and row["device_ratio"] <= DEVICE_LIMIT
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
