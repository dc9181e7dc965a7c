"""Divided layers on the GPUs of one host against one GPU, and against their parts.

    for n in 1 2 4; do
        torchrun --nproc-per-node $n -m benchmarks.parallel --out parallel_$n.json
    done
    torchrun --nproc-per-node 2 -m benchmarks.parallel --shrink 512 --repeats 2   # gloo, on a CPU

For each decode: the layer on one GPU with all heads and keys; a rank's attention to its keys, on
the slowest rank; the exchange; the divided layer. `bound` is the attention of the slowest rank and
the received bytes (X6) at the measured rate of a large exchange; the divided layer should reach 85%
of it. For the prefill of a prompt, and of its last part over the rest: one GPU, the ring, and
gathered keys; four GPUs should be 3.2 times as fast as one. `met` says so, on GPUs. Times are
medians in microseconds, of calls in one CUDA graph each (decodes) or of calls from the host.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import attnlib
from attnlib.parallel import (
    Interleaved,
    ParallelAttention,
    ParallelPrefill,
    RankGroup,
    divided_batch,
    exchange_bytes,
)

DECODES = ((2, 64), (4, 128), (16, 32), (1, 1024))
"""Requests, and thousands of tokens of each (1024 per thousand)."""
PREFILLS = ((128, 0), (8, 120))
"""Thousands of new tokens, and of tokens in the cache."""
SHARE, SPEEDUP = 0.85, {4: 3.2}
"""What must be reached: of the bound of decodes, and of prompts by number of ranks."""
BLOCK = 16
RATE_BYTES = 64 << 20
"""Received in the measurement of the rate."""


class Bench:
    """One rank.

    Args:
        options: of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.on_gpu = options, torch.cuda.is_available()
        self.device = torch.device("cpu")
        if self.on_gpu:
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if self.on_gpu else "gloo")
        self.group = RankGroup()
        self.spec = attnlib.AttentionSpec(
            num_heads=options.num_heads, num_kv_heads=options.num_kv_heads,
            head_size=options.head_size, block_size=BLOCK,
            dtype=torch.bfloat16 if self.on_gpu else torch.float32,
        )  # fmt: skip
        world = self.group.world_size
        self.rank_spec = self.spec.replace(num_heads=options.num_heads // world)

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

    def time(self, call: Callable[[], Any], *, in_graph: bool = False) -> float:
        """Microseconds of a call on the slowest rank: the median."""
        for _ in range(3):
            call()
        run: Callable[[], Any] = call
        if in_graph and self.on_gpu:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
            run = graph.replay
        times = []
        for _ in range(self.options.repeats):
            self.wait()
            dist.barrier()
            start = time.perf_counter()
            run()
            self.wait()
            times.append((time.perf_counter() - start) * 1e6)
        found = torch.tensor(statistics.median(times), device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return round(float(found), 1)

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
        return {
            "all_gather": received / self.time(lambda: self.group.all_gather(part)),
            "all_to_all": received / self.time(lambda: self.group.all_to_all(out, whole)),
        }

    def decode(self, requests: int, length: int, rate: dict[str, float]) -> dict[str, Any]:
        """One decode of `requests` requests of `length` tokens."""
        spec, world = self.spec, self.group.world_size
        ones, lengths = [1] * requests, [length] * requests
        cache, table = self.cache(length, requests)
        whole = attnlib.Attention(spec, device=self.device)
        common = attnlib.CommonAttentionMetadata.from_lengths(
            ones, lengths, table, BLOCK, self.device
        )
        metadata = whole.backend.make_builder(spec, self.device).build(0, common)
        query = self.random(requests, spec.num_heads, spec.head_size)
        one = self.time(lambda: whole(query, None, None, cache, metadata), in_graph=True)
        del cache, table
        division = Interleaved(world)
        cache, table = self.cache(division.bound(length), requests)
        layer = ParallelAttention(
            self.rank_spec, self.group, division, agreement="never", device=self.device
        )
        batch = divided_batch(ones, lengths, table, self.device)
        built = layer.make_builder().build_for_cudagraph_capture(batch, write=False)
        exchange, own = layer._exchange, query[:, : self.rank_spec.num_heads].contiguous()
        gathered = exchange.gather_heads(own)
        partial, lse = layer.attend_cached(gathered, cache, built)
        out, own_lse = torch.empty_like(own), torch.empty_like(lse[:, : own.shape[1]])

        def exchange_only() -> None:
            exchange.gather_heads(own)
            exchange.combine(partial, lse, built.merge_rows, out, own_lse, None)

        part = self.time(lambda: layer.attend_cached(gathered, cache, built), in_graph=True)
        received = exchange_bytes(self.rank_spec, world, requests)
        bound = part
        if rate:
            bound += received["queries"] / rate["all_gather"]
            bound += received["all_to_all"] / rate["all_to_all"]
        divided = self.time(lambda: layer(own, None, None, cache, built), in_graph=True)
        exchanged = self.time(exchange_only, in_graph=True)
        return {
            "requests": requests, "length": length, "one_gpu": one, "rank": part,
            "exchange": exchanged, "rank_and_exchange": round(part + exchanged, 1),
            "divided": divided, "received_bytes": received, "bound": round(bound, 1),
            "share_of_bound": round(bound / divided, 3), "speedup": round(one / divided, 2),
            **self.met(bound / divided, SHARE),
        }  # fmt: skip

    def met(self, value: float, target: float | None) -> dict[str, bool]:
        """Whether a target is reached; nothing without a target or a GPU."""
        return {"met": value >= target} if target is not None and self.on_gpu else {}

    def prefill(self, new: int, context: int) -> dict[str, Any]:
        """New tokens of one prompt, divided among the ranks; the context by the cache."""
        spec, length = self.spec, new + context
        cache, table = self.cache(length, 1)
        whole = attnlib.Attention(spec, device=self.device)
        common = attnlib.CommonAttentionMetadata.from_lengths(
            [new], [length], table, BLOCK, self.device
        )
        metadata = whole.backend.make_builder(spec, self.device).build(0, common)
        sizes = [(spec.num_heads, spec.head_size), *[(spec.num_kv_heads, spec.head_size)] * 2]
        inputs = [self.random(new, *size) for size in sizes]
        found: dict[str, Any] = {"new": new, "context": context}
        found["one_gpu"] = self.time(lambda: whole(*inputs, cache, metadata))
        division = Interleaved(self.group.world_size)
        for method in ("ring", "all_gather"):
            layer = ParallelPrefill(
                spec, self.group, division, method=method, agreement="never", device=self.device
            )
            batch = layer.make_builder().build([new], table, [context])
            own = [each[batch.token_rows] for each in inputs]
            found[method] = self.time(lambda x=own, b=batch, f=layer: f(*x, cache, b))
            found[f"{method}_speedup"] = round(found["one_gpu"] / found[method], 2)
        best = max(found["ring_speedup"], found["all_gather_speedup"])
        target = None if context else SPEEDUP.get(self.group.world_size)
        return {**found, **self.met(best, target)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num-heads", type=int, default=32, help="query heads of all ranks")
    parser.add_argument("--num-kv-heads", type=int, default=4, help="KV heads, on every rank")
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--shrink", type=int, default=1, help="divide all lengths by this")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with torch.inference_mode():
        bench = Bench(options)
        rate = bench.rate()
        result: dict[str, Any] = {
            "ranks": bench.group.world_size, "spec": str(bench.spec), "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if bench.on_gpu else "cpu, gloo",
            "bytes_per_us": {name: round(value, 1) for name, value in rate.items()},
            "decode": [
                bench.decode(requests, thousands * 1024 // options.shrink, rate)
                for requests, thousands in DECODES
            ],
            "prefill": [
                bench.prefill(*(thousands * 1024 // options.shrink for thousands in row))
                for row in PREFILLS
            ],
        }  # fmt: skip
    if bench.group.rank == 0:
        text = json.dumps(result, indent=1)
        print(text)
        if options.out is not None:
            options.out.write_text(text + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
