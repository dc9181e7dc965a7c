"""Prefills of one prompt divided among the ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import attnlib
from attnlib.parallel import Interleaved, ParallelPrefill, PrefillMetadata
from benchmarks.parallel.ranks import BLOCK, Ranks

__all__ = ["prefill"]


def prefill(ranks: Ranks, new: int, context: int) -> dict[str, Any]:
    """New tokens of one prompt, divided among the ranks; the context by the cache."""
    spec, length = ranks.spec, new + context
    cache, table = ranks.cache(length, 1)
    whole = attnlib.Attention(spec, device=ranks.device)
    common = attnlib.CommonAttentionMetadata.from_lengths(
        [new], [length], table, BLOCK, ranks.device
    )
    metadata = whole.backend.make_builder(spec, ranks.device).build(0, common)
    sizes = [(spec.num_heads, spec.head_size), *[(spec.num_kv_heads, spec.head_size)] * 2]
    inputs = [ranks.random(new, *size) for size in sizes]
    world = ranks.group.world_size
    found: dict[str, Any] = {"gpus": world, "new": new, "context": context}
    alone = partial(ranks.times, lambda: whole(*inputs, cache, metadata))
    found["one_gpu"] = max(ranks.once(("prefill", new, context), alone))
    division = Interleaved(world)
    for method in ("ring", "all_gather"):
        layer = ParallelPrefill(
            spec, ranks.group, division, method=method, agreement="never", device=ranks.device
        )
        batch = layer.make_builder().build([new], table, [context])
        own = [each[batch.token_rows] for each in inputs]
        found[method] = ranks.slowest(lambda x=own, b=batch, f=layer: f(*x, cache, b))
        found[f"{method}_attention"] = _attention(ranks, layer, batch, cache, own[0])
        found[f"{method}_speedup"] = round(found["one_gpu"] / found[method], 2)
    return found


def _attention(
    ranks: Ranks,
    layer: ParallelPrefill,
    batch: PrefillMetadata,
    cache: attnlib.PagedKVCache,
    query: torch.Tensor,
) -> list[float]:
    """Microseconds of the attention of all steps on each rank, without exchanges and merges."""
    scratch = batch.scratch.like(cache)

    def attend() -> None:
        for step in batch.steps:
            part = layer.causal if step.is_causal else layer.cross
            if step.metadata is not None and part is not None:
                part(query, None, None, scratch, step.metadata, True)

    return ranks.times(attend)
