"""One rank of the benchmark: its process group, caches and clock."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import attnlib
from attnlib.parallel import RankGroup

__all__ = ["BLOCK", "Call", "Ranks", "all_ranks"]

BLOCK = 16
RATE_BYTES = 64 << 20
"""Received in the measurement of the rate."""
COLD_BYTES = 256 << 20
"""Bytes of keys that the calls of a graph read before one reads the same again: several times the
L2 cache."""
MEASUREMENTS = 30
"""More than a row has, of which each gets an equal part of its time."""
CALLS = 10
"""Calls in a graph, as the layers of a model."""

Call = Callable[[], Any]


def all_ranks(options: argparse.Namespace) -> list[Ranks]:
    """This process as a rank of a group of each size of `--groups`, in that order. Exchanges that
    take longer than a row may end the process."""
    on_gpu, began = torch.cuda.is_available(), time.monotonic()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    limit = timedelta(seconds=options.row_seconds)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=limit)
    world, one_gpu = dist.get_world_size(), dict[Any, Any]()
    found = []
    for size in options.groups or [world]:
        if not 0 < size <= world or world % size:
            raise SystemExit(f"--groups {size}: it must divide the {world} processes")
        groups = [
            dist.new_group(list(range(first, first + size)), timeout=limit)
            for first in range(0, world, size)
        ]
        found.append(Ranks(options, groups[dist.get_rank() // size], began, one_gpu))
    return found


class Ranks:
    """One rank of a group.

    Args:
        options: of the command line.
        process_group: of the ranks.
        began: when the benchmark did.
        one_gpu: what one GPU alone takes, by sizes; known to the groups of all sizes.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        process_group: Any,
        began: float,
        one_gpu: dict[Any, list[float]],
    ) -> None:
        self.options, self.on_gpu = options, torch.cuda.is_available()
        self._began, self._process_group, self._one_gpu = began, process_group, one_gpu
        self.device = torch.device("cpu")
        if self.on_gpu:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.group = RankGroup(process_group)
        self.spec = attnlib.AttentionSpec(
            num_heads=options.num_heads,
            num_kv_heads=options.num_kv_heads,
            head_size=options.head_size,
            block_size=BLOCK,
            dtype=torch.bfloat16 if self.on_gpu else torch.float32,
        )
        self.rank_spec = self.spec.replace(num_heads=options.num_heads // self.group.world_size)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=self.spec.dtype, device=self.device)

    def cache(self, tokens: int, requests: int) -> tuple[attnlib.PagedKVCache, torch.Tensor]:
        """A cache of random keys, and its block table."""
        columns = -(-tokens // BLOCK)
        cache = attnlib.PagedKVCache.allocate(self.spec, requests * columns, self.device)
        for part in (cache.key_cache, cache.value_cache):
            part.normal_()
        order = torch.randperm(requests * columns, device=self.device)
        return cache, order.view(requests, columns).int()

    def layers(self, cache: attnlib.PagedKVCache) -> list[attnlib.PagedKVCache]:
        """The cache, and copies of it until `COLD_BYTES` are reached, as the layers of a model
        have; on a CPU the cache alone."""
        size = cache.key_cache.nbytes + cache.value_cache.nbytes
        more = min(CALLS, -(-COLD_BYTES // size)) - 1 if self.on_gpu else 0
        found = [cache]
        for _ in range(more):
            blocks = cache.num_blocks
            other = attnlib.PagedKVCache.allocate(self.spec, blocks, self.device, cache.layout)
            other.key_cache.copy_(cache.key_cache)
            other.value_cache.copy_(cache.value_cache)
            found.append(other)
        return found

    def each(self, value: float) -> list[float]:
        """The value of each rank."""
        found = torch.zeros(self.group.world_size, dtype=torch.float64, device=self.device)
        found[self.group.rank] = value
        dist.all_reduce(found, group=self._process_group)
        return [round(each, 1) for each in found.tolist()]

    def is_late(self) -> bool:
        """Whether the time limit has passed on any rank of all groups."""
        late = torch.tensor(time.monotonic() - self._began, device=self.device)
        dist.all_reduce(late, dist.ReduceOp.MAX)
        return late.item() >= self.options.limit_seconds

    def once(self, key: Any, measure: Callable[[], list[float]]) -> list[float]:
        """What `measure` found when it was asked for the first time with this key."""
        if key not in self._one_gpu:
            self._one_gpu[key] = measure()
        return self._one_gpu[key]

    def times(self, call: Call) -> list[float]:
        """Microseconds of a call from the host, on each rank: the median. Slow calls are repeated
        less often, as the time of a row allows."""
        for _ in range(2):
            call()
        most = self.options.row_seconds * 1e6 / MEASUREMENTS
        known = max(self.each(self._timed(call)))
        repeats = max(1, min(self.options.repeats, int(most / max(known, 1.0))))
        return self.each(statistics.median(self._timed(call) for _ in range(repeats)))

    def _timed(self, call: Call) -> float:
        self.wait()
        dist.barrier(group=self._process_group)
        start = time.perf_counter()
        call()
        self.wait()
        return (time.perf_counter() - start) * 1e6

    def slowest(self, call: Call) -> float:
        """`times` of the slowest rank."""
        return max(self.times(call))

    def in_graph(self, calls: Sequence[Call], count: int = CALLS) -> list[float]:
        """Microseconds of a call on each rank: the median over replays of one CUDA graph of `count`
        calls, which takes them in turn. Replays follow each other without gaps, and only what the
        calls exchange makes ranks wait for each other. A graph of one call is timed from the host,
        with its launch, after a barrier; so is everything where there is no GPU."""
        if not self.on_gpu:
            return self.times(calls[0])
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for number in range(count):
                calls[number % len(calls)]()
        if count == 1:
            return self.times(graph.replay)
        for _ in range(3):
            graph.replay()
        self.wait()
        dist.barrier()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(self.options.repeats + 1)]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        self.wait()
        pairs = zip(events, events[1:], strict=False)
        times = [first.elapsed_time(second) * 1e3 / count for first, second in pairs]
        return self.each(statistics.median(times))

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def rate(self) -> dict[str, float]:
        """Received bytes per microsecond of large exchanges; nothing on one rank."""
        world = self.group.world_size
        if world == 1:
            return {}
        count = RATE_BYTES // self.options.shrink // (world - 1)
        part = torch.zeros(count, dtype=torch.uint8, device=self.device)
        whole = torch.zeros(count * world, dtype=torch.uint8, device=self.device)
        received = count * (world - 1)
        out = torch.empty_like(whole)
        calls: dict[str, Call] = {
            "all_gather": lambda: self.group.all_gather(part),
            "all_to_all": lambda: self.group.all_to_all(out, whole),
        }
        return {name: received / max(self.in_graph([call])) for name, call in calls.items()}
