"""Decodes over divided keys, their bound, and their parts on each rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import attnlib
from attnlib.parallel import (
    Interleaved,
    ParallelAttention,
    ParallelMetadata,
    divided_batch,
    exchange_bytes,
)
from benchmarks.parallel.ranks import BLOCK, Call, Ranks

__all__ = ["decode"]


class Divided:
    """One divided decode of `requests` requests of `length` tokens."""

    def __init__(
        self, ranks: Ranks, requests: int, length: int, query: torch.Tensor, exchange: str | None
    ) -> None:
        world = ranks.group.world_size
        division = Interleaved(world)
        cache, table = ranks.cache(division.bound(length), requests)
        self.caches, self.ranks = ranks.layers(cache), ranks
        self.layer = ParallelAttention(
            ranks.rank_spec,
            ranks.group,
            division,
            exchange=exchange,
            agreement="never",
            device=ranks.device,
        )
        batch = divided_batch([1] * requests, [length] * requests, table, ranks.device)
        builder = self.layer.make_builder()
        self.batch: ParallelMetadata = builder.build_for_cudagraph_capture(batch, write=False)
        self.own = query[:, : ranks.rank_spec.num_heads].contiguous()
        self.queries = self.layer.exchange.gather_heads(self.own)

    def whole(self) -> list[Call]:
        return [partial(self.layer, self.own, None, None, x, self.batch) for x in self.caches]

    def attention(self) -> list[Call]:
        """This rank's attention, with the heads of all ranks."""
        attend = self.layer.attend_cached
        return [partial(attend, self.queries, cache, self.batch) for cache in self.caches]

    def parts(self) -> dict[str, Call]:
        """What a divided layer does besides attention, and bare exchanges of as many bytes."""
        exchange, group, own = self.layer.exchange, self.ranks.group, self.own
        partial_out, partial_lse = self.layer.attend_cached(
            self.queries, self.caches[0], self.batch
        )
        out, lse = torch.empty_like(own), torch.empty_like(partial_lse[:, : own.shape[1]])
        rows = self.batch.merge_rows

        def results() -> None:
            state = partial_out, partial_lse, rows, out, lse, None
            exchange.combine(*state, has_state=False)

        def both() -> None:
            exchange.gather_heads(own)
            results()

        received = exchange_bytes(self.ranks.rank_spec, group.world_size, own.shape[0])
        size = received["all_to_all"] // max(1, group.world_size - 1) * group.world_size
        sent = torch.zeros(size, dtype=torch.uint8, device=own.device)
        into = torch.zeros_like(sent)
        return {
            "exchange": both,
            "queries": lambda: exchange.gather_heads(own),
            "results": results,
            "bare_all_gather": lambda: group.all_gather(own),
            "bare_all_to_all": lambda: group.all_to_all(into, sent),
        }


def decode(
    ranks: Ranks, requests: int, length: int, rate: dict[str, float], exchange: str | None
) -> dict[str, Any]:
    """One row of the decodes.

    Args:
        ranks: this rank.
        requests, length: of the batch; `length` is that of each request.
        rate: bytes per microsecond (`Ranks.rate`).
        exchange: of the divided layer.
    """
    spec, world = ranks.spec, ranks.group.world_size
    query = ranks.random(requests, spec.num_heads, spec.head_size)
    one = max(
        ranks.once(("decode", requests, length), partial(_one_gpu, ranks, requests, length, query))
    )
    divided = Divided(ranks, requests, length, query, exchange)
    attention, whole = ranks.in_graph(divided.attention()), ranks.in_graph(divided.whole())
    received = exchange_bytes(ranks.rank_spec, world, requests)
    at_rate = 0.0
    if rate:
        at_rate = received["queries"] / rate["all_gather"]
        at_rate += received["all_to_all"] / rate["all_to_all"]
    bound = max(attention) + at_rate
    single = [max(ranks.in_graph(each[:1], 1)) for each in (divided.attention(), divided.whole())]
    parts = {name: ranks.in_graph([call]) for name, call in divided.parts().items()}
    kernels = _kernels(ranks, divided.whole()[0]) if ranks.options.profile else []
    return {
        "gpus": world,
        "exchange": divided.layer.exchange.method.value,
        "requests": requests,
        "length": length,
        "one_gpu": one,
        "divided": max(whole),
        "attention": max(attention),
        "exchange_at_rate": round(at_rate, 1),
        "bound": round(bound, 1),
        "share_of_bound": round(bound / max(whole), 3),
        "measured_exchange": max(parts["exchange"]),
        "share_of_parts": round((max(attention) + max(parts["exchange"])) / max(whole), 3),
        "speedup": round(one / max(whole), 2),
        "single_calls": dict(zip(("attention", "divided"), single, strict=True)),
        "received_bytes": received,
        "ranks": {"attention": attention, "whole": whole, **parts},
        "kernels": kernels,
    }


def _one_gpu(ranks: Ranks, requests: int, length: int, query: torch.Tensor) -> list[float]:
    cache, table = ranks.cache(length, requests)
    layer = attnlib.Attention(ranks.spec, device=ranks.device)
    ones, lengths = [1] * requests, [length] * requests
    common = attnlib.CommonAttentionMetadata.from_lengths(ones, lengths, table, BLOCK, ranks.device)
    metadata = layer.backend.make_builder(ranks.spec, ranks.device).build(0, common)
    caches = ranks.layers(cache)
    return ranks.in_graph([partial(layer, query, None, None, each, metadata) for each in caches])


def _kernels(ranks: Ranks, call: Call) -> list[list[Any]]:
    """Name and microseconds of each kernel and copy of a call on the first rank, in order."""
    if not ranks.on_gpu:
        return []
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(2):
            ranks.wait()
            call()
        ranks.wait()
    on_gpu = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    found = [x for x in profile.events() if x.device_type == on_gpu]
    found.sort(key=lambda event: event.time_range.start)
    last = found[len(found) // 2 :]
    return [[x.name[:80], round(x.time_range.elapsed_us(), 1)] for x in last]
