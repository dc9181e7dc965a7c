"""`attnlib.compat.flash_attn_with_kvcache` against `Attention` over the same batch.

    python -m benchmarks.gpu.flash_attn_compat --out results/flash_attn_compat.json

Both append one token to each request and attend, by the triton backend, over the same cache. The
outputs and the written caches are compared first. Host time: the median over rounds of the time
until an eager call returns that allocates its output (`layer_calls.launch_microseconds`). Device
time: replays of a CUDA graph of many calls over copies of the cache that do not fit the L2 cache.

Times of a few microseconds depend on where small tensors (lengths, tables, scratch memory) are in
memory, by 1 to 2%. Each row is therefore measured in several placements, in which both calls have
new tensors of their own. In each placement the graphs of both take turns with a third one: of
`Attention` in the first placement, as a control. The results are medians over the placements.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import random
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
"""See `Case`."""

_SHORT_US = 40.0
"""Calls of at most so many microseconds are measured in more placements."""

_PLACEMENTS = {True: 7, False: 3}
"""Placements of short and of other calls."""

_ROUNDS = 6
"""Rounds in a placement, one for each order of the three graphs. A round takes 10 ms per graph."""

_HOST_ROUNDS = {True: 60, False: 10}
"""Rounds of host times, of short and of other calls."""

_COLD_BYTES = 256 << 20
HOST_LIMIT_US, DEVICE_LIMIT = 3.0, 1.01


class Case:
    """The caches of one case.

    Args:
        requests, length: the batch; `length` counts the new token.
        form: "paged" with blocks of 16, "contiguous", or "read" (paged, without a new token).
    """

    def __init__(self, requests: int, length: int, form: str) -> None:
        torch.manual_seed(0)
        self.requests, self.length, self.form = requests, length, form
        block_size = 16 if form != "contiguous" else 256
        columns = length // block_size
        shape = (requests * columns, block_size, KV_HEADS, SIZE)
        num_bytes = 2 * 2 * requests * length * KV_HEADS * SIZE
        self.copies = max(2, -(-_COLD_BYTES // num_bytes))
        self.caches = [
            tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            for _ in range(self.copies)
        ]
        order = torch.arange(requests * columns, device="cuda")
        if form != "contiguous":
            order = order[torch.randperm(order.numel(), device="cuda")]
        self.table = order.view(requests, columns).int()
        self.spec = attnlib.AttentionSpec(
            num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=torch.bfloat16,
            block_size=block_size,
        )  # fmt: skip
        self.layer = attnlib.Attention(self.spec, backend="triton", device="cuda")
        self.native = [attnlib.PagedKVCache.from_views(*pair) for pair in self.caches]
        self.views = self.caches
        if form == "contiguous":
            self.views = [
                tuple(x.view(requests, length, KV_HEADS, SIZE) for x in pair)
                for pair in self.caches
            ]


class Placement:
    """The two calls of a case, with all tensors but the caches newly allocated.

    Args:
        case: the caches.
        number: selects how much other memory is allocated before and between the tensors.
    """

    def __init__(self, case: Case, number: int) -> None:
        self.case, self._random = case, random.Random(number)
        self._others: list[torch.Tensor] = []
        # The function's metadata and scratch memory are made anew.
        STATE.calls.clear(), STATE.captured.clear(), STATE.builders.clear()
        STATE.recent = None
        requests, length, form = case.requests, case.length, case.form
        self.table = self._moved(case.table)
        builder = case.layer.backend.make_builder(case.spec, "cuda")
        self._move()
        common = attnlib.CommonAttentionMetadata.from_lengths(
            [1] * requests, [length] * requests, self.table, case.spec.block_size, "cuda"
        )
        if form == "read":
            common.slot_mapping = None
        self.metadata = builder.build(0, common)
        generator = torch.Generator("cuda").manual_seed(1)
        self.rows: list[Any] = [
            self._moved(
                torch.randn(
                    (requests, heads, SIZE), device="cuda", dtype=torch.bfloat16,
                    generator=generator,
                )
            )
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        ]  # fmt: skip
        self.batched = [x[:, None] for x in self.rows]
        if form == "read":
            self.rows[1:] = self.batched[1:] = [None, None]
        cached = length if form == "read" else length - 1
        self.lens = self._moved(torch.full((requests,), cached, dtype=torch.int32, device="cuda"))

    def _move(self) -> None:
        """Allocate 0.5 to 512 KiB that nobody uses."""
        for _ in range(self._random.randrange(1, 17)):
            size = 128 * self._random.randrange(1, 65)
            self._others.append(torch.empty(size, device="cuda"))

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        self._move()
        return tensor.clone()

    def by_layer(self, number: int) -> torch.Tensor:
        """The layer over copy `number`."""
        return self.case.layer(*self.rows, self.case.native[number], self.metadata)

    def by_function(self, number: int) -> torch.Tensor:
        """The function over copy `number`."""
        q, k, v = self.batched
        k_cache, v_cache = self.case.views[number]
        table = None if self.case.form == "contiguous" else self.table
        result: torch.Tensor = flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=self.lens, block_table=table, causal=True
        )
        return result


def check(calls: Placement) -> bool:
    """Compare the outputs, and the bits of the written caches.

    Returns:
        Whether the outputs have equal bits too.
    """
    wanted, caches = calls.by_layer(0), calls.case.caches[0]
    keys = [x.clone() for x in caches]
    if calls.case.form != "read":
        last = calls.table[:, -1].long()
        for x in caches:
            x[last, -1] = 0  # the function must write the new token itself
    for _ in range(3):
        got = calls.by_function(0)
    wanted = wanted.view_as(got)
    torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2)
    assert all(torch.equal(x, y) for x, y in zip(caches, keys, strict=True))
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


def measure(case: Case) -> dict[str, Any]:
    """Host and device microseconds of both calls."""
    device, first = torch.device("cuda"), Placement(case, 0)
    equal = check(first)
    expected = max(warm_up(call, device) for call in (first.by_layer, first.by_function))
    control = GraphTimer(first.by_layer, case.copies, device, expected)
    is_short = control.round()[0] <= _SHORT_US
    eager = [functools.partial(call, 0) for call in (first.by_layer, first.by_function)]
    host = launch_microseconds(*eager, rounds=_HOST_ROUNDS[is_short])
    ratios, controls, times = [], [], []
    for number in range(1, 1 + _PLACEMENTS[is_short]):
        placement = Placement(case, number)
        equal = equal and check(placement)
        timers = [
            GraphTimer(call, case.copies, device, expected)
            for call in (placement.by_layer, placement.by_function)
        ]
        rounds = paired_times([*timers, control], _ROUNDS)
        layer, function, again = (statistics.median(found) for found in rounds)
        pairs = list(zip(*rounds, strict=True))
        ratios.append(statistics.median(b / a for a, b, _ in pairs))
        controls.append(statistics.median(a / c for a, _, c in pairs))
        times.append((layer, function, again))
    names = ("Attention", "flash_attn_with_kvcache")
    medians = [statistics.median(found) for found in zip(*times, strict=True)]
    return {
        "equal_bits": equal,
        "device_us": dict(zip(names, medians, strict=False)),
        "device_ratio": statistics.median(ratios),
        "device_ratios": sorted(ratios),
        "control_ratios": sorted(controls),
        "host_us": dict(zip(names, host, strict=True)),
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
            row: dict[str, Any] = {"form": form, "requests": requests, "seq_len": length}
            row |= measure(Case(requests, length, form))
            row["within"] = (
                row["host_difference_us"] <= HOST_LIMIT_US and row["device_ratio"] <= DEVICE_LIMIT
            )
            document["rows"].append(row)
            print(json.dumps(row), flush=True)
            if options.out:
                options.out.write_text(json.dumps(document, indent=1) + "\n")
            STATE.captured.clear()  # the graphs that used them are gone
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
