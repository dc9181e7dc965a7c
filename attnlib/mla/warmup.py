"""Compile the kernels of expanded prefills before the first request."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.layer.warmup_steps import run_steps
from attnlib.metadata.base import AttentionMetadataBuilder
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.mla.latent_attention import LatentAttention
from attnlib.workspace import BatchLimits

__all__ = ["warm_up_expanded"]


def warm_up_expanded(
    layer: LatentAttention,
    cache: PagedKVCache,
    limits: BatchLimits,
    builder: AttentionMetadataBuilder[Any] | None = None,
) -> None:
    """Run prefills in the expanded form, without and with context, over the first block of the
    cache. Nothing is written.

    Args:
        layer: the layer.
        cache: of the layer.
        limits: the largest batch; if no prefill within it is expanded, nothing is run.
        builder: the builder of the batches' metadata; None creates one.
    """
    spec, query_len = layer.spec, layer.expand_from
    if query_len is None or query_len > min(limits.max_num_tokens, limits.max_seq_len):
        return
    builder = builder or layer.layer.backend.make_builder(spec, cache.device, limits=limits)
    longer = [query_len << power for power in range(3)]
    counts = range(1, min(2, limits.max_num_reqs) + 1)
    steps = [
        partial(_run, layer, cache, builder, count, query_len, context)
        for count, query_len, context in itertools.product(counts, longer, (0, spec.block_size))
        if count * query_len <= limits.max_num_tokens and context + query_len <= limits.max_seq_len
    ]
    run_steps(steps, cache.device)


def _run(
    layer: LatentAttention,
    cache: PagedKVCache,
    builder: AttentionMetadataBuilder[Any],
    count: int,
    query_len: int,
    context: int,
) -> None:
    """One batch of `count` requests with equal lengths."""
    spec, tokens, device = layer.spec, count * query_len, cache.device
    blocks = -(-(context + query_len) // spec.block_size)
    table = torch.zeros(count, blocks, dtype=torch.int32, device="cpu")
    lengths = [query_len] * count, [context + query_len] * count
    common = CommonAttentionMetadata.from_lengths(*lengths, table, spec.block_size, device)
    common.slot_mapping = None
    rotary = spec.head_size - spec.head_size_v
    query, latent = (
        torch.zeros(tokens, *shape, dtype=spec.dtype, device=device)
        for shape in ((spec.num_heads, layer.key_size + rotary), (spec.head_size,))
    )
    with torch.no_grad():
        layer(query, latent, cache, builder.build(0, common))
